"""What `--worker-cls` names on an NVIDIA GPU. Written without a GPU; not run on one yet.

Owns the choice of the attention backend and of the model runner.
"""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.packed_runner import PackedRunner, take_the_place

register_backend(
    AttentionBackendEnum.CUSTOM, "cartridge_engine_ext.gpu_attention.SegmentGpuBackend"
)


class PackedGpuModelRunner(PackedRunner, GPUModelRunner):
    """vLLM's, with live tokens at the positions behind a packed prefix."""


class PackedGpuWorker(Worker):
    """vLLM's, with `PackedGpuModelRunner`."""

    def init_device(self) -> None:
        """As vLLM's.

        Raises:
            ConfigurationError: vLLM made another model runner, or is to use another backend.
        """
        backend = self.vllm_config.attention_config.backend
        if backend is not AttentionBackendEnum.CUSTOM:
            raise ConfigurationError(
                f"packed prefixes: --attention-backend is {backend}; CUSTOM is needed"
            )
        super().init_device()
        take_the_place(self.model_runner, GPUModelRunner, PackedGpuModelRunner)
