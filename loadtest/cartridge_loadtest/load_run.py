"""One load test from beginning to end: a fleet, a plan, Locust, a report, an exit status.

Owns the order of these steps and what is said on the way. Refuses to measure: Locust's process does
(`open_loop_locustfile`), and `run_summary` counts.
"""

import contextlib
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cartridge_loadtest.children import (
    Children,
    Interrupted,
    LoadTestFailed,
    interruptions,
    running_children,
)
from cartridge_loadtest.open_loop_records import (
    PlannedRequest,
    RequestRecord,
    read_lines,
    write_lines,
)
from cartridge_loadtest.report import write_report
from cartridge_loadtest.request_plan import PlanSettings, cut_to_trace, drawn_plan, trace_plan
from cartridge_loadtest.run_summary import Run
from cartridge_loadtest.started_fleet import (
    FleetPlan,
    TargetFleet,
    existing_fleet,
    set_fault,
    started_fleet,
)
from cartridge_loadtest.targets import DEFAULT_FILE, Targets, judged, read_targets, table
from cartridge_loadtest.workloads import Workload, from_mooncake, read_trace

LOCUSTFILE: Final = Path(__file__).with_name("open_loop_locustfile.py")
FAULT_AT: Final = 0.25
"""Of the run: when faults are switched on."""
LOCUST_START_S: Final = 60.0
INTERRUPTED_STATUS: Final = 130


