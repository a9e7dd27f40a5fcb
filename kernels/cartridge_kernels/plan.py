"""The plan of one attention step: which queries read which segments and which live tokens.

Owns the shapes and their checks; made once per step and used by every layer. Refuses to hold keys
or values: those are a layer's, and come as `SegmentTensors` and `LiveTensors` with each call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch


class InvalidPlan(ValueError):
    """Shapes, indexes or dtypes that do not fit; the text names the field and the limit."""


class Representation(StrEnum):
    """How the keys and values of a segment are stored."""

    FULL = "full"
    """Both in one of the float types of 16 or 32 bits, without scales."""
    K16V8 = "k16v8"
    """Keys as in FULL, values as e4m3 codes with float32 scales."""


@dataclass(frozen=True)
class Segment:
    """Keys and values that several requests may read; every query that sees it sees all of it.

    `offset` is the position that its first key is rotated for. It is part of what a segment is and
    no part of the arithmetic: a rotation is in the keys themselves.
    """

    num_tokens: int
    offset: int
    representation: Representation


@dataclass(frozen=True)
class RequestShape:
    """One request of a batch.

    Its queries are the last `num_queries` of its `num_live` live tokens, so query i sees the first
    `num_live - num_queries + i + 1` of them; none where that is not positive (`num_live` 0 = its
    queries read segments only). `segments` are indexes of the segments that it may read.
    """

    num_queries: int
    num_live: int
    segments: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Queries of all requests stand behind one another, row by row, in the order of `requests`.

    Raises:
        InvalidPlan: a length is out of range, or a request names a segment twice or one that is
            not there.
    """

    segments: tuple[Segment, ...]
    requests: tuple[RequestShape, ...]

    def __post_init__(self) -> None:
        for index, segment in enumerate(self.segments):
            if segment.num_tokens < 1:
                raise InvalidPlan(f"segments[{index}].num_tokens: {segment.num_tokens}, at least 1")
        for index, request in enumerate(self.requests):
            name = f"requests[{index}]"
            if request.num_queries < 1:
                raise InvalidPlan(f"{name}.num_queries: {request.num_queries}, at least 1")
            if request.num_live < 0:
                raise InvalidPlan(f"{name}.num_live: {request.num_live}, at least 0")
            if len(set(request.segments)) != len(request.segments):
                raise InvalidPlan(f"{name}.segments: {request.segments} names one twice")
            for segment_index in request.segments:
                if not 0 <= segment_index < len(self.segments):
                    raise InvalidPlan(
                        f"{name}.segments: {segment_index} of {len(self.segments)} segments"
                    )

    @cached_property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each request's queries, and the number of rows: one more than requests."""
        starts = [0]
        for request in self.requests:
            starts.append(starts[-1] + request.num_queries)
        return tuple(starts)

    @property
    def num_rows(self) -> int:
        """Queries of all requests."""
        return self.row_starts[-1]

    def rows(self, request: int) -> slice:
        """Rows of one request's queries."""
        return slice(self.row_starts[request], self.row_starts[request + 1])

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By segment: the requests that see it."""
        found: list[list[int]] = [[] for _ in self.segments]
        for index, request in enumerate(self.requests):
            for segment in request.segments:
                found[segment].append(index)
        return tuple(tuple(requests) for requests in found)


@dataclass(frozen=True)
class PagedRows:
    """Rows of one segment, spread over pages of equal size.

    Row t lies in page `page_ids[(first_row + t) // page_tokens]`, at place
    `(first_row + t) % page_tokens`.

    Attributes:
        storage: [num_pages, num_kv_heads, page_tokens, dim], any strides; the last one is 1.
        page_ids: [number of this segment's pages], int64 or int32.
        first_row: rows before the segment's first in its first page.
    """

    storage: torch.Tensor
    page_ids: torch.Tensor
    first_row: int = 0

    @classmethod
    def whole(cls, rows: torch.Tensor) -> "PagedRows":
        """Rows [num_kv_heads, num_tokens, dim] as one page."""
        return cls(rows[None], torch.zeros(1, dtype=torch.int64, device=rows.device))

    @property
    def page_tokens(self) -> int:
        """Rows of a page."""
        return self.storage.shape[2]

    @property
    def num_rows(self) -> int:
        """Rows from the first one to the end of the last page."""
        return self.page_ids.shape[0] * self.page_tokens - self.first_row

    def gather(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) behind one another: [num_kv_heads, end - begin, dim].

        A view where they lie in one page, a copy otherwise.
        """
        first, last = self.first_row + begin, self.first_row + end
        size = self.page_tokens
        pages = [
            self.storage[
                int(self.page_ids[page]), :, max(first - page * size, 0) : last - page * size
            ]
            for page in range(first // size, -(-last // size))
        ]
        return pages[0] if len(pages) == 1 else torch.cat(pages, dim=1)


@dataclass(frozen=True)
class SegmentTensors:
    """Keys and values of one segment in one layer.

    Attributes:
        keys: rows of head_dim_k numbers; float32, bfloat16 or float16.
        values: rows of head_dim_v; the same types, or `float8_e4m3fn` with K16/V8.
        value_scale: float32. [num_kv_heads], [num_kv_heads, head_dim_v], or for one scale per page
            of the values and head [number of the segment's value pages, num_kv_heads, 1]. `None`
            with FULL.
    """

    keys: PagedRows
    values: PagedRows
    value_scale: torch.Tensor | None = None

    @property
    def has_page_scales(self) -> bool:
        """Whether each page of the values has scales of its own."""
        return self.value_scale is not None and self.value_scale.dim() == 3


@dataclass(frozen=True)
class LiveTensors:
    """The live tokens' paged cache in one layer.

    Attributes:
        keys: [num_blocks, num_kv_heads, block_size, head_dim_k], any strides.
        values: [num_blocks, num_kv_heads, block_size, head_dim_v], any strides.
        block_table: [num_requests, at least as many blocks as a request's live tokens need], int.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor

    def gather(self, request: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's first tokens, [num_kv_heads, num_tokens, dim]; copies."""
        blocks = self.block_table[request, : -(-num_tokens // self.keys.shape[2])].long()

        def rows(cache: torch.Tensor) -> torch.Tensor:
            found = cache[blocks].transpose(0, 1)
            return found.reshape(found.shape[0], -1, found.shape[-1])[:, :num_tokens]

        return rows(self.keys), rows(self.values)


@dataclass(frozen=True)
class Attended:
    """What attention found.

    Attributes:
        output: [num_rows, num_heads, head_dim_v], float32; 0 for a query that saw nothing.
        lse: [num_rows, num_heads], float32: log of the sum of the exponentials of the scaled
            scores, natural; minus infinity for a query that saw nothing.
    """

    output: torch.Tensor
    lse: torch.Tensor


def check_page_ids(plan: Plan, segments: Sequence[SegmentTensors], live: LiveTensors) -> None:
    """Check that every page and block that the plan reads is there: once for each plan.

    Looks at what is in the index tensors, which `check_tensors` leaves alone: on a device that
    would wait for it.

    Raises:
        InvalidPlan: naming the page that is not there.
    """
    size, num_blocks = live.keys.shape[2], live.keys.shape[0]
    for index, request in enumerate(plan.requests):
        blocks = live.block_table[index, : -(-request.num_live // size)]
        _check_ids(f"block_table[{index}]", blocks, num_blocks)
    for index, tensors in enumerate(segments):
        for part, rows in (("keys", tensors.keys), ("values", tensors.values)):
            name = f"segments[{index}].{part}.page_ids"
            _check_ids(name, rows.page_ids, rows.storage.shape[0])


def _check_ids(name: str, ids: torch.Tensor, limit: int) -> None:
    if not ids.numel():
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= limit:
        raise InvalidPlan(f"{name}: {lowest} to {highest} of {limit} pages")


_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(
    plan: Plan,
    queries: torch.Tensor,
    segments: Sequence[SegmentTensors],
    live: LiveTensors,
) -> None:
    """Check that the tensors of a layer are what the plan says.

    `queries` are [num_rows, num_heads, head_dim_k].

    Raises:
        InvalidPlan: naming what does not fit.
    """
    num_kv_heads, head_dim = live.keys.shape[1], live.keys.shape[3]
    if queries.dim() != 3 or queries.shape[0] != plan.num_rows:
        raise InvalidPlan(
            f"queries: shape {tuple(queries.shape)}, {plan.num_rows} rows by the plan"
        )
    if queries.shape[2] != head_dim or queries.shape[1] % num_kv_heads:
        raise InvalidPlan(
            f"queries: {queries.shape[1]} heads of {queries.shape[2]} over {num_kv_heads} KV heads "
            f"of {head_dim}"
        )
    if len(segments) != len(plan.segments):
        raise InvalidPlan(f"segments: {len(segments)} tensors for {len(plan.segments)} segments")
    _check_live(plan, live)
    for index, (segment, tensors) in enumerate(zip(plan.segments, segments, strict=True)):
        _check_segment(f"segments[{index}]", segment, tensors, (num_kv_heads, head_dim))
        if tensors.values.storage.shape[3] != live.values.shape[3]:
            raise InvalidPlan(
                f"segments[{index}].values: width {tensors.values.storage.shape[3]}, live values "
                f"have {live.values.shape[3]}"
            )


def _check_live(plan: Plan, live: LiveTensors) -> None:
    if live.values.shape[:3] != live.keys.shape[:3]:
        raise InvalidPlan(
            f"live values: shape {tuple(live.values.shape)}, keys {tuple(live.keys.shape)}"
        )
    for part, cache in (("keys", live.keys), ("values", live.values)):
        if cache.dtype not in _KEY_DTYPES:
            raise InvalidPlan(f"live {part}: dtype {cache.dtype}; live tokens have 16 or 32 bits")
    if live.block_table.shape[0] != len(plan.requests):
        raise InvalidPlan(
            f"block_table: {live.block_table.shape[0]} rows for {len(plan.requests)} requests"
        )
    capacity = live.block_table.shape[1] * live.keys.shape[2]
    longest = max((request.num_live for request in plan.requests), default=0)
    if longest > capacity:
        raise InvalidPlan(f"block_table: room for {capacity} live tokens, {longest} by the plan")


def _check_segment(
    name: str, segment: Segment, tensors: SegmentTensors, key_shape: tuple[int, int]
) -> None:
    keys, values, scale = tensors.keys, tensors.values, tensors.value_scale
    num_kv_heads = key_shape[0]
    if (keys.storage.shape[1], keys.storage.shape[3]) != key_shape:
        raise InvalidPlan(
            f"{name}.keys: {keys.storage.shape[1]} heads of {keys.storage.shape[3]}, "
            f"live keys have {key_shape[0]} of {key_shape[1]}"
        )
    if values.storage.shape[1] != num_kv_heads:
        raise InvalidPlan(f"{name}.values: {values.storage.shape[1]} heads, {num_kv_heads} wanted")
    for part, rows in (("keys", keys), ("values", values)):
        if rows.num_rows < segment.num_tokens or rows.first_row < 0:
            raise InvalidPlan(
                f"{name}.{part}: pages of {rows.num_rows} rows for {segment.num_tokens} tokens"
            )
    if keys.storage.dtype not in _KEY_DTYPES:
        raise InvalidPlan(f"{name}.keys: dtype {keys.storage.dtype}; keys have 16 or 32 bits")
    if segment.representation is Representation.FULL:
        if values.storage.dtype not in _KEY_DTYPES or scale is not None:
            raise InvalidPlan(f"{name}.values: {values.storage.dtype} or scales in a full segment")
        return
    if values.storage.dtype != torch.float8_e4m3fn:
        raise InvalidPlan(f"{name}.values: dtype {values.storage.dtype}, e4m3 wanted")
    shapes = [
        (num_kv_heads,),
        (num_kv_heads, values.storage.shape[3]),
        (values.page_ids.shape[0], num_kv_heads, 1),
    ]
    if scale is None or scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
        found = None if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise InvalidPlan(f"{name}.value_scale: {found}; float32 of one of the shapes {shapes}")
