"""The workers: which of vLLM's classes they stand in for, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from cartridge_engine_ext import packed_gpu_worker, packed_worker
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.load_plan import LoadPlan
from cartridge_engine_ext.packed_layout import PACKED_GPU_WORKER, PACKED_WORKER, PackedPrefix
from cartridge_engine_ext.packed_runner import PackedRunner, take_the_place
from cartridge_engine_ext.packed_steps import STEPS
from cartridge_engine_ext.segment_attention import SegmentAttentionImpl, SegmentMetadataBuilder


def test_the_names_of_the_workers_are_those_of_the_classes() -> None:
    """Operators write them into deployment files."""
    for name, cls in (
        (PACKED_WORKER, packed_worker.PackedCpuWorker),
        (PACKED_GPU_WORKER, packed_gpu_worker.PackedGpuWorker),
    ):
        assert name == f"{cls.__module__}.{cls.__qualname__}"


@pytest.mark.parametrize(
    ("member", "platform", "impl"),
    [
        (AttentionBackendEnum.CPU_ATTN, CPUAttentionBackend, CPUAttentionBackendImpl),
        (AttentionBackendEnum.CUSTOM, FlashAttentionBackend, FlashAttentionImpl),
    ],
)
def test_each_worker_registers_its_backend(
    member: AttentionBackendEnum, platform: type, impl: type
) -> None:
    """Ours stands before the platform's, of which it is a subclass, in all three parts."""
    backend: Any = member.get_class()
    assert issubclass(backend, platform)
    assert backend.get_name() == member.name
    ours = backend.get_impl_cls().__mro__
    assert ours.index(SegmentAttentionImpl) < ours.index(impl)
    builder = backend.get_builder_cls().__mro__
    assert builder.index(SegmentMetadataBuilder) < builder.index(platform.get_builder_cls())  # type: ignore[attr-defined]


def test_gpu_graphs_are_piecewise() -> None:
    """A graph over attention would replay the segments of the step that it was captured in."""
    backend: Any = AttentionBackendEnum.CUSTOM.get_class()
    found = backend.get_builder_cls().get_cudagraph_support(None, None)
    assert found is AttentionCGSupport.NEVER


def test_another_model_runner_is_refused() -> None:
    """Its steps are others; the message says what to set."""
    with pytest.raises(ConfigurationError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        take_the_place(SimpleNamespace(), CPUModelRunner, packed_worker.PackedCpuModelRunner)


@pytest.mark.parametrize(
    ("expected", "packed"),
    [
        (CPUModelRunner, packed_worker.PackedCpuModelRunner),
        (GPUModelRunner, packed_gpu_worker.PackedGpuModelRunner),
    ],
)
def test_a_model_runner_becomes_a_packed_one(expected: Any, packed: Any) -> None:
    """The same object, with our two methods before vLLM's."""
    runner = object.__new__(expected)
    take_the_place(runner, expected, packed)
    assert type(runner) is packed
    assert packed.__mro__.index(PackedRunner) < packed.__mro__.index(expected)


def test_a_gpu_worker_wants_its_backend() -> None:
    """Before it touches the device."""
    worker = object.__new__(packed_gpu_worker.PackedGpuWorker)
    worker.vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=AttentionBackendEnum.FLASH_ATTN)
    )
    with pytest.raises(ConfigurationError, match="CUSTOM is needed"):
        worker.init_device()


class StubRunner:
    """vLLM's runner, as far as ours calls it."""

    def __init__(self) -> None:
        self.positions = torch.zeros(8, dtype=torch.int64)
        self.device = torch.device("cpu")
        self.seen: list[object] = []
        table = SimpleNamespace(get_numpy_array=lambda: np.zeros((2, 4), np.int32))
        self.input_batch = SimpleNamespace(
            req_ids=["plain", "packed"],
            num_computed_tokens_cpu=np.array([5, 64, 0, 0], np.int32),
            block_table=[table],
        )

    def _prepare_inputs(self, scheduler_output: object, num_scheduled_tokens: Any) -> str:
        """Positions are slots."""
        self.positions[:3] = torch.tensor([5, 64, 65])
        return "prepared"

    def execute_model(self, scheduler_output: Any) -> str:
        """A step."""
        assert self._prepare_inputs(scheduler_output, np.array([1, 2], np.int32)) == "prepared"
        self.seen.append(STEPS.num_positions_ahead(["packed"]))
        if scheduler_output.fails:
            raise RuntimeError("the step failed")
        return "done"


class Runner(PackedRunner, StubRunner):
    """The methods under test."""


@pytest.fixture(autouse=True)
def _steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's one `STEPS` without prefixes; planning is tested elsewhere."""
    monkeypatch.setattr(STEPS, "_prefixes", {})
    monkeypatch.setattr(STEPS, "begin", lambda *_: setattr(STEPS, "current", object()))


def output(*, finished: tuple[str, ...] = (), fails: bool = False, is_first: bool = True) -> Any:
    """A scheduler's output; the first tells of the prefix."""
    prefix = PackedPrefix(num_positions=200, num_blocks=2, block_size=32, segments=(), size_bytes=0)
    plan = LoadPlan(prefixes={"packed": prefix} if is_first else {})
    return SimpleNamespace(kv_connector_metadata=plan, finished_req_ids=set(finished), fails=fails)


def test_live_tokens_stand_behind_the_virtual_length() -> None:
    """Positions of packed requests are shifted from their first step on; others stay."""
    runner = Runner()
    for is_first in (True, False):
        assert runner.execute_model(output(is_first=is_first)) == "done"
        assert runner.positions[:3].tolist() == [5, 200, 201]
        assert STEPS.current is None, "what was planned for one step is for no other"


def test_a_failed_step_leaves_no_plan_behind() -> None:
    """VLLM may go on with a dummy run."""
    with pytest.raises(RuntimeError, match="the step failed"):
        Runner().execute_model(output(fails=True))
    assert STEPS.current is None


def test_a_request_that_is_over_is_forgotten_also_without_a_connectors_plan() -> None:
    """Its id may come again for an ordinary request."""
    runner = Runner()
    runner.execute_model(output())
    later = output(finished=("packed",), is_first=False)
    later.kv_connector_metadata = None
    runner.execute_model(later)
    assert runner.seen == [[136], [0]]
