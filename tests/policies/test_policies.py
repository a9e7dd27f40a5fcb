"""What each policy is for: where it sends a request, and the word it gives as its reason."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from cartridge_policies.baselines import (
    ConsistentHashBounded,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    SessionHash,
)
from cartridge_policies.cartridge_aware import CartridgeAware
from cartridge_policies.rates import ReplicaRates, TierRate
from cartridge_policies.types import (
    ArtifactDemand,
    ClusterView,
    Decision,
    Demand,
    MapMode,
    PlacementPolicy,
    Refusal,
    RefusalKind,
)
from cartridge_proto.residency import ReplicaId, Tier
from tests.contracts.placement_policy import DIGESTS, Fleet, Member, demands, fleets, view_of

ONE = Demand("m", (ArtifactDemand(DIGESTS[0], 100_000_000, 500),), 100)
PLAIN = Demand("m", (), 100)
RATES = ReplicaRates(
    queue_s_per_request=1.0,
    tiers={
        Tier.HBM: TierRate(0.0, float("inf")),
        Tier.DRAM: TierRate(0.1, 1e9),
        Tier.NVME: TierRate(0.2, 1e9),
        Tier.REMOTE: TierRate(2.0, 1e9),
    },
)
"""Each request that decodes costs one second; fetching `ONE` costs 2.1, from memory 0.2."""


def replica(
    name: str, num_in_flight: int = 0, tier: Tier | None = None, *, refusal: str | None = None
) -> Member:
    """A replica that may hold the artifact of `ONE`."""
    return Member(name, num_in_flight, {DIGESTS[0]: tier} if tier else {}, refusal, RATES)


def fleet(
    *members: Member, mode: MapMode = MapMode.EXACT, tick: int = 0, limit: int | None = None
) -> ClusterView:
    """A view of these replicas."""
    return view_of(members, mode=mode, tick=tick, max_in_flight=limit)


def decide(policy: PlacementPolicy, demand: Demand, view: ClusterView) -> Decision:
    """A decision that must not be a refusal."""
    answer = policy.decide(demand, view)
    assert isinstance(answer, Decision)
    return answer


def order(policy: PlacementPolicy, demand: Demand, view: ClusterView) -> list[str]:
    """Names in the order of the ranking."""
    return [candidate.replica for candidate in decide(policy, demand, view).ranking]


# --- the default policy --------------------------------------------------------------------------
AWARE = CartridgeAware()


def test_a_request_goes_where_its_cartridge_is() -> None:
    """Between idle replicas the faster tier wins, and the ranking is by tier."""
    view = fleet(
        replica("a"),
        replica("b", 0, Tier.NVME),
        replica("c", 0, Tier.HBM),
        replica("d", 0, Tier.DRAM),
    )
    assert order(AWARE, ONE, view) == ["c", "d", "b", "a"]


@pytest.mark.parametrize(("queue", "expected"), [(1, "holder"), (2, "idle")])
def test_a_queue_is_worth_its_seconds(queue: int, expected: str) -> None:
    """The holder is kept until its queue costs more than loading elsewhere."""
    view = fleet(replica("holder", queue, Tier.DRAM), replica("idle"))
    assert order(AWARE, ONE, view)[0] == expected


@given(demand=demands(), fleet=fleets(min_size=1))
def test_the_best_is_never_much_slower_than_another(demand: Demand, fleet: Fleet) -> None:
    """The first is within a tenth of the lowest predicted time; beyond that, time is the order."""
    answer = AWARE.decide(demand, fleet.view)
    if isinstance(answer, Refusal):
        return
    totals = [candidate.total_s for candidate in answer.ranking]
    bound = 1.1 * min(totals)
    num_near = sum(total <= bound * (1 - 1e-9) for total in totals)
    assert all(total <= bound * (1 + 1e-9) for total in totals[:num_near])
    slower = [total for total in totals if total > bound * (1 + 1e-9)]
    assert slower == sorted(slower)


@pytest.mark.parametrize("near", [0.0, 0.1])
def test_of_those_nearly_as_fast_the_least_busy_is_asked(near: float) -> None:
    """Rates that differ by 2 % are no reason to send more to the busier one; without `near` are."""
    faster = ReplicaRates(prefill_s_per_token=0.00098, queue_s_per_request=0.0)
    slower = replace(faster, prefill_s_per_token=0.001)
    view = fleet(Member("busy", 3, rates=faster), Member("idle", 0, rates=slower))
    decision = decide(CartridgeAware(near=near), PLAIN, view)
    assert decision.best.replica == ("idle" if near else "busy")


@pytest.mark.parametrize(
    ("demand", "tier", "mode", "reason"),
    [
        (ONE, Tier.HBM, MapMode.EXACT, "resident"),
        (ONE, Tier.NVME, MapMode.DEGRADED, "resident"),
        (ONE, None, MapMode.EXACT, "cold"),
        (PLAIN, None, MapMode.EXACT, "load"),
        (ONE, None, MapMode.FALLBACK, "fallback-load"),
        (PLAIN, None, MapMode.FALLBACK, "fallback-load"),
    ],
)
def test_a_decision_says_why(demand: Demand, tier: Tier | None, mode: MapMode, reason: str) -> None:
    """One word tells a person whether residency or load decided."""
    assert decide(AWARE, demand, fleet(replica("a", 0, tier), mode=mode)).reason == reason


def test_one_missing_artifact_is_cold() -> None:
    """A pair of which the chosen replica holds one is not called resident."""
    pair = replace(ONE, artifacts=(*ONE.artifacts, ArtifactDemand(DIGESTS[1], 1, 1)))
    decision = decide(AWARE, pair, fleet(replica("a", 0, Tier.HBM)))
    assert (decision.reason, decision.best.tiers) == ("cold", (Tier.HBM, Tier.REMOTE))


def test_without_a_map_the_queue_decides() -> None:
    """In fallback mode, where nothing is known to be anywhere, the idle replica is taken."""
    view = fleet(replica("a", 2), replica("b", 1), mode=MapMode.FALLBACK)
    assert order(AWARE, ONE, view) == ["b", "a"]


def test_turns_are_among_the_best_only() -> None:
    """Ties rotate; a slower replica is never first, whatever the tick."""
    members = (replica("a", 0, Tier.HBM), replica("b"), replica("c", 0, Tier.HBM))
    chosen = Counter(order(AWARE, ONE, fleet(*members, tick=tick))[0] for tick in range(10))
    assert chosen == {"a": 5, "c": 5}


# --- baselines -----------------------------------------------------------------------------------
def test_round_robin_takes_each_in_turn() -> None:
    """Neither load nor residency matters: names in order, then from the start."""
    members = (replica("c", 5), replica("a", 0, Tier.HBM), replica("b", 9))
    policy = RoundRobin()
    firsts = [order(policy, ONE, fleet(*members, tick=tick))[0] for tick in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]
    assert decide(policy, ONE, fleet(*members)).reason == "round-robin"


def test_least_loaded_looks_at_requests_in_flight_only() -> None:
    """The shortest queue wins against residency; ties take turns."""
    members = (replica("a", 1, Tier.HBM), replica("b"), replica("c"))
    policy = LeastLoaded()
    orders = [order(policy, ONE, fleet(*members, tick=tick)) for tick in range(3)]
    assert orders == [["b", "c", "a"], ["c", "b", "a"], ["b", "c", "a"]]
    assert decide(policy, ONE, fleet(*members)).reason == "least-loaded"


# --- who may take a request at all ---------------------------------------------------------------
@pytest.mark.parametrize("policy", [AWARE, RoundRobin(), LeastLoaded()])
def test_unable_and_full_are_different_refusals(policy: PlacementPolicy) -> None:
    """A fleet that cannot serve is not a fleet that is busy, and each replica has its reason."""
    unable, full = replica("a", refusal="other model"), replica("b", 4)
    answer = policy.decide(ONE, fleet(unable))
    assert answer == Refusal(RefusalKind.NO_ELIGIBLE, {ReplicaId("a"): "other model"})
    reasons = {ReplicaId("a"): "other model", ReplicaId("b"): "4 requests in flight"}
    assert policy.decide(ONE, fleet(unable, full, limit=4)) == Refusal(
        RefusalKind.SATURATED, reasons
    )
    assert policy.decide(ONE, fleet()) == Refusal(RefusalKind.NO_ELIGIBLE, {})


def test_the_last_free_place_is_used() -> None:
    """A limit is the number of requests in flight at which a replica is full, not one less."""
    assert order(AWARE, ONE, fleet(replica("a", 3), replica("b", 4), limit=4)) == ["a"]


# --- by name, or by chance ------------------------------------------------------------------------
def test_requests_of_one_session_stay_together() -> None:
    """Each session has one replica, sessions spread over all, and load does not move them."""
    names = [f"r{index}" for index in range(4)]
    homes = {}
    for number in range(64):
        demand = replace(PLAIN, session=f"session-{number}")
        crowded = [replica(name, 9 if name == "r0" else 0) for name in names]
        found = {
            order(SessionHash(), demand, fleet(*members))[0]
            for members in (crowded, map(replica, names))
        }
        assert len(found) == 1
        homes[number] = found.pop()
    assert set(homes.values()) == set(names)
    fewer = [name for name in names if name != "r2"]
    for number, home in homes.items():
        demand = replace(PLAIN, session=f"session-{number}")
        moved = order(SessionHash(), demand, fleet(*map(replica, fewer)))[0]
        assert moved == home or home == "r2"


def test_nobody_gets_more_than_its_share_by_a_hash() -> None:
    """A session goes on to the next replica of its order when its own is above the bound."""
    demand = replace(PLAIN, session="s")
    idle = order(ConsistentHashBounded(), demand, fleet(*map(replica, "abc")))
    busy = [replica(name, 6 if name == idle[0] else 0) for name in "abc"]
    assert order(ConsistentHashBounded(), demand, fleet(*busy)) == [idle[1], idle[2], idle[0]]


def test_two_choices_avoid_the_busiest() -> None:
    """Of two different replicas the less loaded is taken; both kinds of pairs come."""
    members = [replica(name, count) for name, count in zip("abcd", (9, 1, 1, 1), strict=True)]
    firsts = Counter(
        order(PowerOfTwo(), PLAIN, fleet(*members, tick=tick))[0] for tick in range(200)
    )
    assert "a" not in firsts
    assert min(firsts[name] for name in "bcd") > 20
