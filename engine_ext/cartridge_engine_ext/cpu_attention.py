"""`segment_attention` on vLLM's CPU backend.

Owns the classes that vLLM finds under the backend's name. Refuses to compute anything itself.
"""

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from cartridge_engine_ext.segment_attention import SegmentAttentionImpl, SegmentMetadataBuilder


class SegmentCpuMetadataBuilder(SegmentMetadataBuilder, CPUAttentionMetadataBuilder):
    """What prepares a step."""


class SegmentCpuImpl(SegmentAttentionImpl, CPUAttentionBackendImpl):
    """What computes a layer."""


class SegmentCpuBackend(CPUAttentionBackend):
    """Stands in for vLLM's `CPU_ATTN`, under its name."""

    @staticmethod
    def get_impl_cls() -> type[SegmentCpuImpl]:
        """What computes a layer."""
        return SegmentCpuImpl

    @staticmethod
    def get_builder_cls() -> type[SegmentCpuMetadataBuilder]:
        """What prepares a step."""
        return SegmentCpuMetadataBuilder
