"""What vLLM's `--worker-cls` names on a CPU: a worker whose requests may have packed prefixes.

Owns the choice of the attention backend and of the model runner.
"""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from cartridge_engine_ext.packed_runner import PackedRunner, take_the_place

# On a CPU vLLM takes CPU_ATTN whatever `--attention-backend` says.
register_backend(
    AttentionBackendEnum.CPU_ATTN, "cartridge_engine_ext.cpu_attention.SegmentCpuBackend"
)


class PackedCpuModelRunner(PackedRunner, CPUModelRunner):
    """vLLM's, with live tokens at the positions behind a packed prefix."""


class PackedCpuWorker(CPUWorker):
    """vLLM's, with `PackedCpuModelRunner`."""

    def init_device(self) -> None:
        """As vLLM's.

        Raises:
            ConfigurationError: vLLM made another model runner.
        """
        super().init_device()
        take_the_place(self.model_runner, CPUModelRunner, PackedCpuModelRunner)
