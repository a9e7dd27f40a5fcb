"""Attention over segments on a GPU: two Triton launches for each layer, whatever the batch holds.

Owns the tables that the programs read: work items, once for each plan, and the addresses of a
layer's tensors. Refuses devices without e4m3 conversions, and to fall back to anything slower.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import torch

from cartridge_kernels.plan import (
    Attended,
    LiveTensors,
    PagedRows,
    Plan,
    SegmentTensors,
    check_tensors,
)
from cartridge_kernels.work_items import (
    WorkTable,
    build_work_table,
    choose_chunk_tokens,
    choose_rows_per_item,
)

MIN_CAPABILITY: Final = (8, 9)
"""The first NVIDIA GPUs that convert e4m3."""

_PROGRAMS_PER_SM: Final = 4
_INTERPRETED_NUM_SMS: Final = 1
_ALIGNMENT_BYTES: Final = 16


def kernels(*, interpret: bool) -> ModuleType:
    """The module of the programs: compiled for the GPU, or interpreted in Python on any device.

    Triton decides which by an environment variable when a function is decorated; both live in one
    process because the module is executed once for each.
    """
    name = f"cartridge_kernels.triton_kernels{'_interpreted' if interpret else '_compiled'}"
    if name in sys.modules:
        return sys.modules[name]
    import triton

    found = importlib.util.find_spec("cartridge_kernels.triton_kernels")
    spec = importlib.util.spec_from_file_location(name, found.origin) if found else None
    if spec is None or spec.loader is None:
        raise ImportError(f"no source of {name}")
    module = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpret
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    sys.modules[name] = module
    return module


@dataclass(frozen=True)
class Tiles:
    """How the partial program is cut and scheduled; changes speed and nothing else.

    With 3 stages one tile of keys and values is loaded while another is in use: each tile's page
    numbers are loaded one stage before it.
    """

    max_rows: int = 64
    num_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def constants(
        self, *, group: int, key_dim: int, value_dim: int, rows_per_item: int
    ) -> dict[str, int]:
        """Sizes that the program is compiled for."""
        return {
            "GROUP": group,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_M": _power_of_two(max(16, rows_per_item * group)),
            "BLOCK_N": self.num_tokens,
            "BLOCK_K": _power_of_two(max(16, key_dim)),
            "BLOCK_V": _power_of_two(max(16, value_dim)),
        }

    @property
    def options(self) -> dict[str, int]:
        """Of the compiler."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


@dataclass
class _Step:
    """What depends on a plan, its page ids and its block table alone."""

    plan: Plan
    geometry: tuple[int, int]
    work: WorkTable
    rows_per_item: int
    page_tokens: int
    items: torch.Tensor
    pages: torch.Tensor
    slot_rows: torch.Tensor
    row_slots: torch.Tensor
    row_starts: torch.Tensor
    sources: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """By content. A layer seen before needs no copy to the device; a captured graph demands it."""


