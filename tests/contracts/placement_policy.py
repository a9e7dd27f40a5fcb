"""What every placement policy keeps, whatever it optimises.

Owns the behaviour suite of the interface `PlacementPolicy` and the views it is tried on. Refuses to
know any policy: a test module runs the suite over those it has.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.types import (
    ArtifactDemand,
    ClusterView,
    Decision,
    Demand,
    MapMode,
    PlacementPolicy,
    Refusal,
    RefusalKind,
    ReplicaView,
)
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import ReplicaId, Tier

DIGESTS = [sha256_digest(name) for name in (b"one", b"two", b"three")]

sizes = st.integers(1, 1 << 30)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """A request for up to three artifacts."""
    digests = draw(st.lists(st.sampled_from(DIGESTS), max_size=3, unique=True))
    return Demand(
        model="m",
        artifacts=tuple(ArtifactDemand(digest, draw(sizes), 100) for digest in digests),
        num_live_tokens=draw(st.integers(0, 10_000)),
    )


def tiers() -> st.SearchStrategy[dict[Digest, Tier]]:
    """What a replica holds."""
    own = st.sampled_from([Tier.HBM, Tier.DRAM, Tier.NVME])
    return st.dictionaries(st.sampled_from(DIGESTS), own, max_size=3)


@st.composite
def replicas(draw: st.DrawFn, name: str) -> ReplicaView:
    """A replica that is able, full or unable."""
    return ReplicaView(
        replica=ReplicaId(name),
        num_in_flight=draw(st.integers(0, 8)),
        max_in_flight=draw(st.none() | st.integers(1, 8)),
        tiers=draw(tiers()),
        refusal=draw(st.none() | st.none() | st.sampled_from(["unhealthy", "other model"])),
    )


@st.composite
def views(draw: st.DrawFn, *, min_size: int = 0) -> ClusterView:
    """A fleet of up to five."""
    count = draw(st.integers(min_size, 5))
    return ClusterView(
        replicas=tuple(draw(replicas(f"replica-{index}")) for index in range(count)),
        mode=draw(st.sampled_from(MapMode)),
        tick=draw(st.integers(0, 1000)),
    )


def can_take(replica: ReplicaView) -> bool:
    """Whether a replica may be named at all, said in other words than the policies'."""
    is_full = replica.max_in_flight is not None and replica.num_in_flight >= replica.max_in_flight
    return replica.refusal is None and not is_full


def twins(count: int, tick: int) -> ClusterView:
    """Replicas that differ in their name only."""
    return ClusterView(
        tuple(
            ReplicaView(ReplicaId(f"replica-{index}"), 2, None, {DIGESTS[0]: Tier.DRAM}, None)
            for index in range(count)
        ),
        MapMode.EXACT,
        tick,
    )


class PlacementPolicyContract:
    """The suite; a subclass in a test module gives the argument `policy`."""

    @given(demand=demands(), view=views())
    def test_only_replicas_that_can_take_the_request_are_ranked(
        self, policy: PlacementPolicy, demand: Demand, view: ClusterView
    ) -> None:
        """Each able replica stands in the ranking once, and no other does."""
        able = sorted(replica.replica for replica in view.replicas if can_take(replica))
        answer = policy.decide(demand, view)
        if isinstance(answer, Refusal):
            assert able == []
        else:
            assert sorted(candidate.replica for candidate in answer.ranking) == able
            assert answer.best is answer.ranking[0]
            assert answer.reason

    @given(demand=demands(), view=views())
    def test_a_refusal_says_which_of_the_two_it_is(
        self, policy: PlacementPolicy, demand: Demand, view: ClusterView
    ) -> None:
        """No able replica and only full ones are different answers, each with all reasons."""
        answer = policy.decide(demand, view)
        if isinstance(answer, Decision):
            return
        is_any_able = any(replica.refusal is None for replica in view.replicas)
        expected = RefusalKind.SATURATED if is_any_able else RefusalKind.NO_ELIGIBLE
        assert answer.kind is expected
        assert set(answer.reasons) == {replica.replica for replica in view.replicas}
        for replica in view.replicas:
            reason = answer.reasons[replica.replica]
            assert reason == (replica.refusal or f"{replica.num_in_flight} requests in flight")

    @given(demand=demands(), view=views(), data=st.data())
    def test_the_order_of_replicas_does_not_matter(
        self, policy: PlacementPolicy, demand: Demand, view: ClusterView, data: st.DataObject
    ) -> None:
        """The same fleet listed in another order gets the same answer."""
        shuffled = tuple(data.draw(st.permutations(view.replicas)))
        other = replace(view, replicas=shuffled)
        assert policy.decide(demand, other) == policy.decide(demand, view)

    @given(demand=demands(), view=views())
    def test_the_same_question_has_the_same_answer(
        self, policy: PlacementPolicy, demand: Demand, view: ClusterView
    ) -> None:
        """Nothing is remembered between decisions."""
        first = policy.decide(demand, view)
        policy.decide(demand, replace(view, tick=view.tick + 1))
        assert policy.decide(demand, view) == first

    @given(demand=demands(), view=views(min_size=1))
    def test_costs_are_named_seconds_that_add_up(
        self, policy: PlacementPolicy, demand: Demand, view: ClusterView
    ) -> None:
        """Every candidate has terms that are not negative, and a tier for each artifact."""
        answer = policy.decide(demand, view)
        if isinstance(answer, Refusal):
            return
        held = {replica.replica: replica.tiers for replica in view.replicas}
        for candidate in answer.ranking:
            assert len({term.name for term in candidate.terms}) == len(candidate.terms)
            assert all(term.seconds >= 0 for term in candidate.terms)
            assert candidate.total_s == sum(term.seconds for term in candidate.terms)
            assert list(candidate.tiers) == [
                held[candidate.replica].get(artifact.digest, Tier.REMOTE)
                for artifact in demand.artifacts
            ]

    @given(demand=demands(), count=st.integers(1, 6), tick=st.integers(0, 1000))
    def test_equals_take_turns(
        self, policy: PlacementPolicy, demand: Demand, count: int, tick: int
    ) -> None:
        """Over as many ticks as there are equal replicas each is chosen once."""
        chosen = Counter[ReplicaId]()
        for turn in range(count):
            answer = policy.decide(demand, twins(count, tick + turn))
            assert isinstance(answer, Decision)
            chosen[answer.best.replica] += 1
        assert set(chosen.values()) == {1}
        assert len(chosen) == count
