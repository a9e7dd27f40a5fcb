"""Where copies should be: what holds of every fleet, and small ones worked out by hand."""

from dataclasses import replace
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.rates import ReplicaRates, TierRate
from cartridge_policies.replication import (
    MAX_PRIORITY,
    Action,
    ActionKind,
    ArrivalRates,
    ArtifactState,
    Bounds,
    CopiesView,
    Copy,
    ReplicaState,
    Replication,
    copies_for,
    wait_s,
)
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import ReplicaId, Tier

K = TypeVar("K")
V = TypeVar("V")

GB = 1_000_000_000
NAMES = [ReplicaId(f"r{index}") for index in range(5)]
DIGESTS = [sha256_digest(f"artifact-{index}".encode()) for index in range(6)]
RATES = ReplicaRates(
    tiers={
        Tier.HBM: TierRate(0.0, float("inf")),
        Tier.DRAM: TierRate(0.0, 20e9),
        Tier.NVME: TierRate(0.0, 4e9),
        Tier.REMOTE: TierRate(0.0, 1e9),
    }
)
"""A GB from the store takes a second."""
DRAM = Copy(Tier.DRAM)


def view_of(
    artifacts: dict[Digest, ArtifactState],
    replicas: dict[ReplicaId, ReplicaState] | None = None,
    service_s: float = 0.1,
) -> CopiesView:
    """A fleet whose requests all use these artifacts."""
    return CopiesView(
        artifacts,
        replicas or {name: ReplicaState(RATES) for name in NAMES},
        service_s,
        sum(state.rate_per_s for state in artifacts.values()),
    )


def plan(view: CopiesView, **bounds: float) -> list[Action]:
    """What is to be done, as a whole."""
    wanted = {"max_actions": 100, "max_copy_bytes": 1000 * GB, **bounds}
    return Replication(Bounds(**wanted)).plan(view)  # type: ignore[arg-type]


def copies_of(actions: list[Action], digest: Digest) -> list[ReplicaId]:
    """Where an artifact is brought to."""
    return [
        each.replica
        for each in actions
        if (each.kind, each.digest) == (ActionKind.PREFETCH, digest)
    ]


# --- any fleet -----------------------------------------------------------------------------------
_COPIES = st.builds(
    Copy,
    st.sampled_from([Tier.HBM, Tier.DRAM, Tier.NVME]),
    is_ready=st.booleans(),
    is_pinned=st.booleans(),
    has_own_pin=st.booleans(),
)
_ARTIFACTS = st.builds(
    ArtifactState,
    size_bytes=st.integers(1, 4 * GB),
    rate_per_s=st.one_of(st.just(0.0), st.floats(0.0001, 50)),
    copies=st.dictionaries(st.sampled_from(NAMES), _COPIES),
    able=st.one_of(st.none(), st.frozensets(st.sampled_from(NAMES))),
)
_REPLICAS = st.builds(
    ReplicaState,
    rates=st.just(RATES),
    queue_s=st.floats(0, 10),
    link_s=st.floats(0, 1),
    capacity_bytes=st.one_of(st.none(), st.just(8 * GB)),
    spare_bytes=st.one_of(st.none(), st.integers(0, 8 * GB)),
    pin_bytes=st.one_of(st.none(), st.integers(0, 8 * GB)),
    is_draining=st.booleans(),
)
_VIEWS = st.builds(
    view_of,
    st.dictionaries(st.sampled_from(DIGESTS), _ARTIFACTS),
    st.dictionaries(st.sampled_from(NAMES), _REPLICAS, min_size=1),
    st.floats(0.001, 2),
)
_BOUNDS = st.builds(
    Bounds,
    max_actions=st.integers(1, 8),
    max_copy_bytes=st.integers(0, 10 * GB),
    horizon_s=st.sampled_from([5.0, 60.0]),
)


@given(view=_VIEWS, bounds=_BOUNDS)
def test_a_fleet_without_traffic_is_left_alone(view: CopiesView, bounds: Bounds) -> None:
    """Nothing is brought, let go or pinned; own pins end."""
    silent = view_of(
        {digest: replace(state, rate_per_s=0.0) for digest, state in view.artifacts.items()},
        dict(view.replicas),
    )
    actions = Replication(bounds).plan(silent)
    assert {action.kind for action in actions} <= {ActionKind.UNPIN}


