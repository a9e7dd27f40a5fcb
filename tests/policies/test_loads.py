"""The table of loads: queues that shrink as time passes, and requests that nobody sees begin."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.cost import costs
from cartridge_policies.loads import Load, LoadTable, Row
from cartridge_policies.ranking import able_rows
from cartridge_policies.rates import ReplicaRates
from cartridge_policies.types import ArtifactDemand, Demand, Refusal
from cartridge_proto.residency import ReplicaId, Tier
from tests.contracts.placement_policy import DIGESTS, Member, view_of

RATES = ReplicaRates(prefill_base_s=0.0, prefill_s_per_token=0.01, queue_s_per_request=0.0)
FOUR_S = Demand("m", (), 400)


def table() -> tuple[LoadTable, Row]:
    """One replica, idle."""
    loads = LoadTable()
    return loads, loads.add(ReplicaId("a"), RATES)


def queue_s(loads: LoadTable, now_s: float) -> float:
    """Predicted for the next request."""
    view = replace(view_of([Member("a")]), loads=loads, now_s=now_s)
    return float(costs(Demand("m", (), 1), view, view.rows).terms[0, 0])


def test_the_oldest_prefill_counts_down() -> None:
    """Two of 4 s: after one second 7 are left; the second one's begins with the first token."""
    loads, row = table()
    first = loads.book(row, FOUR_S, tiers={}, now_s=10.0)
    loads.book(row, FOUR_S, tiers={}, now_s=10.0)
    assert queue_s(loads, 10.0) == pytest.approx(8)
    assert queue_s(loads, 11.0) == pytest.approx(7)
    # It is late: what is behind it has not begun, however long it takes.
    assert queue_s(loads, 99.0) == pytest.approx(4)
    first.note_first_token(20.0)
    assert queue_s(loads, 20.0) == pytest.approx(4)
    assert queue_s(loads, 21.0) == pytest.approx(3)


def test_a_prefill_does_not_begin_before_its_load_has_ended() -> None:
    """While its Cartridge is on the way, none of the work is done."""
    loads, row = table()
    demand = Demand("m", (ArtifactDemand(DIGESTS[0], 1_000_000, 100),), 400)
    load_s = RATES.load_s(Tier.REMOTE, 1_000_000)
    loads.book(row, demand, tiers={DIGESTS[0]: Tier.REMOTE}, now_s=0.0)
    assert queue_s(loads, load_s) == pytest.approx(4)
    assert queue_s(loads, load_s + 1) == pytest.approx(3)


def test_without_a_clock_work_counts_as_a_whole() -> None:
    """Who does not say when a first token came gets the whole of the next one as queue."""
    loads, row = table()
    first = loads.book(row, FOUR_S, tiers={}, now_s=0.0)
    loads.book(row, FOUR_S, tiers={}, now_s=0.0)
    first.note_first_token()
    assert queue_s(loads, 1_000.0) == pytest.approx(4)


def test_an_unseen_prefill_is_over_when_predicted() -> None:
    """An answer that comes as a whole is queue for its 4 s, and reads its context all the time."""
    loads, row = table()
    booking = loads.book(row, FOUR_S, tiers={}, now_s=0.0, is_streamed=False)
    loads.book(row, FOUR_S, tiers={}, now_s=1.0, is_streamed=False)
    assert queue_s(loads, 1.0) == pytest.approx(7)
    assert queue_s(loads, 100.0) == 0
    assert row.context_tokens == 800
    booking.end()
    assert (row.num_in_flight, row.context_tokens) == (1, 400)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("bute"), st.integers(0, 5), st.floats(0, 3)), max_size=40
    )
)
def test_a_table_is_idle_again_when_all_has_ended(steps: list[tuple[str, int, float]]) -> None:
    """Whatever begins, shows its first token and ends, in any order: no number is below zero."""
    loads, row = table()
    now_s = 0.0
    running = []
    for what, index, passed_s in steps:
        now_s += passed_s
        if what in "bu":
            running.append(loads.book(row, FOUR_S, tiers={}, now_s=now_s, is_streamed=what == "b"))
        elif what == "t" and index < len(running):
            running[index].note_first_token(now_s)
        elif what == "e" and index < len(running):
            running.pop(index).end()
        assert 0 <= queue_s(loads, now_s) <= 4 * len(running) + 4 * len(steps) + 1e-9
        assert min(row.num_in_flight, row.num_pending, row.pending_tokens) >= 0
    for booking in running:
        booking.end()
    assert (row.num_in_flight, row.num_pending, row.pending_s, row.context_tokens) == (0, 0, 0, 0)
    assert not row.pending_order
    assert queue_s(loads, now_s + 1_000) == 0


