"""Reads keys and values back from a paged KV cache whose layout only the backend knows.

Owns a map from (head, position, channel) to places in a block, found by writing numbered values
through the backend's own writer, and the strides that it comes to where it has any. Refuses caches
whose elements are not a plain permutation.
"""

from collections.abc import Sequence

import torch

from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.packed_steps import CacheStrides

_BASE = 16
"""Numbers are written digit by digit in this base: every float type holds 0..16 exactly."""


Captured = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [num_kv_heads, num_tokens, head_dim]; heads of one worker. Values
of layers with latents have a head_dim of 0."""


class CacheReader:
    """Where each element of a block lies; the same for all layers of one kind.

    `block_dim` is the cache tensor's dimension that counts blocks; `key_places` and `value_places`
    are [num_kv_heads, block_size, head_dim], int64, places in the flattened block.
    """

    def __init__(
        self, block_dim: int, key_places: torch.Tensor, value_places: torch.Tensor
    ) -> None:
        self._block_dim = block_dim
        self._key_places = key_places
        self._value_places = value_places

    @classmethod
    def probe(cls, layer: CacheLayer, block_size: int, num_blocks: int) -> "CacheReader":
        """Find the layout out. Overwrites block 1 of the layer and leaves zeros there.

        Raises:
            ConfigurationError: the elements written do not all come back.
        """
        cache = layer.cache
        heads, key_dim, value_dim = layer.num_kv_heads, layer.key_dim, layer.value_dim
        num_keys = block_size * heads * key_dim
        num_values = block_size * heads * value_dim
        places = cache.numel() // num_blocks
        for block_dim in (dim for dim, size in enumerate(cache.shape) if size == num_blocks):
            found = torch.zeros(places, dtype=torch.int64)
            for digit in range(_num_digits(num_keys + num_values)):
                _write_digit(layer, block_size, digit, (num_keys, num_values))
                block = cache.select(block_dim, 1).reshape(-1).to("cpu", torch.float32)
                found += block.to(torch.int64) * _BASE**digit
            _write_zeros(layer, block_size)
            order = torch.argsort(found)[places - num_keys - num_values :]
            numbers = torch.arange(1, num_keys + num_values + 1)
            if torch.equal(found[order], numbers):
                shape = (block_size, heads)
                return cls(
                    block_dim,
                    order[:num_keys].reshape(*shape, key_dim).transpose(0, 1).contiguous(),
                    order[num_keys:].reshape(*shape, value_dim).transpose(0, 1).contiguous(),
                )
        raise ConfigurationError(
            f"the KV cache of {layer.backend} ({cache.dtype}, {tuple(cache.shape)}) is "
            "no permutation of what its writer is given; the self-test cannot read it back"
        )

    def read(
        self, cache: torch.Tensor, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `num_tokens` positions of these blocks.

        Returns:
            Two tensors [num_kv_heads, num_tokens, head_dim] on the CPU, in the cache's dtype.
        """
        blocks = [cache.select(self._block_dim, block).reshape(-1).cpu() for block in block_ids]
        keys = torch.cat([block[self._key_places] for block in blocks], 1)
        values = torch.cat([block[self._value_places] for block in blocks], 1)
        return keys[:, :num_tokens].contiguous(), values[:, :num_tokens].contiguous()

    def strides(self, cache: torch.Tensor) -> CacheStrides:
        """The layout as strides, for what reads and writes the cache without its backend.

        Raises:
            ConfigurationError: keys or values are no strided view of it, their widths differ, or
                the elements of a head do not lie behind one another.
        """
        heads, block_size, head_dim = self._key_places.shape
        is_plain = self._block_dim == 0 and cache[0].is_contiguous()
        keys, values = _strides(self._key_places), _strides(self._value_places)
        if not is_plain or keys is None or values is None:
            raise ConfigurationError("packed prefixes: keys or values are no view of the KV cache")
        places = torch.cat([self._key_places, self._value_places], 1).reshape(heads, -1)
        expected = torch.arange(places.numel()).reshape(heads, -1)
        is_by_head = self._value_places.shape[2] == head_dim and torch.equal(
            places.sort(dim=1).values, expected
        )
        if not is_by_head:
            raise ConfigurationError(
                "packed prefixes need each head's part of a block in one piece; on a GPU set "
                "VLLM_KV_CACHE_LAYOUT=HND"
            )
        step = cache.stride(0)
        return CacheStrides(
            num_blocks=cache.shape[0],
            num_kv_heads=heads,
            block_size=block_size,
            head_dim=head_dim,
            keys=(step, *keys),
            values=(step, *values),
            values_at=int(self._value_places[0, 0, 0]),
            item_bytes=cache.element_size(),
        )


def _strides(places: torch.Tensor) -> tuple[int, int, int] | None:
    """Strides of places [heads, slots, channels]; `None` when there are none."""
    first = int(places[0, 0, 0])
    found, grid = [], torch.full_like(places, first)
    for dim, size in enumerate(places.shape):
        second = places.select(dim, 1).flatten()[0] if size > 1 else first + places.numel()
        step = int(second) - first
        found.append(step)
        shape = [1, 1, 1]
        shape[dim] = size
        grid = grid + step * torch.arange(size).reshape(shape)
    return (found[0], found[1], found[2]) if torch.equal(grid, places) else None


def _num_digits(largest: int) -> int:
    digits = 1
    while _BASE**digits <= largest:
        digits += 1
    return digits


def _write_digit(layer: CacheLayer, block_size: int, digit: int, counts: tuple[int, int]) -> None:
    numbers = torch.arange(1, sum(counts) + 1) // _BASE**digit % _BASE
    _write_block(layer, block_size, numbers[: counts[0]], numbers[counts[0] :])


def _write_zeros(layer: CacheLayer, block_size: int) -> None:
    num_rows = block_size * layer.num_kv_heads
    _write_block(
        layer,
        block_size,
        torch.zeros(num_rows * layer.key_dim),
        torch.zeros(num_rows * layer.value_dim),
    )


def _write_block(
    layer: CacheLayer, block_size: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    cache, shape = layer.cache, (block_size, layer.num_kv_heads)
    slots = torch.arange(block_size, 2 * block_size, dtype=torch.int64)
    layer.write(
        keys.to(cache.device, cache.dtype).reshape(*shape, layer.key_dim),
        values.to(cache.device, cache.dtype).reshape(*shape, layer.value_dim),
        slots.to(cache.device),
    )
