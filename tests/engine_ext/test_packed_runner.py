"""The model runner: live tokens at positions behind their prefix, and plans that end with steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from cartridge_engine_ext import packed_runner
from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.in_place import InPlaceSegments
from cartridge_engine_ext.layout_probe import CacheReader
from cartridge_engine_ext.load_plan import LoadPlan
from cartridge_engine_ext.packed_layout import CacheGeometry, StoredSegment, packed_prefix
from cartridge_engine_ext.packed_steps import PackedSteps
from cartridge_engine_ext.packed_worker import PackedCpuModelRunner
from cartridge_engine_ext.stored_segments import InPlacePrefix
from cartridge_kernels.reference import ReferenceBackend
from tests.engine_ext.fake_layers import Packed, fake_layer

HEADS, DIM, BLOCK, NUM_BLOCKS = 2, 8, 4, 24
PREFIX = packed_prefix(
    [StoredSegment(60, 0, "BF16", "F8_E4M3", True)], CacheGeometry(BLOCK, DIM, "F32")
)


def step_of(
    scheduled: dict[str, int], plan: object = None, finished: set[str] | None = None
) -> Any:
    """What a scheduler says of one step."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        kv_connector_metadata=LoadPlan() if plan is None else plan,
        finished_req_ids=finished or set(),
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> PackedSteps:
    """Those of the process, in this test."""
    layer = fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = CacheReader.probe(CacheLayer(layer), BLOCK, NUM_BLOCKS).strides(layer.kv_cache)
    steps = PackedSteps()
    steps.prepare(strides, ReferenceBackend(), InPlaceSegments([], slice(None)))
    monkeypatch.setattr(packed_runner, "STEPS", steps)
    return steps


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, steps: PackedSteps) -> Any:
    """A runner whose own half only sets positions to slots, as vLLM's does, and then calls `ran`.

    Its batch is that of the requests that are scheduled, each with `computed` tokens before.
    """
    made: Any = PackedCpuModelRunner.__new__(PackedCpuModelRunner)
    made.positions, made.device = torch.zeros(64, dtype=torch.int64), torch.device("cpu")
    made.computed, made.ran = {}, lambda: "output"

    def prepare(self: Any, output: Any, counts: Any) -> str:
        begins = self.input_batch.num_computed_tokens_cpu
        slots = [np.arange(b, b + n) for b, n in zip(begins, counts, strict=True)]
        self.positions[: counts.sum()] = torch.from_numpy(np.concatenate(slots))
        return "prepared"

    def execute(self: Any, output: Any) -> Any:
        ids = list(output.num_scheduled_tokens)
        table = np.arange(NUM_BLOCKS, dtype=np.int32)[None].repeat(max(1, len(ids)), 0)
        self.input_batch = SimpleNamespace(
            req_ids=ids,
            num_computed_tokens_cpu=np.array([self.computed.get(i, 0) for i in ids], np.int32),
            block_table=[SimpleNamespace(get_numpy_array=lambda: table)],
        )
        if ids:
            counts = np.array(list(output.num_scheduled_tokens.values()), np.int32)
            assert self._prepare_inputs(output, counts) == "prepared"
        return self.ran()

    monkeypatch.setattr(CPUModelRunner, "_prepare_inputs", prepare)
    monkeypatch.setattr(CPUModelRunner, "execute_model", execute)
    return made


def test_live_tokens_stand_behind_their_prefix(runner: Any, steps: PackedSteps) -> None:
    """By as many positions as the prefix has beyond its slots; ordinary requests stay."""
    assert PREFIX is not None
    runner.computed = {"packed": PREFIX.num_slots, "plain": 7}
    seen = []
    runner.ran = lambda: seen.append(steps.current)
    plan = LoadPlan(prefixes={"packed": PREFIX})
    runner.execute_model(step_of({"packed": 3, "plain": 2}, plan))
    assert runner.positions[:5].tolist() == [60, 61, 62, 7, 8]
    assert seen[0] is not None
    assert steps.current is None
    runner.computed["packed"] += 3
    runner.execute_model(step_of({"plain": 1, "packed": 1}))
    assert runner.positions[:2].tolist() == [7, 63]


def test_a_step_that_fails_leaves_no_plan(runner: Any, steps: PackedSteps) -> None:
    """Dummy runs, which prepare nothing, find none of a step before."""

    def fail() -> None:
        assert steps.current is not None
        raise RuntimeError("no memory")

    runner.ran = fail
    plan = LoadPlan(prefixes={"a": InPlacePrefix(())})
    with pytest.raises(RuntimeError, match="no memory"):
        runner.execute_model(step_of({"a": 1}, plan))
    assert steps.current is None


def test_a_request_that_ends_without_a_forward_pass_is_forgotten(
    runner: Any, steps: PackedSteps
) -> None:
    """Its id then names an ordinary request."""
    assert PREFIX is not None
    runner.computed = {"a": PREFIX.num_slots}
    runner.execute_model(step_of({"a": 1}, LoadPlan(prefixes={"a": PREFIX})))
    runner.execute_model(step_of({}, finished={"a"}))
    runner.computed = {}
    runner.execute_model(step_of({"a": 2}))
    assert runner.positions[:2].tolist() == [0, 1]


def test_an_engine_without_the_connector_runs_ordinary_steps(
    runner: Any, steps: PackedSteps
) -> None:
    """Metadata of none, or of another connector, brings no prefixes."""
    for metadata in (SimpleNamespace(prefixes={"a": InPlacePrefix(())}), "text"):
        assert runner.execute_model(step_of({"a": 1}, metadata)) == "output"
        assert steps.num_positions_ahead(["a"]) == [0]
    runner.ran = lambda: steps.current
    assert runner.execute_model(step_of({"a": 1})) is None
