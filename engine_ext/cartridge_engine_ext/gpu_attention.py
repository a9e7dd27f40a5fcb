"""`segment_attention` on vLLM's FlashAttention backend. Written without a GPU; not run on one yet.

An engine whose answers it changes fails its boot self-test, and does not join the fleet.
"""

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from cartridge_engine_ext.segment_attention import SegmentAttentionImpl, SegmentMetadataBuilder


class SegmentGpuMetadataBuilder(SegmentMetadataBuilder, FlashAttentionMetadataBuilder):
    """What prepares a step."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Piecewise graphs only: what a step reads beside the cache changes from step to step."""
        return AttentionCGSupport.NEVER


class SegmentGpuImpl(SegmentAttentionImpl, FlashAttentionImpl):
    """What computes a layer."""


class SegmentGpuBackend(FlashAttentionBackend):
    """vLLM's `CUSTOM`."""

    @staticmethod
    def get_name() -> str:
        """As `--attention-backend` names it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SegmentGpuImpl]:
        """What computes a layer."""
        return SegmentGpuImpl

    @staticmethod
    def get_builder_cls() -> type[SegmentGpuMetadataBuilder]:
        """What prepares a step."""
        return SegmentGpuMetadataBuilder
