"""A platform's attention backend, with requests that have a packed prefix computed beside it.

Owns the split of a batch: ordinary requests take the platform's own kernel untouched, those with a
packed prefix take `cartridge_kernels`. Refuses layers whose scores are more than scaled products,
and to know any platform: these classes stand in front of a platform's own in a list of bases.
"""

import dataclasses
from typing import Any

import torch

from cartridge_engine_ext.cache_layer import layer_index
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.packed_steps import STEPS


class SegmentMetadataBuilder:
    """Keeps the platform's kernel from the blocks of packed prefixes."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """As the platform's; of packed requests it reads as many tokens as they have queries."""
        step = STEPS.current
        common = common_attn_metadata
        if step is not None:
            common = dataclasses.replace(common, seq_lens=step.ordinary_seq_lens)
        built: Any = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        built.packed = step
        return built


class SegmentAttentionImpl:
    """The platform's, and packed requests by `cartridge_kernels`."""

    num_heads: int
    head_size: int
    scale: float

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        """As vLLM calls every backend.

        Raises:
            ConfigurationError: naming what the layer has that packed prefixes cannot.
        """
        super().__init__(
            num_heads,  # type: ignore[call-arg] # the platform's
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **extra,
        )
        found = [
            what
            for what, is_present in (
                ("alibi", alibi_slopes is not None),
                ("a sliding window", sliding_window is not None),
                ("a softcap of logits", bool(logits_soft_cap)),
                ("sinks", extra.get("sinks") is not None),
                ("a KV cache of 8 bits", kv_cache_dtype.startswith("fp8")),
                ("another layer's KV cache", kv_sharing_target_layer_name is not None),
                (f"type {attn_type}", attn_type != "decoder"),
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
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; the live keys and values of the step are in the cache."""
        # Without metadata vLLM profiles or warms up.
        step = getattr(attn_metadata, "packed", None)
        if step is None or step.has_others:
            super().forward(  # type: ignore[misc] # the platform's
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