@dataclass(frozen=True, kw_only=True)
class LoadTest:
    """What is run; `plan.choices` is filled with what the fleet has."""

    plan: PlanSettings
    fleet: FleetPlan
    host: str | None = None
    """A fleet that runs already; `None`: one is started."""
    model: str | None = None
    """`None`: what the fleet serves."""
    cartridges: tuple[str, ...] | None = None
    """Ids, sets joined by `+`, the most popular first; `None`: what the fleet has."""
    trace: Path | None = None
    """In Mooncake's format; `None`: requests are drawn."""
    faults: tuple[tuple[str, str], ...] = ()
    """Replica and fault, switched on after a quarter of the run."""
    targets: Path = DEFAULT_FILE
    out: Path = Path("build/loadtest")
    drain_s: float = 30.0
    must_stay: bool = False
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse with a `ValueError` what would send nothing."""
        if not 0 < self.drain_s < math.inf:
            raise ValueError("the patience at the end is more than 0")


def run_load_test(test: LoadTest) -> int:
    """Run it; returns 0 when all targets are reached, 1 when not, or when the run is invalid.

    Raises:
        InvalidTargets: before anything starts.
        OSError: as early, there is no place for the results.
        TraceError, ValueError: as early, a trace that is none.
        LoadTestFailed: something did not start, or broke.
    """
    targets = read_targets(test.targets)
    workload = None if test.trace is None else _workload_of(test.trace, test.plan.seed)
    test.out.mkdir(parents=True, exist_ok=True)
    with interruptions() as interrupted:
        try:
            with running_children(test.out / "logs", interrupted) as children:
                return _run(test, targets, workload, children)
        except Interrupted:
            _say("interrupted: everything that was started has ended")
            return INTERRUPTED_STATUS


def _run(test: LoadTest, targets: Targets, workload: Workload | None, children: Children) -> int:
    with _fleet_of(test, children) as fleet:
        choices = test.cartridges if test.cartridges is not None else tuple(fleet.cartridges)
        settings = replace(test.plan, choices=[choice.split("+") for choice in choices])
        if workload is None:
            plan = drawn_plan(settings)
        else:
            settings = cut_to_trace(workload, settings)
            plan = trace_plan(workload, settings)
        records = _send(test, fleet, plan, settings.duration_s, children)
        run = Run(
            records=records,
            num_planned=len(plan),
            duration_s=settings.duration_s,
            slo=targets.slo,
            replicas=tuple(fleet.replicas),
        )
        verdict = judged(run, targets)
        report = write_report(test.out, run, verdict, _about(test, fleet, run, children))
        _say(table(verdict))
        _say(f"report: {report}")
        if test.must_stay:
            _stay(fleet, children)
    return 0 if verdict.is_passed else 1


@contextlib.contextmanager
def _fleet_of(test: LoadTest, children: Children) -> Iterator[TargetFleet]:
    if test.host is not None:
        given = None if test.cartridges is None else list(test.cartridges)
        yield existing_fleet(test.host, model=test.model, cartridges=given, api_key=test.api_key)
        return
    _say(f"starting Redis, {test.fleet.num_replicas} simulated replicas and a gateway")
    with started_fleet(test.fleet, children) as fleet:
        _say(f"gateway: {fleet.host}")
        yield fleet


def _workload_of(trace: Path, seed: int) -> Workload:
    rows = read_trace(trace)
    if len(rows) < 2:
        raise ValueError(f"{trace}: a trace has two requests at least")
    return from_mooncake(rows, name=trace.stem, seed=seed)


def _send(
    test: LoadTest,
    fleet: TargetFleet,
    plan: list[PlannedRequest],
    duration_s: float,
    children: Children,
) -> list[RequestRecord]:
    """Run Locust, switch faults on, and read what came of the requests."""
    plan_file, rows_file = test.out / "plan.jsonl", test.out / "rows.jsonl"
    write_lines(plan_file, plan)
    rows_file.write_bytes(b"")
    _say(f"sending {len(plan)} requests in {duration_s:g} s to {fleet.host}")
    command = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "-u", "1"),
        *("--host", fleet.host, "--plan", str(plan_file), "--rows", str(rows_file)),
        *("--model-name", fleet.model, "--drain-s", str(test.drain_s)),
        *("--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "0"),
    ]
    locust = children.start("locust", command, {}, is_heard=True)
    if test.faults:
        children.wait_until(
            "a quarter of the requests have ended",
            lambda: rows_file.read_bytes().count(b"\n") >= FAULT_AT * len(plan),
            LOCUST_START_S + duration_s,
        )
        for replica, fault in test.faults:
            _say(f"{replica}: {fault}")
            set_fault(fleet.replicas[replica], fault)
    status = children.ended(locust, LOCUST_START_S + duration_s + test.drain_s)
    if status != 0:
        raise LoadTestFailed(f"locust ended with status {status}; {locust.tail()}")
    return read_lines(rows_file, RequestRecord)


def _about(test: LoadTest, fleet: TargetFleet, run: Run, children: Children) -> dict[str, str]:
    plan = test.plan
    what = (
        f"{plan.arrivals.value} arrivals, Zipf {plan.zipf_slope:g}, seed {plan.seed}"
        if test.trace is None
        else f"trace {test.trace.name}"
    )
    about = {
        "fleet": f"{fleet.host}, model {fleet.model}",
        "replicas": (
            f"{len(fleet.replicas)} simulated, started for this run"
            if fleet.replicas
            else f"{len(run.num_by_replica)} that answered"
        ),
        "load": f"{run.num_planned} requests in {run.duration_s:g} s, open loop; {what}",
        "good": f"TTFT at most {run.slo.ttft_s} s, TPOT at most {run.slo.tpot_s} s",
        "targets": test.targets.name,
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if test.faults:
        about["faults"] = ", ".join(f"{replica}: {fault}" for replica, fault in test.faults)
    if children.gone:
        about["ended by itself"] = ", ".join(children.gone)
    return about


def _stay(fleet: TargetFleet, children: Children) -> None:
    """Leave everything running until a signal."""
    named = shlex.quote(fleet.host)
    _say(
        f"the fleet stays until Ctrl-C. Other generators of load (docs/loadtest.md):\n"
        f"  loadtest/profiles/guidellm {named} {fleet.model}\n"
        f"  loadtest/profiles/vllm-bench-serve {named} {fleet.model}"
    )
    with contextlib.suppress(Interrupted):
        while True:
            children.pause()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
