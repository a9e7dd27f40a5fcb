"""Reads keys and values back from a paged KV cache whose layout only the backend knows.

Owns a map from (head, position, channel) to places in a block, found by writing numbered values
through the backend's own writer. Refuses caches whose elements are not a plain permutation.
"""

from collections.abc import Sequence

import torch

from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.errors import ConfigurationError

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
