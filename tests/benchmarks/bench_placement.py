"""`make bench-placement`: all policies on all traces and fleets, simulated; what deciding costs.

Owns the cells, the rows, their targets and docs/benchmarks/placement.md. Refuses to tell policies
apart by anything but their results: each runs the same requests, from the same seeds.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cartridge_loadtest import workloads
from cartridge_loadtest.engine_profiles import read_profile
from cartridge_loadtest.fleet_simulator import FleetSettings, Outcome, at_utilisation, simulate
from cartridge_loadtest.gateway_model import StaleMap
from cartridge_loadtest.replica_model import EngineProfile
from cartridge_loadtest.workloads import Workload
from cartridge_policies import POLICIES
from cartridge_policies.history import RouteHistory
from cartridge_policies.loads import LoadTable
from cartridge_policies.types import ArtifactDemand, ClusterView, Demand, MapMode
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import ReplicaId, Tier

ROOT: Final = Path(__file__).parents[2]
DATA_VARIABLE: Final = "CARTRIDGE_BENCH_DATA"
OURS: Final = "cartridge_aware"
OR_TEXT: Final = "+text"
"""Behind a policy's name: gateways may take texts in the place of Cartridges."""
OURS_OR_TEXT: Final = OURS + OR_TEXT
PUBLISHED: Final = ("cache_aware", "dynamo_kv", "llm_d", "llm_d_precise", "mooncake", "preble")
UTILISATION: Final = 0.6
WARM_UP: Final = 0.2
"""Share of the requests, from the first, that is simulated and not counted."""
SLO_S: Final = 0.5
"""Goodput: first token within this and the prefill of the live tokens on an idle engine."""
MAX_P99_RATIO: Final = 0.7
MAX_REGRET_SHARE, MAX_REGRET = 0.02, 0.05
MAX_SMALL_US, MAX_LARGE_P99_MS = 60.0, 1.0
TARGETS_HEAD: Final = "| target | value | | of |"
STUDENT: Final = {1: math.nan, 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""97.5 % points of Student's t, by the number of seeds."""


@dataclass(frozen=True)
class Row:
    """One result; `target` and `ok` are `None` where the issue names no figure."""

    name: str
    value: float | None
    unit: str
    target: str | None
    ok: bool | None
    against: str


@dataclass(frozen=True)
class Pains:
    """How much is simulated."""

    sizes: tuple[int, ...]
    num_seeds: int
    num_requests: int
    """At least, or as many as a trace has."""
    per_replica: int


THOROUGH: Final = Pains((4, 16, 64, 256), num_seeds=3, num_requests=2_000, per_replica=16)
QUICK: Final = Pains((4, 16), num_seeds=1, num_requests=500, per_replica=10)


@dataclass(frozen=True)
class Figures:
    """What one run says, or the mean of some with half widths of their 95 % intervals."""

    mean_s: float
    p50_s: float
    p99_s: float
    goodput: float
    hbm: float
    dram: float
    nvme: float
    remote: float
    remote_gb: float
    busiest: float
    later: float
    later_5: float
    worst: float
    texts: float


COLUMNS: Final[tuple[tuple[str, str, int], ...]] = (
    ("mean_s", "mean", 3),
    ("p50_s", "p50", 3),
    ("p99_s", "p99", 2),
    ("goodput", "goodput", 3),
    ("hbm", "hbm", 2),
    ("dram", "dram", 2),
    ("nvme", "nvme", 2),
    ("remote", "store", 2),
    ("remote_gb", "GB from the store", 0),
    ("busiest", "max/mean", 2),
    ("later", "later", 3),
    ("later_5", "> 5 % later", 3),
    ("worst", "worst", 2),
    ("texts", "texts", 3),
)
"""Field of `Figures`, heading, digits."""
Cell = tuple[str, int, str]
"""Trace, replicas, policy."""
UNITS: Final = {"mean_s": "s", "p50_s": "s", "p99_s": "s", "remote_gb": "GB"}


@dataclass(frozen=True)
class Results:
    """Figures of each seed by cell, and what is known of each trace."""

    runs: Mapping[Cell, Sequence[Figures]]
    traces: Mapping[str, Workload]
    floors: Mapping[tuple[str, int], float]
    """p99 on an idle fleet with everything in HBM, by trace and size."""

    def mean(self, cell: Cell, field: str) -> float:
        """Over seeds."""
        return statistics.fmean(getattr(each, field) for each in self.runs[cell])

    def half_width(self, cell: Cell, field: str) -> float:
        """Of the 95 % interval of that mean; NaN for one seed."""
        values = [getattr(each, field) for each in self.runs[cell]]
        if len(values) == 1:
            return math.nan
        spread: float = statistics.stdev(values)
        return STUDENT[len(values)] * spread / math.sqrt(len(values))

    def best_published(self, trace: str, size: int, field: str) -> str:
        """The name of the published formula with the lowest mean."""
        return min(PUBLISHED, key=lambda policy: self.mean((trace, size, policy), field))


def main(arguments: Sequence[str]) -> int:
    """Simulate everything; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="make bench-placement", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/placement.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/benchmarks/placement.md")
    parser.add_argument("--quick", action="store_true", help="small and once; no page is written")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get(DATA_VARIABLE, ROOT.parent / "shared/data")),
        help=f"folder of the public traces (or ${DATA_VARIABLE})",
    )
    parser.add_argument(
        "--profile", type=Path, help="of the engines (JSON; docs/simulator.md); no page is written"
    )
    parser.add_argument("--traces", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--policies", nargs="+", metavar="NAME", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument(
        "--decisions", action="store_true", help="measure those anew in what an earlier run wrote"
    )
    given = parser.parse_args(arguments)
    if given.decisions:
        return renew_decisions(given.out, given.page)
    pains = QUICK if given.quick else THOROUGH
    if given.seeds:
        pains = replace(pains, num_seeds=given.seeds)
    policies = [name for name in POLICIES if name in {*given.policies, OURS, *PUBLISHED}]
    profile = EngineProfile() if given.profile is None else read_profile(given.profile)
    results = measure(given.data, pains, [*policies, OURS_OR_TEXT], given.traces, profile)
    rows = [*judged(results, pains), *decision_rows(), *figure_rows(results)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.ok is False]
    for row in [*missed, *(row for row in rows if row.ok)]:
        print(line_of(row))
    if not given.quick and given.profile is None:
        given.page.write_text(page(results, rows, pains))
    return 1 if missed else 0


def line_of(row: Row) -> str:
    """One line of the table."""
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
    value = "        –" if row.value is None else f"{row.value:9.3f}"
    target = f"  target {row.target}" if row.target else ""
    return f"{mark} {row.name:<44} {value} {row.unit:<5}{target}  ({row.against})"


def say(text: str) -> None:
    """Progress; the table alone goes to stdout."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# --- simulation ----------------------------------------------------------------------------------
def traces_of(data: Path, count: int, seed: int) -> Iterator[Workload]:
    """All workloads, at most so long; without data only those that are generated."""
    mooncake = {
        "conversation": "mooncake_conversation_12031.jsonl.gz",
        "synthetic": "mooncake_synthetic_3993.jsonl.gz",
    }
    azure = {
        "azure-conv": "azure2023_conv_19366.csv.gz",
        "azure-code": "azure2023_code_8819.csv.gz",
    }
    for name, file in mooncake.items():
        if (data / file).exists():
            rows = workloads.read_trace(data / file)
            yield workloads.from_mooncake(rows, name=name, seed=seed, limit=count)
    for name, file in azure.items():
        if (data / file).exists():
            yield workloads.from_azure(data / file, name=name, seed=seed, limit=count)
    yield workloads.generated_zipf(count, seed=seed)
    yield workloads.generated_bursts(count, seed=seed)
    yield workloads.generated_tool_agent(count, seed=seed)


def measure(
    data: Path,
    pains: Pains,
    policies: Sequence[str],
    only: Sequence[str] | None,
    profile: EngineProfile,
) -> Results:
    """All cells."""
    if not (data / "README.md").exists():
        say(f"no public traces in {data}: only generated workloads (--data or ${DATA_VARIABLE})")
    runs = dict[Cell, list[Figures]]()
    traces = dict[str, Workload]()
    floors = dict[tuple[str, int], float]()
    for size in pains.sizes:
        count = max(pains.num_requests, pains.per_replica * size)
        for seed in range(pains.num_seeds):
            for trace in traces_of(data, count, seed):
                if only and trace.name not in only:
                    continue
                traces[trace.name] = trace
                timed = at_utilisation(trace, size, UTILISATION, profile)
                floors[trace.name, size] = floor_s(timed, profile)
                begun_s = time.process_time()
                for policy in policies:
                    settings = FleetSettings(
                        num_replicas=size,
                        policy=policy.removesuffix(OR_TEXT),
                        with_fallback=policy.endswith(OR_TEXT),
                        profile=profile,
                        seed=seed,
                    )
                    found = figures_of(timed, simulate(timed, settings), profile)
                    runs.setdefault((trace.name, size, policy), []).append(found)
                say(f"{trace.name} x {size}, seed {seed}: {time.process_time() - begun_s:.0f} s")
    return Results(runs, traces, floors)


def counted(workload: Workload) -> slice:
    """The requests after the warm-up."""
    return slice(int(WARM_UP * len(workload.requests)), None)


def idle_s(workload: Workload, profile: EngineProfile) -> NDArray[np.float64]:
    """First token of each request on an idle engine that has its Cartridges in HBM."""
    return np.array(
        [
            profile.prefill_s(request.num_live_tokens, request.num_virtual_tokens)
            for request in workload.requests
        ]
    )


def floor_s(workload: Workload, profile: EngineProfile) -> float:
    """The p99 that no policy can be below."""
    return float(np.percentile(idle_s(workload, profile)[counted(workload)], 99))


def figures_of(workload: Workload, outcome: Outcome, profile: EngineProfile) -> Figures:
    """Of one run, after the warm-up; bytes, hits and loads over the whole of it."""
    part = counted(workload)
    ttft_s = outcome.ttft_s[part]
    regret = outcome.regret[part]
    hits = outcome.tier_hits
    num_hits = max(1, sum(hits.values()))
    is_good = ttft_s <= SLO_S + idle_s(workload, profile)[part]
    return Figures(
        mean_s=float(ttft_s.mean()),
        p50_s=float(np.percentile(ttft_s, 50)),
        p99_s=float(np.percentile(ttft_s, 99)),
        goodput=float(is_good.mean()),
        hbm=hits[Tier.HBM] / num_hits,
        dram=hits[Tier.DRAM] / num_hits,
        nvme=hits[Tier.NVME] / num_hits,
        remote=hits[Tier.REMOTE] / num_hits,
        remote_gb=outcome.moved_bytes[Tier.REMOTE] / 1e9,
        busiest=outcome.load_ratio,
        # A thousandth is rounding.
        later=float((regret > 0.001).mean()),
        later_5=float((regret > MAX_REGRET).mean()),
        worst=float(regret.max()),
        texts=float(outcome.fell_back[part].mean()),
    )


# --- verdicts ------------------------------------------------------------------------------------
def judged(results: Results, pains: Pains) -> list[Row]:
    """The targets of the issue, for each trace and size."""
    rows = list[Row]()
    for name, trace in results.traces.items():
        for size in pains.sizes:
            rows += _against_published(results, trace, size)
            rows += _regrets(results, name, size)
    return rows


def _regrets(results: Results, trace: str, size: int) -> Iterator[Row]:
    """Without texts in the place of Cartridges, and with them."""
    for title, policy in (("later", OURS), ("later-or-text", OURS_OR_TEXT)):
        cell = (trace, size, policy)
        later, later_5 = results.mean(cell, "later"), results.mean(cell, "later_5")
        yield Row(
            f"{title}/{trace}/{size}",
            later,
            "",
            f"<= {MAX_REGRET_SHARE}",
            later <= MAX_REGRET_SHARE and later_5 == 0,
            f"later than without Cartridges; {later_5:.3f} by more than 5 %, at worst "
            f"{results.mean(cell, 'worst'):.2f} of it; texts of {results.mean(cell, 'texts'):.3f}",
        )


def _against_published(results: Results, trace: Workload, size: int) -> Iterator[Row]:
    for field, title in (("mean_s", "mean"), ("p99_s", "p99")):
        best = results.best_published(trace.name, size, field)
        ours_s = results.mean((trace.name, size, OURS), field)
        theirs_s = results.mean((trace.name, size, best), field)
        ratio = ours_s / theirs_s
        seeds = zip(
            results.runs[trace.name, size, OURS],
            results.runs[trace.name, size, best],
            strict=True,
        )
        num_won = sum(getattr(ours, field) < getattr(other, field) for ours, other in seeds)
        is_heavy = trace.is_cartridge_heavy and title == "p99"
        why = ""
        if title == "p99" and ratio > (MAX_P99_RATIO if is_heavy else 1):
            floor = results.floors[trace.name, size]
            why = f"; an idle fleet with all in HBM: {floor:.2f} s"
        yield Row(
            f"{title}/{trace.name}/{size}",
            ratio,
            "",
            f"<= {MAX_P99_RATIO}" if is_heavy else "< 1",
            ratio <= MAX_P99_RATIO if is_heavy else ratio < 1,
            f"{ours_s:.3f} s of {theirs_s:.3f} s, {best}; lower with {num_won} of "
            f"{len(results.runs[trace.name, size, OURS])} seeds{why}",
        )


def figure_rows(results: Results) -> Iterator[Row]:
    """Everything that was measured, without targets."""
    for cell in results.runs:
        trace, size, policy = cell
        for field, _, _ in COLUMNS:
            yield Row(
                f"{field}/{trace}/{size}/{policy}",
                results.mean(cell, field),
                UNITS.get(field, ""),
                None,
                None,
                f"± {results.half_width(cell, field):.3g}",
            )


# --- what a decision costs -----------------------------------------------------------------------
def fleet_view(num_replicas: int, num_artifacts: int, copies: int) -> Callable[[int], ClusterView]:
    """A busy fleet that holds so many artifacts, each on some replicas; views by tick."""
    loads, residency = LoadTable(), StaleMap(0.0)
    names = [ReplicaId(f"replica-{index:04}") for index in range(num_replicas)]
    chance = np.random.default_rng(0)
    for name in names:
        row = loads.add(name, EngineProfile().rates)
        for _ in range(int(chance.integers(0, 4))):
            booked = loads.book(row, Demand("m", (), 500), tiers={}, now_s=0.0)
            if chance.random() < 0.5:
                booked.note_first_token(0.0)
    tiers = (Tier.HBM, Tier.DRAM, Tier.NVME)
    for index in range(num_artifacts):
        for copy in range(copies):
            holder = names[(index * 7 + copy * 31) % num_replicas]
            residency.publish(0.0, holder, digest_of(index), tiers[(index + copy) % 3])
    residency.catch_up(0.0)
    rows = loads.rows(names)
    history = RouteHistory()

    def view(tick: int) -> ClusterView:
        return ClusterView(loads, rows, residency, history, MapMode.EXACT, tick, now_s=1.0)

    return view


def digest_of(index: int) -> Digest:
    """An artifact of the made fleets."""
    return sha256_digest(f"artifact-{index}".encode())


def decision_us(view: Callable[[int], ClusterView], num_artifacts: int, count: int) -> list[float]:
    """CPU of a decision, of each batch of `count`: a look at the clock costs more than one."""
    policy = POLICIES[OURS]()
    chance = np.random.default_rng(1)
    demands = [
        Demand(
            "m",
            tuple(
                ArtifactDemand(digest_of(int(index)), 400_000_000, 3_000)
                for index in chance.choice(num_artifacts, 4, replace=False)
            ),
            300,
        )
        for _ in range(200)
    ]
    samples = list[float]()
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        for batch in range(100):
            begun_s = time.process_time()
            for turn in range(count):
                policy.decide(demands[(batch * count + turn) % len(demands)], view(turn))
            samples.append(1e6 * (time.process_time() - begun_s) / count)
    finally:
        if is_collecting:
            gc.enable()
    return samples


def decision_rows() -> list[Row]:
    """Both targets."""
    small = decision_us(fleet_view(16, 4, 2), 4, 100)
    large = decision_us(fleet_view(1_000, 100_000, 1), 100_000, 10)
    small_us = statistics.median(small)
    large_ms = float(np.percentile(large, 99)) / 1000
    return [
        Row(
            "decision/16x4",
            small_us,
            "us",
            f"<= {MAX_SMALL_US:.0f}",
            small_us <= MAX_SMALL_US,
            "CPU, median of 100 batches of 100; 4 Cartridges, 16 replicas",
        ),
        Row(
            "decision/1000x100000/p99",
            large_ms,
            "ms",
            f"<= {MAX_LARGE_P99_MS:.0f}",
            large_ms <= MAX_LARGE_P99_MS,
            f"CPU, p99 of 100 batches of 10; median {statistics.median(large) / 1000:.3f} ms",
        ),
    ]


def renew_decisions(out: Path, written: Path) -> int:
    """Put new figures of decisions into the rows and the page of an earlier run."""
    rows = decision_rows()
    names = {row.name for row in rows}
    others = [row for row in json.loads(out.read_text()) if row["name"] not in names]
    out.write_text(json.dumps([*map(asdict, rows), *others], indent=1) + "\n")
    lines = written.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(tuple(f"| {n} |" for n in names))]
    place = kept.index(TARGETS_HEAD) + 2
    kept[place:place] = map(target_line, rows)
    verdicts = [row["ok"] for row in others if row["ok"] is not None] + [row.ok for row in rows]
    title = next(index for index, line in enumerate(kept) if line.startswith("## Targets"))
    kept[title] = targets_title(verdicts)
    written.write_text("\n".join(kept) + "\n")
    for row in rows:
        print(line_of(row))
    return int(not all(row.ok for row in rows))


