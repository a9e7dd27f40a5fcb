"""The Triton programs, interpreted: no GPU is needed, and sums are as exact as float32's.

The interpreter multiplies in float32 what a GPU multiplies in 16 bits, and cuts bfloat16 off where
a GPU rounds: rounding of operands is not seen here, addresses, masks, scales and merging are.
"""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cartridge_kernels import triton_backend
from cartridge_kernels.plan import (
    Attended,
    LiveTensors,
    PagedRows,
    Plan,
    RequestShape,
    SegmentTensors,
)
from cartridge_kernels.reference import attend_dense
from cartridge_kernels.triton_backend import Tiles, TritonBackend
from cartridge_kernels.work_items import WorkTable, build_work_table
from tests.contracts.attention_backend import AttentionBackendContract, assert_close
from tests.kernels.attention_cases import (
    FULL,
    K16V8,
    AttentionCase,
    Geometry,
    Inputs,
    SegmentCase,
    make_inputs,
)

EXACT = {"output": 5e-6, "lse": 2e-5}

BATCH = AttentionCase(
    "two readers of an 8-bit segment, one of a full one",
    [(1, 9, (0, 1)), (2, 6, (0,)), (1, 3, ())],
    [SegmentCase(37, K16V8), SegmentCase(18)],
)


def attend(backend: TritonBackend, inputs: Inputs) -> Attended:
    """What the backend finds."""
    return backend.attend(
        inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
    )


def exact(inputs: Inputs) -> Attended:
    """What the oracle finds."""
    return attend_dense(
        inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
    )


class TestInterpreted(AttentionBackendContract):
    """The contract."""

    @pytest.fixture
    def backend(self) -> TritonBackend:
        """Keys are cut finely, so that results of several items are merged."""
        return TritonBackend(interpret=True, chunk_tokens=192)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(
            "widths of no power of two, rows that are not aligned",
            [(2, 7, (0, 1))],
            [SegmentCase(9, K16V8), SegmentCase(21)],
            Geometry(2, 1, 12, 20),
        ),
        AttentionCase(
            "pages all of one size",
            [(1, 40, (0, 1)), (3, 3, (1,))],
            [SegmentCase(70, K16V8, page_tokens=32, first_row=9), SegmentCase(33, page_tokens=32)],
            block_size=32,
        ),
        AttentionCase(
            "every pair of types",
            [(1, 5, (0, 1, 2, 3))],
            [
                SegmentCase(9, dtype=torch.float16),
                SegmentCase(9, K16V8, dtype=torch.float16),
                SegmentCase(9, K16V8, dtype=torch.float32),
                SegmentCase(9, K16V8, scale_by="page"),
            ],
            query_dtype=torch.float16,
            live_dtype=torch.bfloat16,
        ),
        AttentionCase(
            "more readers than a tile holds",
            [(1, 2, (0,))] * 9,
            [SegmentCase(20, K16V8)],
            Geometry(8, 1),
        ),
        AttentionCase("three heads of a tile of sixteen", [(7, 9, (0,))], [SegmentCase(9)]),
    ],
    ids=lambda case: case.name,
)
def test_shapes_of_the_programs(case: AttentionCase) -> None:
    """What the programs are compiled for, one shape each, changes no answer."""
    inputs = make_inputs(case)
    assert_close(attend(TritonBackend(interpret=True), inputs), exact(inputs), **EXACT)


def test_channels_that_do_not_lie_side_by_side() -> None:
    """A live cache may have any strides, also keys stored channel by channel."""
    inputs = make_inputs(BATCH)
    keys = inputs.live.keys.transpose(2, 3).contiguous().transpose(2, 3)
    values = torch.stack([inputs.live.values, inputs.live.values], dim=-1)[..., 0]
    inputs = dataclasses.replace(
        inputs, live=LiveTensors(keys, values, inputs.live.block_table.to(torch.int64))
    )
    assert keys.stride(3) != 1 != values.stride(3)
    assert_close(attend(TritonBackend(interpret=True), inputs), exact(inputs), **EXACT)


