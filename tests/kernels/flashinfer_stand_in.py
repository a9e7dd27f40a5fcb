"""FlashInfer's Python interface as far as we call it, computed by torch on a CPU.

Owns what its documentation of 0.7.4 says about layouts: pages HND, causal from the end, outputs in
the queries' type, log-sum-exps [tokens, heads] of base 2. Its speed and rounding are not here.
"""

import math
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """One plan, then any number of runs."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self._planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Keep it all; check what the kernels take for granted."""
        assert q_data_type == kv_data_type == torch.bfloat16
        assert {t.dtype for t in (qo_indptr, paged_kv_indptr, paged_kv_indices)} == {torch.int32}
        assert paged_kv_indices.shape[0] == int(paged_kv_indptr[-1])
        assert int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size
        self._planned = dict(locals())

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp, request by request."""
        assert return_lse
        planned = self._planned
        assert q.shape == (
            int(planned["qo_indptr"][-1]), planned["num_qo_heads"], planned["head_dim_qk"]
        )  # fmt: skip
        parts = [self._request(q, paged_kv_cache, i) for i in range(len(planned["qo_indptr"]) - 1)]
        return torch.cat([output for output, _ in parts]), torch.cat([lse for _, lse in parts])

    def _request(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planned = self._planned
        rows = q[planned["qo_indptr"][index] : planned["qo_indptr"][index + 1]]
        pages = slice(planned["paged_kv_indptr"][index], planned["paged_kv_indptr"][index + 1])
        ids = planned["paged_kv_indices"][pages].long()
        num_full = (len(ids) - 1) * planned["page_size"]
        num_tokens = num_full + int(planned["paged_kv_last_page_len"][index])
        group = planned["num_qo_heads"] // planned["num_kv_heads"]
        keys, values = (
            cache[ids].transpose(0, 1).flatten(1, 2)[:, :num_tokens].repeat_interleave(group, 0)
            for cache in paged_kv_cache
        )
        assert values.shape[2] == planned["head_dim_vo"]
        scores = torch.einsum("qhd,hkd->qhk", rows.float(), keys.float()) * planned["sm_scale"]
        if planned["causal"]:
            assert len(rows) <= num_tokens
            last = torch.arange(len(rows))[:, None] + (num_tokens - len(rows))
            unseen = torch.arange(num_tokens)[None, :] > last
            scores = scores.masked_fill(unseen[:, None, :], -math.inf)
        weights = torch.softmax(scores, dim=-1).to(torch.bfloat16).float()
        output = torch.einsum("qhk,hkd->qhd", weights, values.float()).to(q.dtype)
        return output, torch.logsumexp(scores, dim=-1) / math.log(2.0)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [tokens, states, heads, dim] as one; of no state -5e4, FlashInfer's minus infinity."""
    assert v.dtype == torch.bfloat16
    assert s.dtype == torch.float32
    highest = s.amax(dim=1, keepdim=True).clamp(min=-5e4)
    weights = torch.exp2(s - highest)
    total = weights.sum(dim=1, keepdim=True)
    merged = (v.float() * (weights / total.clamp(min=1e-30))[..., None]).sum(dim=1)
    return merged.to(v.dtype), (highest + torch.log2(total))[:, 0].clamp(min=-5e4)
