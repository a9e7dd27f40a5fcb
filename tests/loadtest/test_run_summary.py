"""Figures of a run: percentiles, shares and balance, and that failures never make one better."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.open_loop_records import RequestRecord
from cartridge_loadtest.run_summary import (
    LATE_P99,
    METRICS,
    Run,
    Slo,
    faults_of_the_generator,
    measured,
    percentile,
)

SECONDS = st.floats(0.0, 100.0)
DURATION_S = 30.0


def answered(
    index: int = 0,
    *,
    ttft_s: float | None = 0.1,
    itl_s: tuple[float, ...] = (0.01,),
    due_s: float = 1.0,
    replica: str = "sim-0",
    tier: str | None = "dram",
    late_s: float = 0.0,
) -> RequestRecord:
    """A request whose stream was complete."""
    return RequestRecord(
        index=index,
        due_s=due_s,
        late_s=late_s,
        cartridges=[] if tier is None else ["rules@1"],
        status=200,
        ttft_s=ttft_s,
        itl_s=list(itl_s),
        tpot_s=sum(itl_s) / len(itl_s) if itl_s else None,
        total_s=(ttft_s or 0.0) + sum(itl_s),
        replica=replica,
        tier=tier,
    )


def failed(index: int = 0, *, due_s: float = 1.0) -> RequestRecord:
    """A request that came to nothing."""
    return RequestRecord(
        index=index, due_s=due_s, late_s=0.0, cartridges=[], error="cut", total_s=0.001
    )


def run_of(*records: RequestRecord, **fields: object) -> Run:
    """A run of these."""
    given_fields = {"num_planned": len(records), "duration_s": DURATION_S} | fields
    return Run(records=records, **given_fields)  # type: ignore[arg-type]


RECORDS = st.lists(
    st.builds(
        answered,
        ttft_s=st.none() | SECONDS,
        itl_s=st.lists(SECONDS, max_size=4).map(tuple),
        due_s=st.floats(0.0, DURATION_S),
        replica=st.sampled_from(["sim-0", "sim-1", "sim-2"]),
        tier=st.sampled_from([None, "hbm", "dram", "nvme", "remote"]),
    )
    | st.builds(failed, due_s=st.floats(0.0, DURATION_S)),
    min_size=1,
    max_size=30,
)


@given(
    values=st.lists(SECONDS, min_size=1, max_size=50),
    share=st.floats(0.01, 1.0),
    num_missing=st.integers(0, 20),
)
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], share: float, num_missing: int
) -> None:
    """It is one of the values, the least that covers the share; none if the missing are needed."""
    found = percentile(values, share, num_missing=num_missing)
    needed = math.ceil(share * (len(values) + num_missing))
    if needed > len(values):
        assert found is None
        return
    assert found in values
    assert sum(value <= found for value in values) >= needed
    assert sum(value < found for value in values) < needed


def test_a_percentile_of_nothing_is_unknown() -> None:
    """Unknown is `None`, never 0."""
    assert percentile([], 0.5) is None


@given(records=RECORDS, data=st.data())
def test_a_failure_makes_no_figure_of_latency_better(
    records: list[RequestRecord], data: st.DataObject
) -> None:
    """Fail one more request: TTFT, total time, errors and goodput get worse, or stay."""
    slo = Slo(ttft_s=50.0, tpot_s=50.0)
    before = measured(run_of(*records, slo=slo))
    victim = data.draw(st.integers(0, len(records) - 1))
    worse = [*records[:victim], failed(victim), *records[victim + 1 :]]
    after = measured(run_of(*worse, slo=slo))
    for name in before:
        if not name.startswith(("ttft", "total", "error", "goodput")):
            continue
        then, now = before[name], after[name]
        if then is None or now is None:
            # Unknown is worse than any number.
            assert now is None
        elif METRICS[name].is_least:
            assert now <= then
        else:
            assert now >= then


@given(records=RECORDS)
def test_shares_are_shares(records: list[RequestRecord]) -> None:
    """Ratios lie between 0 and 1, the busiest replica is never below the mean."""
    values = measured(run_of(*records, replicas=("sim-0", "sim-1", "sim-2")))
    for name, value in values.items():
        if name.endswith("_ratio") and value is not None:
            assert 0 <= value <= 1
    balance = values["max_over_mean_replicas"]
    # The quotient of sums of at most 30: one rounding.
    assert balance is None or 1 - 1e-9 <= balance <= 3 + 1e-9


@given(records=RECORDS, ttft_s=SECONDS, tpot_s=SECONDS)
def test_good_and_not_good_are_all(
    records: list[RequestRecord], ttft_s: float, tpot_s: float
) -> None:
    """Goodput counts exactly the complete answers with content that keep both limits."""
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    expected = [
        each
        for each in records
        if each.error is None
        and each.ttft_s is not None
        and each.ttft_s <= ttft_s
        and not (each.tpot_s is not None and each.tpot_s > tpot_s)
    ]
    values = measured(run_of(*records, slo=slo))
    assert values["goodput_ratio"] == len(expected) / len(records)
    assert values["goodput_per_s"] == len(expected) / DURATION_S


def test_what_was_planned_and_has_no_line_is_not_good() -> None:
    """One good answer to two planned requests is a half."""
    assert measured(run_of(answered(), num_planned=2))["goodput_ratio"] == 0.5


def test_failed_requests_are_the_latest_of_all() -> None:
    """With 2 % failed, the 99th percentile of TTFT is not to be had, and the 90th is."""
    records = [*[answered(ttft_s=0.2)] * 98, *[failed()] * 2]
    values = measured(run_of(*records))
    assert (values["ttft_p90_s"], values["ttft_p99_s"]) == (0.2, None)
    assert values["error_ratio"] == 0.02


def test_a_replica_that_answers_nothing_counts_in_the_balance() -> None:
    """Two of three replicas share the answers: the busiest has 1.5 times the mean."""
    records = [answered(replica="sim-0"), answered(replica="sim-1")]
    run = run_of(*records, replicas=("sim-0", "sim-1", "sim-2"))
    assert run.num_by_replica == {"sim-0": 1, "sim-1": 1, "sim-2": 0}
    assert measured(run)["max_over_mean_replicas"] == 1.5


def test_a_replica_that_stopped_answering_is_missed_at_the_end() -> None:
    """One of two answered in the first seconds only."""
    records = [answered(replica=name, due_s=1.0) for name in ("sim-0", "sim-1")]
    records.append(answered(replica="sim-0", due_s=29.0))
    assert measured(run_of(*records))["replicas_at_end_ratio"] == 0.5


def test_warm_is_hbm_or_dram() -> None:
    """Of four answers with Cartridges two were warm; a plain one and a failed one do not count."""
    records = [answered(tier=tier) for tier in ("hbm", "dram", "nvme", "remote", None)]
    assert measured(run_of(*records, failed()))["warm_ratio"] == 0.5


@pytest.mark.parametrize(
    ("late_s", "num_planned", "part"),
    [(0.5, 1, "could not keep up"), (0.0, 2, "1 of 2"), (0.0, 0, "nothing was planned")],
)
def test_a_generator_that_did_not_do_its_work_says_so(
    late_s: float, num_planned: int, part: str
) -> None:
    """Late sends, requests without a line and an empty plan are faults."""
    run = run_of(answered(late_s=late_s), num_planned=num_planned)
    assert any(part in fault for fault in faults_of_the_generator(run, 0.25))
    assert measured(run)[LATE_P99] == late_s


def test_a_generator_on_time_has_no_faults() -> None:
    """A slow fleet is no fault of the generator."""
    assert faults_of_the_generator(run_of(answered(ttft_s=90.0)), 0.25) == []
