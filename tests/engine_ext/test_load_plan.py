"""Messages between the halves: they pickle, and reports of several workers join."""

import pickle

import pytest
import torch

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.load_plan import (
    Capture,
    Load,
    LoadPlan,
    LoadReport,
    LoadResult,
)
from cartridge_engine_ext.sealed_memory import MemoryReference
from cartridge_engine_ext.stored_segments import Segment, TensorReference

GOOD, SLOW = LoadResult(100, 0.1, None), LoadResult(50, 0.4, None)
BAD = LoadResult(0, 0.2, "OSError: gone")


def test_a_plan_survives_the_way_to_another_process() -> None:
    """Everything in a plan pickles and comes back equal."""
    reference = TensorReference(MemoryReference(1, 2, 3, 4), "F32", (1, 2, 3), 8, 32)
    segments = tuple(
        Segment("sha256:0", 2, 5, (reference,), (reference,), scales)
        for scales in ((), (reference,))
    )
    load = Load("r", segments, 0, 2, (7,))
    plan = LoadPlan([load], ["f"], [Capture("c", 3, (4,))])
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("ours", "theirs", "joined"),
    [
        (GOOD, SLOW, LoadResult(150, 0.4, None)),
        (GOOD, BAD, LoadResult(100, 0.2, "OSError: gone")),
        (BAD, GOOD, LoadResult(100, 0.2, "OSError: gone")),
    ],
)
def test_a_load_failed_if_it_failed_on_any_worker(
    ours: LoadResult, theirs: LoadResult, joined: LoadResult
) -> None:
    """Bytes add up, the slowest counts, and one error is the error of all."""
    report = LoadReport({"r": ours}).aggregate(LoadReport({"r": theirs}))
    assert report.results == {"r": joined}


def test_joining_keeps_what_only_one_worker_did() -> None:
    """Requests and captures of either side are in the joined report; neither input changes."""
    rows = [(torch.zeros(1), torch.ones(1))]
    one, other = LoadReport({"a": GOOD}, {"c": {0: rows}}), LoadReport({"b": BAD}, {"c": {1: rows}})
    joined = one.aggregate(other)
    assert joined.results == {"a": GOOD, "b": BAD}
    assert joined.captured == {"c": {0: rows, 1: rows}}
    assert one.captured == {"c": {0: rows}}
    assert (one.results, other.results) == ({"a": GOOD}, {"b": BAD})
