"""Values in 8 bits: how far they are off, that nothing overflows, and what is refused."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cartridge_kernels.plan import PagedRows, SegmentTensors
from cartridge_kernels.reference import segment_rows
from cartridge_kernels.scaled_values import E4M3_MAX, dequantise_values, quantise_values

HEADS, TOKENS, DIM = 2, 5, 4

# e4m3 has 3 bits of mantissa: half a unit in the last place is 2^-4 of the number, and 2^-10 of the
# scale below the smallest normal number. Float32 roundings of scale and product add 2^-22.
RELATIVE, ABSOLUTE = 2**-4 + 2**-22, 2**-10 * (1 + 2**-20)


def some_values(factor: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values, the same on each call, channels of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(HEADS, TOKENS, DIM, generator=generator)
    return (factor * values * torch.tensor([1.0, 100.0, 0.01, 1.0])).to(dtype)


def over_tokens(scale: torch.Tensor) -> torch.Tensor:
    """Scales, float64, for values [heads, tokens, dim]."""
    wide = scale.double()
    return wide.reshape(HEADS, 1, -1)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back_as_near_as_e4m3_allows(by_channel: bool, dtype: torch.dtype) -> None:
    """Each is off by half a unit in the last place of its code at most, in float64."""
    values = some_values(dtype=dtype)
    codes, scale = quantise_values(values, by_channel=by_channel)
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert list(scale.shape) == ([HEADS, DIM] if by_channel else [HEADS])
    found = dequantise_values(codes, scale)
    assert found.dtype is torch.float32
    off = (found.double() - values.double()).abs()
    bound = values.double().abs() * RELATIVE
    assert bool((off <= torch.maximum(bound, over_tokens(scale) * ABSOLUTE)).all())


@pytest.mark.parametrize("by_channel", [False, True])
def test_dequantising_is_the_product_rounded_once(by_channel: bool) -> None:
    """Equal to the float64 product, rounded to float32."""
    codes, scale = quantise_values(some_values(), by_channel=by_channel)
    exact = codes.double() * over_tokens(scale)
    assert torch.equal(dequantise_values(codes, scale), exact.to(torch.float32))


def test_scales_by_channel_are_finer() -> None:
    """A small channel beside a large one keeps its numbers only with a scale of its own."""
    values = some_values()
    values[..., 2] *= 1e-4
    errors = [
        (dequantise_values(*quantise_values(values, by_channel=by)) - values)[..., 2].abs().max()
        for by in (False, True)
    ]
    assert errors[1] < errors[0] / 4
    assert errors[0] >= values[..., 2].abs().max() / 2


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_any_finite_numbers_give_finite_codes(numbers: list[float]) -> None:
    """Also the largest, the smallest and zeros: the largest magnitude becomes 448, none is more."""
    values = torch.tensor(numbers).reshape(1, -1, 1)
    codes, scale = quantise_values(values, by_channel=False)
    found = codes.to(torch.float32)
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) <= E4M3_MAX
    assert bool((scale > 0).all())
    assert bool(dequantise_values(codes, scale).isfinite().all())
    if max(abs(number) for number in numbers) > 1e-30:
        assert float(found.abs().max()) == E4M3_MAX


def test_zeros_stay_zeros() -> None:
    """A head without any number has the scale 1."""
    codes, scale = quantise_values(torch.zeros(HEADS, TOKENS, DIM), by_channel=False)
    assert torch.equal(scale, torch.ones(HEADS))
    assert not codes.to(torch.float32).any()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused(number: float) -> None:
    """It would spoil the scale of its whole channel, or vanish in saturation."""
    values = some_values()
    values[1, 2, 3] = number
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantise_values(values, by_channel=True)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("factor", [1e-36, 1e-6, 1.0, 1e6, 1e35])
def test_scales_that_are_powers_of_two_lose_nothing_in_bfloat16(
    by_channel: bool, factor: float
) -> None:
    """What is dequantised is a bfloat16 number, bit for bit; it is as near as with any scale."""
    values = some_values(factor)
    codes, scale = quantise_values(values, by_channel=by_channel, power_of_two=True)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    found = dequantise_values(codes, scale)
    assert torch.equal(found.to(torch.bfloat16).to(torch.float32), found)
    off = (found.double() - values.double()).abs()
    bound = values.double().abs() * RELATIVE
    assert bool((off <= torch.maximum(bound, over_tokens(scale) * ABSOLUTE)).all())


def test_a_scale_that_is_a_power_of_two_stays() -> None:
    """Rounding up leaves it alone, and takes the next one above it otherwise."""
    for largest, wanted in ((448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (225.0, 1.0)):
        values = torch.tensor([[[largest], [-1.0]]])
        _, scale = quantise_values(values, by_channel=False, power_of_two=True)
        assert scale.tolist() == [wanted]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_powers_of_two_never_overflow(numbers: list[float]) -> None:
    """Also the largest float32 numbers come back finite, and as bfloat16 numbers."""
    values = torch.tensor(numbers).reshape(1, -1, 1)
    codes, scale = quantise_values(values, by_channel=False, power_of_two=True)
    found = dequantise_values(codes, scale)
    assert bool(found.isfinite().all())
    assert torch.equal(found.to(torch.bfloat16).to(torch.float32), found)


# --- faults: what a wrong scale or format does to the tensor itself -------------------------------
def e5m2_of(codes: torch.Tensor) -> torch.Tensor:
    """The same bytes read as the other format of 8 bits."""
    return codes.view(torch.uint8).view(torch.float8_e5m2)


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dropped scale": lambda codes, scale: dequantise_values(codes, torch.ones_like(scale)),
    "neighbour's scale by head": lambda codes, scale: dequantise_values(codes, scale.roll(1, 0)),
    "neighbour's scale by channel": lambda codes, scale: dequantise_values(
        codes, scale.roll(1, -1)
    ),
    "one scale for all heads": lambda codes, scale: dequantise_values(
        codes, scale.amax(dim=0, keepdim=True).expand_as(scale)
    ),
    "scale squared": lambda codes, scale: dequantise_values(codes, scale * scale),
    "read as e5m2": lambda codes, scale: dequantise_values(e5m2_of(codes), scale),
}


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_or_format_shows_in_the_values(fault: str, by_channel: bool) -> None:
    """Dequantised values are outside of what e4m3 allows; the right ones are inside."""
    values = some_values() * torch.tensor([1.0, 3.0])[:, None, None]
    codes, scale = quantise_values(values, by_channel=by_channel)

    def share_outside(found: torch.Tensor) -> float:
        off = (found.double() - values.double()).abs()
        bound = torch.maximum(values.double().abs() * RELATIVE, over_tokens(scale) * ABSOLUTE)
        return float((~(off <= bound)).double().mean())

    assert share_outside(dequantise_values(codes, scale)) == 0
    assert share_outside(FAULTS[fault](codes, scale)) > 0.25


def test_keys_that_were_quantised_instead_show() -> None:
    """The values of a segment are bit for bit those stored, and so are its keys: not swapped."""
    keys, values = some_values(dtype=torch.bfloat16), some_values(2.0, torch.bfloat16)
    codes, scale = quantise_values(values, by_channel=True)
    right = SegmentTensors(PagedRows.whole(keys), PagedRows.whole(codes), scale)
    found_keys, found_values = segment_rows(right, TOKENS)
    assert torch.equal(found_keys, keys.float())
    assert torch.equal(found_values, dequantise_values(codes, scale))

    wrong_codes, wrong_scale = quantise_values(keys, by_channel=True)
    rounded = dequantise_values(wrong_codes, wrong_scale).to(torch.bfloat16)
    wrong = SegmentTensors(PagedRows.whole(rounded), PagedRows.whole(values))
    found_keys, found_values = segment_rows(wrong, TOKENS)
    assert not torch.equal(found_keys, keys.float())
    assert not torch.equal(found_values, dequantise_values(codes, scale))
