"""One attention layer's KV cache, written through the backend's own writer.

Owns the two ways in which vLLM's writers are called, keys and values or latents, and how a layer's
name is read. Refuses to know how a backend lays its cache out.
"""

import functools
import re
from typing import Any

import torch

_LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@functools.cache
def layer_index(name: str) -> int:
    """Number of an attention layer, by vLLM's name for it.

    Raises:
        ValueError: the name has no number.
    """
    match = _LAYER_INDEX.search(name)
    if match is None:
        raise ValueError(f"{name} is no numbered layer")
    return int(match.group(1))


class CacheLayer:
    """A layer as it is written and read back.

    Where positions have latents they are its keys, and its values have no elements (`value_dim` 0).

    `layer` is vLLM's. The writer of its backend, `impl.do_kv_cache_update`, takes
    `(layer, keys, values, kv_cache, slots)`; with latents, where the layer has a `kv_lora_rank` and
    no `head_size_v`, `(latent, rotated, kv_cache, slots, kv_cache_dtype, scale)`.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._latent_dim: int | None = getattr(layer, "kv_lora_rank", None)
        self.num_kv_heads: int = layer.num_kv_heads
        self.key_dim: int = layer.head_size
        self.value_dim: int = 0 if self.has_latents else self._layer.head_size_v
        self.has_window: bool = getattr(layer, "sliding_window", None) is not None

    @property
    def has_latents(self) -> bool:
        """Whether its positions have latents instead of keys and values."""
        return self._latent_dim is not None

    @property
    def cache(self) -> torch.Tensor:
        """The cache tensor, whose layout the backend knows."""
        kv_cache: torch.Tensor = self._layer.kv_cache
        return kv_cache

    @property
    def backend(self) -> str:
        """Class name of the backend's implementation."""
        return type(self._layer.impl).__name__

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [num_tokens, num_kv_heads, dim], of the cache's dtype, to int64 slots."""
        layer = self._layer
        if self._latent_dim is None:
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            return
        latent, rotated = keys[:, 0, : self._latent_dim], keys[:, :, self._latent_dim :]
        scale = layer._k_scale  # noqa: SLF001 - as vLLM's own caller passes it
        layer.impl.do_kv_cache_update(
            latent, rotated, layer.kv_cache, slots, layer.kv_cache_dtype, scale
        )
