"""`make bench-gateway`: what a request costs in the gateway, beside its peers, in one run.

Owns the cells, the rows and their targets. Refuses wall time where CPU time can be had: proxies
stay on one core, load and mock on the other, and ratios are between proxies of the same run.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tests.benchmarks import contenders
from tests.benchmarks.contenders import (
    CARTRIDGES,
    LOAD_CORE,
    PEERS_BIN,
    VLLM_ROUTER,
    Contender,
    NotStarted,
)
from tests.benchmarks.gateway_answers import NUM_CHUNKS
from tests.benchmarks.load_generator import Plan, Sample
from tests.benchmarks.process_costs import cpu_s, peak_bytes
from tests.router.keys_files import ACME_KEY

OURS, PLAIN, BARE = "gateway/cartridges", "gateway/plain", "gateway/bare"
OWN = (OURS, PLAIN, BARE)
LEAST = "least-proxy"
CACHE_AWARE, ROUND_ROBIN = f"{VLLM_ROUTER}/cache_aware", f"{VLLM_ROUTER}/round_robin"
LITELLM, DIRECT = "litellm", "direct"
PYTHON_PEERS = (LITELLM,)
MIN_PYTHON_RATIO = 4.0


@dataclass(frozen=True)
class Column:
    """One way to ask one contender."""

    name: str
    contender: str
    has_cartridges: bool = False
    key: str | None = None


COLUMNS: Final = (
    Column(DIRECT, DIRECT),
    Column(OURS, "gateway", has_cartridges=True, key=ACME_KEY),
    Column(PLAIN, "gateway", key=ACME_KEY),
    Column(BARE, BARE),
    Column(LEAST, LEAST),
    Column(CACHE_AWARE, CACHE_AWARE),
    Column(ROUND_ROBIN, ROUND_ROBIN),
    Column("sglang-router", "sglang-router"),
    Column("smg", "smg"),
    Column(LITELLM, LITELLM),
)


@dataclass(frozen=True)
class Cell:
    """One kind of request, from a number of connections; `pace_s` lies between two events."""

    kind: str
    concurrency: int
    size_bytes: int
    is_stream: bool = False
    pace_s: float = 0.0

    @property
    def name(self) -> str:
        """As in rows."""
        return f"{self.kind}/c{self.concurrency}"


CONCURRENCIES = (1, 8, 64)
# Paced streams bring at most 4000 events a second in all: more than one core of load can pace.
PACES_S = {1: 0.002, 8: 0.002, 64: 0.016}
CELLS: Final = tuple(
    cell
    for count in CONCURRENCIES
    for cell in (
        Cell("json-2k", count, 2_000),
        Cell("json-100k", count, 100_000),
        Cell("burst-2k", count, 2_000, is_stream=True),
        Cell("burst-100k", count, 100_000, is_stream=True),
        Cell("paced-2k", count, 2_000, is_stream=True, pace_s=PACES_S[count]),
    )
)


TABLES: Final = (
    ("cpu", "CPU µs for each request", 0),
    ("chunk", "CPU µs for each event of a stream", 1),
    ("added-p50", "Added latency, p50, ms", 2),
    ("added-p99", "Added latency, p99, ms", 2),
    ("spread", "Requests of the busiest replica, of the mean", 2),
)
"""Kind of row, title, digits."""


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
class Measured:
    """One sample of one column in one cell."""

    cpu_us: float
    spread: float
    sample: Sample


@dataclass
class Results:
    """All samples of a run, and what went wrong in it."""

    samples: dict[tuple[str, str], list[Measured]] = field(
        default_factory=lambda: defaultdict(list)
    )
    wrong: list[Row] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    def median(self, column: str, cell: str, of: Callable[[Measured], float]) -> float | None:
        """Of all repeats; `None` when there is none."""
        found = self.samples.get((column, cell))
        return statistics.median(map(of, found)) if found else None

    def cpu_us(self, column: str, cell: str) -> float | None:
        """CPU µs for each request."""
        return self.median(column, cell, lambda one: one.cpu_us)


@dataclass(frozen=True)
class Pains:
    """How much is measured."""

    num_repeats: int
    num_requests: int
    min_s: float
    max_s: float


THOROUGH: Final = Pains(num_repeats=3, num_requests=500, min_s=0.6, max_s=3.0)
QUICK: Final = Pains(num_repeats=1, num_requests=150, min_s=0.2, max_s=1.0)


def main(arguments: Sequence[str]) -> int:
    """Measure everything; 1 when a target was missed or an answer was wrong."""
    parser = argparse.ArgumentParser(prog="make bench-gateway", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/gateway.json"))
    parser.add_argument("--quick", action="store_true", help="once, and less of it")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="columns with this in their name")
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="cells with this in their name")
    parser.add_argument(
        "--profile", action="store_true", help="show the dearest functions of the gateway instead"
    )
    given = parser.parse_args(arguments)
    only = OWN if given.profile else given.only
    columns = [c for c in COLUMNS if c.name == DIRECT or _is_chosen(c.name, only)]
    cells = [cell for cell in CELLS if _is_chosen(cell.name, given.cells)]
    results = Results()
    with (
        tempfile.TemporaryDirectory(prefix="cartridge-bench-") as folder,
        Bench(Path(folder), {c.contender for c in columns}, results) as bench,
    ):
        if given.profile:
            profile(bench, [c for c in columns if c.name in OWN], cells)
            return 0
        measure(bench, columns, cells, QUICK if given.quick else THOROUGH)
        bench.note_peaks()
    rows = [*results.wrong, *judged(results, columns, cells)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.ok is False]
    for row in [*missed, *(row for row in rows if row.ok is not False)]:
        print(line_of(row))
    print(tables(rows, columns, cells))
    return 1 if missed else 0


def _is_chosen(name: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part in name for part in parts)


def line_of(row: Row) -> str:
    """One line of the table."""
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
    value = "        –" if row.value is None else f"{row.value:9.2f}"
    target = f"  target {row.target}" if row.target else ""
    return f"{mark} {row.name:<50} {value} {row.unit:<6}{target}  ({row.against})"


def tables(rows: Sequence[Row], columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    """What was measured, cells by columns, as docs/benchmarks/gateway.md has it."""
    values = {row.name: row.value for row in rows}
    names = [column.name for column in columns if column.name != DIRECT]
    lines = list[str]()
    for kind, title, digits in TABLES:
        lines += ["", f"{title}:", "", f"| | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
        for cell in cells:
            found = [values.get(f"{kind}/{cell.name}/{name}") for name in names]
            texts = ["–" if value is None else f"{value:.{digits}f}" for value in found]
            if any(value is not None for value in found):
                lines.append(f"| {cell.name} | {' | '.join(texts)} |")
    return "\n".join(lines)


# --- what runs -----------------------------------------------------------------------------------
class Bench:
    """Everything that runs, from the beginning of a `with` block to its end."""

    def __init__(self, folder: Path, wanted: set[str], results: Results) -> None:
        self.folder = folder
        self.results = results
        self.contenders: dict[str, Contender] = {}
        self._wanted = wanted
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Bench":
        with contextlib.ExitStack() as stack:
            # What this process starts itself is load too.
            stack.enter_context(contenders.on_core(LOAD_CORE))
            redis_url = stack.enter_context(contenders.running_redis(self.folder))
            receipts = stack.enter_context(contenders.running_publishers(self.folder, redis_url))
            self.engines = stack.enter_context(contenders.running_engines(self.folder, receipts))
            self._load = stack.enter_context(
                contenders.running(
                    LOAD_CORE,
                    [sys.executable, "-m", "tests.benchmarks.load_generator"],
                    self.folder / "load.log",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for name, starting in self._starts(redis_url).items():
                if name in self._wanted:
                    self._start(stack, name, starting)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _starts(self, redis_url: str) -> dict[str, contextlib.AbstractContextManager[Contender]]:
        folder, engines = self.folder, self.engines

        def peer(program: str, policy: str) -> contextlib.AbstractContextManager[Contender]:
            return contenders.rust_peer(folder, engines, program, policy)

        return {
            "gateway": contenders.gateway(folder, engines, redis_url),
            BARE: contenders.bare_gateway(folder, engines),
            LEAST: contenders.least_proxy(folder, engines),
            CACHE_AWARE: peer(VLLM_ROUTER, "cache_aware"),
            ROUND_ROBIN: peer(VLLM_ROUTER, "round_robin"),
            "sglang-router": peer("sglang-router", "cache_aware"),
            "smg": peer("smg", "cache_aware"),
            LITELLM: contenders.litellm(folder, engines),
        }

    def _start(
        self,
        stack: contextlib.ExitStack,
        name: str,
        starting: contextlib.AbstractContextManager[Contender],
    ) -> None:
        begun_s = time.monotonic()
        try:
            self.contenders[name] = stack.enter_context(starting)
        except NotStarted as error:
            say(f"{name} was not started: {error}")
            self.results.wrong.append(
                Row(f"started/{name}", None, "", "answers", False, str(error))
            )
        else:
            say(f"{name} answers after {time.monotonic() - begun_s:.1f} s")

    def note_peaks(self) -> None:
        """Read what each contender has needed at most."""
        for name, contender in self.contenders.items():
            self.results.peaks[name] = peak_bytes(contender.pid)

    # --- one sample ------------------------------------------------------------------------------
    def port_of(self, column: Column) -> int | None:
        """Where a column is asked; `None` when it was not started."""
        if column.name == DIRECT:
            return self.engines.ports[0]
        found = self.contenders.get(column.contender)
        return found.port if found else None

    def ask(self, plan: Plan) -> Sample:
        """Have the load generator do it."""
        assert self._load.stdin is not None
        assert self._load.stdout is not None
        self._load.stdin.write(msgspec.json.encode(plan).decode() + "\n")
        self._load.stdin.flush()
        line = self._load.stdout.readline()
        if not line:
            raise RuntimeError((self.folder / "load.log").read_text()[-2000:])
        return msgspec.json.decode(line, type=Sample)

    def measure(self, column: Column, cell: Cell, plan: Plan) -> Measured:
        """One sample, and what it cost; what is wrong with it becomes a row."""
        pid = None if column.name == DIRECT else self.contenders[column.contender].pid
        counts = self.engines.counts()
        spent_s = 0.0 if pid is None else cpu_s(pid)
        sample = self.ask(plan)
        spent_s = 0.0 if pid is None else cpu_s(pid) - spent_s
        pairs = list(zip(self.engines.counts(), counts, strict=True))
        asked = [after.num_requests - before.num_requests for after, before in pairs]
        problems = list(sample.problems)
        if sum(asked) != sample.num_requests:
            problems.append(f"{sum(asked)} of {sample.num_requests} requests reached an engine")
        num_bytes = sum(after.num_body_bytes - before.num_body_bytes for after, before in pairs)
        if num_bytes < 0.9 * sample.num_body_bytes:
            problems.append(f"{num_bytes} of {sample.num_body_bytes} bytes reached an engine")
        num_composed = sum(a.num_compositions - b.num_compositions for a, b in pairs)
        if num_composed != (sample.num_requests if column.has_cartridges else 0):
            problems.append(f"{num_composed} of {sample.num_requests} with Cartridges")
        if num_lost := sum(a.num_lost_receipts - b.num_lost_receipts for a, b in pairs):
            problems.append(f"{num_lost} receipts were not sent")
        if problems:
            self.results.wrong.append(
                Row(
                    f"wrong/{cell.name}/{column.name}",
                    sample.num_wrong,
                    "",
                    "0",
                    False,
                    "; ".join(problems)[:600],
                )
            )
        return Measured(
            cpu_us=1e6 * spent_s / max(1, sample.num_requests),
            spread=max(asked) / max(1e-9, statistics.fmean(asked)),
            sample=sample,
        )


def say(text: str) -> None:
    """Progress; the table alone goes to stdout."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def plan_of(column: Column, cell: Cell, port: int, pains: Pains, seed: int) -> Plan:
    """What the load generator does for one sample."""
    return Plan(
        port=port,
        concurrency=cell.concurrency,
        size_bytes=cell.size_bytes,
        is_stream=cell.is_stream,
        num_requests=max(pains.num_requests, 2 * cell.concurrency),
        min_s=pains.min_s,
        max_s=min(pains.max_s, _longest_s(column, cell)),
        cartridges=CARTRIDGES if column.has_cartridges else (),
        key=column.key,
        seed=seed,
    )