class TritonBackend:
    """Flash-decoding with split keys over one table of work items, on the current CUDA device.

    A second call with a plan, page ids and block table of its first launches two programs and
    copies nothing to the device, so it can be captured in a graph.

    Args:
        interpret: run in Triton's interpreter, on tensors of any device, some 50 ms for each
            program. `None` = as the environment variable TRITON_INTERPRET says.
        chunk_tokens: keys of an item; `None` = such that all multiprocessors have work.
        tiles: see there.
    """

    name = "triton"

    def __init__(
        self,
        *,
        interpret: bool | None = None,
        chunk_tokens: int | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        if interpret is None:
            interpret = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
        self._interpret = interpret
        self._chunk_tokens = chunk_tokens
        self._tiles = tiles or Tiles()
        self._step: _Step | None = None

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Triton, and a CUDA device that knows e4m3; interpreted, no device."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install 'cartridge-router[gpu]')"
        if self._interpret:
            return None
        if device.type != "cuda" or not torch.cuda.is_available():
            return (
                f"no CUDA device (asked for {device}); TRITON_INTERPRET=1 runs it without, slowly"
            )
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return (
                f"compute capability {capability[0]}.{capability[1]} cannot convert e4m3 values, "
                f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} can"
            )
        return None

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
        if queries.stride(2) != 1:
            queries = queries.contiguous()
        num_heads, value_dim = queries.shape[1], live.values.shape[3]
        step = self._step_of(plan, queries, segments, live)
        num_slots = step.slot_rows.shape[0]
        partials = self._slots(num_slots, num_heads, value_dim, queries.device)
        if step.work.items:
            self._attend_items(step, queries, segments, live, scale, partials)
        return self._merge(step, partials, plan.num_rows)

    def _slots(
        self, num_slots: int, num_heads: int, value_dim: int, device: torch.device
    ) -> Attended:
        """Room for partial results; what it holds before is never read."""
        return Attended(
            torch.empty(num_slots, num_heads, value_dim, dtype=torch.float32, device=device),
            torch.empty(num_slots, num_heads, dtype=torch.float32, device=device),
        )

    def _attend_items(
        self,
        step: _Step,
        queries: torch.Tensor,
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
        scale: float,
        partials: Attended,
    ) -> None:
        module = kernels(interpret=self._interpret)
        num_kv_heads = live.keys.shape[1]
        table, kinds, is_aligned = _sources(module, segments, live)
        if table not in step.sources:
            step.sources[table] = torch.tensor(table, dtype=torch.int64).to(queries.device)
        module.partial_kernel[(len(step.work.items), num_kv_heads)](
            queries,
            queries.stride(0),
            queries.stride(1),
            step.items,
            step.sources[table],
            step.pages,
            step.slot_rows,
            partials.output,
            partials.lse,
            scale * math.log2(math.e),
            KINDS=kinds,
            NUM_KINDS=len(kinds),
            PAGE_TOKENS=step.page_tokens,
            ALIGNED=is_aligned,
            UPCAST=self._interpret,
            **self._tiles.constants(
                group=queries.shape[1] // num_kv_heads,
                key_dim=queries.shape[2],
                value_dim=live.values.shape[3],
                rows_per_item=step.rows_per_item,
            ),
            **self._tiles.options,
        )

    def _merge(self, step: _Step, partials: Attended, num_rows: int) -> Attended:
        module = kernels(interpret=self._interpret)
        _, num_heads, value_dim = partials.output.shape
        merged = self._slots(num_rows, num_heads, value_dim, partials.output.device)
        module.merge_kernel[(num_rows, num_heads)](
            partials.output,
            partials.lse,
            step.row_slots,
            step.row_starts,
            merged.output,
            merged.lse,
            VALUE_DIM=value_dim,
            BLOCK_V=_power_of_two(value_dim),
            BLOCK_SLOTS=16,
            enable_fp_fusion=True,
        )
        return merged

    def _step_of(
        self,
        plan: Plan,
        queries: torch.Tensor,
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
    ) -> _Step:
        geometry = queries.shape[1], live.keys.shape[1]
        step = self._step
        if step is None or step.plan is not plan or step.geometry != geometry:
            step = self._make_step(plan, geometry, segments, live, queries.device)
            self._step = step
        return step

    def _make_step(
        self,
        plan: Plan,
        geometry: tuple[int, int],
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
        device: torch.device,
    ) -> _Step:
        num_heads, num_kv_heads = geometry
        rows_per_item = choose_rows_per_item(
            plan, group=num_heads // num_kv_heads, max_tile_rows=self._tiles.max_rows
        )
        chunk_tokens = self._chunk_tokens or choose_chunk_tokens(
            plan,
            num_kv_heads=num_kv_heads,
            rows_per_item=rows_per_item,
            num_programs=_num_sms(device) * _PROGRAMS_PER_SM,
        )
        work = build_work_table(plan, rows_per_item=rows_per_item, chunk_tokens=chunk_tokens)
        row_slots, row_starts = work.slots_by_row
        items, pages = _paged_items(kernels(interpret=self._interpret), work, segments, live)

        def table(numbers: Sequence[Any]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32).to(device)

        return _Step(
            plan=plan,
            geometry=geometry,
            work=work,
            rows_per_item=rows_per_item,
            page_tokens=_common_page_tokens(segments, live),
            items=table(items),
            pages=pages.to(device),
            slot_rows=table(work.slot_rows),
            row_slots=table(row_slots),
            row_starts=table(row_starts),
        )


