"""The workers: which of vLLM's classes they stand in for, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest

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
from cartridge_engine_ext.packed_layout import PACKED_GPU_WORKER, PACKED_WORKER
from cartridge_engine_ext.packed_runner import PackedRunner, take_the_place
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
