"""Attention over segments by FlashInfer: everything in bfloat16, one launch for each segment.

Owns the translation between a plan and FlashInfer's wrappers, whose log-sum-exps are of base 2 and
never leave. Refuses K16/V8: FlashInfer 0.7.4 reads keys and values of one type, but on Blackwell,
where nobody has tried this.

Source: `flashinfer/prefill.py` and `flashinfer/cascade.py` of flashinfer-python 0.7.4; arXiv
2501.01005, section 2.2.
"""

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from cartridge_kernels.plan import (
    Attended,
    InvalidPlan,
    LiveTensors,
    Plan,
    Representation,
    SegmentTensors,
    check_tensors,
)

DTYPE: Final = torch.bfloat16
MIN_CAPABILITY: Final = (8, 0)
WORKSPACE_BYTES: Final = 128 << 20
"""What FlashInfer's documentation recommends."""


def natural_lse(base_two_lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps [rows, heads] of base 2 as natural ones."""
    return base_two_lse * math.log(2.0)


@dataclass(frozen=True)
class _Part:
    """One run of a wrapper: the rows that it answers, and as the how manieth of each row's parts.

    `segment` is `None` for the live parts of all requests.
    """

    wrapper: Any
    segment: int | None
    rows: torch.Tensor
    turns: torch.Tensor


@dataclass(frozen=True)
class _Step:
    """What depends on the plan, its page ids, its block table and the layer's shape."""

    plan: Plan
    shape: tuple[int | float, ...]
    parts: tuple[_Part, ...]
    num_turns: int
    saw_nothing: torch.Tensor


class FlashInferBackend:
    """`BatchPrefillWithPagedKVCacheWrapper` for each segment and for the live parts, then a merge.

    Partial results are rounded to bfloat16, as FlashInfer merges them. Pages of keys and values of
    a segment must be the same ones, and hold it from their first row.

    Args:
        flashinfer: the module; `None` = import it at the first use.
    """

    name = "flashinfer"

    def __init__(self, flashinfer: Any = None) -> None:
        self._flashinfer = flashinfer
        self._workspace: torch.Tensor | None = None
        self._step: _Step | None = None

    def unavailable_reason(self, device: torch.device) -> str | None:
        """FlashInfer, and a CUDA device with bfloat16."""
        if self._flashinfer is None and importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed (pip install 'cartridge-router[gpu]')"
        if device.type != "cuda" or not torch.cuda.is_available():
            return f"no CUDA device (asked for {device})"
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return (
                f"compute capability {capability[0]}.{capability[1]}, bfloat16 needs "
                f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
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
        """See `cartridge_kernels.reference.attend`.

        Raises:
            InvalidPlan: also for types and page layouts that FlashInfer cannot read.
        """
        check_tensors(plan, queries, segments, live)
        _check_types(plan, queries, segments, live)
        shape = (*queries.shape[1:], *live.keys.shape[1:3], live.values.shape[3], scale)
        step = self._step
        if step is None or step.plan is not plan or step.shape != shape:
            _check_pages(segments)
            step = self._make_step(plan, shape, segments, live)
            self._step = step
        num_rows, num_heads, value_dim = *queries.shape[:2], live.values.shape[3]
        outputs = queries.new_zeros(num_rows, step.num_turns, num_heads, value_dim)
        lses = torch.full(outputs.shape[:3], -math.inf, dtype=torch.float32, device=queries.device)
        for part in step.parts:
            keys_and_values = (
                (live.keys, live.values)
                if part.segment is None
                else (segments[part.segment].keys.storage, segments[part.segment].values.storage)
            )
            output, lse = part.wrapper.run(queries[part.rows], keys_and_values, return_lse=True)
            outputs[part.rows, part.turns] = output
            lses[part.rows, part.turns] = lse
        output, lse = self._module().merge_states(outputs, lses)
        return Attended(
            output.to(torch.float32).masked_fill(step.saw_nothing[:, None, None], 0.0),
            natural_lse(lse).masked_fill(step.saw_nothing[:, None], -math.inf),
        )

    def _module(self) -> Any:
        if self._flashinfer is None:
            self._flashinfer = importlib.import_module("flashinfer")
        return self._flashinfer

    def _make_step(
        self,
        plan: Plan,
        shape: tuple[int | float, ...],
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
    ) -> _Step:
        turns = [0] * plan.num_rows
        parts = []

        def add(wrapper: Any, segment: int | None, rows: list[int]) -> None:
            device = live.keys.device
            numbers = [turns[row] for row in rows]
            for row in rows:
                turns[row] += 1
            parts.append(
                _Part(
                    wrapper,
                    segment,
                    torch.tensor(rows, device=device),
                    torch.tensor(numbers, device=device),
                )
            )

        live_rows, wrapper = self._plan_live(plan, shape, live)
        if live_rows:
            add(wrapper, None, live_rows)
        for index, readers in enumerate(plan.readers):
            rows = [
                row
                for request in readers
                for row in range(plan.row_starts[request], plan.row_starts[request + 1])
            ]
            if rows:
                num_tokens = plan.segments[index].num_tokens
                size = segments[index].keys.page_tokens
                pages = segments[index].keys.page_ids[: -(-num_tokens // size)]
                wrapper = self._planned(
                    shape, [len(rows)], [num_tokens], [pages], page_tokens=size, causal=False
                )
                add(wrapper, index, rows)
        saw_nothing = torch.tensor([count == 0 for count in turns], device=live.keys.device)
        # The merge wants at least one.
        return _Step(plan, shape, tuple(parts), max(1, *turns), saw_nothing)

    def _plan_live(
        self, plan: Plan, shape: tuple[int | float, ...], live: LiveTensors
    ) -> tuple[list[int], Any]:
        """Rows that see a live token, and the wrapper that answers them; `None` without any."""
        size = live.keys.shape[2]
        rows: list[int] = []
        num_queries, num_tokens, pages = [], [], []
        for index, request in enumerate(plan.requests):
            # The last queries; those before see nothing where there are more than live tokens.
            num_seeing = min(request.num_queries, request.num_live)
            if num_seeing:
                end = plan.row_starts[index + 1]
                rows += range(end - num_seeing, end)
                num_queries.append(num_seeing)
                num_tokens.append(request.num_live)
                pages.append(live.block_table[index, : -(-request.num_live // size)])
        if not rows:
            return rows, None
        return rows, self._planned(
            shape, num_queries, num_tokens, pages, page_tokens=size, causal=True
        )

    def _planned(
        self,
        shape: tuple[int | float, ...],
        num_queries: list[int],
        num_tokens: list[int],
        pages: list[torch.Tensor],
        *,
        page_tokens: int,
        causal: bool,
    ) -> Any:
        num_heads, key_dim, num_kv_heads, _, value_dim, scale = shape
        device = pages[0].device
        if self._workspace is None or self._workspace.device != device:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = self._module().BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        wrapper.plan(
            _running_sum(num_queries),
            _running_sum([len(some) for some in pages]),
            torch.cat(pages).to(torch.int32),
            torch.tensor([(n - 1) % page_tokens + 1 for n in num_tokens], dtype=torch.int32),
            num_heads,
            num_kv_heads,
            key_dim,
            page_tokens,
            head_dim_vo=value_dim,
            causal=causal,
            sm_scale=scale,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )
        return wrapper


def _running_sum(counts: list[int]) -> torch.Tensor:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return torch.tensor(starts, dtype=torch.int32)


def _check_types(
    plan: Plan, queries: torch.Tensor, segments: Sequence[SegmentTensors], live: LiveTensors
) -> None:
    for index, segment in enumerate(plan.segments):
        if segment.representation is Representation.K16V8:
            raise InvalidPlan(
                f"segments[{index}]: k16v8; FlashInfer reads keys and values of one type, "
                "the triton backend reads these"
            )
    tensors = {"queries": queries, "live.keys": live.keys, "live.values": live.values}
    for index, part in enumerate(segments):
        tensors[f"segments[{index}].keys"] = part.keys.storage
        tensors[f"segments[{index}].values"] = part.values.storage
    for name, tensor in tensors.items():
        if tensor.dtype != DTYPE:
            raise InvalidPlan(f"{name}: {tensor.dtype}; with FlashInfer all are {DTYPE}")


def _check_pages(segments: Sequence[SegmentTensors]) -> None:
    for index, part in enumerate(segments):
        keys, values = part.keys, part.values
        if keys.first_row or values.first_row:
            raise InvalidPlan(
                f"segments[{index}]: first_row {keys.first_row} and {values.first_row}; FlashInfer "
                "reads a page from its first row"
            )
        if keys.page_tokens != values.page_tokens or not torch.equal(
            keys.page_ids.to(torch.int64), values.page_ids.to(torch.int64)
        ):
            raise InvalidPlan(
                f"segments[{index}]: keys and values on different pages; FlashInfer has one list"
            )
