"""Moving keys: against a float64 reference, against the model's own embedding, and by its laws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys, relocate_latents

HEADS, TOKENS, DIM = 2, 3, 16
THETA = 10_000.0
FREQUENCIES = default_inverse_frequencies(THETA, DIM)

# One float32 rotation of values near 1 rounds a handful of times: 2^-24 relative each, and the
# float32 cosine and sine are off by as much. Ten units in the last place leave room for both.
ONE_ROTATION = 10 * 2**-24 * 4

moves = st.integers(-100_000, 100_000)


def some_keys(dtype: torch.dtype = torch.float32, dim: int = DIM) -> torch.Tensor:
    """Random keys, the same on each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(HEADS, TOKENS, dim, generator=generator).to(dtype)


def reference(keys: torch.Tensor, num_positions: int, frequencies: torch.Tensor) -> torch.Tensor:
    """The same rotation written out number by number in Python floats (float64)."""
    half = len(frequencies)
    moved = keys.to(torch.float64).clone()
    for pair, frequency in enumerate(frequencies.tolist()):
        angle = frequency * num_positions
        cosine, sine = math.cos(angle), math.sin(angle)
        for head in range(keys.shape[0]):
            for token in range(keys.shape[1]):
                first = float(keys[head, token, pair])
                second = float(keys[head, token, pair + half])
                moved[head, token, pair] = first * cosine - second * sine
                moved[head, token, pair + half] = first * sine + second * cosine
    return moved


@given(moves)
def test_a_move_is_the_rotation_of_the_reference(num_positions: int) -> None:
    """Float32 keys equal the float64 reference up to float32 rounding, however far they move."""
    moved = relocate_keys(some_keys(), num_positions, FREQUENCIES)
    expected = reference(some_keys(), num_positions, FREQUENCIES)
    torch.testing.assert_close(moved.to(torch.float64), expected, atol=ONE_ROTATION, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(num_positions=moves.filter(bool))
def test_half_precision_is_rounded_once(dtype: torch.dtype, num_positions: int) -> None:
    """Half-precision keys come back in their dtype, at most one rounding from the exact result."""
    moved = relocate_keys(some_keys(dtype), num_positions, FREQUENCIES)
    assert moved.dtype is dtype
    exact = reference(some_keys(dtype), num_positions, FREQUENCIES)
    # Half a unit in the last place is one rounding; float32 noise can tip a tie, hence the atol.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(moved.to(torch.float64), exact, atol=ONE_ROTATION, rtol=unit / 2)


@given(moves, moves)
def test_moves_add_up(one: int, other: int) -> None:
    """R(a) after R(b) is R(a + b)."""
    twice = relocate_keys(relocate_keys(some_keys(), one, FREQUENCIES), other, FREQUENCIES)
    once = relocate_keys(some_keys(), one + other, FREQUENCIES)
    torch.testing.assert_close(twice, once, atol=2 * ONE_ROTATION, rtol=0)


@given(moves)
def test_a_move_can_be_undone(num_positions: int) -> None:
    """Moving back gives the keys again."""
    moved = relocate_keys(some_keys(), num_positions, FREQUENCIES)
    back = relocate_keys(moved, -num_positions, FREQUENCIES)
    torch.testing.assert_close(back, some_keys(), atol=2 * ONE_ROTATION, rtol=0)


def test_no_move_returns_the_input() -> None:
    """Zero positions cost nothing and copy nothing."""
    keys = some_keys(torch.bfloat16)
    assert relocate_keys(keys, 0, FREQUENCIES) is keys


def test_the_input_stays_as_it_is() -> None:
    """Keys may lie in memory that others read: a move writes to its own."""
    keys = some_keys()
    relocate_keys(keys, 5, FREQUENCIES)
    assert torch.equal(keys, some_keys())


@given(moves.filter(bool))
def test_channels_beyond_the_rotary_part_stay(num_positions: int) -> None:
    """With a partial rotary embedding the rest of each head is not touched by a bit."""
    frequencies = default_inverse_frequencies(THETA, 6)
    moved = relocate_keys(some_keys(), num_positions, frequencies)
    assert torch.equal(moved[..., 6:], some_keys()[..., 6:])
    expected = reference(some_keys(), num_positions, frequencies)
    torch.testing.assert_close(moved.to(torch.float64), expected, atol=ONE_ROTATION, rtol=0)


def rotary_embedding() -> LlamaRotaryEmbedding:
    """The rotary embedding of a small Llama, as transformers makes it."""
    config = LlamaConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, head_dim=DIM, rope_theta=THETA
    )
    return LlamaRotaryEmbedding(config)


def test_the_frequencies_are_those_of_transformers() -> None:
    """The unscaled inverse frequencies equal the model's own to the bit."""
    assert torch.equal(FREQUENCIES, rotary_embedding().inv_freq)


@given(st.integers(0, 2000), st.integers(-2000, 2000))
def test_moved_keys_are_the_models_keys_at_the_new_place(position: int, num_positions: int) -> None:
    """Keys the model rotated at p, moved by n, are the keys the model rotates at p + n."""
    embedding, raw = rotary_embedding(), some_keys()

    def at(start: int) -> torch.Tensor:
        places = torch.arange(start, start + TOKENS)[None]
        cosine, sine = embedding(raw, places)
        rotated: torch.Tensor = apply_rotary_pos_emb(raw[None], raw[None], cosine, sine)[1]
        return rotated[0]

    moved = relocate_keys(at(position), num_positions, embedding.inv_freq)
    # The model takes the angle itself in float32: off by 2^-24 of an angle of up to 4000 radians.
    tolerance = 4000 * 2**-24 * 4
    torch.testing.assert_close(moved, at(position + num_positions), atol=tolerance, rtol=0)


@given(moves)
def test_latents_turn_their_last_channels_in_neighbouring_pairs(num_positions: int) -> None:
    """The same rotation as of keys, with the two channels of a pair side by side."""
    rotary_dim = 6
    frequencies = default_inverse_frequencies(THETA, rotary_dim)
    latents = some_keys()[:1]
    moved = relocate_latents(latents, num_positions, frequencies)
    assert torch.equal(latents, some_keys()[:1])
    compressed = DIM - rotary_dim
    assert torch.equal(moved[..., :compressed], latents[..., :compressed])
    order = [*range(compressed, DIM, 2), *range(compressed + 1, DIM, 2)]
    expected = reference(latents[..., order], num_positions, frequencies)
    torch.testing.assert_close(
        moved[..., order].to(torch.float64), expected, atol=ONE_ROTATION, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_keep_their_dtype_and_cost_nothing_at_home(dtype: torch.dtype) -> None:
    """Half precision comes back as it came; no move is no copy."""
    latents, frequencies = some_keys(dtype)[:1], default_inverse_frequencies(THETA, 4)
    assert relocate_latents(latents, 5, frequencies).dtype is dtype
    assert relocate_latents(latents, 0, frequencies) is latents