def _paged_items(
    module: ModuleType, work: WorkTable, segments: Sequence[SegmentTensors], live: LiveTensors
) -> tuple[list[list[int]], torch.Tensor]:
    """Rows of the table of items, and the pages of all sources behind one another, int32."""
    device = live.block_table.device
    lists: list[torch.Tensor] = []
    begins: list[int] = []
    num_pages = 0
    for paged in (part for segment in segments for part in (segment.keys, segment.values)):
        lists.append(paged.page_ids.to(device=device, dtype=torch.int32))
        begins.append(num_pages)
        num_pages += paged.page_ids.shape[0]
    lists.append(live.block_table.to(torch.int32).flatten())
    num_blocks, block_size = live.block_table.shape[1], live.keys.shape[2]
    rows = []
    for item in work.items:
        row = [0] * module.ITEM_COLUMNS.value
        row[module.ITEM_BEGIN.value] = item.begin
        row[module.ITEM_END.value] = item.end
        row[module.ITEM_FIRST_SLOT.value] = item.first_slot
        row[module.ITEM_NUM_ROWS.value] = len(item.rows)
        row[module.ITEM_LIMIT.value] = item.limit
        row[module.ITEM_LIMIT_STEP.value] = item.limit_step
        if item.is_live:
            row[module.ITEM_SOURCE.value] = len(segments)
            places = [(num_pages + item.index * num_blocks, 0, block_size)] * 2
        else:
            tensors = segments[item.index]
            row[module.ITEM_SOURCE.value] = item.index
            places = [
                (begins[2 * item.index + part], paged.first_row, paged.page_tokens)
                for part, paged in enumerate((tensors.keys, tensors.values))
            ]
        key_column, value_column = module.ITEM_KEY_PAGES.value, module.ITEM_VALUE_PAGES.value
        row[key_column : key_column + 3] = places[0]
        row[value_column : value_column + 3] = places[1]
        rows.append(row)
    return rows, torch.cat(lists)


def _sources(
    module: ModuleType, segments: Sequence[SegmentTensors], live: LiveTensors
) -> tuple[tuple[int, ...], tuple[tuple[Any, Any, int], ...], bool]:
    """The table of sources row by row, the kinds in it, and whether all of it lies aligned."""
    kinds: dict[tuple[Any, Any, int], int] = {}
    table: list[int] = []
    is_aligned = True
    sources = [
        *((part.keys.storage, part.values.storage, _scaling(module, part)) for part in segments),
        (live.keys, live.values, (module.UNSCALED.value, [0, 0, 0, 0])),
    ]
    for keys, values, (scaling, scales) in sources:
        kind = _triton_type(keys.dtype), _triton_type(values.dtype), scaling
        row = [
            kinds.setdefault(kind, len(kinds)),
            *(keys.data_ptr(), *keys.stride()),
            *(values.data_ptr(), *values.stride()),
            *scales,
        ]
        table += [*row, *[0] * (module.SOURCE_COLUMNS.value - len(row))]
        is_aligned = is_aligned and _is_aligned(keys) and _is_aligned(values)
    return tuple(table), tuple(kinds), is_aligned


def _scaling(module: ModuleType, tensors: SegmentTensors) -> tuple[int, list[int]]:
    """How values are scaled, and address and strides (page, head, channel) of the scales."""
    scale = tensors.value_scale
    if scale is None:
        return module.UNSCALED.value, [0, 0, 0, 0]
    if tensors.has_page_scales:
        return module.BY_PAGE.value, [scale.data_ptr(), scale.stride(0), scale.stride(1), 0]
    channel_stride = scale.stride(1) if scale.dim() == 2 else 0
    return module.BY_CHANNEL.value, [scale.data_ptr(), 0, scale.stride(0), channel_stride]


def _is_aligned(storage: torch.Tensor) -> bool:
    size = storage.element_size()
    strides = [stride * size for stride in storage.stride()[:3]]
    return storage.stride(3) == 1 and not any(
        number % _ALIGNMENT_BYTES for number in (storage.data_ptr(), *strides)
    )


def _common_page_tokens(segments: Sequence[SegmentTensors], live: LiveTensors) -> int:
    """Page size of all sources where it is one power of two; else 0."""
    parts: list[PagedRows] = [part for each in segments for part in (each.keys, each.values)]
    sizes = {part.page_tokens for part in parts} | {live.keys.shape[2]}
    size = sizes.pop()
    return size if not sizes and size >= 16 and size == _power_of_two(size) else 0


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    """The smallest that is not smaller."""
    return 1 << (number - 1).bit_length()


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float8_e4m3fn: tl.float8e4nv,
    }[dtype]
