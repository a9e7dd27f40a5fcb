"""Reading a cache back: any permutation is found out, anything else is refused."""

import pytest
import torch

from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.layout_probe import CacheReader
from tests.engine_ext.fake_layers import (
    LAYOUTS,
    FakeLayer,
    Layout,
    Packed,
    Split,
    Writer,
    fake_latent_layer,
    fake_layer,
)

BLOCK = 4


def write_numbers(layer: FakeLayer, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Write distinct random rows; returns them as [heads, num_tokens, dim]."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(slots), layer.num_kv_heads, layer.head_size)
    key, value = (
        torch.randn(shape, generator=generator).to(layer.kv_cache.dtype) for _ in range(2)
    )
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, torch.tensor(slots))
    return key.transpose(0, 1), value.transpose(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_written_is_read_back(layout: Layout, dtype: torch.dtype) -> None:
    """Rows in scattered blocks come back bit for bit, in the order of the positions."""
    layer = fake_layer(layout, dtype=dtype)
    reader = CacheReader.probe(CacheLayer(layer), BLOCK, 6)
    block_ids, num_tokens = [5, 0, 3], 10
    slots = [block_ids[place // BLOCK] * BLOCK + place % BLOCK for place in range(num_tokens)]
    key, value = write_numbers(layer, slots)
    found_key, found_value = reader.read(layer.kv_cache, block_ids, num_tokens)
    assert found_key.dtype is found_value.dtype is dtype
    assert torch.equal(found_key, key)
    assert torch.equal(found_value, value)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_probe_leaves_zeros_and_touches_one_block(layout: Layout) -> None:
    """After the probe block 1 holds zeros and every other block what it held before."""
    layer = fake_layer(layout)
    layer.kv_cache.fill_(7.0)
    CacheReader.probe(CacheLayer(layer), BLOCK, 6)
    for slot in range(6 * BLOCK):
        expected = 0.0 if slot // BLOCK == 1 else 7.0
        for row in layer.row(slot):
            assert torch.equal(row, torch.full_like(row, expected))


@pytest.mark.parametrize("num_blocks", [2, 4, 8])
def test_the_block_dimension_is_found_among_equals(num_blocks: int) -> None:
    """A cache whose other dimensions are as large as the number of blocks is still read right."""
    layer = fake_layer(Split(), num_blocks=num_blocks)
    reader = CacheReader.probe(CacheLayer(layer), BLOCK, num_blocks)
    key, value = write_numbers(layer, [4, 5, 6, 7])
    found = reader.read(layer.kv_cache, [1], 4)
    assert torch.equal(found[0], key)
    assert torch.equal(found[1], value)


def test_latents_are_read_back() -> None:
    """Latents are keys of one head, rotated part last, and values without elements."""
    layer = CacheLayer(fake_latent_layer())
    reader = CacheReader.probe(layer, BLOCK, 6)
    rows = torch.randn(6, 1, 10, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([20, 21, 22, 23, 8, 9])
    layer.write(rows, rows[..., :0], slots)
    keys, values = reader.read(layer.cache, [5, 2], 6)
    assert torch.equal(keys, rows.transpose(0, 1))
    assert values.shape == (1, 6, 0)


class ForgetsValues(Writer):
    """Writes the key twice."""

    def write_row(
        self,
        layer: FakeLayer,
        cache: torch.Tensor,
        slot: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Lose the value."""
        super().write_row(layer, cache, slot, key, key)


class Rounds(Writer):
    """Keeps multiples of two."""

    def write_row(
        self,
        layer: FakeLayer,
        cache: torch.Tensor,
        slot: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Lose the last bit."""
        super().write_row(layer, cache, slot, (key / 2).floor() * 2, value)


class SkipsASlot(Writer):
    """Never writes the last place of a block."""

    def write_row(
        self,
        layer: FakeLayer,
        cache: torch.Tensor,
        slot: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Lose a row."""
        if slot % self.block != self.block - 1:
            super().write_row(layer, cache, slot, key, value)


@pytest.mark.parametrize("writer", [ForgetsValues, Rounds, SkipsASlot])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_writer_that_loses_something_is_refused(layout: Layout, writer: type[Writer]) -> None:
    """A cache that does not hold every element as it was given cannot be read back."""
    layer = fake_layer(layout, writer=writer)
    with pytest.raises(ConfigurationError, match=f"{writer.__name__}.*no permutation"):
        CacheReader.probe(CacheLayer(layer), BLOCK, 6)


# --- strides -------------------------------------------------------------------------------------
class SlotsBeforeHeads(Packed):
    """[num_blocks, block, heads, 2 * dim]: the rows of a head lie between those of others."""

    def empty(self, num_blocks: int, heads: int, block: int, dim: int) -> torch.Tensor:
        """See `Layout`."""
        return torch.zeros(num_blocks, block, heads, 2 * dim)

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout`."""
        row = cache[slot // block, slot % block]
        dim = row.shape[-1] // 2
        return row[:, :dim], row[:, dim:]


class SwappedSlots(Packed):
    """The first two slots of a block in each other's place."""

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout`."""
        swapped = slot // block * block + {0: 1, 1: 0}.get(slot % block, slot % block)
        return super().places(cache, heads, block, swapped)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Split(), "no view of the KV cache"),
        (SwappedSlots(), "no view of the KV cache"),
        (SlotsBeforeHeads(), "VLLM_KV_CACHE_LAYOUT=HND"),
    ],
)
def test_layouts_that_packed_prefixes_cannot_use_are_refused(layout: Layout, text: str) -> None:
    """They are read back all the same; the message says what helps, where something does."""
    layer = fake_layer(layout)
    reader = CacheReader.probe(CacheLayer(layer), BLOCK, 6)
    with pytest.raises(ConfigurationError, match=text):
        reader.strides(layer.kv_cache)
