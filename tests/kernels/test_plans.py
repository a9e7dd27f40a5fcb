"""Random plans: every kernel for CPUs against one softmax in float64, and what none may accept."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_kernels import cpu
from cartridge_kernels.backends import AttentionBackend
from cartridge_kernels.cpu import CpuBackend
from cartridge_kernels.native import VARIANTS, BuildError, NativeBackend, build
from cartridge_kernels.plan import (
    InvalidPlan,
    LiveTensors,
    PagedRows,
    Plan,
    RequestShape,
    Segment,
    SegmentTensors,
    check_page_ids,
    check_tensors,
)
from cartridge_kernels.reference import ReferenceBackend, attend_dense, segment_rows
from tests.contracts.attention_backend import assert_close
from tests.kernels.attention_cases import (
    FULL,
    K16V8,
    AttentionCase,
    Geometry,
    Inputs,
    SegmentCase,
    as_vllm_lays_out,
    make_inputs,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
with contextlib.suppress(BuildError):
    build()


def native_of(variant: str) -> Callable[[], AttentionBackend]:
    """The C kernel for one instruction set."""

    def make() -> AttentionBackend:
        return NativeBackend(variant)

    make.__name__ = f"native-{variant}"
    return make


BACKENDS: list[Callable[[], AttentionBackend]] = [
    ReferenceBackend,
    CpuBackend,
    *map(native_of, VARIANTS),
]


def opened(make: Callable[[], AttentionBackend]) -> AttentionBackend:
    """A kernel; skips, with the reason, where it cannot run."""
    backend = make()
    reason = backend.unavailable_reason(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    return backend


@st.composite
def segment_cases(draw: st.DrawFn) -> SegmentCase:
    """Segments of up to three tiles of the smallest tile."""
    page_tokens = draw(st.sampled_from([1, 4, 16, 256]))
    return SegmentCase(
        draw(st.integers(1, 150)),
        draw(st.sampled_from([FULL, K16V8])),
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from(["head", "channel", "page"])),
        page_tokens,
        draw(st.integers(0, min(page_tokens - 1, 9))),
    )


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    """Batches of up to five requests, most of one query; shuffled visibility; odd widths."""
    segments = draw(st.lists(segment_cases(), max_size=4))
    shuffled = st.permutations(range(len(segments)))
    requests = draw(
        st.lists(
            st.tuples(
                st.one_of(st.just(1), st.integers(1, 40)),
                st.one_of(st.just(0), st.integers(0, 90)),
                shuffled.flatmap(
                    lambda order: st.integers(0, len(order)).map(lambda n: tuple(order[:n]))
                ),
            ),
            min_size=1,
            max_size=5,
        )
    )
    kv_heads = draw(st.integers(1, 3))
    widths = st.sampled_from([5, 16, 24, 64])
    return AttentionCase(
        "random",
        requests,
        segments,
        Geometry(kv_heads * draw(st.integers(1, 4)), kv_heads, draw(widths), draw(widths)),
        draw(st.sampled_from([1, 4, 32])),
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from(FLOATS)),
    )


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
@settings(deadline=None)
@given(case=attention_cases(), seed=st.integers(0, 99), is_strided=st.booleans())
def test_any_plan_is_exact(
    make: Callable[[], AttentionBackend], case: AttentionCase, seed: int, is_strided: bool
) -> None:
    """Whatever is ragged, shared, empty, paged or quantised, and across tiles of every kind."""
    inputs = make_inputs(case, seed)
    if is_strided:
        inputs = as_vllm_lays_out(inputs)
    arguments = (inputs.plan, inputs.queries, inputs.segments, inputs.live)
    exact = attend_dense(*arguments, scale=inputs.scale)
    with patch.multiple(cpu, _TILE=32, _ROWS=16, _BATCHED_LIVE=64, _BATCHED_NUMBERS=4000):
        found = opened(make).attend(*arguments, scale=inputs.scale)
    assert_close(found, exact, output=5e-6, lse=2e-5)


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
def test_layers_and_steps_of_one_kernel(make: Callable[[], AttentionBackend]) -> None:
    """One object serves other tensors of the same plan, then other plans, then the first again."""
    case = AttentionCase(
        "two", [(1, 9, (0, 1)), (3, 70, (1,))], [SegmentCase(90, K16V8), SegmentCase(40)]
    )
    first = make_inputs(case, seed=1)
    # Another layer of the same step: other numbers, the same page ids and block table.
    layer = replace(
        first,
        segments=[
            replace(part, keys=replace(part.keys, storage=part.keys.storage.flip(1)))
            for part in first.segments
        ],
        live=replace(first.live, keys=first.live.keys * 2),
    )
    moved = make_inputs(replace(case, requests=[(2, 4, (1,)), (1, 1, ())]), seed=3)
    backend = opened(make)
    for inputs in (first, layer, moved, first):
        arguments = (inputs.plan, inputs.queries, inputs.segments, inputs.live)
        found = backend.attend(*arguments, scale=inputs.scale)
        exact = attend_dense(*arguments, scale=inputs.scale)
        assert_close(found, exact, output=5e-6, lse=2e-5)


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_scores_of_any_size(make: Callable[[], AttentionBackend], factor: float) -> None:
    """Neither flat nor one-hot weights lose more than float32 sums do; nothing overflows."""
    case = AttentionCase("sharp", [(1, 70, (0,)), (5, 5, (0,))], [SegmentCase(1100)])
    inputs = make_inputs(case)
    inputs = replace(inputs, queries=inputs.queries * factor)
    arguments = (inputs.plan, inputs.queries, inputs.segments, inputs.live)
    found = opened(make).attend(*arguments, scale=inputs.scale)
    # An error of a logit is that of a float32 of its size.
    tolerance = 5e-6 * max(1.0, factor)
    exact = attend_dense(*arguments, scale=inputs.scale)
    assert_close(found, exact, output=tolerance, lse=tolerance * 20)


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("scale_by", ["head", "channel", "page"])
def test_values_are_dequantised_bit_for_bit(
    make: Callable[[], AttentionBackend], scale_by: str
) -> None:
    """A query that sees one token gets its values: every code of e4m3 times its scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), torch.zeros(()), codes.float())
    geometry = Geometry(2, 2, 8, 256)
    values = torch.stack([codes, codes.flip(0)]).to(torch.float8_e4m3fn)[:, None]
    generator = torch.Generator().manual_seed(0)
    shapes = {"head": (2,), "channel": (2, 256), "page": (1, 2, 1)}
    tensors = SegmentTensors(
        PagedRows.whole(torch.ones(2, 1, 8)),
        PagedRows.whole(values),
        0.1 + torch.rand(shapes[scale_by], generator=generator),
    )
    inputs = make_inputs(AttentionCase("one", [(1, 0, (0,))], [SegmentCase(1, K16V8)], geometry))
    found = opened(make).attend(
        inputs.plan, inputs.queries, [tensors], inputs.live, scale=inputs.scale
    )
    assert torch.equal(found.output[0], segment_rows(tensors, 1)[1][:, 0])


