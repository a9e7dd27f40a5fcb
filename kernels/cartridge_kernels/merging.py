"""Joining partial attention: outputs over disjoint sets of keys become the output over all of them.

Owns the merge by log-sum-exp, natural, in float32. Refuses partials in half precision: their error
would be that of the whole (1.6e-3 instead of 4e-6).

Source: online softmax, Milakov and Gimelshein, arXiv 1805.02867, section 3; FlashInfer, arXiv
2501.01005, section 2.2.
"""

from collections.abc import Sequence

import torch

from cartridge_kernels.plan import Attended


def merge(partials: Sequence[Attended]) -> Attended:
    """The attention over all keys of the partials together, whose keys are disjoint.

    Associative and order-free up to float32 rounding. A partial that saw nothing (log-sum-exp minus
    infinity) changes nothing, whatever its output holds.
    """
    output, lse = partials[0].output, partials[0].lse
    for other in partials[1:]:
        output, lse = merge_pair(output, lse, other.output, other.lse)
    return Attended(output, lse)


def merge_pair(
    output: torch.Tensor, lse: torch.Tensor, other_output: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two partials as one: outputs [..., dim] and log-sum-exps [...], float32; new tensors."""
    joined = torch.logaddexp(lse, other_lse)
    # Where neither saw anything both weights are 0, not 0 / 0.
    base = joined.masked_fill(joined == -torch.inf, 0.0)
    weight, other_weight = torch.exp(lse - base), torch.exp(other_lse - base)
    return _weighted(weight, output) + _weighted(other_weight, other_output), joined


def _weighted(weight: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    # Of a partial that saw nothing the output may hold anything, also NaN; a weight of NaN stays.
    return torch.where(weight[..., None] == 0, 0.0, weight[..., None] * output)
