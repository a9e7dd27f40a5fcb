"""Tiny random models of other kinds of layers than full attention, as Hugging Face folders.

Owns one model for each kind. Refuses weights that mean anything; they are large enough that every
position changes the answer.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.models.deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

from tests.engine_ext.tiny_model import MAX_POSITIONS, NUM_SIGNS, save_tiny_tokenizer

WINDOW = 70
"""Positions that a layer with a window reads: more than two blocks, and no multiple of one."""
_COMMON = {
    "vocab_size": NUM_SIGNS,
    "hidden_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.15,
}


def windows_and_full() -> PreTrainedModel:
    """Gemma 3: layers with a window and without, each kind with its own rotary embedding."""
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def windows_only() -> PreTrainedModel:
    """Mistral as it was first: every layer has the window."""
    config = MistralConfig(
        **_COMMON,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
    )
    return MistralForCausalLM(config)


_LATENT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    # The only latent that vLLM's kernel for CPUs is compiled for.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    # Without experts: all layers come before the first that has any.
    "first_k_dense_replace": 2,
}


def latents_v2() -> PreTrainedModel:
    """DeepSeek V2."""
    return DeepseekV2ForCausalLM(DeepseekV2Config(**_COMMON, **_LATENT))


def latents_v3() -> PreTrainedModel:
    """DeepSeek V3, whose rotated channels transformers keeps in another order."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_COMMON, **_LATENT))


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "windows_and_full": windows_and_full,
    "windows_only": windows_only,
    "latents_v2": latents_v2,
    "latents_v3": latents_v3,
}


def save_tiny_kind(target: Path, kind: str) -> Path:
    """A model of one of `KINDS` with its tokenizer; equal each time."""
    save_tiny_tokenizer(target)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        KINDS[kind]().save_pretrained(target)
    return target