# --- what is refused -----------------------------------------------------------------------------
def plan_of(*requests: RequestShape, num_tokens: int = 4) -> Plan:
    """A plan with one segment."""
    return Plan((Segment(num_tokens, 0, FULL),), requests)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_of(num_tokens=0), r"segments\[0\].num_tokens: 0"),
        (lambda: plan_of(RequestShape(0, 1, ())), r"requests\[0\].num_queries: 0"),
        (lambda: plan_of(RequestShape(1, -1, ())), r"requests\[0\].num_live: -1"),
        (
            lambda: plan_of(RequestShape(1, 1, (0, 0))),
            r"requests\[0\].segments: .* names one twice",
        ),
        (lambda: plan_of(RequestShape(1, 1, (1,))), r"requests\[0\].segments: 1 of 1"),
        (lambda: plan_of(RequestShape(1, 1, (-1,))), r"requests\[0\].segments: -1 of 1"),
    ],
)
def test_plans_that_are_none(make: Callable[[], Plan], message: str) -> None:
    """Each limit of a plan, by the name of the field."""
    with pytest.raises(InvalidPlan, match=message):
        make()


def with_live(
    inputs: Inputs,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> Inputs:
    """Other live tensors."""
    live = inputs.live
    return replace(
        inputs,
        live=LiveTensors(
            live.keys if keys is None else keys,
            live.values if values is None else values,
            live.block_table if block_table is None else block_table,
        ),
    )


def with_keys(inputs: Inputs, storage: torch.Tensor, index: int = 0) -> Inputs:
    """Another storage of the keys of a segment."""
    part = inputs.segments[index]
    return with_segment(inputs, replace(part, keys=replace(part.keys, storage=storage)), index)


def with_values(inputs: Inputs, storage: torch.Tensor, index: int = 0) -> Inputs:
    """Another storage of the values of a segment."""
    part = inputs.segments[index]
    return with_segment(inputs, replace(part, values=replace(part.values, storage=storage)), index)


def with_segment(inputs: Inputs, part: SegmentTensors, index: int = 0) -> Inputs:
    """Another segment in one place."""
    return replace(
        inputs,
        segments=[part if at == index else old for at, old in enumerate(inputs.segments)],
    )


def with_scale(inputs: Inputs, scale: torch.Tensor | None, index: int) -> Inputs:
    """Another scale of a segment."""
    return with_segment(inputs, replace(inputs.segments[index], value_scale=scale), index)


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """Twice as wide."""
    return torch.cat([tensor, tensor], dim=3)


FAULTS: dict[str, tuple[Callable[[Inputs], Inputs], str]] = {
    "rows": (lambda i: replace(i, queries=i.queries[1:]), "queries: shape .* 2 rows"),
    "dimensions": (lambda i: replace(i, queries=i.queries[:, 0]), "queries: shape"),
    "query heads": (lambda i: replace(i, queries=i.queries[:, :3]), "queries: 3 heads"),
    "query width": (lambda i: replace(i, queries=i.queries[:, :, :3]), "queries: 4 heads of 3"),
    "live widths": (
        lambda i: with_live(i, values=i.live.values[:, :, 1:]),
        "live values: shape",
    ),
    "live dtype": (lambda i: with_live(i, keys=i.live.keys.double()), "live keys: dtype"),
    "number of segments": (lambda i: replace(i, segments=i.segments[1:]), "segments: 1 tensors"),
    "table rows": (
        lambda i: with_live(i, block_table=i.live.block_table[1:]),
        "block_table: 1 rows for 2",
    ),
    "table room": (
        lambda i: with_live(i, block_table=i.live.block_table[:, :1]),
        "block_table: room for 4 live tokens, 9",
    ),
    "value width": (
        lambda i: with_values(i, wider(i.segments[0].values.storage)),
        r"segments\[0\].values: width 32",
    ),
    "key width": (
        lambda i: with_keys(i, wider(i.segments[0].keys.storage)),
        r"segments\[0\].keys: 2 heads of 32",
    ),
    "key heads": (
        lambda i: with_keys(i, i.segments[0].keys.storage[:, :1]),
        r"segments\[0\].keys: 1 heads",
    ),
    "value heads": (
        lambda i: with_values(i, i.segments[0].values.storage[:, :1]),
        r"segments\[0\].values: 1 heads",
    ),
    "too few rows": (
        lambda i: with_keys(i, i.segments[0].keys.storage[:, :, :1]),
        r"segments\[0\].keys: pages of",
    ),
    "first row": (
        lambda i: with_segment(
            i, replace(i.segments[0], values=replace(i.segments[0].values, first_row=-1))
        ),
        r"segments\[0\].values: pages of",
    ),
    "keys in 8 bits": (
        lambda i: with_keys(i, i.segments[0].keys.storage.to(torch.float8_e4m3fn)),
        r"segments\[0\].keys: dtype",
    ),
    "values in 8 bits without K16/V8": (
        lambda i: with_values(i, i.segments[0].values.storage.to(torch.float8_e4m3fn)),
        r"segments\[0\].values: .* in a full segment",
    ),
    "scales without K16/V8": (
        lambda i: with_scale(i, torch.ones(2), 0),
        r"segments\[0\].values: .* or scales in a full segment",
    ),
    "e5m2": (
        lambda i: with_values(i, torch.ones(9, 2, 8, 16).to(torch.float8_e5m2), 1),
        r"segments\[1\].values: dtype torch.float8_e5m2, e4m3 wanted",
    ),
    "no scale": (lambda i: with_scale(i, None, 1), r"segments\[1\].value_scale: None"),
    "scale in half precision": (
        lambda i: with_scale(i, torch.ones(2, 16, dtype=torch.bfloat16), 1),
        r"segments\[1\].value_scale: torch.bfloat16",
    ),
    "scale of another shape": (
        lambda i: with_scale(i, torch.ones(3, 16), 1),
        r"segments\[1\].value_scale: torch.float32 \(3, 16\)",
    ),
}


def two_requests() -> Inputs:
    """A small valid step."""
    return make_inputs(
        AttentionCase(
            "two", [(1, 9, (0, 1)), (1, 3, (1,))], [SegmentCase(20), SegmentCase(20, K16V8)]
        )
    )


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace(" ", "-"))
def test_tensors_that_do_not_fit(make: Callable[[], AttentionBackend], fault: str) -> None:
    """Each is refused by every kernel before a number is read, by the name of the field."""
    break_it, message = FAULTS[fault]
    inputs = two_requests()
    check_tensors(inputs.plan, inputs.queries, inputs.segments, inputs.live)
    broken = break_it(inputs)
    with pytest.raises(InvalidPlan, match=message):
        make().attend(broken.plan, broken.queries, broken.segments, broken.live, scale=broken.scale)


