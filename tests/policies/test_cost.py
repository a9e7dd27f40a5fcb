"""The cost model: seconds that add up, and that never rise for being nearer or less loaded."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.cost import CostPriors, TierRate, cost_terms, tier_of
from cartridge_policies.types import ArtifactDemand, Demand, ReplicaView
from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier
from tests.contracts.placement_policy import DIGESTS, demands, replicas

PRIORS = CostPriors()
IDLE = ReplicaView(ReplicaId("replica-0"), 0, None, {}, None)


@st.composite
def priors(draw: st.DrawFn) -> CostPriors:
    """Any rates in which a faster tier is at least as fast in both respects."""
    latencies = sorted(draw(st.lists(st.floats(0, 10), min_size=4, max_size=4)))
    rates = sorted(draw(st.lists(st.floats(1e3, 1e12), min_size=4, max_size=4)), reverse=True)
    pairs = zip(TIERS_FASTEST_FIRST, latencies, rates, strict=True)
    return CostPriors(
        queue_s_per_request=draw(st.floats(0, 10)),
        prefill_base_s=draw(st.floats(0, 10)),
        prefill_s_per_token=draw(st.floats(0, 1)),
        tiers={tier: TierRate(latency, rate) for tier, latency, rate in pairs},
    )


def total_s(demand: Demand, replica: ReplicaView, rates: CostPriors) -> float:
    """Predicted seconds to the first token."""
    return sum(term.seconds for term in cost_terms(demand, replica, rates))


def test_the_terms_are_those_of_the_formula() -> None:
    """A worked example: two requests ahead, 500 MB from memory and 1 GB from the store."""
    rates = CostPriors(
        queue_s_per_request=0.5,
        prefill_base_s=0.25,
        prefill_s_per_token=0.001,
        tiers={Tier.DRAM: TierRate(0.125, 1e9), Tier.REMOTE: TierRate(2.0, 5e8)},
    )
    demand = Demand(
        "m",
        (
            ArtifactDemand(DIGESTS[0], 500_000_000, 1),
            ArtifactDemand(DIGESTS[1], 1_000_000_000, 1),
        ),
        num_live_tokens=250,
    )
    replica = replace(IDLE, num_in_flight=2, tiers={DIGESTS[0]: Tier.DRAM})
    found = {term.name: term.seconds for term in cost_terms(demand, replica, rates)}
    assert found == {"queue": 1.0, "load": 0.125 + 0.5 + 2.0 + 2.0, "prefill": 0.5}


@given(demand=demands(), replica=replicas("replica-0"), rates=priors(), data=st.data())
def test_a_faster_tier_never_costs_more(
    demand: Demand, replica: ReplicaView, rates: CostPriors, data: st.DataObject
) -> None:
    """Moving one artifact to a faster tier does not raise any term."""
    digest = data.draw(st.sampled_from(DIGESTS))
    place = TIERS_FASTEST_FIRST.index(tier_of(replica, digest))
    faster = data.draw(st.sampled_from(TIERS_FASTEST_FIRST[: place + 1]))
    moved = replace(replica, tiers={**replica.tiers, digest: faster})
    before, after = cost_terms(demand, replica, rates), cost_terms(demand, moved, rates)
    for old, new in zip(before, after, strict=True):
        assert new.name == old.name
        # Sums of the same numbers in the same order: one rounding at most, in the last place.
        assert new.seconds <= old.seconds * (1 + 1e-15)


@given(demand=demands(), replica=replicas("replica-0"), rates=priors(), more=st.integers(1, 50))
def test_more_in_flight_never_costs_less(
    demand: Demand, replica: ReplicaView, rates: CostPriors, more: int
) -> None:
    """A longer queue raises the queue term by its rate and no other term."""
    busier = replace(replica, num_in_flight=replica.num_in_flight + more)
    before = {term.name: term.seconds for term in cost_terms(demand, replica, rates)}
    after = {term.name: term.seconds for term in cost_terms(demand, busier, rates)}
    expected_s = (replica.num_in_flight + more) * rates.queue_s_per_request
    assert after == {**before, "queue": expected_s}
    assert after["queue"] >= before["queue"]


@given(demand=demands(), replica=replicas("replica-0"), more=st.integers(1, 10_000))
def test_more_live_tokens_cost_more_prefill(
    demand: Demand, replica: ReplicaView, more: int
) -> None:
    """Live tokens raise the prefill term only."""
    longer = replace(demand, num_live_tokens=demand.num_live_tokens + more)
    before = {term.name: term.seconds for term in cost_terms(demand, replica, PRIORS)}
    after = {term.name: term.seconds for term in cost_terms(longer, replica, PRIORS)}
    assert after.pop("prefill") > before.pop("prefill")
    assert after == before


def test_default_tiers_are_ordered() -> None:
    """The priors make each tier cheaper than the next, and HBM free."""
    demand = Demand("m", (ArtifactDemand(DIGESTS[0], 50_000_000, 500),), 0)
    costs = [
        total_s(demand, replace(IDLE, tiers={DIGESTS[0]: tier}), PRIORS)
        for tier in TIERS_FASTEST_FIRST
    ]
    assert costs == sorted(costs)
    assert len(set(costs)) == len(costs)
    assert costs[0] == PRIORS.prefill_base_s


@pytest.mark.parametrize("held", [[], DIGESTS[1:]])
def test_what_no_tier_holds_comes_from_the_store(held: list[Digest]) -> None:
    """An artifact that a replica does not list is remote for it."""
    replica = replace(IDLE, tiers=dict.fromkeys(held, Tier.HBM))
    assert tier_of(replica, DIGESTS[0]) is Tier.REMOTE
