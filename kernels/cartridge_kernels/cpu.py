"""Attention on a CPU with torch alone: every segment is read once for all queries that see it.

Owns the float32 products, tile by tile, the integer conversion of e4m3 and the scratch memory.
Refuses products in half precision, which are 11 to 20 times slower here, and to fill memory with
scores: a tile has at most `_TILE` keys and `_ROWS` query rows for each KV head.

Source: online softmax, Milakov and Gimelshein, arXiv 1805.02867, section 3.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cartridge_kernels.merging import merge_pair
from cartridge_kernels.plan import (
    Attended,
    LiveTensors,
    PagedRows,
    Plan,
    SegmentTensors,
    check_page_ids,
    check_tensors,
)

_TILE = 1024
_TILE_NUMBERS = 1 << 19
"""Numbers of a tile's keys, all KV heads: 2 MiB; more leave the second cache."""
_ROWS = 2048
_BATCHED_LIVE = 2048
"""Live tokens up to which one-query requests are computed together, padded to the longest."""
_BATCHED_NUMBERS = 1 << 20
"""Numbers of the padded keys of such a group: 4 MiB."""
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
_FROM_BITS = 2.0**8
"""What an e4m3 code at the place of a float16 is too small by: 2 ** (15 - 7)."""


class CpuBackend:
    """See the module; float32 results, whatever the inputs. Keeps its scratch between calls."""

    name = "cpu"

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._scratch = _Scratch()

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Runs on every CPU."""
        return None if device.type == "cpu" else f"device {device.type}, cpu wanted"

    @torch.no_grad()
    def attend(
        self,
        plan: Plan,
        queries: torch.Tensor,
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
        *,
        scale: float,
    ) -> Attended:
        """See `cartridge_kernels.reference.attend`."""
        check_tensors(plan, queries, segments, live)
        prepared = self._prepare(plan, segments, live)
        rows, heads, dim = queries.shape
        kv_heads, value_dim = live.keys.shape[1], live.values.shape[3]
        group = heads // kv_heads
        # By KV head, so that the queries of a group are rows of one product; scores are to base 2,
        # whose exponential costs 0.4 of the natural one.
        by_head = (queries.to(torch.float32) * (scale * _LOG2_E)).view(rows, kv_heads, group, dim)
        by_head = by_head.transpose(0, 1).contiguous()
        output = by_head.new_zeros(kv_heads, rows, group, value_dim)
        lse = by_head.new_full((kv_heads, rows, group), -math.inf)

        for batch in prepared.batches:
            output[:, batch.rows], lse[:, batch.rows] = self._batch(by_head, live, batch)
        for part in prepared.parts:
            found = self._live_part(by_head[:, part.rows].flatten(1, 2), group, live, part)
            _put(output, lse, part.rows, found)
        for index, (readers, tensors) in enumerate(zip(prepared.readers, segments, strict=True)):
            if readers is None:
                continue
            asked = by_head[:, readers].flatten(1, 2)
            found = self._segment(asked, tensors, prepared.segments[index])
            found = (
                found[0].view(kv_heads, -1, group, value_dim),
                found[1].view(kv_heads, -1, group),
            )
            output[:, readers], lse[:, readers] = merge_pair(
                output[:, readers], lse[:, readers], *found
            )
        return Attended(
            output.transpose(0, 1).reshape(rows, heads, value_dim),
            lse.transpose(0, 1).reshape(rows, heads),
        )

    def _prepare(
        self, plan: Plan, segments: Sequence[SegmentTensors], live: LiveTensors
    ) -> "_Prepared":
        known = self._prepared
        if known is None or not known.is_for(plan, segments, live):
            known = self._prepared = _Prepared(plan, segments, live)
        return known

    def _segment(
        self, queries: torch.Tensor, tensors: SegmentTensors, pages: "_SegmentPages"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial of [num_kv_heads, rows, dim], already scaled, over a whole segment."""
        storage = tensors.values.storage
        sums = _Sums(queries, storage.shape[3], self._scratch)
        scale = tensors.value_scale
        for tile, (key_rows, value_rows) in enumerate(pages.tiles):
            keys = self._floats("keys", tensors.keys.storage, key_rows)
            values = self._floats("values", storage, value_rows)
            factor = None
            if pages.places is not None and scale is not None:
                places = pages.places[tile * pages.size : (tile + 1) * pages.size]
                factor = (scale[places] * _FROM_BITS).permute(1, 2, 0)
            sums.add(keys.transpose(1, 2), values, factor)
        output, lse = sums.finish()
        if scale is not None and pages.places is None:
            factor = scale * _FROM_BITS
            output.mul_(factor[:, None, None] if scale.dim() == 1 else factor[:, None, :])
        return output, lse

    def _live_part(
        self, queries: torch.Tensor, group: int, live: LiveTensors, part: "_LivePart"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = _Sums(queries, live.values.shape[3], self._scratch)
        size = live.keys.shape[2]
        for first, blocks in part.tiles:
            length = min(blocks.shape[0] * size, part.num_live - first)
            keys = self._blocks("keys", live.keys.transpose(2, 3), blocks[None], by_column=True)
            values = self._blocks("values", live.values, blocks[None], by_column=False)
            sums.add(
                keys[0, :, :, :length],
                values[0, :, :length],
                None,
                hidden=_Hidden(first, part.num_live - part.num_queries, group),
            )
        return sums.finish()

    def _batch(
        self, by_head: torch.Tensor, live: LiveTensors, batch: "_LiveBatch"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Requests of one query each: [num_kv_heads, requests, group(, dim)]."""
        queries = by_head[:, batch.rows].transpose(0, 1).flatten(0, 1)
        keys = self._blocks("keys", live.keys.transpose(2, 3), batch.blocks, by_column=True)
        values = self._blocks("values", live.values, batch.blocks, by_column=False)
        length = batch.num_live
        keys, values = keys[..., :length], values[:, :, :length]
        scores = torch.bmm(queries, keys.flatten(0, 1))
        if batch.tails is not None:
            # Whatever lies there, also NaN: a weight of 0 does not hide it.
            values[batch.tails[0], :, batch.tails[1]] = 0.0
            by_request = scores.view(*values.shape[:2], -1, length)
            by_request.masked_fill_(batch.is_tail[:, None, None, :], -math.inf)
        # Every request here has live tokens, so no maximum is minus infinity.
        largest = scores.amax(dim=2, keepdim=True)
        weights = scores.sub_(largest).exp2_()
        total = weights.sum(dim=2, keepdim=True)
        output = torch.bmm(weights, values.flatten(0, 1)).div_(total)
        lse = (largest + total.log2()) * _LN_2
        shape = (batch.blocks.shape[0], by_head.shape[0], -1)
        return (
            output.view(*shape, output.shape[-1]).transpose(0, 1),
            lse.view(shape).transpose(0, 1),
        )

    def _blocks(
        self, name: str, cache: torch.Tensor, blocks: torch.Tensor, *, by_column: bool
    ) -> torch.Tensor:
        """Blocks [requests, blocks] of a cache [blocks, heads, a, b] behind one another, float32.

        [requests, heads, a, blocks * b] by column, else [requests, heads, blocks * a, b]; scratch.
        """
        shape = (blocks.numel(), *cache.shape[1:])
        found = self._scratch.take(f"{name} {cache.dtype}", shape, cache.dtype)
        torch.index_select(cache, 0, blocks.flatten(), out=found)
        joined = found.view(*blocks.shape, *cache.shape[1:])
        joined = joined.permute((0, 2, 3, 1, 4) if by_column else (0, 2, 1, 3, 4))
        if blocks.shape[1] > 1 or cache.dtype != torch.float32:
            whole = self._scratch.take(f"joined {name}", joined.shape, torch.float32)
            joined = whole.copy_(joined)
        return joined.flatten(3, 4) if by_column else joined.flatten(2, 3)

    def _floats(self, name: str, storage: torch.Tensor, rows: "_Rows") -> torch.Tensor:
        """Rows as float32 [num_kv_heads, rows, dim], in scratch; e4m3 lacks its `_FROM_BITS`."""
        is_coded = storage.dtype == torch.float8_e4m3fn
        if is_coded:
            storage = storage.view(torch.int8)
        if isinstance(rows.pages, slice):
            found = storage[rows.pages, :, rows.begin : rows.end]
        else:
            shape = (rows.pages.shape[0], *storage.shape[1:])
            found = self._scratch.take(f"pages {storage.dtype}", shape, storage.dtype)
            torch.index_select(storage, 0, rows.pages, out=found)
        pages, kv_heads, size, dim = found.shape
        if is_coded:
            # Exponent and mantissa to where float16 has them; 14 is the sign's copy, cleared.
            bits = self._scratch.take("bits", (pages, kv_heads, size, dim), torch.int16)
            bits.copy_(found)
            found = bits.mul_(128).bitwise_and_(-16512).view(torch.float16)
        floats = self._scratch.take(name, (kv_heads, pages, size, dim), torch.float32)
        floats.copy_(found.transpose(0, 1))
        return floats.view(kv_heads, pages * size, dim)[:, rows.skip : rows.skip + rows.count]


class _Scratch:
    """Buffers by name, made anew only when one is too small."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(*shape)


@dataclass(frozen=True)
class _Hidden:
    """Keys from `first_key`; row i is query `i // group`, which sees keys up to `offset` + it."""

    first_key: int
    offset: int
    group: int

    def mask(self, first_row: int, rows: int, keys: int) -> torch.Tensor | None:
        """[rows, keys], True where a row does not see a key; `None` where all see all."""
        if self.first_key + keys - 1 <= self.offset + first_row // self.group:
            return None
        last = self.offset + torch.arange(first_row, first_row + rows) // self.group
        return torch.arange(self.first_key, self.first_key + keys) > last[:, None]


class _Sums:
    """Softmax sums of rows over keys that come tile by tile: weights relative to the maximum."""

    def __init__(self, queries: torch.Tensor, value_dim: int, scratch: _Scratch) -> None:
        self._queries, self._scratch = queries, scratch
        heads, rows = queries.shape[:2]
        self._output = queries.new_zeros(heads, rows, value_dim)
        self._largest = queries.new_full((heads, rows, 1), -math.inf)
        self._total = queries.new_zeros(heads, rows, 1)

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        factor: torch.Tensor | None,
        hidden: _Hidden | None = None,
    ) -> None:
        """Keys [heads, dim, tokens], values [heads, tokens, value_dim]; `factor` of weights."""
        heads, rows, _ = self._queries.shape
        for first in range(0, rows, _ROWS):
            part = slice(first, min(first + _ROWS, rows))
            shape = (heads, part.stop - first, keys.shape[2])
            scores = self._scratch.take("scores", shape, torch.float32)
            torch.bmm(self._queries[:, part], keys, out=scores)
            mask = hidden.mask(first, shape[1], shape[2]) if hidden is not None else None
            if mask is not None:
                scores.masked_fill_(mask, -math.inf)
            self._add_scores(part, scores, values, factor)

    def _add_scores(
        self,
        part: slice,
        scores: torch.Tensor,
        values: torch.Tensor,
        factor: torch.Tensor | None,
    ) -> None:
        before = self._largest[:, part]
        largest = torch.maximum(before, scores.amax(dim=2, keepdim=True))
        # Rows that have seen nothing yet: differences of -inf, not NaN.
        base = largest.clamp(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(base).exp2_()
        shrink = torch.exp2(before - base)
        self._total[:, part] = self._total[:, part] * shrink + weights.sum(dim=2, keepdim=True)
        if factor is not None:
            weights.mul_(factor)
        output = self._output[:, part]
        output.mul_(shrink).baddbmm_(weights, values)
        self._largest[:, part] = largest

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp; 0 and minus infinity for rows that saw nothing."""
        nothing = self._total == 0
        output = self._output.div_(self._total.masked_fill(nothing, 1.0))
        return output, ((self._largest + self._total.log2()) * _LN_2)[..., 0]


@dataclass(frozen=True)
class _Rows:
    """Where the rows of a tile lie: of each page [begin, end), then `count` after `skip`.

    Pages that are no slice are read whole.
    """

    pages: torch.Tensor | slice
    begin: int
    end: int
    skip: int
    count: int


class _SegmentPages:
    """Tiles of a segment, and of each token the page of its value where pages have scales."""

    def __init__(self, num_tokens: int, tensors: SegmentTensors) -> None:
        self._of = (tensors.keys.page_ids, tensors.values.page_ids)
        self._layout = _layout(tensors)
        key_ids, value_ids = (ids.tolist() for ids in self._of)
        _, kv_heads, _, dim = tensors.keys.storage.shape
        self.size = min(_TILE, max(_TILE_NUMBERS // (kv_heads * dim), 1))
        self.tiles = [
            (
                _rows(tensors.keys, key_ids, begin, min(begin + self.size, num_tokens)),
                _rows(tensors.values, value_ids, begin, min(begin + self.size, num_tokens)),
            )
            for begin in range(0, num_tokens, self.size)
        ]
        self.places: torch.Tensor | None = None
        if tensors.has_page_scales:
            places = torch.arange(num_tokens) + tensors.values.first_row
            self.places = places // tensors.values.page_tokens

    def is_for(self, tensors: SegmentTensors) -> bool:
        return (
            tensors.keys.page_ids is self._of[0]
            and tensors.values.page_ids is self._of[1]
            and _layout(tensors) == self._layout
        )


def _layout(tensors: SegmentTensors) -> tuple[int, ...]:
    keys, values = tensors.keys, tensors.values
    sizes = *keys.storage.shape[::2], *values.storage.shape[::2]
    return (*sizes, keys.first_row, values.first_row, int(tensors.has_page_scales))


def _rows(paged: PagedRows, ids: list[int], begin: int, end: int) -> _Rows:
    size, first, last = paged.page_tokens, paged.first_row + begin, paged.first_row + end
    chosen = ids[first // size : -(-last // size)]
    skip = first % size
    if len(chosen) == 1:
        page = slice(chosen[0], chosen[0] + 1)
        return _Rows(page, skip, skip + end - begin, 0, end - begin)
    if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
        # A view where an index would be a copy.
        return _Rows(slice(chosen[0], chosen[-1] + 1), 0, size, skip, end - begin)
    return _Rows(torch.tensor(chosen), 0, size, skip, end - begin)


@dataclass(frozen=True)
class _LivePart:
    """The live tokens of one request: (first token, blocks) of each tile."""

    rows: slice
    num_queries: int
    num_live: int
    tiles: list[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class _LiveBatch:
    """Requests of one query and about as many live tokens; `num_live` those of the longest.

    `tails` are (request, token) of the padding, `is_tail` the same as a mask; `None` without any.
    """

    rows: slice | torch.Tensor
    num_live: int
    blocks: torch.Tensor
    tails: tuple[torch.Tensor, ...] | None
    is_tail: torch.Tensor


class _Prepared:
    """What a plan, its page ids and its block table say, once for all layers."""

    def __init__(self, plan: Plan, segments: Sequence[SegmentTensors], live: LiveTensors) -> None:
        check_page_ids(plan, segments, live)
        self._plan, self._table = plan, live.block_table
        self._num_blocks, self._block_size = live.keys.shape[::2]
        table = live.block_table.long()
        together: list[int] = []
        self.parts: list[_LivePart] = []
        for index, request in enumerate(plan.requests):
            if request.num_queries == 1 and request.num_live <= _BATCHED_LIVE:
                together += [index] if request.num_live else []
            elif request.num_live:
                self.parts.append(self._part(plan, index, table[index]))
        most = max(_BATCHED_NUMBERS // live.keys[0, :, 0].numel(), 1)
        self.batches = [self._batch(plan, group, table) for group in _groups(plan, together, most)]
        self.readers = [_rows_of(plan, requests) if requests else None for requests in plan.readers]
        self.segments = [
            _SegmentPages(segment.num_tokens, tensors)
            for segment, tensors in zip(plan.segments, segments, strict=True)
        ]

    def is_for(self, plan: Plan, segments: Sequence[SegmentTensors], live: LiveTensors) -> bool:
        return (
            self._plan is plan
            and self._table is live.block_table
            and (self._num_blocks, self._block_size) == live.keys.shape[::2]
            and all(
                pages.is_for(tensors)
                for pages, tensors in zip(self.segments, segments, strict=True)
            )
        )

    def _part(self, plan: Plan, index: int, table: torch.Tensor) -> _LivePart:
        request, size = plan.requests[index], self._block_size
        step = max(_TILE // size, 1)
        tiles = [
            (block * size, table[block : min(block + step, -(-request.num_live // size))])
            for block in range(0, -(-request.num_live // size), step)
        ]
        return _LivePart(plan.rows(index), request.num_queries, request.num_live, tiles)

    def _batch(self, plan: Plan, requests: list[int], table: torch.Tensor) -> _LiveBatch:
        lengths = torch.tensor([plan.requests[index].num_live for index in requests])
        longest = int(lengths.max())
        blocks = table[requests, : -(-longest // self._block_size)]
        # Entries after a request's last block may be anything.
        used = torch.arange(blocks.shape[1]) * self._block_size < lengths[:, None]
        is_tail = torch.arange(longest) >= lengths[:, None]
        return _LiveBatch(
            _rows_of(plan, requests),
            longest,
            torch.where(used, blocks, blocks[:, :1]),
            is_tail.nonzero(as_tuple=True) if is_tail.any() else None,
            is_tail,
        )


def _groups(plan: Plan, requests: list[int], most_tokens: int) -> Iterator[list[int]]:
    """Requests of similar length together, so that padding stays below half of the work."""
    group: list[int] = []
    for index in sorted(requests, key=lambda index: -plan.requests[index].num_live):
        if group:
            longest = plan.requests[group[0]].num_live
            is_full = longest * (len(group) + 1) > most_tokens
            if is_full or longest > max(2 * plan.requests[index].num_live, 64):
                yield sorted(group)
                group = []
        group.append(index)
    if group:
        yield sorted(group)


def _rows_of(plan: Plan, requests: Sequence[int]) -> slice | torch.Tensor:
    """Rows of requests, ascending: a slice where they stand behind one another."""
    if list(requests) == list(range(requests[0], requests[-1] + 1)):
        return slice(plan.row_starts[requests[0]], plan.row_starts[requests[-1] + 1])
    rows = [row for index in requests for row in range(*plan.rows(index).indices(plan.num_rows))]
    return torch.tensor(rows)


def _put(
    output: torch.Tensor,
    lse: torch.Tensor,
    rows: slice,
    found: tuple[torch.Tensor, torch.Tensor],
) -> None:
    output[:, rows] = found[0].view_as(output[:, rows])
    lse[:, rows] = found[1].view_as(lse[:, rows])
