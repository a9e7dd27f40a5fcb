"""Joining partial attention: in any order and grouping, also where a part saw nothing."""

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from cartridge_kernels.merging import merge, merge_pair
from cartridge_kernels.plan import Attended

TOLERANCE = 2e-6
"""Of a few float32 roundings; outputs are of size 1."""


@st.composite
def partials(draw: st.DrawFn) -> list[Attended]:
    """Up to six partials of 4 queries; scores of very different sizes; some saw nothing."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        output = torch.randn(4, 2, 3, generator=generator)
        lse = torch.randn(4, 2, generator=generator) * draw(st.sampled_from([0.1, 3.0, 40.0]))
        nothing = torch.rand(4, 2, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        # What such a part holds is undefined: a NaN is found out.
        output[nothing], lse[nothing] = float("nan"), -torch.inf
        found.append(Attended(output, lse))
    return found


def in_float64(parts: list[Attended]) -> Attended:
    """One softmax over the parts."""
    lse = torch.stack([part.lse.double() for part in parts])
    joined = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - joined.masked_fill(joined == -torch.inf, 0.0))
    outputs = torch.stack([part.output.double().nan_to_num() for part in parts])
    return Attended((weights[..., None] * outputs).sum(dim=0), joined)


def assert_same(found: Attended, exact: Attended) -> None:
    """Within a few roundings; minus infinity exactly where it is."""
    torch.testing.assert_close(found.output.double(), exact.output, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found.lse.double(), exact.lse, atol=TOLERANCE, rtol=TOLERANCE)


@given(partials(), st.randoms(use_true_random=False))
def test_order_does_not_matter(parts: list[Attended], random: Random) -> None:
    """Any order gives the softmax over all, and all are nothing only where each is."""
    exact = in_float64(parts)
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert_same(merge(parts if len(parts) > 1 else [*parts, *nothing_of(parts)]), exact)
    assert_same(merge([*shuffled, *nothing_of(parts)]), exact)


def nothing_of(parts: list[Attended]) -> list[Attended]:
    """A partial that saw nothing."""
    return [Attended(torch.zeros_like(parts[0].output), torch.full_like(parts[0].lse, -torch.inf))]


@given(partials().filter(lambda parts: len(parts) >= 3), st.data())
def test_grouping_does_not_matter(parts: list[Attended], data: st.DataObject) -> None:
    """Merging some first is merging all."""
    cut = data.draw(st.integers(1, len(parts) - 1))
    left, right = (merge([*some, *nothing_of(parts)]) for some in (parts[:cut], parts[cut:]))
    output, lse = merge_pair(left.output, left.lse, right.output, right.lse)
    assert_same(Attended(output, lse), in_float64(parts))


def test_what_is_no_number() -> None:
    """A partial of NaN makes the whole NaN, in either place."""
    broken = Attended(torch.full((1, 1, 2), torch.nan), torch.full((1, 1), torch.nan))
    whole = Attended(torch.ones(1, 1, 2), torch.zeros(1, 1))
    for parts in ([broken, whole], [whole, broken]):
        found = merge(parts)
        assert found.output.isnan().all()
        assert found.lse.isnan().all()
