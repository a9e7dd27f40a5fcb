"""What we ask FlashInfer for, and what of it we refuse; FlashInfer itself needs a GPU."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from cartridge_kernels.flashinfer_backend import FlashInferBackend, natural_lse
from cartridge_kernels.plan import Attended, InvalidPlan, PagedRows, SegmentTensors
from cartridge_kernels.reference import attend_dense
from tests.contracts.attention_backend import assert_close
from tests.kernels import flashinfer_stand_in
from tests.kernels.attention_cases import (
    CASES,
    FULL,
    K16V8,
    AttentionCase,
    Inputs,
    SegmentCase,
    make_inputs,
)

BFLOAT16 = {"output": 8e-3, "lse": 1e-4}
"""Weights, partial results and their sum are each rounded to 8 bits; scores are not."""

BATCH = AttentionCase(
    "shared",
    [(1, 9, (0, 1)), (2, 6, (0,)), (1, 3, ())],
    [SegmentCase(37), SegmentCase(18)],
    query_dtype=torch.bfloat16,
    live_dtype=torch.bfloat16,
)


def in_bfloat16(case: AttentionCase) -> AttentionCase:
    """The same shapes in the only type that FlashInfer takes here."""
    segments = [
        dataclasses.replace(each, representation=FULL, dtype=torch.bfloat16, first_row=0)
        for each in case.segments
    ]
    return dataclasses.replace(
        case, segments=segments, query_dtype=torch.bfloat16, live_dtype=torch.bfloat16
    )


def on_same_pages(inputs: Inputs) -> Inputs:
    """Values on the pages of their keys, as an engine's blocks hold them."""
    segments = []
    for part in inputs.segments:
        storage = torch.full_like(part.values.storage, math.nan)
        storage[part.keys.page_ids] = part.values.storage[part.values.page_ids]
        segments.append(SegmentTensors(part.keys, PagedRows(storage, part.keys.page_ids)))
    return dataclasses.replace(inputs, segments=segments)


def attend(backend: FlashInferBackend, inputs: Inputs) -> Attended:
    """What the backend finds."""
    return backend.attend(
        inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
    )


def exact(inputs: Inputs) -> Attended:
    """What the oracle finds."""
    return attend_dense(
        inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plans_are_translated(case: AttentionCase) -> None:
    """Rows, pages, lengths, masks and bases come out as FlashInfer's documentation has them."""
    inputs = on_same_pages(make_inputs(in_bfloat16(case)))
    found = attend(FlashInferBackend(flashinfer_stand_in), inputs)
    assert found.output.dtype == found.lse.dtype == torch.float32
    assert_close(found, exact(inputs), **BFLOAT16)


def test_layers_of_a_step_share_a_plan() -> None:
    """FlashInfer plans once for a plan object; each layer's own tensors are read."""
    made: list[object] = []

    class Counted(flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper):
        """Remembers each wrapper made."""

        def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
            super().__init__(float_workspace_buffer, kv_layout)
            made.append(self)

    backend = FlashInferBackend(
        SimpleNamespace(
            BatchPrefillWithPagedKVCacheWrapper=Counted,
            merge_states=flashinfer_stand_in.merge_states,
        )
    )
    first = on_same_pages(make_inputs(BATCH))
    second = dataclasses.replace(
        first, live=dataclasses.replace(first.live, values=-first.live.values)
    )
    for inputs in (first, second, first):
        assert_close(attend(backend, inputs), exact(inputs), **BFLOAT16)
    assert len(made) == len(BATCH.segments) + 1
    other = on_same_pages(make_inputs(BATCH, seed=1))
    assert_close(attend(backend, other), exact(other), **BFLOAT16)


def test_a_wrong_base_is_found() -> None:
    """One wrapper's log-sum-exps in another base, or ours left as base 2, would show."""

    class OneNatural(flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper):
        """Of the shared segments."""

        def run(
            self,
            q: torch.Tensor,
            paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
            return_lse: bool = False,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            output, lse = super().run(q, paged_kv_cache, return_lse)
            return output, lse if self._planned["causal"] else natural_lse(lse)

    inputs = on_same_pages(make_inputs(BATCH))
    found = attend(
        FlashInferBackend(
            SimpleNamespace(
                BatchPrefillWithPagedKVCacheWrapper=OneNatural,
                merge_states=flashinfer_stand_in.merge_states,
            )
        ),
        inputs,
    )
    assert torch.isfinite(found.output).all()
    with pytest.raises(AssertionError):
        assert_close(found, exact(inputs), **BFLOAT16)
    right = attend(FlashInferBackend(flashinfer_stand_in), inputs)
    with pytest.raises(AssertionError):
        assert_close(Attended(right.output, right.lse / math.log(2.0)), exact(inputs), **BFLOAT16)


def test_natural_lse() -> None:
    """log2(8) is 3, and the natural logarithm of 8 is what it becomes; minus infinity stays."""
    found = natural_lse(torch.tensor([[3.0, -math.inf]]))
    torch.testing.assert_close(found, torch.tensor([[math.log(8.0), -math.inf]]))


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (dataclasses.replace(BATCH, segments=[SegmentCase(9), SegmentCase(9, K16V8)]), "k16v8"),
        (dataclasses.replace(BATCH, query_dtype=torch.float32), "queries: torch.float32"),
        (dataclasses.replace(BATCH, live_dtype=torch.float16), "live.keys: torch.float16"),
        (
            dataclasses.replace(
                BATCH, segments=[SegmentCase(9), SegmentCase(9, dtype=torch.float32)]
            ),
            r"segments\[1\]",
        ),
        (
            dataclasses.replace(BATCH, segments=[SegmentCase(9, first_row=2), SegmentCase(9)]),
            "first_row 2",
        ),
        (BATCH, "different pages"),
    ],
    ids=["k16v8", "queries", "live", "segment", "first row", "pages"],
)
def test_what_flashinfer_cannot_read(case: AttentionCase, named: str) -> None:
    """Types and layouts beyond FlashInfer's are refused before anything is computed, by name."""
    with pytest.raises(InvalidPlan, match=named):
        attend(FlashInferBackend(flashinfer_stand_in), make_inputs(case))


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((7, 5), True), ((8, 0), False), ((10, 0), False)]
)
def test_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    """A CPU and a GPU without bfloat16 are refused, and what is missing is said."""
    backend = FlashInferBackend(flashinfer_stand_in)
    assert "no CUDA device" in (backend.unavailable_reason(torch.device("cpu")) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = backend.unavailable_reason(torch.device("cuda"))
    assert (reason is not None) == is_refused
    if reason is not None:
        assert f"{capability[0]}.{capability[1]}" in reason


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, it says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = FlashInferBackend().unavailable_reason(torch.device("cuda"))
    assert reason is not None
    assert "cartridge-router[gpu]" in reason