def targets_title(verdicts: Sequence[bool | None]) -> str:
    """How many of them are met."""
    return f"## Targets: {sum(map(bool, verdicts))} of {len(verdicts)} met"


def target_line(row: Row) -> str:
    """One line of the table of targets."""
    verdict = "met" if row.ok else "**missed**"
    return f"| {row.name} | {row.value:.3f} {row.unit} | {verdict} {row.target} | {row.against} |"


# --- the page ------------------------------------------------------------------------------------
def page(results: Results, rows: Sequence[Row], pains: Pains) -> str:
    """docs/benchmarks/placement.md."""
    judged_rows = [row for row in rows if row.ok is not None]
    lines = [
        "# Placement, simulated",
        "",
        f"Made by `make bench-placement`; do not edit. {len(POLICIES)} policies, the objects that",
        "the gateway runs, in the simulator of [simulator.md](../simulator.md): replicas of an 8B",
        f"model on one H100 each, prefill busy {UTILISATION:.0%} of the time if all is in HBM.",
        f"Means over {pains.num_seeds} seeds ± half of the 95 % interval; the first {WARM_UP:.0%}",
        "of the requests warm the fleet up and are not counted. Seconds to the first token.",
        f"`goodput`: within {SLO_S} s and the prefill of the live tokens on an idle engine.",
        "`hbm` to `store`: where Cartridges were when their requests came. `max/mean`: prefill of",
        "the busiest replica. `later`: share of requests whose first token came later than it",
        "would have at the same place without Cartridges (of those that had some); `worst`: by",
        "which share of it at most. `texts`: share that went with the text instead (`+text`).",
        "",
        "| trace | requests | virtual share | what is real |",
        "|---|--:|--:|---|",
    ]
    lines += [
        f"| {trace.name}{' (heavy)' if trace.is_cartridge_heavy else ''} | "
        f"{len(trace.requests)} | {trace.virtual_share:.2f} | {trace.about} |"
        for trace in results.traces.values()
    ]
    lines += [
        "",
        targets_title([row.ok for row in judged_rows]),
        "",
        "Ratios of `cartridge_aware` to the best published formula of that cell.",
        "",
        TARGETS_HEAD,
        "|---|--:|---|---|",
    ]
    lines += map(target_line, sorted(judged_rows, key=lambda row: bool(row.ok)))
    for trace in results.traces.values():
        for size in pains.sizes:
            lines += _table(results, trace.name, size)
    return "\n".join(lines) + "\n"


def _table(results: Results, trace: str, size: int) -> list[str]:
    lines = [
        "",
        f"## {trace}, {size} replicas",
        "",
        f"| policy | {' | '.join(heading for _, heading, _ in COLUMNS)} |",
        "|---|" + "--:|" * len(COLUMNS),
    ]
    cells = sorted(
        (cell for cell in results.runs if cell[:2] == (trace, size)),
        key=lambda cell: results.mean(cell, "mean_s"),
    )
    for cell in cells:
        texts = list[str]()
        for field, _, digits in COLUMNS:
            text = f"{results.mean(cell, field):.{digits}f}"
            if field in ("mean_s", "p99_s"):
                text += f" ± {results.half_width(cell, field):.{digits}f}"
            texts.append(text)
        lines.append(f"| {cell[2]} | {' | '.join(texts)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
