"""Targets files: what they may say, and the verdict on a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.run_summary import METRICS, Run, Slo
from cartridge_loadtest.targets import (
    DEFAULT_FILE,
    InvalidTargets,
    Targets,
    judged,
    read_targets,
    table,
)
from tests.loadtest.test_run_summary import answered, failed, run_of


def targets_of(limits: dict[str, float], *, late_p99_s: float = 0.25) -> Targets:
    """Limits without an SLO."""
    return Targets(slo=Slo(), late_p99_s=late_p99_s, limits=limits)


def test_the_default_file_is_one() -> None:
    """What ships with the package can be read and has limits."""
    targets = read_targets(DEFAULT_FILE)
    assert targets.slo.ttft_s is not None
    assert {"error_ratio", "replicas_at_end_ratio"} <= set(targets.limits)


def run_of_eight(*, hangs_from_s: float) -> Run:
    """A minute of 1,200 good answers, in turn; `sim-3` gives none to what is due later."""
    records = []
    for index in range(1200):
        name = f"sim-{index % 8}"
        if name == "sim-3" and index / 20 >= hangs_from_s:
            # The gateway leaves it alone: its share goes to the next one.
            name = "sim-4"
        records.append(answered(index, due_s=index / 20, replica=name))
    return run_of(*records, duration_s=60.0, replicas=[f"sim-{index}" for index in range(8)])


@pytest.mark.parametrize(("hangs_from_s", "is_passed"), [(61.0, True), (30.0, False), (0.0, False)])
def test_the_default_targets_miss_a_replica_that_hangs(
    hangs_from_s: float, is_passed: bool
) -> None:
    """Though no request fails and no latency suffers."""
    run = run_of_eight(hangs_from_s=hangs_from_s)
    assert judged(run, read_targets(DEFAULT_FILE)).is_passed is is_passed


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """Unknown names come with the known ones, values that are no numbers by name."""
    file = tmp_path / "targets.toml"
    file.write_text(
        "[targets]\nttft_p98_s = 1\nitl_p99_s = 'fast'\nerror_ratio = -1\n"
        "[slo]\nttft_s = nan\n[limit]\n[generator]\nlate_p99_s = true\n"
    )
    with pytest.raises(InvalidTargets) as caught:
        read_targets(file)
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 6
    for part in (
        "limit: unknown; known are slo, generator, targets",
        "targets.ttft_p98_s: unknown; known are error_ratio, goodput_per_s",
        *("targets.itl_p99_s: must be", "targets.error_ratio: must be"),
        *("slo.ttft_s: must be", "generator.late_p99_s: must be"),
    ):
        assert part in told


@pytest.mark.parametrize(
    "text", ["targets = 3", "not toml", "[slo]\nttft_s = 1\n[targets]\n", "", None]
)
def test_what_is_no_targets_file_is_refused(tmp_path: Path, text: str | None) -> None:
    """Another shape, another format, no target that could be missed, no file."""
    file = tmp_path / "targets.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidTargets):
        read_targets(file)


@given(value=st.floats(0.0, 10.0), limit=st.floats(0.0, 10.0))
def test_a_limit_is_reached_by_itself(value: float, limit: float) -> None:
    """At most includes the limit."""
    verdict = judged(run_of(answered(ttft_s=value)), targets_of({"ttft_p50_s": limit}))
    (row,) = [row for row in verdict.rows if row.name == "ttft_p50_s"]
    assert row.value == value
    assert row.ok is (value <= limit)
    assert verdict.is_passed is (value <= limit)


def test_at_least_is_the_other_way_round() -> None:
    """A share of good answers below its target misses it."""
    run = run_of(answered(), failed())
    assert judged(run, targets_of({"goodput_ratio": 0.5})).is_passed
    assert not judged(run, targets_of({"goodput_ratio": 0.6})).is_passed


def test_a_figure_that_is_not_to_be_had_misses_its_target() -> None:
    """All failed: there is no TTFT, and that is not below any limit."""
    verdict = judged(run_of(failed()), targets_of({"ttft_p99_s": 1000.0}))
    assert verdict.word == "FAIL"


def test_an_invalid_run_does_not_pass() -> None:
    """Every target is reached, but the generator was late."""
    verdict = judged(run_of(answered(late_s=1.0)), targets_of({"error_ratio": 0.0}))
    assert not verdict.is_passed
    assert verdict.word == "INVALID"
    assert "could not keep up" in table(verdict)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (run_of(answered(late_s=1.0)), "late_p99_s"),
        (run_of(answered(), num_planned=2), "recorded_ratio"),
        (run_of(answered(), num_planned=0), "recorded_ratio"),
    ],
)
def test_a_row_says_why_a_run_is_invalid(run: Run, name: str) -> None:
    """Who reads `results.json` alone finds a miss there as well."""
    rows = judged(run, targets_of({"error_ratio": 0.0})).rows
    assert [row.name for row in rows if row.ok is False] == [name]


def test_the_table_begins_with_what_was_missed() -> None:
    """Every figure has a line, misses first, and the verdict ends it."""
    verdict = judged(run_of(answered()), targets_of({"total_p99_s": 0.0, "error_ratio": 0.0}))
    _, first, *rest, last = table(verdict).splitlines()
    assert first.split()[:2] == ["MISSED", "total_p99_s"]
    assert last == "FAIL"
    named = {line[7:31].strip() for line in (first, *rest)}
    assert named == {*METRICS, "late_p99_s", "recorded_ratio"}
