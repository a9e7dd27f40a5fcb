"""Targets of a load test: a file that says what is good enough, and the verdict on a run.

Owns the format of the file and the exit status. Refuses unknown names, and reports every problem of
a file in one message.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cartridge_loadtest.run_summary import (
    LATE_P99,
    METRICS,
    RECORDED,
    Run,
    Slo,
    faults_of_the_generator,
    measured,
)

DEFAULT_FILE: Final = Path(__file__).with_name("targets.toml")
_SECTIONS: Final[Mapping[str, frozenset[str]]] = {
    "slo": frozenset({"ttft_s", "tpot_s"}),
    "generator": frozenset({LATE_P99}),
    "targets": frozenset(METRICS),
}


class InvalidTargets(Exception):
    """A targets file that is none; `problems` has them all."""

    def __init__(self, file: Path, problems: list[str]) -> None:
        super().__init__("; ".join(f"{file}: {problem}" for problem in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a targets file says."""

    slo: Slo
    late_p99_s: float
    """A generator that is later than this measures itself."""
    limits: Mapping[str, float]
    """By name of a metric."""


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a run; `target` and `ok` are `None` where the file names none."""

    name: str
    value: float | None
    """`None`: not to be had, for a percentile because too many requests failed."""
    unit: str
    target: str | None
    ok: bool | None
    against: str
    """What the figure is of."""

    @property
    def reached(self) -> str:
        """The value for people, four digits and its unit."""
        if self.value is None:
            return "none"
        return f"{self.value:.4g}" + ("" if self.unit == "1" else f" {self.unit}")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a run."""

    rows: list[ResultRow]
    faults: list[str]
    """Of the generator; with one of them no row says anything about the fleet."""

    @property
    def is_passed(self) -> bool:
        """Valid, and no target missed."""
        return not self.faults and all(row.ok is not False for row in self.rows)

    @property
    def word(self) -> str:
        """For people."""
        return "INVALID" if self.faults else "PASS" if self.is_passed else "FAIL"


def read_targets(file: Path) -> Targets:
    """Read a targets file.

    Raises:
        InvalidTargets: with every problem.
    """
    try:
        sections = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidTargets(file, [str(error)]) from error
    problems = [
        f"{name}: unknown; known are {', '.join(_SECTIONS)}"
        for name in sections
        if name not in _SECTIONS
    ]
    values = {
        name: _numbers(name, sections.get(name, {}), known, problems)
        for name, known in _SECTIONS.items()
    }
    if not sections.get("targets"):
        # A run in which everything fails would pass.
        problems.append(f"targets: names none; known are {', '.join(sorted(METRICS))}")
    if problems:
        raise InvalidTargets(file, problems)
    return Targets(
        slo=Slo(**values["slo"]),
        late_p99_s=values["generator"].get(LATE_P99, 0.25),
        limits=values["targets"],
    )


def _numbers(
    section: str, given: Any, known: frozenset[str], problems: list[str]
) -> dict[str, float]:
    """The numbers of a section; what is none becomes a problem."""
    if not isinstance(given, dict):
        problems.append(f"{section}: must be a table")
        return {}
    numbers = dict[str, float]()
    for name, value in given.items():
        if name not in known:
            problems.append(f"{section}.{name}: unknown; known are {', '.join(sorted(known))}")
            continue
        try:
            number = msgspec.convert(value, float)
        except msgspec.ValidationError:
            number = math.nan
        if not 0 <= number < math.inf:
            problems.append(f"{section}.{name}: must be a number that is not negative")
        numbers[name] = number
    return numbers


def judged(run: Run, targets: Targets) -> Verdict:
    """Each figure of a run beside its target; `run.slo` should be that of the targets."""
    values = measured(run)
    rows = [_row(name, values[name], targets.limits.get(name)) for name in METRICS]
    late_s = values[LATE_P99]
    rows.append(
        ResultRow(
            name=LATE_P99,
            value=late_s,
            unit="s",
            target=f"<= {targets.late_p99_s:g}",
            ok=late_s is not None and late_s <= targets.late_p99_s,
            against="due to sent, 99th percentile: the generator's own fault",
        )
    )
    recorded_ratio = values[RECORDED]
    rows.append(
        ResultRow(
            name=RECORDED,
            value=recorded_ratio,
            unit="1",
            target="= 1",
            ok=recorded_ratio == 1,
            against="planned requests that have a line: with others the run is invalid",
        )
    )
    return Verdict(rows=rows, faults=faults_of_the_generator(run, targets.late_p99_s))


def _row(name: str, value: float | None, limit: float | None) -> ResultRow:
    metric = METRICS[name]
    sign = ">=" if metric.is_least else "<="
    is_ok: bool | None = None
    if limit is not None:
        is_ok = value is not None and (value >= limit if metric.is_least else value <= limit)
    return ResultRow(
        name=name,
        value=value,
        unit=metric.unit,
        target=None if limit is None else f"{sign} {limit:g}",
        ok=is_ok,
        against=metric.about,
    )


def table(verdict: Verdict) -> str:
    """Rows for a terminal, misses first."""
    order = {False: 0, True: 1, None: 2}
    lines = [f"{'':6} {'metric':24} {'reached':>10} {'target':>10}  of"]
    for row in sorted(verdict.rows, key=lambda row: order[row.ok]):
        word = {False: "MISSED", True: "ok", None: ""}[row.ok]
        lines.append(
            f"{word:6} {row.name:24} {row.reached:>10} {row.target or '':>10}  {row.against}"
        )
    return "\n".join([*lines, *(f"invalid: {fault}" for fault in verdict.faults), verdict.word])
