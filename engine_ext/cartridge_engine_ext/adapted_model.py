"""A model with a LoRA adapter in it, computed by the peft library as an engine computes it.

Owns which kinds of adapters mean the same to peft and to vLLM. Refuses the others, naming the field
of adapter_config.json, and adapters whose tensors are not those of the model's layers.
"""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.identity import ADAPTER_FILES, adapter_config

_READ_ALIKE = frozenset(
    # What the adapter is and where it came from.
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"}
    | {"revision", "task_type"}
    # Rank, scale, and which layers have tensors.
    | {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules"}
    | {"exclude_modules", "layers_to_transform", "layers_pattern"}
    # Training and the first weights, which the saved ones have replaced.
    | {"lora_dropout", "init_lora_weights", "eva_config", "lora_ga_config"}
    # Parameters of what is off: the switch is looked at.
    | {"megatron_core", "qalora_group_size"}
)
"""Fields of peft's `LoraConfig` that peft and vLLM read alike. Any other must be off.

Source: `PEFTHelper` of vLLM 0.32.0 (vllm/lora/peft_helper.py) and `LoraConfig` of peft 0.21.
"""
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to begin training that leave the base model's weights as they are; see the same source."""


def adapted_model(model: Any, folder: Path) -> Any:
    """Put an adapter into a transformers model, in place; weights are not merged.

    Adapter weights take the model's dtype, as they do in an engine by default.

    Raises:
        ConfigurationError: peft is not installed, or the adapter cannot be applied as vLLM would.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError(
            f"adapters need {error.name}: pip install 'cartridge-router[adapters]'"
        ) from error
    refuse_other_kinds(folder)
    try:
        # First: where there is none, peft would read a pickle, or ask the hub.
        with safe_open(folder / ADAPTER_FILES[1], framework="pt") as file:
            found = set(file.keys())
        adapted = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
        expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    except (OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{folder}: {error}") from error
    if found != expected:
        # peft would leave the former out, and give the latter values of its own.
        raise ConfigurationError(
            f"{folder / ADAPTER_FILES[1]}: {len(found - expected)} tensors fit no layer of the "
            f"model, {len(expected - found)} are missing, such as {min(found ^ expected)}"
        )
    return adapted.get_base_model().eval()


def refuse_other_kinds(folder: Path) -> None:
    """Refuse an adapter that vLLM would not apply, or would apply otherwise.

    Raises:
        ConfigurationError: naming each such field and its value.
    """
    config = adapter_config(folder)
    found = [
        name
        for name, value in config.items()
        if name not in _READ_ALIKE and value and (name, value) != ("bias", "none")
    ]
    if config.get("peft_type") != "LORA":
        found.append("peft_type")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        found.append("init_lora_weights")
    if found:
        shown = ", ".join(f"{name} is {config.get(name)!r:.100}" for name in found)
        raise ConfigurationError(
            f"{folder / ADAPTER_FILES[0]}: engines do not apply this adapter as peft does: {shown}"
        )