def _longest_s(column: Column, cell: Cell) -> float:
    """A second of CPU is enough, and so are the chunks of some paced streams."""
    if column.name in PYTHON_PEERS:
        return 1.2
    return 1.6 if cell.pace_s else THOROUGH.max_s


def measure(bench: Bench, columns: Sequence[Column], cells: Sequence[Cell], pains: Pains) -> None:
    """All cells, each with all columns in turn, some times."""
    seed = 0
    for repeat in range(pains.num_repeats):
        for cell in cells:
            bench.engines.set_pace(cell.pace_s)
            told = []
            for column in columns:
                port = bench.port_of(column)
                if port is None:
                    continue
                seed += 1
                plan = plan_of(column, cell, port, pains, seed)
                warm = msgspec.structs.replace(
                    plan,
                    num_requests=(100 if repeat == 0 else 10) + cell.concurrency,
                    min_s=0.0,
                    max_s=0.4,
                )
                bench.ask(warm)
                found = bench.measure(column, cell, plan)
                bench.results.samples[column.name, cell.name].append(found)
                told.append(f"{column.name} {found.cpu_us:.0f}")
            say(f"{repeat + 1}/{pains.num_repeats} {cell.name}: {', '.join(told[1:])} µs")


# --- what it means -------------------------------------------------------------------------------
def judged(results: Results, columns: Sequence[Column], cells: Sequence[Cell]) -> list[Row]:
    """Rows of a run, those with targets first."""
    names = [column.name for column in columns if column.name != DIRECT]
    return [
        *_ratios(results, names, cells),
        *_chunk_ratios(results, names, cells),
        *_python_ratios(results, names, cells),
        *(row for cell in cells for name in names for row in _plain_rows(results, name, cell)),
        *(
            Row(f"chunk/{cell.name}/{name}", us, "µs", None, None, "less the same as JSON, / 32")
            for cell in cells
            for name in names
            if (us := chunk_us(results, name, cell)) is not None
        ),
        *(
            Row(f"peak/{name}", num_bytes / (1 << 20), "MiB", None, None, "VmHWM of all processes")
            for name, num_bytes in results.peaks.items()
        ),
    ]


