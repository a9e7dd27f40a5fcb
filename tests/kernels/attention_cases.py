"""Plans with random tensors, for tests of kernels: segments on shuffled pages, ragged batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cartridge_kernels.plan import (
    LiveTensors,
    PagedRows,
    Plan,
    Representation,
    RequestShape,
    Segment,
    SegmentTensors,
)
from cartridge_kernels.scaled_values import quantise_values

FULL, K16V8 = Representation.FULL, Representation.K16V8


@dataclass(frozen=True)
class Geometry:
    """Heads and widths of a layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16


@dataclass(frozen=True)
class SegmentCase:
    """How one segment is to be made."""

    num_tokens: int
    representation: Representation = FULL
    dtype: torch.dtype = torch.bfloat16
    scale_by: str = "channel"
    """`head`, `channel` or `page`; with K16V8."""
    page_tokens: int = 8
    first_row: int = 0


@dataclass(frozen=True)
class AttentionCase:
    """A named row of a table of shapes: requests are (queries, live tokens, segments)."""

    name: str
    requests: Sequence[tuple[int, int, tuple[int, ...]]]
    segments: Sequence[SegmentCase] = ()
    geometry: Geometry = Geometry()
    block_size: int = 4
    query_dtype: torch.dtype = torch.float32
    live_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Inputs:
    """Arguments of `attend`."""

    plan: Plan
    queries: torch.Tensor
    segments: list[SegmentTensors]
    live: LiveTensors
    scale: float


CASES = [
    AttentionCase("one token, one head", [(1, 1, (0,))], [SegmentCase(1)], Geometry(1, 1)),
    AttentionCase("no segments", [(3, 9, ()), (1, 5, ())]),
    AttentionCase("empty live part", [(2, 0, (0,))], [SegmentCase(13)]),
    AttentionCase("queries that see nothing", [(2, 0, ()), (1, 3, (0,))], [SegmentCase(5)]),
    AttentionCase("more queries than live tokens", [(4, 2, (0,))], [SegmentCase(5)]),
    AttentionCase("whole prefill", [(17, 17, (0,))], [SegmentCase(19, K16V8)]),
    AttentionCase("prefill chunk", [(7, 30, (0, 1))], [SegmentCase(8), SegmentCase(9, K16V8)]),
    AttentionCase(
        "shared by a ragged batch",
        [(1, 11, (0,)), (5, 5, (0, 1)), (1, 1, (1,)), (3, 40, (1, 0)), (2, 2, ())],
        [SegmentCase(21, K16V8), SegmentCase(32)],
    ),
    AttentionCase(
        "eight segments",
        [(1, 6, tuple(range(8))), (2, 3, (7, 0, 3))],
        [SegmentCase(3 + 5 * i, (FULL, K16V8)[i % 2]) for i in range(8)],
    ),
    AttentionCase("as many KV heads as heads", [(2, 8, (0,))], [SegmentCase(9)], Geometry(3, 3)),
    AttentionCase(
        "nine heads over three", [(1, 8, (0,))], [SegmentCase(33, K16V8)], Geometry(9, 3, 64, 64)
    ),
    AttentionCase(
        "values wider than keys", [(2, 5, (0,))], [SegmentCase(9, K16V8)], Geometry(4, 2, 16, 32)
    ),
    AttentionCase("scales by head", [(1, 4, (0,))], [SegmentCase(20, K16V8, scale_by="head")]),
    AttentionCase(
        "scales by page", [(2, 4, (0,))], [SegmentCase(20, K16V8, scale_by="page", first_row=3)]
    ),
    AttentionCase(
        "first row inside a page",
        [(1, 4, (0, 1))],
        [SegmentCase(20, K16V8, first_row=5), SegmentCase(11, first_row=7)],
    ),
    AttentionCase("long prefix", [(1, 5, (0,)), (1, 9, (0,))], [SegmentCase(700, K16V8)]),
    AttentionCase(
        "float32 keys and values", [(1, 4, (0,))], [SegmentCase(20, dtype=torch.float32)]
    ),
    AttentionCase(
        "all in bfloat16",
        [(1, 14, (0, 1)), (4, 4, (0,))],
        [SegmentCase(40, K16V8), SegmentCase(24)],
        query_dtype=torch.bfloat16,
        live_dtype=torch.bfloat16,
    ),
]


