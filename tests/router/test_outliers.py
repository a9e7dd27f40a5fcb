"""Outliers, the retry budget and attempts: their counts, on a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.residency import ReplicaId
from cartridge_router.attempts import Attempts
from cartridge_router.outliers import MAX_BUSY_S, Outliers
from cartridge_router.retry_budget import BURST_S, RetryBudget
from cartridge_router.settings import FleetSettings

NAMES = [ReplicaId(f"r{index}") for index in range(4)]


class Clock:
    """Seconds that go on when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """Stands still."""
    return Clock()


def outliers_of(clock: Clock, num_replicas: int = 4) -> Outliers:
    """Five failures in a row, ten seconds, a second without an answer."""
    settings = FleetSettings(num_request_failures=5, ejection_s=10.0, suspect_after_s=1.0)
    outliers = Outliers(settings, clock)
    for name in NAMES[:num_replicas]:
        outliers.add(name)
    return outliers


def fail(outliers: Outliers, replica: ReplicaId, times: int) -> list[bool]:
    """Failures in a row."""
    return [outliers.note_failure(replica) for _ in range(times)]


# --- outliers ------------------------------------------------------------------------------------
def test_five_failures_in_a_row_eject(clock: Clock) -> None:
    """A success in between begins the count anew; the ejection ends by itself."""
    outliers = outliers_of(clock)
    assert fail(outliers, NAMES[0], 4) == [False] * 4
    outliers.note_success(NAMES[0])
    assert fail(outliers, NAMES[0], 5) == [False] * 4 + [True]
    assert outliers.reason_against(NAMES[0]) == "ejected after 5 failures in a row"
    clock.now_s += 10.0
    assert outliers.reason_against(NAMES[0]) is None


def test_who_comes_back_and_fails_is_away_for_longer(clock: Clock) -> None:
    """One failure is enough then; a success after the return makes it count as before."""
    outliers = outliers_of(clock)
    fail(outliers, NAMES[0], 5)
    clock.now_s += 10.0
    assert outliers.note_failure(NAMES[0])
    clock.now_s += 19.9
    assert outliers.reason_against(NAMES[0]) is not None
    clock.now_s += 0.1
    assert outliers.reason_against(NAMES[0]) is None
    outliers.note_success(NAMES[0])
    assert not outliers.note_failure(NAMES[0])