def with_page(rows: PagedRows, page: int) -> PagedRows:
    """Another first page."""
    return replace(rows, page_ids=torch.cat([torch.tensor([page]), rows.page_ids[1:]]))


PAGE_FAULTS: dict[str, tuple[Callable[[Inputs], Inputs], str]] = {
    "keys beyond": (
        lambda i: with_segment(i, replace(i.segments[0], keys=with_page(i.segments[0].keys, 6))),
        r"segments\[0\].keys.page_ids: \d to 6 of 6 pages",
    ),
    "values negative": (
        lambda i: with_segment(
            i, replace(i.segments[1], values=with_page(i.segments[1].values, -1)), 1
        ),
        r"segments\[1\].values.page_ids: -1 to",
    ),
    "block beyond": (
        lambda i: with_live(i, block_table=i.live.block_table + 5),
        r"block_table\[0\]: \d to \d+ of 6 pages",
    ),
    "fewer pages in a later layer": (
        lambda i: with_keys(i, i.segments[0].keys.storage[:1]),
        r"segments\[0\].keys.page_ids: \d to \d of 1 pages",
    ),
}


@pytest.mark.parametrize("make", [CpuBackend, NativeBackend], ids=lambda make: make.__name__)
@pytest.mark.parametrize("fault", PAGE_FAULTS, ids=lambda fault: fault.replace(" ", "-"))
def test_pages_that_are_not_there(make: Callable[[], AttentionBackend], fault: str) -> None:
    """Nothing is read outside of a tensor, also where an earlier layer of the step was right."""
    break_it, message = PAGE_FAULTS[fault]
    inputs = two_requests()
    backend = opened(make)
    backend.attend(inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale)
    broken = break_it(inputs)
    with pytest.raises(InvalidPlan, match=message):
        check_page_ids(broken.plan, broken.segments, broken.live)
    with pytest.raises(InvalidPlan, match=message):
        backend.attend(
            broken.plan, broken.queries, broken.segments, broken.live, scale=broken.scale
        )


