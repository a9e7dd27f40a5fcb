"""Random LoRA adapters of the tiny model, as peft saves them.

Owns their shape: rank 4 on the four projections of attention, far from zero. Refuses training.
"""

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM


def save_tiny_adapter(model_dir: Path, target: Path, *, seed: int, **config: Any) -> Path:
    """An adapter that changes every answer clearly; equal for equal seeds."""
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
        # Not the usual zeros in B, with which an adapter changes nothing until it is trained.
        "init_lora_weights": False,
        **config,
    }
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    adapted.save_pretrained(target)
    return target
