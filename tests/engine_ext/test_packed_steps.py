"""Packed bytes written into blocks are what attention of a step reads, for the right requests."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.in_place import InPlaceSegments
from cartridge_engine_ext.layout_probe import CacheReader
from cartridge_engine_ext.packed_layout import (
    CacheGeometry,
    PackedPrefix,
    StoredSegment,
    packed_prefix,
)
from cartridge_engine_ext.packed_steps import CacheStrides, PackedSteps
from cartridge_engine_ext.packed_writer import PackedWriter, write_prefix
from cartridge_kernels.plan import RequestShape
from cartridge_kernels.reference import ReferenceBackend, segment_rows
from cartridge_kernels.scaled_values import dequantise_values, quantise_values
from tests.engine_ext.fake_layers import (
    LAYOUTS,
    FakeLayer,
    Layout,
    Packed,
    Split,
    TransposedKeys,
    fake_layer,
)

HEADS, DIM, BLOCK, NUM_BLOCKS = 2, 8, 4, 24
LENGTHS = [19, 33]
CPU = torch.device("cpu")


@dataclass
class Tensors:
    """One segment: keys, stored values and scales, and what the values mean."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None

    @property
    def exact_values(self) -> torch.Tensor:
        """Dequantised, float32."""
        if self.scales is None:
            return self.values.float()
        return dequantise_values(self.values, self.scales)