def _ratios(results: Results, names: Sequence[str], cells: Sequence[Cell]) -> Iterator[Row]:
    for cell in cells:
        for name in OWN:
            if name in names:
                own_us = results.cpu_us(name, cell.name)
                yield from _two_targets(
                    f"cpu-ratio/{cell.name}/{name}",
                    own_us,
                    lambda peer, cell=cell: results.cpu_us(peer, cell.name),  # type: ignore[misc]
                    has_target=name == OURS,
                )


def _chunk_ratios(results: Results, names: Sequence[str], cells: Sequence[Cell]) -> Iterator[Row]:
    for cell in cells:
        for name in OWN:
            if name in names and cell.is_stream:
                yield from _two_targets(
                    f"chunk-ratio/{cell.name}/{name}",
                    chunk_us(results, name, cell),
                    lambda peer, cell=cell: chunk_us(results, peer, cell),  # type: ignore[misc]
                    has_target=name == OURS,
                )


def _two_targets(
    name: str,
    own_us: float | None,
    of_peer: Callable[[str], float | None],
    *,
    has_target: bool,
) -> Iterator[Row]:
    """Not above `vllm-router` cache_aware; the stretch, its round robin, is told when reached."""
    for peer, suffix in ((CACHE_AWARE, ""), (ROUND_ROBIN, " (stretch)")):
        peer_us = of_peer(peer)
        if own_us is None or peer_us is None:
            continue
        if peer_us <= 0:
            against = f"{own_us:.1f} µs; {peer}: {peer_us:.1f} µs, less than the noise"
            yield Row(f"{name}/of-{peer}", None, "of 1", None, None, against)
            continue
        is_reached = own_us <= peer_us
        ok = None if not has_target or (suffix and not is_reached) else is_reached
        target = f"≤ 1{suffix}" if has_target else None
        against = f"{own_us:.1f} µs; {peer}: {peer_us:.1f} µs"
        yield Row(f"{name}/of-{peer}", own_us / peer_us, "of 1", target, ok, against)


