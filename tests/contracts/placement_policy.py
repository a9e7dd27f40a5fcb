"""What every placement policy keeps, whatever it optimises.

Owns the behaviour suite of the interface `PlacementPolicy` and the fleets it is tried on. Refuses
to know any policy: a test module runs the suite over those it has.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.history import RouteHistory
from cartridge_policies.loads import LoadTable
from cartridge_policies.rates import PRIORS, ReplicaRates
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
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import ReplicaId, Tier

DIGESTS = [sha256_digest(name) for name in (b"one", b"two", b"three")]
BUSY = Demand("m", (), 100)
"""What the requests that replicas are busy with demand."""

sizes = st.integers(1, 1 << 30)


@dataclass(frozen=True)
class Member:
    """A replica that is tried: what it holds, is busy with, and why it cannot be asked."""

    name: str
    num_in_flight: int = 0
    """Of which the first token has come."""
    tiers: Mapping[Digest, Tier] = field(default_factory=dict)
    refusal: str | None = None
    rates: ReplicaRates = PRIORS
    num_pending: int = 0
    """Of which it has not."""


class Held:
    """A residency map of members."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._ready: dict[Digest, dict[ReplicaId, Tier]] = {}
        for member in members:
            for digest, tier in member.tiers.items():
                self._ready.setdefault(digest, {})[ReplicaId(member.name)] = tier

    def ready_on(self, digest: Digest) -> Mapping[ReplicaId, Tier]:
        """As `Residency` says."""
        return self._ready.get(digest, {})


def view_of(
    members: Sequence[Member],
    *,
    mode: MapMode = MapMode.EXACT,
    tick: int = 0,
    max_in_flight: int | None = None,
    history: RouteHistory | None = None,
) -> ClusterView:
    """The fleet of these members, which join in this order."""
    loads = LoadTable()
    for member in members:
        row = loads.add(ReplicaId(member.name), member.rates)
        for index in range(member.num_in_flight + member.num_pending):
            booking = loads.book(row, BUSY, tiers={}, now_s=0.0)
            if index < member.num_in_flight:
                booking.note_first_token()
    return ClusterView(
        loads=loads,
        rows=loads.rows(ReplicaId(each.name) for each in members if each.refusal is None),
        residency=Held(members),
        history=history or RouteHistory(),
        mode=mode,
        tick=tick,
        refusals={ReplicaId(m.name): m.refusal for m in members if m.refusal is not None},
        max_in_flight=max_in_flight,
    )


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """A request for up to three artifacts."""
    digests = draw(st.lists(st.sampled_from(DIGESTS), max_size=3, unique=True))
    return Demand(
        model="m",
        artifacts=tuple(ArtifactDemand(digest, draw(sizes), 100) for digest in digests),
        num_live_tokens=draw(st.integers(0, 10_000)),
        session=draw(st.none() | st.sampled_from(["s", "t"])),
    )


def tiers() -> st.SearchStrategy[dict[Digest, Tier]]:
    """What a replica holds."""
    own = st.sampled_from([Tier.HBM, Tier.DRAM, Tier.NVME])
    return st.dictionaries(st.sampled_from(DIGESTS), own, max_size=3)


@st.composite
def members(draw: st.DrawFn, name: str) -> Member:
    """A replica that is able, busy or unable."""
    return Member(
        name=name,
        num_in_flight=draw(st.integers(0, 6)),
        tiers=draw(tiers()),
        refusal=draw(st.none() | st.none() | st.sampled_from(["unhealthy", "other model"])),
        num_pending=draw(st.integers(0, 3)),
    )


@dataclass(frozen=True)
class Fleet:
    """Members and what is known of all; `view` is made anew for each question."""

    members: tuple[Member, ...]
    mode: MapMode
    tick: int
    max_in_flight: int | None

    @property
    def view(self) -> ClusterView:
        """As a policy is given it."""
        return view_of(
            self.members, mode=self.mode, tick=self.tick, max_in_flight=self.max_in_flight
        )

    @property
    def able(self) -> list[str]:
        """Who may be named at all, said in other words than the policies'."""
        return sorted(m.name for m in self.members if m.refusal is None and not self.is_full(m))

    def is_full(self, member: Member) -> bool:
        """Whether a member is at the limit."""
        limit = self.max_in_flight
        return limit is not None and member.num_in_flight + member.num_pending >= limit


