"""The published formulas choose as their sources say, on fleets small enough to work out."""

from dataclasses import replace

import pytest

from cartridge_policies.history import MAX_AGE_S, MAX_TOKENS, RouteHistory
from cartridge_policies.published import (
    CacheAware,
    DynamoKv,
    LlmdDefault,
    LlmdPrecise,
    MooncakeConductor,
    Preble,
)
from cartridge_policies.types import ArtifactDemand, Decision, Demand, PlacementPolicy
from cartridge_proto.residency import ReplicaId, Tier
from tests.contracts.placement_policy import DIGESTS, Member, view_of

ONE = Demand("m", (ArtifactDemand(DIGESTS[0], 1_000_000, 900),), 100)
PAIR = replace(ONE, artifacts=(*ONE.artifacts, ArtifactDemand(DIGESTS[1], 1_000_000, 900)))


def order(
    policy: PlacementPolicy,
    demand: Demand,
    *members: Member,
    history: RouteHistory | None = None,
    tick: int = 0,
) -> list[str]:
    """Names in the order of the ranking."""
    answer = policy.decide(demand, view_of(members, history=history, tick=tick))
    assert isinstance(answer, Decision)
    return [candidate.replica for candidate in answer.ranking]


def sent(demand: Demand, *names: str) -> RouteHistory:
    """A history in which these replicas were given a request."""
    history = RouteHistory()
    for name in names:
        history.record(ReplicaId(name), demand, 0.0)
    return history


def test_cache_aware_matches_until_loads_are_uneven() -> None:
    """The replica that was given the prefix keeps it with 64 requests more, and not with 65."""
    history = sent(ONE, "b")
    kept = order(CacheAware(), ONE, Member("a"), Member("b", 64), history=history)
    left = order(CacheAware(), ONE, Member("a"), Member("b", 65), history=history)
    assert (kept[0], left[0]) == ("b", "a")


def test_cache_aware_sends_what_nobody_has_to_the_smallest_tree() -> None:
    """A match of 0.3 of the prompt or less is none."""
    history = sent(ONE, "a")
    long = replace(ONE, num_live_tokens=2200)
    assert order(CacheAware(), long, Member("a"), Member("b"), history=history)[0] == "b"
    shorter = replace(ONE, num_live_tokens=2000)
    assert order(CacheAware(), shorter, Member("a"), Member("b"), history=history)[0] == "a"


def test_llm_d_weighs_queue_cache_and_prefix() -> None:
    """A prefix of nine tenths (2.7) is worth more than an empty queue (2), a third of it is not."""
    waiting = Member("a", num_pending=3)
    history = sent(ONE, "a")
    assert order(LlmdDefault(), ONE, waiting, Member("b"), history=history)[0] == "a"
    longer = replace(ONE, num_live_tokens=1800)
    assert order(LlmdDefault(), longer, waiting, Member("b"), history=history)[0] == "b"


def test_llm_d_precise_reads_the_map_and_counts_tiers() -> None:
    """What was sent somewhere says nothing; GPU beats CPU, and what is on disk does not count."""
    members = [
        Member("cpu", tiers={DIGESTS[0]: Tier.DRAM}),
        Member("disk", tiers={DIGESTS[0]: Tier.NVME}),
        Member("gpu", tiers={DIGESTS[0]: Tier.HBM}),
    ]
    assert order(LlmdPrecise(), ONE, *members, history=sent(ONE, "disk"))[:2] == ["gpu", "cpu"]


def test_only_a_prefix_counts() -> None:
    """Who has the second artifact and not the first has nothing."""
    second, first = {DIGESTS[1]: Tier.HBM}, {DIGESTS[0]: Tier.DRAM}
    assert order(LlmdPrecise(), PAIR, Member("a", tiers=second), Member("b", tiers=first)) == [
        "b",
        "a",
    ]


def test_dynamo_adds_blocks_of_prefill_and_decode() -> None:
    """900 tokens on the device are worth 900 tokens of other requests' context, not 1000."""
    holder = Member("a", tiers={DIGESTS[0]: Tier.HBM})
    assert order(DynamoKv(), ONE, replace(holder, num_in_flight=8), Member("b"))[0] == "a"
    assert order(DynamoKv(), ONE, replace(holder, num_in_flight=10), Member("b"))[0] == "b"


def test_a_temperature_makes_dynamo_choose_among_the_cheap() -> None:
    """At 0 always the best; above, others too, the better ones more often."""
    members = [Member("a"), Member("b", 1), Member("c", 20)]
    cold = {order(DynamoKv(), ONE, *members, tick=tick)[0] for tick in range(50)}
    warm = [order(DynamoKv(temperature=0.5), ONE, *members, tick=tick)[0] for tick in range(300)]
    assert cold == {"a"}
    assert warm.count("a") > warm.count("c") > 0
    assert warm.count("b") > warm.count("c")


def test_preble_exploits_a_long_match_until_it_is_overloaded() -> None:
    """Who has most of the prompt is asked, unless it carries 1.5 times the mean."""
    history = sent(ONE, "a")
    even = [Member("a", 2), Member("b", 1), Member("c", 1)]
    assert order(Preble(), ONE, *even, history=history)[0] == "a"
    # Its match is worth nine tenths of half a second; ten requests cost as much.
    hot = [Member("a", 12), Member("b"), Member("c")]
    assert order(Preble(), ONE, *hot, history=history)[0] != "a"


def test_mooncake_fetches_where_that_is_sooner() -> None:
    """An idle replica that must fetch the prefix is taken when the holder's queue costs more."""
    holder = Member("a", tiers={DIGESTS[0]: Tier.HBM})
    assert order(MooncakeConductor(), ONE, holder, Member("b"))[0] == "a"
    busy = replace(holder, num_pending=5)
    assert order(MooncakeConductor(), ONE, busy, Member("b"))[0] == "b"


@pytest.mark.parametrize("age_s", [0.0, MAX_AGE_S, MAX_AGE_S + 1])
def test_a_history_forgets(age_s: float) -> None:
    """What was not sent again for two minutes is not believed to be there."""
    matched = sent(ONE, "a").matched_tokens(ONE, [ReplicaId("a"), ReplicaId("b")], age_s)
    assert matched.tolist() == [900 if age_s <= MAX_AGE_S else 0, 0]


def test_a_history_is_bounded() -> None:
    """Tokens over the limit push the oldest out."""
    history, big = RouteHistory(), MAX_TOKENS // 2 + 1
    demands = [Demand("m", (ArtifactDemand(digest, 1, big),), 1) for digest in DIGESTS[:2]]
    for demand in demands:
        history.record(ReplicaId("a"), demand, 0.0)
    assert history.num_tokens([ReplicaId("a")]).tolist() == [big]
    assert history.matched_tokens(demands[0], [ReplicaId("a")], 0.0).tolist() == [0]
    assert history.matched_tokens(demands[1], [ReplicaId("a")], 0.0).tolist() == [big]
    history.forget(ReplicaId("a"))
    assert history.num_tokens([ReplicaId("a")]).tolist() == [0]
