"""Moving keys along the sequence: one more rotation of keys that are already rotated.

Owns the rotation in float32. Refuses rotary embeddings whose frequencies depend on the length:
their rotations do not add up (the caller knows the type).
"""

import torch


def default_inverse_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """Inverse frequencies of an unscaled rotary embedding: [rotary_dim / 2], float32.

    Source: RoFormer (arXiv 2104.09864), equation 15.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def relocate_keys(
    keys: torch.Tensor, num_positions: int, inverse_frequencies: torch.Tensor
) -> torch.Tensor:
    """Keys as if they stood `num_positions` further along the sequence.

    Args:
        keys: [num_kv_heads, num_tokens, head_dim], any float dtype, rotated for their present
            positions; pairs are (i, i + rotary_dim / 2), the rest of head_dim is not rotated.
        num_positions: positions to move by; may be negative.
        inverse_frequencies: [rotary_dim / 2], float32, the model's own.

    Returns:
        Same shape and dtype; computed in float32 and rounded once. The input itself when
        `num_positions` is 0.

    Source: R(a)R(b) = R(a + b), RoFormer section 3.2.2.
    """
    if num_positions == 0:
        return keys
    half = inverse_frequencies.shape[0]
    moved = keys.to(torch.float32, copy=True)
    _rotate(moved[..., :half], moved[..., half : 2 * half], num_positions, inverse_frequencies)
    return moved.to(keys.dtype)


def relocate_latents(
    latents: torch.Tensor, num_positions: int, inverse_frequencies: torch.Tensor
) -> torch.Tensor:
    """Latents of multi-head latent attention as if they stood `num_positions` further along.

    Args:
        latents: [1, num_tokens, width], any float dtype; the compressed vector, then the part that
            is rotated for the present positions, in pairs of neighbours (i, i + 1).
        num_positions: positions to move by; may be negative.
        inverse_frequencies: [rotary_dim / 2], float32, the model's own.

    Returns:
        As `relocate_keys`.

    Source: the same law; DeepSeek-V2 (arXiv 2405.04434), section 2.1.3.
    """
    if num_positions == 0:
        return latents
    moved = latents.to(torch.float32, copy=True)
    rotated = moved[..., moved.shape[-1] - 2 * inverse_frequencies.shape[0] :]
    _rotate(rotated[..., 0::2], rotated[..., 1::2], num_positions, inverse_frequencies)
    return moved.to(latents.dtype)


def _rotate(
    first: torch.Tensor,
    second: torch.Tensor,
    num_positions: int,
    inverse_frequencies: torch.Tensor,
) -> None:
    """Turn pairs in place, [..., rotary_dim / 2], float32; one angle for all rows."""
    # float64 because the product can be large and is taken once.
    angles = inverse_frequencies.to(torch.float64) * num_positions
    cosine, sine = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
    turned = second * cosine + first * sine
    first.copy_(first * cosine - second * sine)
    second.copy_(turned)