@given(view=_VIEWS, bounds=_BOUNDS)
def test_a_round_is_bounded(view: CopiesView, bounds: Bounds) -> None:
    """In actions and in bytes; each is of a replica and an artifact that are there, once."""
    actions = Replication(bounds).plan(view)
    assert len(actions) <= bounds.max_actions
    brought = [action for action in actions if action.kind is ActionKind.PREFETCH]
    assert sum(action.size_bytes for action in brought) <= bounds.max_copy_bytes
    assert len({(a.kind, a.replica, a.digest) for a in actions}) == len(actions)
    for action in actions:
        assert action.replica in view.replicas
        assert action.digest in view.artifacts
    for action in brought:
        state = view.artifacts[action.digest]
        assert not view.replicas[action.replica].is_draining
        assert state.able is None or action.replica in state.able
        assert action.ratio > bounds.min_ratio
        assert 1 <= action.priority <= MAX_PRIORITY


@given(view=_VIEWS, bounds=_BOUNDS, chance=st.randoms(use_true_random=False))
def test_the_order_of_what_is_known_does_not_matter(
    view: CopiesView, bounds: Bounds, chance: Random
) -> None:
    """Several gateways that know the same decide the same."""

    def shuffled(mapping: dict[K, V]) -> dict[K, V]:
        items = list(mapping.items())
        chance.shuffle(items)
        return dict(items)

    other = replace(
        view,
        artifacts=shuffled(
            {
                digest: replace(state, copies=shuffled(dict(state.copies)))
                for digest, state in view.artifacts.items()
            }
        ),
        replicas=shuffled(dict(view.replicas)),
    )
    assert Replication(bounds).plan(other) == Replication(bounds).plan(view)


def test_what_goes_in_a_round_does_not_come_back_in_it() -> None:
    """Two hot ones, and one full replica: the engine is not asked for both at once."""
    full = ReplicaState(RATES, capacity_bytes=10 * GB, spare_bytes=0, pin_bytes=0)
    none = ReplicaState(RATES, capacity_bytes=0, spare_bytes=0, pin_bytes=0)
    one, other = DIGESTS[:2]
    artifacts = {
        one: ArtifactState(GB, 10.0, dict.fromkeys(NAMES[:2], DRAM)),
        other: ArtifactState(GB, 10.0),
    }
    replicas = {NAMES[0]: full, NAMES[1]: ReplicaState(RATES), NAMES[2]: none}
    actions = plan(view_of(artifacts, replicas, service_s=1.0))
    evicted = {a.digest for a in actions if a.kind is ActionKind.EVICT and a.replica == NAMES[0]}
    assert evicted == {one}
    assert copies_of(actions, one) == []
    assert NAMES[0] in copies_of(actions, other)


@given(view=_VIEWS, bounds=_BOUNDS)
def test_the_last_copy_of_what_is_hot_stays(view: CopiesView, bounds: Bounds) -> None:
    """Of each artifact that is asked for within the horizon one ready copy is left."""
    actions = Replication(bounds).plan(view)
    for digest, state in view.artifacts.items():
        ready = {
            name
            for name, copy in state.copies.items()
            if copy.is_ready
            and copy.tier in (Tier.HBM, Tier.DRAM)
            and name in view.replicas
            and not view.replicas[name].is_draining
        }
        gone = {a.replica for a in actions if a.digest == digest and a.kind is ActionKind.EVICT}
        if ready and state.rate_per_s * bounds.horizon_s >= 1:
            assert ready - gone


@given(view=_VIEWS, bounds=_BOUNDS)
def test_what_is_pinned_is_not_let_go_and_only_own_pins_end(
    view: CopiesView, bounds: Bounds
) -> None:
    """Neither by an eviction nor by an unpin of somebody else's."""
    for action in Replication(bounds).plan(view):
        copy = view.artifacts[action.digest].copies.get(action.replica)
        if action.kind is ActionKind.EVICT:
            assert copy is not None
            assert not copy.is_pinned
            assert not copy.has_own_pin
        if action.kind is ActionKind.UNPIN:
            assert copy is not None
            assert copy.has_own_pin
        if action.kind is ActionKind.PIN:
            assert copy is not None
            assert not copy.is_pinned