@pytest.mark.parametrize("make", [CpuBackend, NativeBackend], ids=lambda make: make.__name__)
def test_page_ids_that_change_in_place(make: Callable[[], AttentionBackend]) -> None:
    """They were checked once for the plan, and what was checked is what is read."""
    inputs = two_requests()
    backend = opened(make)
    arguments = (inputs.plan, inputs.queries, inputs.segments, inputs.live)
    before = backend.attend(*arguments, scale=inputs.scale)
    inputs.segments[0].keys.page_ids.fill_(0)
    inputs.segments[1].values.page_ids.fill_(0)
    again = backend.attend(*arguments, scale=inputs.scale)
    assert torch.equal(before.output, again.output)


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
def test_what_lies_behind_a_requests_blocks_is_never_looked_at(
    make: Callable[[], AttentionBackend],
) -> None:
    """Entries of the block table after the last one that is needed may be anything."""
    inputs = two_requests()
    table = inputs.live.block_table.clone()
    table[1, 1:] = -7
    changed = with_live(inputs, block_table=table)
    exact = attend_dense(
        inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
    )
    found = opened(make).attend(
        changed.plan, changed.queries, changed.segments, changed.live, scale=changed.scale
    )
    assert_close(found, exact, output=5e-6, lse=2e-5)
    assert math.isfinite(float(found.lse.max()))
