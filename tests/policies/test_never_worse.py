"""Cartridges or their texts: which is taken, and what the margin learns."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.cartridge_aware import CartridgeAware
from cartridge_policies.never_worse import (
    MAX_MARGIN,
    MIN_SEEN,
    NeverWorse,
    Residuals,
    fallback_demand,
)
from cartridge_policies.types import ArtifactDemand, Candidate, CostTerm, Decision, Demand
from cartridge_proto.residency import ReplicaId, Tier
from tests.contracts.placement_policy import DIGESTS, Fleet, Member, demands, fleets, view_of

SECONDS = st.floats(1e-4, 1e3)
LONG = Demand("m", (ArtifactDemand(DIGESTS[0], 1 << 30, 8_000),), 100, composition=DIGESTS[0])


def decision_of(total_s: float) -> Decision:
    """A decision for a replica where the first token is predicted then."""
    return Decision([Candidate(ReplicaId("r"), (CostTerm("all", total_s),), ())], "load")


def queued(queue_s: float, load_s: float, prefill_s: float) -> Decision:
    """One with terms."""
    terms = (("queue", queue_s), ("load", load_s), ("prefill", prefill_s))
    candidate = Candidate(ReplicaId("r"), tuple(CostTerm(*term) for term in terms), ())
    return Decision([candidate], "load")


def learned(*ratios: float, count: int = 200) -> Residuals:
    """What such residuals lead to, over and over."""
    residuals = Residuals()
    for index in range(count):
        residuals.note(1.0, ratios[index % len(ratios)])
    return residuals


@given(attached_s=SECONDS, fallback_s=SECONDS)
def test_without_a_margin_the_lower_one_is_taken(attached_s: float, fallback_s: float) -> None:
    """Perfect predictions need no margin; of equals the Cartridges are taken."""
    sure = NeverWorse(0.0)
    assert sure.margin == 0.0
    compared = sure.compare(decision_of(attached_s), decision_of(fallback_s))
    assert compared.is_attached is (attached_s <= fallback_s)


@given(spreads=st.tuples(st.floats(0, 2), st.floats(0, 2)))
def test_the_margin_grows_with_the_spread(spreads: tuple[float, float]) -> None:
    """The less is known, the more attaching must save; never more than the bound."""
    narrow, wide = (NeverWorse(spread).margin for spread in sorted(spreads))
    assert 0.0 <= narrow <= wide <= MAX_MARGIN


@pytest.mark.parametrize("kind", ["attached", "fallback"])
def test_residuals_that_scatter_widen_the_margin(kind: str) -> None:
    """Off by a factor of 2 up and down: wider than the prior; always right: narrower."""
    prior = NeverWorse()
    for ratios, is_wider in (((0.5, 2.0), True), ((1.0,), False)):
        compared = NeverWorse()
        setattr(compared, kind, learned(*ratios))
        assert (compared.margin > prior.margin) is is_wider


def test_what_was_underestimated_must_save_more() -> None:
    """Cartridges that take 1.5 times as long must save a third; the other way round nothing."""
    late, early = NeverWorse(), NeverWorse()
    late.attached, late.fallback = learned(1.5), learned(1.0)
    early.attached, early.fallback = learned(1.0), learned(1.5)
    assert late.margin == pytest.approx(1 / 3, abs=0.05)
    assert early.margin == 0.0


def test_one_stall_moves_little() -> None:
    """A request that took a million times as long as predicted counts as four times."""
    residuals = learned(1.0)
    residuals.note(1e-6, 1.0)
    assert residuals.mean == pytest.approx(0.02 * math.log(4), rel=0.01)
    for predicted_s, actual_s in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        residuals.note(predicted_s, actual_s)
    assert residuals.mean == pytest.approx(0.02 * math.log(4), rel=0.01)


def test_what_was_learned_is_forgotten() -> None:
    """An engine that has become steady is believed again."""
    compared = NeverWorse()
    compared.attached = learned(0.5, 2.0)
    wide = compared.margin
    for _ in range(500):
        compared.attached.note(1.0, 1.0)
    assert compared.margin < wide / 2


@given(demand=demands(), fleet=fleets(min_size=1), num_text_tokens=st.integers(1, 50_000))
def test_it_is_deterministic_and_leaves_everything_as_it_was(
    demand: Demand, fleet: Fleet, num_text_tokens: int
) -> None:
    """The same two decisions compare alike, whoever asks and how often."""
    policy, other = CartridgeAware(), fallback_demand(demand, num_text_tokens)
    attached, fallback = (policy.decide(each, fleet.view) for each in (demand, other))
    if not isinstance(attached, Decision) or not isinstance(fallback, Decision):
        return
    one = NeverWorse()
    first = one.compare(attached, fallback)
    assert one.compare(attached, fallback) == first == NeverWorse().compare(attached, fallback)
    found = (first.attached_s, first.fallback_s, first.margin)
    assert found == (attached.best.total_s, fallback.best.total_s, one.margin)


@given(num_in_flight=st.integers(0, 5), spread=st.floats(0.0, 1.0))
def test_a_cartridge_in_hbm_beats_prefilling_a_long_text(num_in_flight: int, spread: float) -> None:
    """No queue, nothing to load: 8,000 tokens of prefill never win, whatever was learned."""
    view = view_of(
        [Member("r0", 0, {DIGESTS[0]: Tier.HBM}), Member("r1", num_in_flight, {})], tick=0
    )
    policy = CartridgeAware()
    attached = policy.decide(LONG, view)
    fallback = policy.decide(fallback_demand(LONG, 8_000), view)
    assert isinstance(attached, Decision)
    assert isinstance(fallback, Decision)
    assert attached.best.replica == "r0"
    assert NeverWorse(spread).compare(attached, fallback).is_attached


@given(queue_s=st.floats(0, 100), load_s=st.floats(0, 2))
def test_what_both_wait_for_is_left_out_of_the_margin(queue_s: float, load_s: float) -> None:
    """However long the queue is: the load is held against the prefill that it saves."""
    policy = NeverWorse(queue_share=math.inf)
    idle = policy.compare(queued(0.0, load_s, 0.1), queued(0.0, 0.0, 1.1))
    busy = policy.compare(queued(queue_s, load_s, 0.1), queued(queue_s, 0.0, 1.1))
    if abs(load_s + 0.1 - 1.1 * (1 - policy.margin)) > 1e-9:
        assert busy.is_attached is idle.is_attached


def test_a_text_keeps_nobody_waiting() -> None:
    """Sooner by far, but others wait there: it is taken only while they are few."""
    for queue_s, is_attached in ((0.0, False), (0.09, False), (0.11, True), (5.0, True)):
        attached, text = queued(queue_s, 10.0, 0.1), queued(queue_s, 0.0, 1.1)
        assert NeverWorse().compare(attached, text).is_attached is is_attached
        assert not NeverWorse(queue_share=math.inf).compare(attached, text).is_attached
    # What adds no prefill keeps nobody waiting longer, and is no gain either.
    assert NeverWorse().compare(queued(0.1, 0.0, 1.0), queued(0.1, 0.0, 1.0)).is_attached


def test_a_fallback_has_the_text_instead_of_the_artifacts() -> None:
    """The same question: model and session stay, nothing is loaded, more is prefilled."""
    demand = Demand("m", LONG.artifacts, 100, composition=DIGESTS[0], session="s")
    assert fallback_demand(demand, 8_000) == Demand("m", (), 8_100, session="s")


def test_regret_is_rare_where_predictions_scatter() -> None:
    """Errors of 10 % each way, many close pairs: below 2 % are over 5 % late, half at most."""
    late = {}
    for num_deviations in (0.0, 2.0):
        chance, policy = random.Random(0), NeverWorse(num_deviations=num_deviations)
        late[num_deviations] = 0
        for index in range(4_000):
            attached_s, fallback_s = chance.uniform(0.1, 1.0), chance.uniform(0.1, 1.0)
            actual = [s * math.exp(chance.gauss(0, 0.1)) for s in (attached_s, fallback_s)]
            compared = policy.compare(decision_of(attached_s), decision_of(fallback_s))
            if compared.is_attached:
                policy.attached.note(attached_s, actual[0])
                late[num_deviations] += index > 500 and actual[0] > 1.05 * actual[1]
            else:
                policy.fallback.note(fallback_s, actual[1])
    assert late[2.0] / 3_500 < 0.02
    assert late[2.0] < late[0.0] / 2


@given(scatter=st.floats(0.01, 0.3), predicted_s=st.floats(0.01, 10))
def test_hardly_anything_comes_before_its_bound(scatter: float, predicted_s: float) -> None:
    """Until enough was seen there is none; then it is below nearly all that comes."""
    residuals, chance = Residuals(), random.Random(0)
    factors = [math.exp(chance.gauss(0.5, scatter)) for _ in range(300)]
    assert residuals.at_least_s(predicted_s) == 0
    for factor in factors[:MIN_SEEN]:
        assert residuals.at_least_s(predicted_s) == 0
        residuals.note(1.0, factor)
    for factor in factors[MIN_SEEN:]:
        residuals.note(1.0, factor)
    bound_s = residuals.at_least_s(predicted_s)
    assert sum(predicted_s * factor < bound_s for factor in factors) <= 0.05 * len(factors)
    # And no idle one: it is near what is to be expected.
    assert bound_s >= predicted_s * math.exp(0.5 - 3 * max(scatter, 0.1))
