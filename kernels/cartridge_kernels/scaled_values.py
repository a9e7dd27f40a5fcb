"""Values in 8 bits with float32 scales: K16/V8.

Owns the quantiser and its reverse. Refuses numbers that are none, and any format but e4m3: keys are
never quantised, because their errors move the softmax itself.

Source: FP8 Formats for Deep Learning (arXiv 2209.05433), table 1: e4m3 has no infinity, its largest
number is 448.
"""

import torch

E4M3_MAX = 448.0
"""Largest finite number of e4m3."""
_LARGEST_SCALE = 2.0**120
"""Of the powers of two: the largest float32 number over 448, rounded up."""


def quantise_values(
    values: torch.Tensor, *, by_channel: bool, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales such that `dequantise_values` gives the values back, rounded.

    Args:
        values: [num_kv_heads, num_tokens, head_dim], any float dtype.
        by_channel: one scale for each head and channel, else one for each head.
        power_of_two: scales rounded up to powers of two. Half a bit of range is lost at most, and
            what `dequantise_values` gives is a bfloat16 number: any kernel for those is exact.

    Returns:
        Codes of the same shape, `float8_e4m3fn`, and scales, float32: [num_kv_heads, head_dim] or
        [num_kv_heads]. The largest magnitude under a scale becomes 448, or with powers of two one
        from 224 to 448; nothing overflows. A scale over zeros alone is 1.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    exact = values.to(torch.float32)
    if not bool(exact.isfinite().all()):
        raise ValueError("a value is NaN or infinite")
    largest = exact.abs().amax(dim=1 if by_channel else (1, 2))
    # The smallest normal number: a scale that is rounded to nothing would divide by zero.
    scale = (largest / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        scale = _round_up(scale)
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    # With the largest scale 256 would already be beyond float32.
    limit = torch.where(scale < _LARGEST_SCALE, E4M3_MAX, 240.0)
    limit = _over_tokens(limit).expand_as(exact)
    codes = torch.minimum(torch.maximum(exact / _over_tokens(scale), -limit), limit)
    return codes.to(torch.float8_e4m3fn), scale


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    # Below it the smallest code, 2^-9, is no bfloat16 number any more.
    return power.clamp(min=2.0**-124)


def dequantise_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of codes [num_kv_heads, num_tokens, head_dim], float32, rounded once.

    `scale` is [num_kv_heads] or [num_kv_heads, head_dim], float32.
    """
    return codes.to(torch.float32) * _over_tokens(scale)


def _over_tokens(scale: torch.Tensor) -> torch.Tensor:
    return scale[:, None, None] if scale.dim() == 1 else scale[:, None, :]
