"""Attention layers with paged KV caches of several layouts, each with the backend's own writer.

Owns layouts like those of vLLM's backends, and a way to look a slot up that shares no code with the
reader under test. Refuses vllm.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch


class Layout(Protocol):
    """One way to arrange keys and values in a cache tensor."""

    def empty(self, num_blocks: int, heads: int, block: int, dim: int) -> torch.Tensor:
        """A cache of zeros, float32."""
        ...

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable views of the key and the value of a slot, [heads, dim]."""
        ...


class Packed:
    """[num_blocks, heads, block, 2 * dim]: each row is a key and its value."""

    def empty(self, num_blocks: int, heads: int, block: int, dim: int) -> torch.Tensor:
        """See `Layout`."""
        return torch.zeros(num_blocks, heads, block, 2 * dim)

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout`."""
        row = cache[slot // block, :, slot % block]
        dim = row.shape[-1] // 2
        return row[:, :dim], row[:, dim:]


class TransposedKeys:
    """Looks like `Packed`; per block and head keys lie as [dim, block], then values [block, dim].

    vLLM's CPU backend does this.
    """

    def empty(self, num_blocks: int, heads: int, block: int, dim: int) -> torch.Tensor:
        """See `Layout`."""
        return torch.zeros(num_blocks, heads, block, 2 * dim)

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout`."""
        tiles = cache[slot // block].view(heads, -1)
        half = tiles.shape[1] // 2
        keys = tiles[:, :half].view(heads, -1, block)
        values = tiles[:, half:].view(heads, block, -1)
        return keys[:, :, slot % block], values[:, slot % block]


class Split:
    """[2, num_blocks, block, heads, dim]: keys of all blocks, then values."""

    def empty(self, num_blocks: int, heads: int, block: int, dim: int) -> torch.Tensor:
        """See `Layout`."""
        return torch.zeros(2, num_blocks, block, heads, dim)

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout`."""
        return cache[0, slot // block, slot % block], cache[1, slot // block, slot % block]


LAYOUTS: dict[str, Layout] = {
    "packed": Packed(),
    "transposed_keys": TransposedKeys(),
    "split": Split(),
}


@dataclass
class Writer:
    """What vLLM calls `impl`: writes rows to slots of a cache."""

    layout: Layout
    block: int

    def do_kv_cache_update(
        self,
        layer: "FakeLayer",
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write key and value rows [num_tokens, heads, dim] to their slots."""
        assert key.dtype == value.dtype == cache.dtype
        assert slots.dtype == torch.int64
        assert len(key) == len(value) == len(slots)
        for row, slot in enumerate(slots.tolist()):
            self.write_row(layer, cache, slot, key[row], value[row])

    def write_row(
        self,
        layer: "FakeLayer",
        cache: torch.Tensor,
        slot: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Write one row."""
        key_place, value_place = self.layout.places(cache, layer.num_kv_heads, self.block, slot)
        key_place.copy_(key)
        value_place.copy_(value)


@dataclass
class FakeLayer:
    """One attention layer; the attributes are vLLM's."""

    kv_cache: torch.Tensor
    num_kv_heads: int
    head_size: int
    head_size_v: int
    impl: Writer
    sliding_window: int | None = None

    def row(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the key and the value that stand at a slot, [heads, dim]."""
        writer = self.impl
        key, value = writer.layout.places(self.kv_cache, self.num_kv_heads, writer.block, slot)
        return key.clone(), value.clone()


@dataclass
class LatentWriter:
    """The writer of a backend with latents: [num_blocks, block, latent and rotated]."""

    block: int

    def do_kv_cache_update(
        self,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        kv_cache_dtype: str,
        scale: torch.Tensor,
    ) -> None:
        """Write rows [num_tokens, rank] and [num_tokens, 1, rest] to their slots."""
        assert latent.dtype == rotated.dtype == cache.dtype
        assert (kv_cache_dtype, float(scale)) == ("auto", 1.0)
        rows = torch.cat([latent, rotated[:, 0]], -1)
        for row, slot in zip(rows, slots.tolist(), strict=True):
            cache[slot // self.block, slot % self.block] = row


@dataclass
class FakeLatentLayer:
    """One layer with latents; the attributes are vLLM's."""

    kv_cache: torch.Tensor
    kv_lora_rank: int
    head_size: int
    impl: LatentWriter
    num_kv_heads: int = 1
    kv_cache_dtype: str = "auto"
    _k_scale: torch.Tensor = field(default_factory=lambda: torch.tensor(1.0))


def fake_latent_layer(
    *, num_blocks: int = 6, block: int = 4, rank: int = 6, rotary_dim: int = 4
) -> FakeLatentLayer:
    """A layer with an empty cache of float32 latents."""
    width = rank + rotary_dim
    return FakeLatentLayer(torch.zeros(num_blocks, block, width), rank, width, LatentWriter(block))


def fake_layer(
    layout: Layout,
    *,
    num_blocks: int = 6,
    heads: int = 2,
    block: int = 4,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    writer: type[Writer] = Writer,
) -> FakeLayer:
    """A layer with an empty cache."""
    cache = layout.empty(num_blocks, heads, block, dim).to(dtype)
    return FakeLayer(cache, heads, dim, dim, writer(layout, block))