def made(length: int, seed: int, *, is_small: bool, by_channel: bool = True) -> Tensors:
    """Random keys in bfloat16, and values in e4m3 or bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, HEADS, length, DIM, generator=generator)
    if not is_small:
        return Tensors(keys.bfloat16(), values.bfloat16(), None)
    codes, scales = quantise_values(values, by_channel=by_channel)
    return Tensors(keys.bfloat16(), codes, scales)


def strides_of(layer: FakeLayer) -> CacheStrides:
    """The layout, found out as a worker does."""
    reader = CacheReader.probe(CacheLayer(layer), BLOCK, NUM_BLOCKS)
    return reader.strides(layer.kv_cache)


def laid_out(segments: list[Tensors], cache_dtype: str = "F32") -> PackedPrefix:
    """The layout of these segments."""
    names = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
    prefix = packed_prefix(
        [
            StoredSegment(
                part.keys.shape[1], 0, "BF16", names[part.values.dtype], part.scales is not None
            )
            for part in segments
        ],
        CacheGeometry(BLOCK, DIM, cache_dtype),
    )
    assert prefix is not None
    return prefix


def write(
    layer: FakeLayer,
    strides: CacheStrides,
    prefix: PackedPrefix,
    blocks: list[int],
    segments: list[Tensors],
    first_block: int = 0,
) -> int:
    """Write them into a layer, few rows at a time."""
    writer = PackedWriter(strides.head_bytes(layer.kv_cache), blocks, first_block, 5)

    def scales(index: int) -> torch.Tensor:
        found = segments[index].scales
        assert found is not None
        return found

    return write_prefix(
        writer,
        prefix,
        lambda i: lambda begin, end: segments[i].keys[:, begin:end],
        lambda i: lambda begin, end: segments[i].values[:, begin:end],
        scales,
    )


SHAREABLE = [name for name, layout in LAYOUTS.items() if not isinstance(layout, Split)]


@pytest.mark.parametrize("layout", SHAREABLE)
@pytest.mark.parametrize("by_channel", [True, False])
def test_what_was_written_is_what_a_step_reads(layout: str, by_channel: bool) -> None:
    """Keys bit for bit, values as their codes and scales say, from scattered blocks."""
    layer = fake_layer(LAYOUTS[layout], num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = strides_of(layer)
    segments = [
        made(LENGTHS[0], 1, is_small=True, by_channel=by_channel),
        made(LENGTHS[1], 2, is_small=False),
    ]
    prefix = laid_out(segments)
    blocks = [17, 3, 9, 20, 5, 11, 2, 8, 14, 6, 23][: prefix.num_blocks]
    size = write(layer, strides, prefix, blocks, segments)
    assert size == HEADS * DIM * (LENGTHS[0] * 3 + 4 + LENGTHS[1] * 4)
    steps = steps_of(strides)
    steps.note({"a": prefix}, [])
    begin(steps, ["a"], computed=[prefix.num_slots], scheduled=[3], tables=[[*blocks, 1]])
    assert steps.current is not None
    found = steps.current.tensors(0, layer.kv_cache, strides)
    for tensors, segment in zip(found, segments, strict=True):
        keys, values = segment_rows(tensors, segment.keys.shape[1])
        assert torch.equal(keys, segment.keys.float())
        assert torch.equal(values, segment.exact_values)


def test_a_load_of_the_rest_leaves_the_first_blocks_alone() -> None:
    """Blocks that the prefix cache brought are not written again."""
    layer = fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = strides_of(layer)
    segments = [made(60, 1, is_small=True)]
    prefix = laid_out(segments)
    blocks = list(range(2, 2 + prefix.num_blocks))
    write(layer, strides, prefix, blocks, segments)
    whole = layer.kv_cache.clone()
    layer.kv_cache[blocks[2] :] = 0
    layer.kv_cache[blocks[0]] = 7
    write(layer, strides, prefix, blocks, segments, first_block=2)
    assert torch.equal(layer.kv_cache[blocks[1:]], whole[blocks[1:]])
    assert bool((layer.kv_cache[blocks[0]] == 7).all())


def test_numbers_that_do_not_fit_are_refused() -> None:
    """A key that bfloat16 rounds to infinity is no key any more."""
    layer = fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = strides_of(layer)
    segment = made(60, 1, is_small=True)
    prefix = laid_out([segment])
    segment.keys = torch.full_like(segment.keys, 3.4e38, dtype=torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        write(layer, strides, prefix, list(range(prefix.num_blocks)), [segment])


@pytest.mark.parametrize("layout", [Packed(), TransposedKeys()])
def test_live_views_are_the_slots(layout: Layout) -> None:
    """Keys and values of live tokens are read where the backend's own writer put them."""
    layer = fake_layer(layout, num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = strides_of(layer)
    rows = torch.randn(2, 6, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([20, 21, 22, 23, 12, 13])
    layer.impl.do_kv_cache_update(layer, rows[0], rows[1], layer.kv_cache, slots)
    live = strides.live(layer.kv_cache, torch.tensor([[5, 3]], dtype=torch.int32))
    keys, values = live.gather(0, 6)
    assert torch.equal(keys, rows[0].transpose(0, 1))
    assert torch.equal(values, rows[1].transpose(0, 1))


def test_a_layout_whose_heads_are_not_in_one_piece_is_refused() -> None:
    """Keys and values of all blocks apart, or heads within slots: there is no string of bytes."""
    layer = fake_layer(Split(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    with pytest.raises(ConfigurationError, match="packed prefixes"):
        strides_of(layer)
    layer = fake_layer(SlotMajor(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    with pytest.raises(ConfigurationError, match="VLLM_KV_CACHE_LAYOUT=HND"):
        strides_of(layer)


class SlotMajor:
    """[num_blocks, block, heads, 2 * dim]: heads side by side in each slot."""

    def empty(self, num_blocks: int, heads: int, block: int, dim: int) -> torch.Tensor:
        """See `Layout`."""
        return torch.zeros(num_blocks, block, heads, 2 * dim)

    def places(
        self, cache: torch.Tensor, heads: int, block: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout`."""
        row = cache[slot // block, slot % block]
        return row[:, : row.shape[1] // 2], row[:, row.shape[1] // 2 :]


# --- which requests of a batch -------------------------------------------------------------------
def steps_of(strides: CacheStrides) -> PackedSteps:
    """A worker that knows its cache."""
    steps = PackedSteps()
    steps.prepare(strides, ReferenceBackend(), InPlaceSegments([], slice(None)))
    return steps


def begin(
    steps: PackedSteps,
    request_ids: list[str],
    *,
    computed: list[int],
    scheduled: list[int],
    tables: list[list[int]],
) -> None:
    """Plan a step."""
    table = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, ids in enumerate(tables):
        table[row, : len(ids)] = ids
    steps.begin(
        request_ids, np.array(computed, np.int32), np.array(scheduled, np.int32), table, CPU
    )


@pytest.fixture
def steps() -> PackedSteps:
    """A worker with a plain cache."""
    layer = fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    return steps_of(strides_of(layer))


def test_a_batch_is_split_by_prefix_and_by_blocks(steps: PackedSteps) -> None:
    """Readers of the same blocks share segments; the same prefix in other blocks is another."""
    prefix = laid_out([made(60, 1, is_small=True)])
    slots, first = prefix.num_slots, list(range(prefix.num_blocks))
    other = [block + 10 for block in first]
    steps.note({"a": prefix, "b": prefix, "c": prefix}, [])
    begin(
        steps,
        ["a", "plain", "b", "c"],
        computed=[slots, 3, slots + 5, slots],
        scheduled=[2, 1, 1, 4],
        tables=[[*first, 21], [22], [*first, 20, 19], [*other, 23]],
    )
    step = steps.current
    assert step is not None
    assert step.has_others
    assert step.rows.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert step.plan.requests == (
        RequestShape(2, 2, (0,)),
        RequestShape(1, 6, (0,)),
        RequestShape(4, 4, (1,)),
    )
    assert step.block_table.tolist() == [[21, 0], [20, 19], [23, 0]]
    assert step.ordinary_seq_lens.tolist() == [2, 4, 1, 4]
    ahead = prefix.num_positions - slots
    assert ahead > 0
    assert steps.num_positions_ahead(["a", "plain", "b"]) == [ahead, 0, ahead]


def test_without_packed_requests_there_is_no_step(steps: PackedSteps) -> None:
    """A batch of ordinary requests, also right after another one, is left to the platform."""
    prefix = laid_out([made(60, 1, is_small=True)])
    steps.note({"a": prefix}, [])
    blocks = [*range(prefix.num_blocks), 20]
    begin(steps, ["a"], computed=[prefix.num_slots], scheduled=[1], tables=[blocks])
    assert steps.current is not None
    assert not steps.current.has_others
    begin(steps, ["plain"], computed=[0], scheduled=[2], tables=[[3]])
    assert steps.current is None


def test_a_finished_request_is_forgotten(steps: PackedSteps) -> None:
    """A later request of the same id, without a packed prefix, is an ordinary one."""
    prefix = laid_out([made(60, 1, is_small=True)])
    steps.note({"a": prefix}, [])
    steps.note({}, ["a", "never seen"])
    begin(steps, ["a"], computed=[0], scheduled=[2], tables=[[3]])
    assert steps.current is None
    assert steps.num_positions_ahead(["a"]) == [0]
