"""Attention over segments and live tokens as it is written in books: slow, short, on any device.

Owns the two answers that every fast backend is held to: one softmax over everything that a query
sees, in float64, and the same by parts in float32. Refuses to save work.
"""

import math
from collections.abc import Sequence

import torch

from cartridge_kernels.merging import merge
from cartridge_kernels.plan import Attended, LiveTensors, Plan, SegmentTensors, check_tensors


class ReferenceBackend:
    """`attend` of this module; runs everywhere."""

    name = "reference"

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Nothing is missing, ever."""
        return None

    def attend(
        self,
        plan: Plan,
        queries: torch.Tensor,
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
        *,
        scale: float,
    ) -> Attended:
        """See `attend`."""
        return attend(plan, queries, segments, live, scale=scale)


def attend(
    plan: Plan,
    queries: torch.Tensor,
    segments: Sequence[SegmentTensors],
    live: LiveTensors,
    *,
    scale: float,
) -> Attended:
    """Exact attention, one partial for each request and segment, merged in float32.

    Args:
        plan: the step.
        queries: [num_rows, num_heads, head_dim_k], any float dtype; query head h reads KV head
            `h // (num_heads // num_kv_heads)`.
        segments: of this layer, in the order of `plan.segments`.
        live: of this layer.
        scale: factor of the scores, most often `head_dim_k ** -0.5`.

    Raises:
        InvalidPlan: the tensors are not what the plan says.
    """
    check_tensors(plan, queries, segments, live)
    parts = []
    for index, request in enumerate(plan.requests):
        rows = queries[plan.rows(index)].to(torch.float32)
        partials = [
            _partial(rows, *_live_rows(live, index, request.num_live), scale, is_causal=True)
        ]
        for segment in request.segments:
            keys, values = segment_rows(segments[segment], plan.segments[segment].num_tokens)
            partials.append(_partial(rows, keys, values, scale, is_causal=False))
        parts.append(merge(partials))
    return Attended(
        torch.cat([part.output for part in parts]), torch.cat([part.lse for part in parts])
    )


def attend_dense(
    plan: Plan,
    queries: torch.Tensor,
    segments: Sequence[SegmentTensors],
    live: LiveTensors,
    *,
    scale: float,
) -> Attended:
    """The oracle: one softmax over all that a query sees, in float64. Arguments as `attend`.

    Returns:
        As `attend`, in float64.
    """
    check_tensors(plan, queries, segments, live)
    parts = []
    for index, request in enumerate(plan.requests):
        live_keys, live_values = _live_rows(live, index, request.num_live)
        stored = [segment_rows(segments[s], plan.segments[s].num_tokens) for s in request.segments]
        keys = torch.cat([*(key for key, _ in stored), live_keys], dim=1).to(torch.float64)
        values = torch.cat([*(value for _, value in stored), live_values], dim=1)
        num_stored = keys.shape[1] - request.num_live
        seen = _causal_mask(request.num_queries, request.num_live)
        seen = torch.cat([seen.new_ones(request.num_queries, num_stored), seen], dim=1)
        rows = queries[plan.rows(index)].to(torch.float64)
        parts.append(_softmax(rows, keys, values.to(torch.float64), scale, seen))
    return Attended(
        torch.cat([part.output for part in parts]), torch.cat([part.lse for part in parts])
    )


def segment_rows(tensors: SegmentTensors, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and dequantised values of a segment, [num_kv_heads, num_tokens, dim], float32."""
    keys = tensors.keys.gather(0, num_tokens).to(torch.float32)
    values = tensors.values.gather(0, num_tokens).to(torch.float32)
    scale = tensors.value_scale
    if scale is None:
        return keys, values
    if tensors.has_page_scales:
        places = torch.arange(num_tokens, device=scale.device) + tensors.values.first_row
        return keys, values * scale[places // tensors.values.page_tokens].transpose(0, 1)
    return keys, values * (scale[:, None, None] if scale.dim() == 1 else scale[:, None, :])


def _live_rows(
    live: LiveTensors, request: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = live.gather(request, num_tokens)
    return keys.to(torch.float32), values.to(torch.float32)


def _partial(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> Attended:
    num_queries, num_keys = queries.shape[0], keys.shape[1]
    seen = _causal_mask(num_queries, num_keys)
    return _softmax(queries, keys, values, scale, seen if is_causal else torch.ones_like(seen))


def _causal_mask(num_queries: int, num_keys: int) -> torch.Tensor:
    """[num_queries, num_keys]: whether a query, one of the last of the keys' tokens, sees a key."""
    last_seen = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
    return torch.arange(num_keys)[None, :] <= last_seen


def _softmax(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
) -> Attended:
    """Queries [num_queries, num_heads, dim], keys and values [num_kv_heads, num_keys, dim]."""
    group = queries.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hkd->hqk", queries, keys) * scale
    scores = scores.masked_fill(~seen.to(scores.device), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # A query that saw nothing: weights 0, not NaN.
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return Attended(torch.einsum("hqk,hkd->qhd", weights, values), lse.transpose(0, 1).contiguous())
