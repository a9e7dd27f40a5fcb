"""Plans: when requests are due, and what they name."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.open_loop_records import PlannedRequest, read_lines, write_lines
from cartridge_loadtest.request_plan import (
    ArrivalLaw,
    PlanSettings,
    cut_to_trace,
    drawn_plan,
    trace_plan,
)
from cartridge_loadtest.workloads import TraceRow, from_mooncake

CHOICES = (("rules@1",), ("tides@1",), ("rules@1", "prices@2"))
SETTINGS = PlanSettings(duration_s=200.0, rate_per_s=20.0, choices=CHOICES)


@given(
    seed=st.integers(0, 1000),
    rate_per_s=st.floats(1.0, 50.0),
    duration_s=st.floats(1.0, 20.0),
    law=st.sampled_from(ArrivalLaw),
)
def test_requests_are_due_in_order_within_the_run(
    seed: int, rate_per_s: float, duration_s: float, law: ArrivalLaw
) -> None:
    """No request is due before the start or after the end."""
    settings = replace(
        SETTINGS, seed=seed, rate_per_s=rate_per_s, duration_s=duration_s, arrivals=law
    )
    due = [each.due_s for each in drawn_plan(settings)]
    assert due == sorted(due)
    assert all(0 <= due_s < duration_s for due_s in due)


def test_the_same_seed_makes_the_same_plan() -> None:
    """Another seed makes another one."""
    assert drawn_plan(SETTINGS) == drawn_plan(SETTINGS)
    assert drawn_plan(SETTINGS) != drawn_plan(replace(SETTINGS, seed=1))


def test_the_rate_is_the_mean_rate() -> None:
    """4,000 are expected; five standard deviations of a Poisson law are 316."""
    assert len(drawn_plan(SETTINGS)) == pytest.approx(4000, abs=316)


def test_bursts_have_longer_silences_than_poisson() -> None:
    """At one mean rate the longest gap of bursts is longer."""
    bursty = drawn_plan(replace(SETTINGS, arrivals=ArrivalLaw.BURSTY))
    longest = [
        max(later.due_s - earlier.due_s for earlier, later in pairwise(plan))
        for plan in (bursty, drawn_plan(SETTINGS))
    ]
    assert longest[0] > 2 * longest[1]


def test_popularity_falls_along_the_list() -> None:
    """The first is named more than the second, that more than the third; one in ten names none."""
    counts = Counter(tuple(each.cartridges) for each in drawn_plan(SETTINGS))
    assert counts[CHOICES[0]] > counts[CHOICES[1]] > counts[CHOICES[2]] > 0
    # Five standard deviations of a binomial law of 4,000 at 0.1 are 95.
    assert counts[()] == pytest.approx(400, abs=95)


def test_a_session_is_about_one_cartridge() -> None:
    """All requests of a conversation that name something name the same."""
    named: dict[str, set[tuple[str, ...]]] = {}
    for each in drawn_plan(SETTINGS):
        if each.cartridges and each.session is not None:
            named.setdefault(each.session, set()).add(tuple(each.cartridges))
    assert len(named) == 4 * len(CHOICES)
    assert all(len(sets) == 1 for sets in named.values())


def test_without_cartridges_all_are_plain() -> None:
    """A fleet that has none can be loaded too."""
    plan = drawn_plan(replace(SETTINGS, choices=(), sessions_per_choice=0))
    assert {(tuple(each.cartridges), each.session) for each in plan} == {((), None)}


@pytest.mark.parametrize(
    "changes",
    [
        {"rate_per_s": 0.0},
        {"duration_s": -1.0},
        {"rate_per_s": 1e9},
        {"plain_ratio": 1.5},
        {"zipf_slope": -1.0},
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, float]) -> None:
    """No rate, no time, too many requests, a share that is none."""
    with pytest.raises(ValueError, match=r"rate|share|slope"):
        replace(SETTINGS, **changes)  # type: ignore[arg-type]


TRACE = [
    TraceRow(timestamp=at * 1000, input_length=1200, output_length=5 + at, hash_ids=[0, head, at])
    for at, head in enumerate((101, 102, 101, 101, 102, 103))
]


def test_a_trace_keeps_its_sharing_and_its_shape() -> None:
    """The head most requests share is the first choice; a head that comes once is none."""
    workload = from_mooncake(TRACE, name="t", seed=0)
    settings = replace(SETTINGS, rate_per_s=5.0, answer_tokens=8)
    plan = trace_plan(workload, settings)
    first, second = list(CHOICES[0]), list(CHOICES[1])
    assert [each.cartridges for each in plan] == [first, second, first, first, second, []]
    assert [each.max_answer_tokens for each in plan] == [5, 6, 7, 8, 8, 8]
    # Five gaps at five requests a second.
    assert plan[0].due_s == 0
    assert plan[-1].due_s == pytest.approx(1.0)
    assert trace_plan(workload, replace(settings, duration_s=0.5)) == [
        each for each in plan if each.due_s < 0.5
    ]


@pytest.mark.parametrize(("duration_s", "expected_s"), [(60.0, 1.2), (0.5, 0.5)])
def test_a_run_is_no_longer_than_its_trace(duration_s: float, expected_s: float) -> None:
    """Six requests at five a second are 1.2 s, all of them; a shorter run stays as it is."""
    workload = from_mooncake(TRACE, name="t", seed=0)
    settings = replace(SETTINGS, rate_per_s=5.0, duration_s=duration_s)
    cut = cut_to_trace(workload, settings)
    assert cut.duration_s == pytest.approx(expected_s)
    assert trace_plan(workload, cut) == trace_plan(workload, settings)


def test_a_trace_of_one_moment_is_refused() -> None:
    """It has no rate that could be scaled."""
    with pytest.raises(ValueError, match="two moments"):
        trace_plan(from_mooncake(TRACE[:1], name="t", seed=0), SETTINGS)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Lines of JSON, nothing lost."""
    plan = drawn_plan(replace(SETTINGS, duration_s=2.0))
    write_lines(tmp_path / "plan.jsonl", plan)
    assert read_lines(tmp_path / "plan.jsonl", PlannedRequest) == plan