@st.composite
def fleets(draw: st.DrawFn, *, min_size: int = 0) -> Fleet:
    """A fleet of up to five."""
    count = draw(st.integers(min_size, 5))
    return Fleet(
        members=tuple(draw(members(f"replica-{index}")) for index in range(count)),
        mode=draw(st.sampled_from(MapMode)),
        tick=draw(st.integers(0, 1000)),
        max_in_flight=draw(st.none() | st.integers(1, 8)),
    )


class PlacementPolicyContract:
    """The suite; a subclass in a test module gives the argument `policy`."""

    @given(demand=demands(), fleet=fleets())
    def test_only_replicas_that_can_take_the_request_are_ranked(
        self, policy: PlacementPolicy, demand: Demand, fleet: Fleet
    ) -> None:
        """Each able replica stands in the ranking once, and no other does."""
        answer = policy.decide(demand, fleet.view)
        if isinstance(answer, Refusal):
            assert fleet.able == []
        else:
            assert sorted(candidate.replica for candidate in answer.ranking) == fleet.able
            assert answer.best is answer.ranking[0]
            assert answer.reason

    @given(demand=demands(), fleet=fleets())
    def test_a_refusal_says_which_of_the_two_it_is(
        self, policy: PlacementPolicy, demand: Demand, fleet: Fleet
    ) -> None:
        """No able replica and only full ones are different answers, each with all reasons."""
        answer = policy.decide(demand, fleet.view)
        if isinstance(answer, Decision):
            return
        is_any_able = any(member.refusal is None for member in fleet.members)
        expected = RefusalKind.SATURATED if is_any_able else RefusalKind.NO_ELIGIBLE
        assert answer.kind is expected
        assert answer.reasons == {
            m.name: m.refusal or f"{m.num_in_flight + m.num_pending} requests in flight"
            for m in fleet.members
        }

    @given(demand=demands(), fleet=fleets(), data=st.data())
    def test_the_order_of_replicas_does_not_matter(
        self, policy: PlacementPolicy, demand: Demand, fleet: Fleet, data: st.DataObject
    ) -> None:
        """The same fleet, joined in another order, gets the same answer."""
        other = replace(fleet, members=tuple(data.draw(st.permutations(fleet.members))))
        assert policy.decide(demand, other.view) == policy.decide(demand, fleet.view)

    @given(demand=demands(), fleet=fleets())
    def test_the_same_question_has_the_same_answer(
        self, policy: PlacementPolicy, demand: Demand, fleet: Fleet
    ) -> None:
        """Nothing is remembered between decisions, and the view is left as it was."""
        view = fleet.view
        first = policy.decide(demand, view)
        policy.decide(demand, replace(view, tick=view.tick + 1))
        assert policy.decide(demand, view) == first

    @given(demand=demands(), fleet=fleets(min_size=1))
    def test_costs_are_named_seconds_that_add_up(
        self, policy: PlacementPolicy, demand: Demand, fleet: Fleet
    ) -> None:
        """Every candidate has terms that are not negative, and a tier for each artifact."""
        answer = policy.decide(demand, fleet.view)
        if isinstance(answer, Refusal):
            return
        is_known = fleet.mode is not MapMode.FALLBACK
        held = {member.name: member.tiers if is_known else {} for member in fleet.members}
        for candidate in answer.ranking:
            assert len({term.name for term in candidate.terms}) == len(candidate.terms)
            assert all(term.seconds >= 0 for term in candidate.terms)
            assert candidate.total_s == sum(term.seconds for term in candidate.terms)
            assert list(candidate.tiers) == [
                held[candidate.replica].get(artifact.digest, Tier.REMOTE)
                for artifact in demand.artifacts
            ]


class FairPolicyContract(PlacementPolicyContract):
    """The suite of policies for which replicas with equal loads and tiers are equals."""

    @given(demand=demands(), count=st.integers(1, 6), tick=st.integers(0, 1000))
    def test_equals_take_turns(
        self, policy: PlacementPolicy, demand: Demand, count: int, tick: int
    ) -> None:
        """Over as many ticks as there are equal replicas each is chosen once."""
        twins = [Member(f"replica-{n}", 2, {DIGESTS[0]: Tier.DRAM}) for n in range(count)]
        chosen = Counter[ReplicaId]()
        for turn in range(count):
            answer = policy.decide(demand, view_of(twins, tick=tick + turn))
            assert isinstance(answer, Decision)
            chosen[answer.best.replica] += 1
        assert set(chosen.values()) == {1}
        assert len(chosen) == count