def test_nothing_that_is_left_is_less_than_nothing() -> None:
    """Sums of floats are off by a little: whoever is told of work below 0 believes nothing."""
    for num_tokens in range(1, 100):
        loads, row = table()
        first = loads.book(row, Demand("m", (), 7), tiers={}, now_s=0.0)
        loads.book(row, Demand("m", (), num_tokens), tiers={}, now_s=0.0)
        first.note_first_token(1.0)
        # The second one is late: nothing is behind it.
        assert 0 <= row.own_load(1_000.0).pending_s < 1e-9


@given(
    booked=st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(1, 500)), max_size=6
    ),
    num_slots=st.sampled_from([None, 1, 4]),
)
def test_what_another_gateway_has_booked_costs_the_same(
    booked: list[tuple[bool, bool, bool, int]], num_slots: int | None
) -> None:
    """Told by another, requests delay the next one as if they had been booked here.

    Each: whose it is, whether it has shown its first token, whether it is streamed, its tokens.
    """
    rates = replace(RATES, num_slots=num_slots, queue_s_per_request=0.02)
    whole, own, other = LoadTable(), LoadTable(), LoadTable()
    rows = [loads.add(ReplicaId("a"), rates) for loads in (whole, own, other)]
    # Of one that both wait for, each learns by its own first tokens whether it has come.
    artifacts = [ArtifactDemand(digest, 1_000_000, 100) for digest in DIGESTS[:2]]
    for is_others, has_shown, is_streamed, num_tokens in booked:
        demand = Demand("m", (artifacts[is_others],), num_tokens)
        tiers = {artifacts[is_others].digest: Tier.NVME}
        for loads, row in ((whole, rows[0]), ((own, rows[1]), (other, rows[2]))[is_others]):
            booking = loads.book(row, demand, tiers=tiers, now_s=5.0, is_streamed=is_streamed)
            if has_shown:
                booking.note_first_token(5.0)
            # The next gateway learns of it before it books the next one.
            own.note_others(rows[1], rows[2].own_load(5.0), 5.0)
            other.note_others(rows[2], rows[1].own_load(5.0), 5.0)
    asked = Demand("m", tuple(artifacts), 10)
    tables = []
    for loads in (whole, own):
        view = replace(view_of([Member("a")]), loads=loads, now_s=5.0)
        tables.append(costs(asked, view, view.rows))
    assert tables[1].terms[:, 0] == pytest.approx(tables[0].terms[:, 0])


def test_a_load_goes_on_for_those_who_still_wait() -> None:
    """The first to ask is given up: the second one's artifact is on its way all the same."""
    loads, row = table()
    demand = Demand("m", (ArtifactDemand(DIGESTS[0], 1_000_000, 100),), 400)
    tiers = {DIGESTS[0]: Tier.REMOTE}
    first, second, third = (loads.book(row, demand, tiers=tiers, now_s=0.0) for _ in range(3))
    first.end()
    assert row in loads.loading(DIGESTS[0])
    second.note_first_token(1.0)
    assert row not in loads.loading(DIGESTS[0])
    third.end()
    second.end()
    assert not row.num_waiting
    assert not row.loading


def test_a_limit_is_for_each_gateway() -> None:
    """Requests of others make a replica dearer, and never full: nobody here could say when not."""
    loads, row = table()
    loads.note_others(row, Load(num_in_flight=9, num_pending=9, pending_s=9.0), 0.0)
    view = replace(view_of([Member("a")]), loads=loads, max_in_flight=1)
    assert isinstance(able_rows(view), np.ndarray)
    loads.book(row, FOUR_S, tiers={}, now_s=0.0)
    assert isinstance(able_rows(view), Refusal)


def test_a_row_that_leaves_takes_others_loads_with_it() -> None:
    """Nothing is thought to be brought to a replica that is gone."""
    loads, row = table()
    loads.note_others(row, Load(num_in_flight=1, due_s={DIGESTS[0]: 3.0}), 0.0)
    assert loads.loading(DIGESTS[0]) == {row: 3.0}
    loads.remove(row)
    assert loads.loading(DIGESTS[0]) == {}


def test_an_unseen_prefill_is_over_when_the_answers_are_there() -> None:
    """Predicted to take four seconds each, two that have ended leave no queue."""
    loads, row = table()
    both = [loads.book(row, FOUR_S, tiers={}, now_s=0.0, is_streamed=False) for _ in range(2)]
    assert queue_s(loads, 0.0) == pytest.approx(8)
    both[0].end()
    assert queue_s(loads, 0.0) == pytest.approx(8)
    both[1].end()
    assert queue_s(loads, 0.0) == 0