def make_inputs(case: AttentionCase, seed: int = 0, device: str = "cpu") -> Inputs:
    """Random tensors for a case; the same for equal arguments.

    What no query may read (other pages and blocks, rows before the first and after the last) is
    NaN, or with e4m3 its largest number: a kernel that reads it is found out.
    """
    generator = torch.Generator().manual_seed(seed)
    geometry = case.geometry
    plan = Plan(
        tuple(
            Segment(segment.num_tokens, 10 * index, segment.representation)
            for index, segment in enumerate(case.segments)
        ),
        tuple(RequestShape(*request) for request in case.requests),
    )
    queries = torch.randn(
        plan.num_rows, geometry.num_heads, geometry.key_dim, generator=generator
    ).to(case.query_dtype)
    segments = [_segment(segment, geometry, generator, device) for segment in case.segments]
    return Inputs(
        plan,
        queries.to(device),
        segments,
        _live(case, generator, device),
        geometry.key_dim**-0.5,
    )


def as_vllm_lays_out(inputs: Inputs) -> Inputs:
    """Pages inside larger rows; keys of live tokens transposed inside their block."""

    def inside(rows: PagedRows) -> PagedRows:
        storage = torch.cat([rows.storage, rows.storage], dim=2)[:, :, : rows.page_tokens]
        return replace(rows, storage=storage)

    live = inputs.live
    keys = live.keys.transpose(2, 3).contiguous().transpose(2, 3)
    both = torch.cat([live.values, live.values], dim=1)[:, live.values.shape[1] :]
    return replace(
        inputs,
        segments=[
            replace(part, keys=inside(part.keys), values=inside(part.values))
            for part in inputs.segments
        ],
        live=replace(live, keys=keys, values=both),
    )


def _segment(
    case: SegmentCase, geometry: Geometry, generator: torch.Generator, device: str
) -> SegmentTensors:
    shape = geometry.num_kv_heads, case.num_tokens
    keys = torch.randn(*shape, geometry.key_dim, generator=generator).to(case.dtype)
    values = torch.randn(*shape, geometry.value_dim, generator=generator).to(case.dtype)
    if case.representation is FULL:
        return SegmentTensors(
            paged(keys, case.page_tokens, case.first_row, generator, device),
            paged(values, case.page_tokens, case.first_row, generator, device),
        )
    # Channels of different size, so that a scale at the wrong place shows.
    values = values * torch.rand(geometry.num_kv_heads, 1, geometry.value_dim, generator=generator)
    num_pages = -(-(case.first_row + case.num_tokens) // case.page_tokens)
    if case.scale_by == "page":
        scale = 0.5 + torch.rand(num_pages, geometry.num_kv_heads, 1, generator=generator)
        codes = values.to(torch.float8_e4m3fn)
    else:
        codes, scale = quantise_values(values, by_channel=case.scale_by == "channel")
    return SegmentTensors(
        paged(keys, case.page_tokens, case.first_row, generator, device),
        paged(codes, case.page_tokens, case.first_row, generator, device),
        scale.to(device),
    )


def paged(
    rows: torch.Tensor,
    page_tokens: int,
    first_row: int,
    generator: torch.Generator,
    device: str = "cpu",
) -> PagedRows:
    """Rows [num_kv_heads, num_tokens, dim] on shuffled pages among others."""
    num_kv_heads, num_tokens, dim = rows.shape
    num_pages = -(-(first_row + num_tokens) // page_tokens)
    padded = _unreadable((num_kv_heads, num_pages * page_tokens, dim), rows.dtype)
    padded[:, first_row : first_row + num_tokens] = rows
    storage = _unreadable((num_pages + 3, num_kv_heads, page_tokens, dim), rows.dtype)
    ids = torch.randperm(num_pages + 3, generator=generator)[:num_pages]
    storage[ids] = padded.reshape(num_kv_heads, num_pages, page_tokens, dim).transpose(0, 1)
    return PagedRows(storage.to(device), ids.to(device), first_row)


def _live(case: AttentionCase, generator: torch.Generator, device: str) -> LiveTensors:
    geometry, size = case.geometry, case.block_size
    counts = [-(-num_live // size) for _, num_live, _ in case.requests]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=generator)
    keys = _unreadable((num_blocks, geometry.num_kv_heads, size, geometry.key_dim), case.live_dtype)
    values = _unreadable(
        (num_blocks, geometry.num_kv_heads, size, geometry.value_dim), case.live_dtype
    )
    table = torch.full((len(counts), max(1, *counts, 1)), int(order[-1]), dtype=torch.int32)
    begin = 0
    for row, (count, (_, num_live, _)) in enumerate(zip(counts, case.requests, strict=True)):
        ids = order[begin : begin + count]
        begin += count
        table[row, :count] = ids.to(torch.int32)
        for place in range(num_live):
            block, slot = ids[place // size], place % size
            keys[block, :, slot] = torch.randn(keys[0, :, 0].shape, generator=generator).to(
                keys.dtype
            )
            values[block, :, slot] = torch.randn(values[0, :, 0].shape, generator=generator).to(
                values.dtype
            )
    return LiveTensors(keys.to(device), values.to(device), table.to(device))


def _unreadable(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 448.0).to(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)