def test_queries_that_do_not_lie_side_by_side() -> None:
    """Queries may be a view, of either kind."""
    inputs = make_inputs(BATCH)
    heads_apart = torch.cat([inputs.queries, inputs.queries], dim=1)[:, : inputs.queries.shape[1]]
    channels_apart = torch.stack([inputs.queries, inputs.queries], dim=-1)[..., 0]
    for queries in (heads_apart, channels_apart):
        found = attend(TritonBackend(interpret=True), dataclasses.replace(inputs, queries=queries))
        assert_close(found, exact(inputs), **EXACT)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    """Ragged batches over up to three segments."""
    segments = draw(
        st.lists(
            st.builds(
                SegmentCase,
                num_tokens=st.integers(1, 40),
                representation=st.sampled_from([FULL, K16V8]),
                scale_by=st.sampled_from(["head", "channel", "page"]),
                page_tokens=st.sampled_from([4, 16]),
                first_row=st.integers(0, 3),
            ),
            max_size=3,
        )
    )
    orders = st.permutations(range(len(segments)))
    request = st.tuples(st.integers(1, 4), st.integers(0, 20), orders.map(tuple))
    requests = draw(st.lists(request, min_size=1, max_size=3))
    num_seen = draw(st.integers(0, len(segments)))
    group = draw(st.sampled_from([1, 3]))
    return AttentionCase(
        "drawn",
        [(queries, live, order[:num_seen]) for queries, live, order in requests],
        segments,
        Geometry(2 * group, 2),
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([8, 32, None]), st.sampled_from([16, 64]), st.integers(0, 1000))
def test_any_batch(
    case: AttentionCase, chunk_tokens: int | None, tile_tokens: int, seed: int
) -> None:
    """Whatever the batch and wherever its keys are cut, the answer is the oracle's."""
    inputs = make_inputs(case, seed)
    backend = TritonBackend(
        interpret=True, chunk_tokens=chunk_tokens, tiles=Tiles(num_tokens=tile_tokens)
    )
    assert_close(attend(backend, inputs), exact(inputs), **EXACT)


class PoisonedSlots(TritonBackend):
    """Hands out slots full of NaN, and keeps them."""

    def __init__(self, chunk_tokens: int) -> None:
        super().__init__(interpret=True, chunk_tokens=chunk_tokens)
        self.handed_out: list[Attended] = []

    def _slots(
        self, num_slots: int, num_heads: int, value_dim: int, device: torch.device
    ) -> Attended:
        slots = super()._slots(num_slots, num_heads, value_dim, device)
        slots.output.fill_(math.nan)
        slots.lse.fill_(math.nan)
        self.handed_out.append(slots)
        return slots


def test_every_slot_is_written() -> None:
    """No partial result and no answer holds what its memory held before."""
    backend = PoisonedSlots(chunk_tokens=16)
    inputs = make_inputs(BATCH)
    found = attend(backend, inputs)
    partials, merged = backend.handed_out
    assert partials.output.shape[0] > inputs.plan.num_rows
    assert torch.isfinite(partials.output).all()
    assert torch.isfinite(partials.lse).all()
    assert merged is found
    assert_close(found, exact(inputs), **EXACT)


def test_layers_of_a_step_share_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is made once for a plan object, and each layer's own tensors are read."""
    made: list[Plan] = []

    def counted(plan: Plan, *, rows_per_item: int, chunk_tokens: int) -> WorkTable:
        made.append(plan)
        return build_work_table(plan, rows_per_item=rows_per_item, chunk_tokens=chunk_tokens)

    monkeypatch.setattr(triton_backend, "build_work_table", counted)
    backend = TritonBackend(interpret=True)
    first = make_inputs(BATCH)
    second = dataclasses.replace(
        first,
        queries=first.queries.flip(0),
        segments=[
            dataclasses.replace(part, keys=negated(part.keys), values=part.values)
            for part in first.segments
        ],
        live=dataclasses.replace(first.live, values=-first.live.values),
    )
    for inputs in (first, second, first):
        assert_close(attend(backend, inputs), exact(inputs), **EXACT)
    assert made == [first.plan]


def negated(rows: PagedRows) -> PagedRows:
    """Other numbers at other addresses, on the same pages."""
    return dataclasses.replace(rows, storage=-rows.storage)


def test_an_equal_plan_is_another_step() -> None:
    """A plan that is equal and another object may come with other pages and another block table."""
    backend = TritonBackend(interpret=True)
    for seed in (0, 1):
        inputs = make_inputs(BATCH, seed)
        assert_close(attend(backend, inputs), exact(inputs), **EXACT)