def _python_ratios(results: Results, names: Sequence[str], cells: Sequence[Cell]) -> Iterator[Row]:
    for cell in cells:
        for peer in PYTHON_PEERS:
            own_us, peer_us = results.cpu_us(OURS, cell.name), results.cpu_us(peer, cell.name)
            if peer in names and own_us and peer_us:
                ratio = peer_us / own_us
                against = f"{own_us:.0f} µs; {peer}: {peer_us:.0f} µs"
                target = f"≥ {MIN_PYTHON_RATIO:g}"
                ok = ratio >= MIN_PYTHON_RATIO
                yield Row(f"less-than/{cell.name}/{peer}", ratio, "times", target, ok, against)


def chunk_us(results: Results, column: str, cell: Cell) -> float | None:
    """CPU µs for each event of a stream beyond what the same request costs as JSON."""
    if not cell.is_stream:
        return None
    size = cell.kind.partition("-")[2]
    stream_us = results.cpu_us(column, cell.name)
    json_us = results.cpu_us(column, f"json-{size}/c{cell.concurrency}")
    return None if stream_us is None or json_us is None else (stream_us - json_us) / NUM_CHUNKS


def _plain_rows(results: Results, name: str, cell: Cell) -> Iterator[Row]:
    found = results.samples.get((name, cell.name))
    if not found:
        return
    num_requests = sum(one.sample.num_requests for one in found)
    values = [one.cpu_us for one in found]
    against = (
        f"{num_requests} requests in {len(found)} samples, {min(values):.0f}–{max(values):.0f}"
    )
    yield Row(f"cpu/{cell.name}/{name}", statistics.median(values), "µs", None, None, against)
    for percent in ("p50", "p99"):
        # The wait for the first event is what a proxy adds to a paced stream.
        moment = "first" if cell.pace_s else "total"

        def of(one: Measured, attribute: str = f"{moment}_{percent}_s") -> float:
            value: float = getattr(one.sample, attribute)
            return 1e3 * value

        own_ms, direct_ms = (
            results.median(name, cell.name, of),
            results.median(DIRECT, cell.name, of),
        )
        if own_ms is not None and direct_ms is not None:
            yield Row(
                f"added-{percent}/{cell.name}/{name}",
                own_ms - direct_ms,
                "ms",
                None,
                None,
                f"{moment} byte{'s' if moment == 'total' else ''}; mock alone {direct_ms:.2f} ms",
            )
    spread = results.median(name, cell.name, lambda one: one.spread)
    yield Row(f"spread/{cell.name}/{name}", spread, "of 1", None, None, "max / mean of replicas")
    if cell.pace_s:
        reads = results.median(name, cell.name, lambda one: one.sample.num_reads)
        yield Row(f"reads/{cell.name}/{name}", reads, "", None, None, "pieces that a client read")


