"""Attention of one step as a table of equal pieces of work, each made by one program of a GPU.

Owns who reads which keys in which piece, and where the piece's partial result goes. Refuses to know
devices, tensors and heads: it is made of the plan alone, and serves all layers of a step.
"""

from dataclasses import dataclass
from functools import cached_property

from cartridge_kernels.plan import Plan

MIN_CHUNK_TOKENS = 256
MAX_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class WorkItem:
    """A span of the keys of one segment or of one request's live part, and rows that read it.

    The i-th row sees the keys [begin, min(end, limit + i * limit_step)), never none of them. Its
    partial result goes to slot `first_slot + i`.

    Attributes:
        is_live: whether the keys are of a request's live part, else of a segment.
        index: of the request or the segment.
        begin, end: of the keys.
        rows: of the plan's queries; in order.
        limit, limit_step: 0 keys more for each row in a segment, 1 in a live part, which is causal.
        first_slot: see above.
    """

    is_live: bool
    index: int
    begin: int
    end: int
    rows: tuple[int, ...]
    limit: int
    limit_step: int
    first_slot: int


@dataclass(frozen=True)
class WorkTable:
    """All pieces of work of a step. Slots are numbered through all items, one for each row."""

    num_rows: int
    items: tuple[WorkItem, ...]

    @cached_property
    def slot_rows(self) -> tuple[int, ...]:
        """By slot: the row whose partial result it holds."""
        return tuple(row for item in self.items for row in item.rows)

    @cached_property
    def slots_by_row(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots sorted by row, and where each row's begin in them: one more than there are rows."""
        found: list[list[int]] = [[] for _ in range(self.num_rows)]
        for slot, row in enumerate(self.slot_rows):
            found[row].append(slot)
        starts = [0]
        for slots in found:
            starts.append(starts[-1] + len(slots))
        return tuple(slot for slots in found for slot in slots), tuple(starts)


def build_work_table(plan: Plan, *, rows_per_item: int, chunk_tokens: int) -> WorkTable:
    """Cut a plan into items of at most so many rows and keys.

    A span of a segment's keys stands there once for each `rows_per_item` rows that see it, whatever
    requests they are of. Spans begin at multiples of `chunk_tokens`: where that is the same, a
    query's sums are cut at the same keys whatever else is in the batch.
    """
    builder = _Builder(rows_per_item, chunk_tokens)
    for index, segment in enumerate(plan.segments):
        rows = tuple(
            row
            for request in plan.readers[index]
            for row in range(plan.row_starts[request], plan.row_starts[request + 1])
        )
        builder.add_segment(index, segment.num_tokens, rows)
    for index, request in enumerate(plan.requests):
        builder.add_live(index, plan.row_starts[index], request.num_queries, request.num_live)
    return WorkTable(plan.num_rows, tuple(builder.items))


class _Builder:
    def __init__(self, rows_per_item: int, chunk_tokens: int) -> None:
        self.items: list[WorkItem] = []
        self._rows_per_item = rows_per_item
        self._chunk_tokens = chunk_tokens
        self._num_slots = 0

    def add_segment(self, segment: int, num_tokens: int, rows: tuple[int, ...]) -> None:
        size = self._rows_per_item
        for begin in range(0, num_tokens, self._chunk_tokens):
            end = min(begin + self._chunk_tokens, num_tokens)
            for first in range(0, len(rows), size):
                some = rows[first : first + size]
                self._add((False, segment), (begin, end), some, (num_tokens, 0))

    def add_live(self, request: int, first_row: int, num_queries: int, num_live: int) -> None:
        size = self._rows_per_item
        num_before = num_live - num_queries
        for begin in range(0, num_live, self._chunk_tokens):
            # The first query that sees the first of these keys.
            first_query = max(0, begin - num_before)
            for first in range(first_query, num_queries, size):
                last = min(first + size, num_queries)
                limit = num_before + first + 1
                end = min(begin + self._chunk_tokens, num_before + last)
                rows = tuple(range(first_row + first, first_row + last))
                self._add((True, request), (begin, end), rows, (limit, 1))

    def _add(
        self,
        source: tuple[bool, int],
        span: tuple[int, int],
        rows: tuple[int, ...],
        limits: tuple[int, int],
    ) -> None:
        self.items.append(WorkItem(*source, *span, rows, *limits, self._num_slots))
        self._num_slots += len(rows)


def choose_rows_per_item(plan: Plan, *, group: int, max_tile_rows: int) -> int:
    """Rows of an item such that `group` heads of each fill a tile of queries.

    The tile is of the size that the most rows over one segment or live part need: 16, 32, and so on
    up to `max_tile_rows`.
    """
    most = max(
        (sum(plan.requests[request].num_queries for request in found) for found in plan.readers),
        default=1,
    )
    most = max(most, *(request.num_queries for request in plan.requests), 1)
    tile_rows = 16
    while tile_rows < min(most * group, max_tile_rows):
        tile_rows *= 2
    return max(1, tile_rows // group)


def choose_chunk_tokens(
    plan: Plan, *, num_kv_heads: int, rows_per_item: int, num_programs: int
) -> int:
    """The largest power of two, within limits, that makes at least so many programs."""
    num_tokens = 0
    for segment, readers in zip(plan.segments, plan.readers, strict=True):
        num_rows = sum(plan.requests[request].num_queries for request in readers)
        num_tokens += segment.num_tokens * -(-num_rows // rows_per_item)
    for request in plan.requests:
        num_tokens += request.num_live * -(-request.num_queries // rows_per_item)
    chunk = MAX_CHUNK_TOKENS
    while chunk > MIN_CHUNK_TOKENS and num_tokens * num_kv_heads < chunk * num_programs:
        chunk //= 2
    return chunk
