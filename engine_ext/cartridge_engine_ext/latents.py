"""Latents of multi-head latent attention, from how transformers keeps them to how vLLM does.

Owns the order of the rotated channels. Refuses architectures of which that order is not known.
"""

from typing import Any

import torch

from cartridge_engine_ext.errors import ConfigurationError

_NEIGHBOURS, _HALVES = "neighbours", "halves"
_PAIRING = {"deepseek_v2": _NEIGHBOURS, "deepseek_v3": _HALVES}
"""How transformers orders the rotated channels of a model type: the two of a pair side by side, as
vLLM has them, or the first of each pair and then the second of each."""


def stored_latents(config: Any, compressed: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Latents of a layer in vLLM's order.

    Args:
        config: the model's configuration in transformers.
        compressed: [1, num_tokens, kv_lora_rank], normalised.
        rotated: [1, num_tokens, qk_rope_head_dim], rotated for positions from 0.

    Returns:
        [1, num_tokens, kv_lora_rank + qk_rope_head_dim].

    Raises:
        ConfigurationError: it is not known how this model type orders its channels.
    """
    pairing = _PAIRING.get(config.model_type)
    if pairing is None or not getattr(config, "rope_interleave", True):
        raise ConfigurationError(
            f"model_type: {config.model_type}: latents are known of {', '.join(_PAIRING)}, with "
            "rope_interleave"
        )
    widths = (compressed.shape[-1], rotated.shape[-1])
    if widths != (config.kv_lora_rank, config.qk_rope_head_dim):
        raise ConfigurationError(
            f"model_type: {config.model_type}: this transformers caches {widths} channels for a "
            f"position, latents are {(config.kv_lora_rank, config.qk_rope_head_dim)}"
        )
    if pairing == _HALVES:
        rotated = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
    return torch.cat([compressed, rotated], -1)