@given(view=_VIEWS, bounds=_BOUNDS)
def test_doing_what_was_said_ends_the_talk(view: CopiesView, bounds: Bounds) -> None:
    """What was just brought is not let go in the next round, nor brought again."""
    actions = Replication(bounds).plan(view)
    artifacts = dict(view.artifacts)
    brought = {(a.digest, a.replica) for a in actions if a.kind is ActionKind.PREFETCH}
    for digest, name in brought:
        state = artifacts[digest]
        artifacts[digest] = replace(state, copies={**state.copies, name: DRAM})
    for action in Replication(bounds).plan(replace(view, artifacts=artifacts)):
        if (action.digest, action.replica) in brought:
            assert action.kind in {ActionKind.PIN, ActionKind.EVICT}
            if action.kind is ActionKind.EVICT:
                # Its replica is too full: only for something that is worth more.
                assert view.replicas[action.replica].spare_bytes is not None


# --- by hand -------------------------------------------------------------------------------------
def test_holders_are_as_many_as_keep_its_queue_below_one_service() -> None:
    """One holder up to half of its time, two up to the whole of one; never more than are able."""
    assert [copies_for(work, 4) for work in (0.0, 0.1, 0.5, 0.51, 1.0, 1.6, 9.0)] == [
        *(0, 1, 1, 2, 2, 4, 4)
    ]


def test_one_queue_is_that_of_a_single_server() -> None:
    """Half busy: one service time; half busy and twice as many: less than half of it."""
    assert wait_s(1, 0.5, 3.0) == pytest.approx(3.0)
    assert wait_s(2, 0.5, 3.0) < 1.5
    assert wait_s(1, 0.0, 3.0) == 0


