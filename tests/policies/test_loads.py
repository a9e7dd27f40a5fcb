"""The table of loads: queues that shrink as time passes, and requests that nobody sees begin."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.cost import costs
from cartridge_policies.loads import LoadTable, Row
from cartridge_policies.rates import ReplicaRates
from cartridge_policies.types import ArtifactDemand, Demand
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


def test_an_unseen_prefill_is_over_when_the_answers_are_there() -> None:
    """Predicted to take four seconds each, two that have ended leave no queue."""
    loads, row = table()
    both = [loads.book(row, FOUR_S, tiers={}, now_s=0.0, is_streamed=False) for _ in range(2)]
    assert queue_s(loads, 0.0) == pytest.approx(8)
    both[0].end()
    assert queue_s(loads, 0.0) == pytest.approx(8)
    both[1].end()
    assert queue_s(loads, 0.0) == 0
