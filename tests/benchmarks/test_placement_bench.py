"""The harness of `make bench-placement` judges what it measured, and nothing else.

Owns its figures, verdicts and page on a tiny run. Refuses to time anything.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cartridge_loadtest.replica_model import EngineProfile
from cartridge_policies import POLICIES
from tests.benchmarks import bench_placement as bench

TINY = bench.Pains((2,), num_seeds=2, num_requests=40, per_replica=1)


POLICIES_AND_TEXTS = [*POLICIES, bench.OURS_OR_TEXT]


@pytest.fixture(scope="module")
def results() -> bench.Results:
    """All policies on the one generated workload that is quickest."""
    return bench.measure(
        Path("/nonexistent"), TINY, POLICIES_AND_TEXTS, ["tool-agent"], EngineProfile()
    )


def test_without_public_traces_the_generated_ones_run(results: bench.Results) -> None:
    """Each policy has a run for each seed, and the traces that are missing have none."""
    assert set(results.traces) == {"tool-agent"}
    assert {policy for _, _, policy in results.runs} == set(POLICIES_AND_TEXTS)
    assert all(len(runs) == 2 for runs in results.runs.values())


def test_verdicts_are_about_our_policy_and_the_best_published(results: bench.Results) -> None:
    """A policy that is twice as slow as the best misses both targets and says whose it was."""
    cell = ("tool-agent", 2, bench.OURS)
    best = results.best_published("tool-agent", 2, "mean_s")
    theirs = results.runs["tool-agent", 2, best]
    slow = [replace(run, mean_s=2 * run.mean_s, p99_s=100.0) for run in theirs]
    rows = bench.judged(replace(results, runs={**results.runs, cell: slow}), TINY)
    mean, p99, *_ = rows
    assert mean.name == "mean/tool-agent/2"
    assert mean.value == pytest.approx(2)
    assert (mean.ok, p99.ok) == (False, False)
    assert best in mean.against
    assert "idle fleet" in p99.against


def test_the_page_has_each_policy_once_for_each_fleet(results: bench.Results) -> None:
    """And says how many targets were met."""
    rows = bench.judged(results, TINY)
    text = bench.page(results, rows, TINY)
    for policy in POLICIES_AND_TEXTS:
        assert text.count(f"\n| {policy} |") == 1
    assert f"of {len(rows)} met" in text


def test_decisions_are_renewed_in_place(
    tmp_path: Path, results: bench.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old figures of decisions give way to new ones, in the rows and on the page."""
    old = bench.Row("decision/16x4", 99.0, "us", "<= 60", False, "old")
    judged = bench.judged(results, TINY)
    out, page = tmp_path / "rows.json", tmp_path / "page.md"
    out.write_text(json.dumps([asdict(row) for row in [*judged, old]]))
    page.write_text(bench.page(results, [*judged, old], TINY))
    new = replace(old, value=1.0, ok=True, against="new")
    monkeypatch.setattr(bench, "decision_rows", lambda: [new])
    assert bench.renew_decisions(out, page) == 0
    assert [row["against"] for row in json.loads(out.read_text())].count("new") == 1
    assert "| old |" not in page.read_text()
    assert bench.target_line(new) in page.read_text()