@pytest.mark.parametrize(("num_replicas", "most"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_never_more_than_half_of_the_fleet_is_ejected(
    num_replicas: int, most: int, clock: Clock
) -> None:
    """However many fail."""
    outliers = outliers_of(clock, num_replicas)
    ejected = [any(fail(outliers, name, 50)) for name in NAMES[:num_replicas]]
    assert sum(ejected) == most


def test_who_asks_to_be_left_alone_is(clock: Clock) -> None:
    """For as long as it says, within a limit."""
    outliers = outliers_of(clock)
    outliers.note_busy(NAMES[0], 3.0)
    assert "Retry-After" in (outliers.reason_against(NAMES[0]) or "")
    clock.now_s += 3.0
    assert outliers.reason_against(NAMES[0]) is None
    outliers.note_busy(NAMES[0], 1e9)
    clock.now_s += MAX_BUSY_S
    assert outliers.reason_against(NAMES[0]) is None


def test_who_does_not_answer_probes_is_suspect(clock: Clock) -> None:
    """From the first probe without an answer on, until one is answered."""
    outliers = outliers_of(clock)
    outliers.note_asked(NAMES[0])
    clock.now_s += 0.9
    outliers.note_asked(NAMES[0])
    assert outliers.reason_against(NAMES[0]) is None
    clock.now_s += 0.2
    assert outliers.reason_against(NAMES[0]) == "does not answer its probes"
    outliers.note_answered(NAMES[0])
    assert outliers.reason_against(NAMES[0]) is None


def test_who_was_removed_is_forgotten(clock: Clock) -> None:
    """Late news of it change nothing; who comes under its name has a clean record."""
    outliers = outliers_of(clock)
    fail(outliers, NAMES[0], 5)
    outliers.remove(NAMES[0])
    outliers.note_success(NAMES[0])
    outliers.note_asked(NAMES[0])
    outliers.note_answered(NAMES[0])
    outliers.note_busy(NAMES[0], 1.0)
    assert fail(outliers, NAMES[0], 50) == [False] * 50
    outliers.add(NAMES[0])
    assert outliers.reason_against(NAMES[0]) is None


def test_the_half_that_may_be_ejected_is_of_those_that_are_there(clock: Clock) -> None:
    """After two of four have gone, the second failing one is kept."""
    outliers = outliers_of(clock)
    fail(outliers, NAMES[0], 5)
    for name in NAMES[2:]:
        outliers.remove(name)
    assert not any(fail(outliers, NAMES[1], 50))


# --- the retry budget ----------------------------------------------------------------------------
def test_retries_are_a_part_of_the_requests(clock: Clock) -> None:
    """With the saved-up ones spent: one for five requests."""
    budget = RetryBudget(ratio=0.2, per_s=0.0, clock=clock)
    assert [budget.take(), budget.take()] == [True, False]
    for _ in range(6):
        budget.note_request()
    assert [budget.take(), budget.take()] == [True, False]


def test_time_brings_retries_too(clock: Clock) -> None:
    """So many a second; unused ones are kept for a while and no longer."""
    budget = RetryBudget(ratio=0.0, per_s=10.0, clock=clock)
    assert sum(budget.take() for _ in range(500)) == 10 * BURST_S
    clock.now_s += 1.0
    assert sum(budget.take() for _ in range(500)) == 10
    clock.now_s += 1e6
    assert sum(budget.take() for _ in range(500)) == 10 * BURST_S


@given(st.lists(st.sampled_from(["request", "retry", "second"]), max_size=300))
def test_the_budget_is_never_overdrawn(events: list[str]) -> None:
    """Whatever comes: retries are at most what was saved up, earned, and brought by time."""
    clock = Clock()
    budget = RetryBudget(ratio=0.2, per_s=1.0, clock=clock)
    num_retries = 0
    for event in events:
        if event == "request":
            budget.note_request()
        elif event == "second":
            clock.now_s += 1.0
        else:
            num_retries += budget.take()
    earned = 0.2 * events.count("request") + events.count("second")
    assert num_retries <= BURST_S + earned + 1e-6


# --- attempts ------------------------------------------------------------------------------------
def test_replicas_are_tried_in_order_while_the_budget_lasts(clock: Clock) -> None:
    """Each failure is kept for the answer that tells them all."""
    budget = RetryBudget(ratio=0.0, per_s=0.1, clock=clock)
    attempts = Attempts(NAMES, budget)
    assert list(attempts) == NAMES
    assert [attempts.go_on("one"), attempts.go_on("two")] == [True, False]
    assert attempts.failures == ["one", "two"]


def test_back_pressure_goes_to_one_other_replica(clock: Clock) -> None:
    """A second replica that pushes back is believed."""
    attempts = Attempts(NAMES, RetryBudget(ratio=0.0, per_s=10.0, clock=clock))
    assert attempts.go_on("429", is_push_back=True)
    assert attempts.go_on("broke off")
    assert not attempts.go_on("503", is_push_back=True)


def test_who_is_passed_over_costs_no_retry(clock: Clock) -> None:
    """It is named all the same, and counts as one of those there were."""
    budget = RetryBudget(ratio=0.0, per_s=0.1, clock=clock)
    attempts = Attempts(NAMES[:3], budget)
    attempts.pass_over("removed")
    assert attempts.go_on("two")
    assert not attempts.go_on("three")
    assert attempts.failures == ["removed", "two", "three"]


def test_there_is_nobody_behind_the_last(clock: Clock) -> None:
    """And no retry is spent on it."""
    budget = RetryBudget(ratio=0.0, per_s=0.1, clock=clock)
    assert not Attempts(NAMES[:1], budget).go_on("one")
    assert budget.take()
