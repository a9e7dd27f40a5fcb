"""Which requests of the running step have a packed prefix, and where its bytes are.

Owns the prefixes of live requests in a worker and the plan of the step that runs. Refuses to decide
who has one: the scheduler half tells.

vLLM makes its model runner, metadata builder and attention layers itself and gives them no word of
connectors, so they meet in this module's one object, `STEPS`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from cartridge_engine_ext.artifact_pool import TORCH_DTYPES
from cartridge_engine_ext.in_place import InPlaceSegments
from cartridge_engine_ext.packed_layout import PackedPrefix, PackedSegment
from cartridge_engine_ext.stored_segments import InPlacePrefix
from cartridge_engine_ext.stored_segments import Segment as SealedSegment
from cartridge_kernels.backends import AttentionBackend
from cartridge_kernels.plan import (
    LiveTensors,
    PagedRows,
    Plan,
    Representation,
    RequestShape,
    Segment,
    SegmentTensors,
)


@dataclass(frozen=True)
class CacheStrides:
    """A KV cache as keys and values: element strides of (block, head, slot, channel).

    In each block the elements of one head lie behind one another, in whatever order.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    keys: tuple[int, int, int, int]
    values: tuple[int, int, int, int]
    values_at: int
    """Place of the first value's first element in a block."""
    item_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one head in a block."""
        return 2 * self.block_size * self.head_dim * self.item_bytes

    def live(self, cache: torch.Tensor, block_table: torch.Tensor) -> LiveTensors:
        """Views of a layer's cache."""
        shape = (self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        begin = cache.storage_offset()
        return LiveTensors(
            cache.as_strided(shape, self.keys, begin),
            cache.as_strided(shape, self.values, begin + self.values_at),
            block_table,
        )

    def head_bytes(self, cache: torch.Tensor) -> torch.Tensor:
        """The same memory as bytes of each block and head: [num_blocks, num_kv_heads, bytes]."""
        num_elements = 2 * self.block_size * self.head_dim
        shape = (self.num_blocks, self.num_kv_heads, num_elements)
        strides = (self.keys[0], num_elements, 1)
        return cache.as_strided(shape, strides, cache.storage_offset()).view(torch.uint8)


@dataclass(frozen=True)
class _PlacedSegment:
    """A segment in blocks of one group of requests: page ids of its parts, the same on all layers.

    The parts are (page ids, bytes before the part in its first page).
    """

    packed: PackedSegment
    keys: tuple[torch.Tensor, int]
    values: tuple[torch.Tensor, int]
    scales: tuple[torch.Tensor, int] | None

    def tensors(self, layer: int, memory: torch.Tensor, head_dim: int) -> SegmentTensors:
        """Views of the layer's memory, [num_blocks, num_kv_heads, bytes]."""

        def rows(part: tuple[torch.Tensor, int], name: str) -> PagedRows:
            ids, num_bytes_before = part
            dtype = TORCH_DTYPES[name]
            storage = memory.view(dtype).view(memory.shape[0], memory.shape[1], -1, head_dim)
            return PagedRows(storage, ids, num_bytes_before // (head_dim * dtype.itemsize))

        scale = None
        if self.scales is not None:
            scale = rows(self.scales, "F32").gather(0, 1)[:, 0]
        return SegmentTensors(
            rows(self.keys, self.packed.key_dtype),
            rows(self.values, self.packed.value_dtype),
            scale,
        )


class _Placed(Protocol):
    """A segment of a step."""

    def tensors(self, layer: int, memory: torch.Tensor, head_dim: int) -> SegmentTensors:
        """Its keys and values in a layer whose cache is `memory`."""
        ...


@dataclass(frozen=True)
class PackedStep:
    """The requests with a packed prefix in one step.

    Attributes:
        plan: of these requests only, in the order of the batch.
        rows: [number of their queries] int64, rows of the batch's queries.
        ordinary_seq_lens: [number of requests in the batch] int32, what the platform's own kernel
            is to read: of packed requests as many tokens as they have queries, which costs least
            and whose answer is replaced.
        has_others: whether the batch has requests without a packed prefix.
    """

    plan: Plan
    rows: torch.Tensor
    block_table: torch.Tensor
    ordinary_seq_lens: torch.Tensor
    has_others: bool
    placed: tuple[_Placed, ...]

    def tensors(
        self, layer: int, cache: torch.Tensor, strides: CacheStrides
    ) -> list[SegmentTensors]:
        """The segments in a layer, as views of its cache or of where they lie."""
        memory = strides.head_bytes(cache)
        return [placed.tensors(layer, memory, strides.head_dim) for placed in self.placed]


class PackedSteps:
    """One for each worker process; used on vLLM's model thread only."""

    def __init__(self) -> None:
        self._prefixes: dict[str, PackedPrefix | InPlacePrefix] = {}
        self._in_place: InPlaceSegments | None = None
        self._strides: CacheStrides | None = None
        self._kernel: AttentionBackend | None = None
        self.current: PackedStep | None = None

    def prepare(
        self, strides: CacheStrides, kernel: AttentionBackend, in_place: InPlaceSegments
    ) -> None:
        """Learn the cache's layout, the kernel and where to read in place; before any request."""
        self._strides, self._kernel, self._in_place = strides, kernel, in_place

    @property
    def strides(self) -> CacheStrides:
        """The layout of every layer's cache."""
        assert self._strides is not None  # noqa: S101 - set when caches are registered
        return self._strides

    @property
    def kernel(self) -> AttentionBackend:
        """What computes attention over segments."""
        assert self._kernel is not None  # noqa: S101 - set when caches are registered
        return self._kernel

    @property
    def in_place(self) -> InPlaceSegments:
        """Segments that are read where they lie."""
        assert self._in_place is not None  # noqa: S101 - set when caches are registered
        return self._in_place

    def note(
        self, prefixes: Mapping[str, PackedPrefix | InPlacePrefix], finished: Iterable[str]
    ) -> None:
        """Requests that are over, and requests that got their prefix, some of them once more."""
        for prefix in prefixes.values():
            if isinstance(prefix, InPlacePrefix):
                # Before any goes: what both use stays mapped.
                self.in_place.acquire(prefix)
        for request_id in (*finished, *prefixes):
            self._forget(request_id)
        self._prefixes.update(prefixes)

    def _forget(self, request_id: str) -> None:
        prefix = self._prefixes.pop(request_id, None)
        if isinstance(prefix, InPlacePrefix):
            self.in_place.release(prefix)

    def num_positions_ahead(self, request_ids: Sequence[str]) -> list[int]:
        """By request: positions of its prefix minus slots, how far live tokens stand ahead."""
        prefixes = [self._prefixes.get(request_id) for request_id in request_ids]
        return [p.num_positions - _num_slots(p) if p is not None else 0 for p in prefixes]

    def begin(
        self,
        request_ids: Sequence[str],
        num_computed: "np.ndarray[tuple[int], np.dtype[np.int32]]",
        num_scheduled: "np.ndarray[tuple[int], np.dtype[np.int32]]",
        block_table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
        device: torch.device,
    ) -> None:
        """Plan the step of a batch; `current` is `None` where no request has a packed prefix.

        Args:
            request_ids: of the batch, row by row.
            num_computed: slots that each has, before this step.
            num_scheduled: queries of each in this step.
            block_table: [at least as many rows, blocks].
            device: of the model.
        """
        packed = [
            (row, self._prefixes[request_id])
            for row, request_id in enumerate(request_ids)
            if request_id in self._prefixes
        ]
        self.current = None
        if not packed:
            return
        ends = np.cumsum(num_scheduled)
        found = _StepSegments(self.strides, self.in_place, device)
        requests, rows, tables = [], [], []
        for row, prefix in packed:
            num_slots = _num_slots(prefix)
            num_blocks = num_slots // self.strides.block_size
            indexes = found.indexes(prefix, tuple(block_table[row, :num_blocks].tolist()))
            num_live = int(num_computed[row] + num_scheduled[row]) - num_slots
            requests.append(RequestShape(int(num_scheduled[row]), num_live, indexes))
            rows.append(np.arange(ends[row] - num_scheduled[row], ends[row]))
            last = num_blocks - (-num_live // self.strides.block_size)
            tables.append(block_table[row, num_blocks:last])
        table = np.zeros((len(tables), max(len(ids) for ids in tables)), np.int32)
        for index, ids in enumerate(tables):
            table[index, : len(ids)] = ids
        seq_lens = num_computed + num_scheduled
        packed_rows = [row for row, _ in packed]
        seq_lens[packed_rows] = num_scheduled[packed_rows]
        self.current = PackedStep(
            plan=Plan(tuple(found.planned), tuple(requests)),
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            block_table=torch.from_numpy(table).to(device),
            ordinary_seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
            has_others=len(packed) < len(request_ids),
            placed=tuple(found.placed),
        )


class _StepSegments:
    """Segments of a step, each once: of packed prefixes by their blocks, in place by themselves."""

    def __init__(
        self, strides: CacheStrides, in_place: InPlaceSegments, device: torch.device
    ) -> None:
        self._strides, self._in_place, self._device = strides, in_place, device
        self._known: dict[object, tuple[int, ...]] = {}
        self.planned: list[Segment] = []
        self.placed: list[_Placed] = []

    def indexes(
        self, prefix: PackedPrefix | InPlacePrefix, blocks: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Where the segments of a prefix, packed into these blocks, stand in the lists."""
        if isinstance(prefix, InPlacePrefix):
            found: list[int] = []
            num_named: Counter[tuple[str, int]] = Counter()
            for segment in prefix.segments:
                # One that a request names twice is read twice, as two are.
                key = segment.place, num_named[segment.place]
                num_named[segment.place] += 1
                found += self._added(key, partial(self._mapped, segment))
            return tuple(found)

        def in_blocks() -> list[tuple[Segment, _Placed]]:
            return [(_planned(part), self._place(part, blocks)) for part in prefix.segments]

        return self._added((prefix, blocks), in_blocks)

    def _added(
        self, key: object, make: Callable[[], list[tuple[Segment, _Placed]]]
    ) -> tuple[int, ...]:
        if key not in self._known:
            begin = len(self.planned)
            for planned, placed in make():
                self.planned.append(planned)
                self.placed.append(placed)
            self._known[key] = tuple(range(begin, len(self.planned)))
        return self._known[key]

    def _mapped(self, segment: SealedSegment) -> list[tuple[Segment, _Placed]]:
        found = self._in_place.segment(segment)
        return [(found.planned, found)]

    def _place(self, segment: PackedSegment, blocks: tuple[int, ...]) -> _PlacedSegment:
        head_dim, cache_bytes = self._strides.head_dim, self._strides.block_bytes

        def pages(at: int, num_bytes: int) -> tuple[torch.Tensor, int]:
            first, stop = at // cache_bytes, -(-(at + num_bytes) // cache_bytes)
            ids = torch.tensor(blocks[first:stop], dtype=torch.int64, device=self._device)
            return ids, at - first * cache_bytes

        row_bytes = {name: head_dim * dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
        return _PlacedSegment(
            segment,
            pages(segment.keys_at, segment.num_tokens * row_bytes[segment.key_dtype]),
            pages(segment.values_at, segment.num_tokens * row_bytes[segment.value_dtype]),
            None if segment.scales_at is None else pages(segment.scales_at, row_bytes["F32"]),
        )


def _num_slots(prefix: PackedPrefix | InPlacePrefix) -> int:
    return 0 if isinstance(prefix, InPlacePrefix) else prefix.num_slots


STEPS = PackedSteps()
"""Of this process."""


def _planned(segment: PackedSegment) -> Segment:
    has_scales = segment.scales_at is not None
    kind = Representation.K16V8 if has_scales else Representation.FULL
    return Segment(segment.num_tokens, segment.offset, kind)