def test_a_hot_artifact_gets_the_copies_that_its_demand_needs() -> None:
    """20 requests a second of 0.1 s are 2 s of work: 4 holders, to be used in so many seconds."""
    hot, cold = DIGESTS[:2]
    actions = plan(
        view_of(
            {
                hot: ArtifactState(GB // 10, 20.0, {NAMES[0]: DRAM}),
                cold: ArtifactState(GB // 10, 0.1, {NAMES[0]: DRAM}),
            }
        )
    )
    assert sorted(copies_of(actions, hot)) == NAMES[1:4]
    assert copies_of(actions, cold) == []
    assert [action.expected_in_s for action in actions] == [2 / 20, 3 / 20, 4 / 20]


def test_what_nobody_has_is_brought_once_it_is_asked_for_often() -> None:
    """Where there is room and the queue is shortest."""
    lost = DIGESTS[0]
    replicas = {
        NAMES[0]: ReplicaState(RATES, queue_s=3.0),
        NAMES[1]: ReplicaState(RATES, queue_s=1.0),
        NAMES[2]: ReplicaState(RATES, queue_s=0.0, capacity_bytes=GB // 2, spare_bytes=0),
    }
    actions = plan(view_of({lost: ArtifactState(GB, 1.0)}, replicas, service_s=0.01))
    assert copies_of(actions, lost) == [NAMES[1]]
    assert plan(view_of({lost: ArtifactState(GB, 0.001)}, replicas)) == []


def test_a_copy_on_disk_is_brought_nearer_first() -> None:
    """A quarter of a second there, a second elsewhere."""
    hot = DIGESTS[0]
    copies = {NAMES[0]: DRAM, NAMES[3]: Copy(Tier.NVME)}
    actions = plan(view_of({hot: ArtifactState(GB, 6.0, copies)}))
    assert copies_of(actions, hot)[0] == NAMES[3]


def test_where_all_load_from_the_store_copies_wait() -> None:
    """The same fleet makes a copy when its links are free, and none when requests use them."""
    wanted = {DIGESTS[0]: ArtifactState(GB, 0.02)}
    free = {name: ReplicaState(RATES) for name in NAMES}
    busy = {name: ReplicaState(RATES, link_s=2.0) for name in NAMES}
    assert len(plan(view_of(wanted, free), link_price=0.5)) == 1
    assert plan(view_of(wanted, busy), link_price=0.5) == []


def test_what_a_replica_that_leaves_has_comes_first() -> None:
    """Before copies that save more; on the others in turn."""
    replicas = {name: ReplicaState(RATES) for name in NAMES[1:]}
    replicas[NAMES[0]] = ReplicaState(RATES, is_draining=True)
    artifacts = {digest: ArtifactState(GB // 10, 1.0, {NAMES[0]: DRAM}) for digest in DIGESTS[:4]}
    artifacts[DIGESTS[5]] = ArtifactState(GB // 10, 20.0, {NAMES[1]: DRAM})
    actions = plan(view_of(artifacts, replicas), max_actions=5)
    assert [action.is_handover for action in actions] == [True, True, True, True, False]
    assert len({action.replica for action in actions[:4]}) == 4


def test_cold_artifacts_go_where_room_is_short_and_nowhere_else() -> None:
    """The coldest first, until there is room; the pinned one and the hot one stay."""
    full = ReplicaState(RATES, capacity_bytes=10 * GB, spare_bytes=0)
    roomy = ReplicaState(RATES, capacity_bytes=10 * GB, spare_bytes=9 * GB)
    artifacts = {
        DIGESTS[0]: ArtifactState(GB, 1.0, {NAMES[0]: DRAM}),
        DIGESTS[1]: ArtifactState(GB, 0.0001, {NAMES[0]: replace(DRAM, is_pinned=True)}),
        DIGESTS[2]: ArtifactState(GB, 0.002, {NAMES[0]: DRAM}),
        DIGESTS[3]: ArtifactState(GB, 0.001, {NAMES[0]: DRAM, NAMES[1]: DRAM}),
    }
    actions = plan(view_of(artifacts, {NAMES[0]: full, NAMES[1]: roomy}))
    evicted = [(a.replica, a.digest) for a in actions if a.kind is ActionKind.EVICT]
    assert evicted == [(NAMES[0], DIGESTS[3])]


def test_surplus_copies_go_only_when_far_more_demand_would_not_need_them() -> None:
    """What was brought for 10 requests a second stays at 6, and goes at 1."""
    full = {name: ReplicaState(RATES, capacity_bytes=2 * GB, spare_bytes=0) for name in NAMES[:2]}
    copies = {NAMES[0]: DRAM, NAMES[1]: DRAM}

    def evicted(rate_per_s: float) -> int:
        actions = plan(view_of({DIGESTS[0]: ArtifactState(GB, rate_per_s, copies)}, full))
        return sum(action.kind is ActionKind.EVICT for action in actions)

    assert [evicted(rate) for rate in (10.0, 6.0, 3.0, 1.0)] == [0, 0, 0, 1]


def test_the_only_copy_of_what_is_hot_is_pinned_in_a_full_replica() -> None:
    """Within what pins may take; it ends below half of the rate, or when others have it."""
    full = ReplicaState(RATES, capacity_bytes=GB, spare_bytes=0, pin_bytes=GB)
    state = ArtifactState(GB, 0.1, {NAMES[0]: DRAM})

    def kinds(state: ArtifactState, replica: ReplicaState = full) -> list[ActionKind]:
        return [a.kind for a in plan(view_of({DIGESTS[0]: state}, {NAMES[0]: replica}))]

    assert kinds(state) == [ActionKind.PIN]
    assert kinds(state, replace(full, pin_bytes=GB - 1)) == []
    assert kinds(state, replace(full, spare_bytes=GB)) == []
    own = {NAMES[0]: replace(DRAM, has_own_pin=True)}
    assert kinds(replace(state, copies=own, rate_per_s=0.6 / 30)) == []
    assert kinds(replace(state, copies=own, rate_per_s=0.4 / 30)) == [ActionKind.UNPIN]


# --- rates ---------------------------------------------------------------------------------------
def test_rates_come_near_what_arrives_and_fade() -> None:
    """Two a second for a minute; a minute later about a quarter is left, after an hour none."""
    arrivals = ArrivalRates(tau_s=60.0)
    for step in range(120):
        arrivals.note([DIGESTS[0]], step / 2)
    assert arrivals.rates(60.0)[DIGESTS[0]] == pytest.approx(2.0, rel=0.02)
    assert arrivals.requests_per_s(60.0) == pytest.approx(2.0, rel=0.02)
    # 120 arrivals in a window that now is longer.
    assert arrivals.rates(120.0)[DIGESTS[0]] == pytest.approx(2.0 * 0.269, rel=0.02)
    assert arrivals.rates(3600.0) == {}


def test_only_the_most_wanted_are_kept() -> None:
    """However many there are; one that comes again and again is not lost among strangers."""
    arrivals = ArrivalRates(tau_s=60.0, max_artifacts=8)
    for number in range(1000):
        arrivals.note([sha256_digest(str(number).encode())], number / 100)
        if number % 10 == 0:
            arrivals.note([DIGESTS[0]], number / 100)
    rates = arrivals.rates(10.0)
    assert len(rates) <= 8
    assert max(rates, key=rates.__getitem__) == DIGESTS[0]
