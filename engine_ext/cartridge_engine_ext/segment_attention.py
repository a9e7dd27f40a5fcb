"""vLLM's CPU attention, with requests that have a packed prefix computed beside it.

Owns the split of a batch: ordinary requests take the platform's own kernel untouched, those with a
packed prefix take `cartridge_kernels`. Refuses layers whose scores are more than scaled products.
"""

import dataclasses
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from cartridge_engine_ext.cache_layer import layer_index
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.packed_steps import STEPS, PackedStep


class SegmentAttentionBackend(CPUAttentionBackend):
    """Stands in for vLLM's `CPU_ATTN`."""

    @staticmethod
    def get_impl_cls() -> "type[SegmentAttentionImpl]":
        """What computes a layer."""
        return SegmentAttentionImpl

    @staticmethod
    def get_builder_cls() -> "type[SegmentMetadataBuilder]":
        """What prepares a step."""
        return SegmentMetadataBuilder


@dataclasses.dataclass
class SegmentMetadata(CPUAttentionMetadata):
    """The platform's, and the packed part of the step."""

    packed: PackedStep | None = None


class SegmentMetadataBuilder(CPUAttentionMetadataBuilder):
    """Keeps the platform's kernel from the blocks of packed prefixes."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """As the platform's; of packed requests it reads as many tokens as they have queries."""
        step = STEPS.current
        if step is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        ordinary = dataclasses.replace(
            common_attn_metadata, seq_lens=step.ordinary_seq_lens.to(torch.int32)
        )
        built = super().build(common_prefix_len, ordinary, fast_build)
        fields = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}
        return SegmentMetadata(**fields, packed=step)


class SegmentAttentionImpl(CPUAttentionBackendImpl):
    """The platform's, and packed requests by `cartridge_kernels`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = [
            what
            for what, is_present in (
                ("alibi", self.alibi_slopes is not None),
                ("a sliding window", self.sliding_window != -1),
                ("a softcap of logits", bool(self.logits_soft_cap)),
                ("sinks", self.sinks is not None),
                ("a KV cache of 8 bits", self.is_fp8_kv_cache),
                ("another layer's KV cache", self.kv_sharing_target_layer_name is not None),
                (f"type {self.attn_type}", self.attn_type != AttentionType.DECODER),
            )
            if is_present
        ]
        if found:
            raise ConfigurationError(
                f"packed prefixes: attention with {', '.join(found)} is not supported; start the "
                "engine without --worker-cls"
            )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; the live keys and values of the step are in the cache."""
        step = attn_metadata.packed if isinstance(attn_metadata, SegmentMetadata) else None
        if step is None or step.has_others:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if step is not None:
            strides = STEPS.strides
            found = STEPS.kernel.attend(
                step.plan,
                query.view(-1, self.num_heads, self.head_size)[step.rows],
                step.tensors(layer_index(layer.layer_name), kv_cache, strides),
                strides.live(kv_cache, step.block_table),
                scale=self.scale,
            )
            rows = output.view(-1, self.num_heads, self.head_size)
            rows[step.rows] = found.output.to(output.dtype)
        return output