# --- wrong kernels that the comparison must find --------------------------------------------------
def with_scales(inputs: Inputs, scales: Sequence[torch.Tensor | None]) -> Inputs:
    """The same with other scales."""
    return dataclasses.replace(
        inputs,
        segments=[
            dataclasses.replace(part, value_scale=scale)
            for part, scale in zip(inputs.segments, scales, strict=True)
        ],
    )


def without_scale(inputs: Inputs) -> Inputs:
    """As if the codes were the values."""
    return with_scales(
        inputs,
        [
            None if part.value_scale is None else torch.ones_like(part.value_scale)
            for part in inputs.segments
        ],
    )


def scale_of_the_neighbour(inputs: Inputs) -> Inputs:
    """Each head with the scales of another."""
    return with_scales(
        inputs,
        [
            None if part.value_scale is None else part.value_scale.roll(1, 0)
            for part in inputs.segments
        ],
    )


def scale_of_the_next_channel(inputs: Inputs) -> Inputs:
    """Each channel with the scale of another."""
    return with_scales(
        inputs,
        [
            None if part.value_scale is None else part.value_scale.roll(1, 1)
            for part in inputs.segments
        ],
    )


def seen_by_another_request(inputs: Inputs) -> Inputs:
    """The second segment is read by the second request instead of the first."""
    requests = list(inputs.plan.requests)
    requests[0] = RequestShape(1, 9, (0,))
    requests[1] = RequestShape(2, 6, (0, 1))
    return dataclasses.replace(inputs, plan=Plan(inputs.plan.segments, tuple(requests)))


def keys_of_the_other_page(inputs: Inputs) -> Inputs:
    """Two full pages of a segment's keys in the wrong order; all values where they belong."""
    keys = inputs.segments[0].keys
    ids = keys.page_ids[[1, 0, *range(2, len(keys.page_ids))]]
    swapped = SegmentTensors(
        dataclasses.replace(keys, page_ids=ids),
        inputs.segments[0].values,
        inputs.segments[0].value_scale,
    )
    return dataclasses.replace(inputs, segments=[swapped, *inputs.segments[1:]])


@pytest.mark.parametrize(
    "change",
    [
        without_scale,
        scale_of_the_neighbour,
        scale_of_the_next_channel,
        seen_by_another_request,
        keys_of_the_other_page,
    ],
)
def test_a_wrong_reading_is_found(change: object) -> None:
    """A program that read so would not pass the comparison that it passes."""
    assert callable(change)
    inputs = make_inputs(BATCH)
    found = attend(TritonBackend(interpret=True), change(inputs))
    with pytest.raises(AssertionError):
        assert_close(found, exact(inputs), **EXACT)


class OneSegmentInBaseTwo(TritonBackend):
    """Forgets to convert the log-sum-exps of one segment."""

    def _merge(self, step: triton_backend._Step, partials: Attended, num_rows: int) -> Attended:
        for item in step.work.items:
            if not item.is_live and item.index == 0:
                slots = slice(item.first_slot, item.first_slot + len(item.rows))
                partials.lse[slots] *= math.log2(math.e)
        return super()._merge(step, partials, num_rows)


def test_a_wrong_base_is_found() -> None:
    """Outputs merged with a log-sum-exp of another base look plausible and are wrong."""
    inputs = make_inputs(BATCH)
    found = attend(OneSegmentInBaseTwo(interpret=True), inputs)
    assert torch.isfinite(found.output).all()
    with pytest.raises(AssertionError):
        assert_close(found, exact(inputs), **EXACT)


# --- where it runs -------------------------------------------------------------------------------
def test_without_a_gpu() -> None:
    """Not interpreted it wants a CUDA device, and says how to go without."""
    reason = TritonBackend(interpret=False).unavailable_reason(torch.device("cpu"))
    assert reason is not None
    assert "CUDA" in reason
    assert TritonBackend(interpret=True).unavailable_reason(torch.device("cpu")) is None


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own variable has it interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().unavailable_reason(torch.device("cpu")) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert TritonBackend().unavailable_reason(torch.device("cpu")) is not None


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)]
)
def test_gpus_without_e4m3(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    """A GPU that cannot convert e4m3 is refused by its compute capability, which is named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = TritonBackend(interpret=False).unavailable_reason(torch.device("cuda"))
    assert (reason is not None) == is_refused
    if reason is not None:
        assert f"{capability[0]}.{capability[1]}" in reason