# --- where the time goes -------------------------------------------------------------------------
PROFILE_S = 8
SAMPLES_PER_S = 250
_LINE = re.compile(r":\d+(?=\)$)")


def profile(bench: Bench, columns: Sequence[Column], cells: Sequence[Cell]) -> None:
    """Stacks of the gateway, a file for each column and cell, and its dearest functions.

    py-spy takes who waits for a core for one that works: for a quiet machine. It stops the process
    for each sample: without that it reads torn stacks.
    """
    target = Path("build/bench/profiles")
    target.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        bench.engines.set_pace(cell.pace_s)
        for column in columns:
            port = bench.port_of(column)
            if port is None:
                continue
            file = target / f"{cell.name}-{column.name}.txt".replace("/", "-")
            pid = bench.contenders[column.contender].pid
            command = [str(PEERS_BIN / "py-spy"), "record", "--pid", str(pid)]
            command += ["--format", "raw", "--rate", str(SAMPLES_PER_S)]
            command += ["--duration", str(PROFILE_S), "--output", str(file)]
            span_s = PROFILE_S + 2.0
            plan = plan_of(column, cell, port, THOROUGH, 0)
            with (target / "py-spy.log").open("ab") as log:
                spy = subprocess.Popen(command, stdout=log, stderr=log)
                found = bench.measure(
                    column, cell, msgspec.structs.replace(plan, min_s=span_s, max_s=span_s)
                )
                spy.wait(timeout=60)
            print(f"\n{cell.name} {column.name}, {found.cpu_us:.0f} µs a request: {file}")
            print(dearest(file.read_text()))


def dearest(stacks: str, num_functions: int = 30) -> str:
    """The functions of the main thread with the most samples of their own, and in all.

    Threads of the pool wait, which py-spy does not see.
    """
    own, within = Counter[str](), Counter[str]()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = [_LINE.sub("", frame) for frame in frames.split(";")]
        if names[0].startswith("Thread."):
            continue
        own[names[-1]] += int(count)
        within.update(dict.fromkeys(names, int(count)))
    total = max(1, own.total())
    lines = [f"{'self':>6} {'in all':>7}  function ({total} samples)"]
    ranked = dict.fromkeys(
        [name for name, _ in own.most_common(num_functions)]
        + [name for name, _ in within.most_common(num_functions)]
    )
    lines += [f"{own[f] / total:6.1%} {within[f] / total:7.1%}  {f}" for f in ranked]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
