"""`bench/gpu.sh`: attention over shared segments on a GPU, beside copies and FlashInfer.

Owns the clocks, the floors by bandwidth measured in the same run, and the targets. Refuses to time
what is wrong (each contender answers for float64 first) and, without a GPU, to time at all.
"""

import argparse
import gc
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cartridge_kernels.plan import Representation
from cartridge_kernels.reference import attend_dense
from cartridge_kernels.triton_backend import Tiles, TritonBackend
from tests.benchmarks.gpu_cells import (
    Batch,
    Cell,
    Contender,
    Geometry,
    contenders,
    ours,
    relative_error,
)
from tests.benchmarks.rows import Row, report
from tests.kernels.attention_cases import CASES, make_inputs

LLAMA, SMOLLM = Geometry(32, 8, 128), Geometry(9, 3, 64)
OUTPUT_TOLERANCE, LSE_TOLERANCE = 8e-3, 1e-2
"""Queries and weights are rounded to 8 bits; an error of a score is one of the log-sum-exp."""
INTERPRETED_TOLERANCE = 8e-3
"""SDPA over copies rounds to bfloat16 on a CPU too."""

MIN_WORKING_SET_BYTES = 200_000_000
"""Of all layers of a graph: several times the 50 MB of L2 of an H100 or H200."""
MAX_LAYERS = 400
NUM_REPLAYS = 15
BUDGET_S = 480.0


def cells() -> list[Cell]:
    """The most telling first: time may run out."""
    found = [
        Cell(geometry, batch, (length,))
        for geometry in (LLAMA, SMOLLM)
        for length in (8192, 2048, 32768, 512)
        for batch in (16, 1, 64)
    ]
    mixed = Cell(LLAMA, 16, (4096, 2048, 2048), ((0, 1), (2, 0)))
    return [*found[:3], mixed, *found[3:]]


def tiny_cells() -> list[Cell]:
    """Some seconds in the interpreter."""
    return [
        Cell(Geometry(4, 2, 16), 3, (70,), num_live=5),
        Cell(Geometry(6, 2, 16), 2, (40, 30, 30), ((0, 1), (2, 0)), num_live=5),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure everything; 1 when a target was missed or an answer wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu-kernels.json"))
    parser.add_argument("--interpret", action="store_true", help="on a CPU, without times")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    given = parser.parse_args(arguments)
    problem = missing(interpret=given.interpret)
    if problem is not None:
        sys.stderr.write(f"bench/gpu.sh: {problem}\n")
        return 2
    rows = interpreted() if given.interpret else measured(time.monotonic() + given.budget_s)
    return report(rows, given.out)


def missing(*, interpret: bool) -> str | None:
    """What the machine lacks, and where it comes from."""
    if importlib.util.find_spec("triton") is None:
        return "triton is missing: pip install 'triton>=3.6'"
    reason = TritonBackend(interpret=interpret).unavailable_reason(torch.device("cuda"))
    if reason is None:
        return None
    return (
        f"{reason}; torch is {torch.__version__}. It takes one NVIDIA GPU, a CUDA build of torch "
        "and triton: pip install torch 'triton>=3.6' (and flashinfer-python==0.7.4, to compare). "
        "--interpret tries the programs without a GPU."
    )


def progress(text: str) -> None:
    """What goes on, beside the table."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# --- without a GPU -------------------------------------------------------------------------------
def interpreted() -> list[Row]:
    """The same batches in small, through the interpreter: answers, no times."""
    rows: list[Row] = []
    for cell in tiny_cells():
        batch = Batch(cell, num_layers=2, device=torch.device("cpu"))
        made = contenders(batch, interpret=True).values()
        rows += [checked(batch, make(), INTERPRETED_TOLERANCE) for make in made]
    return rows


def checked(batch: Batch, contender: Contender, tolerance: float) -> Row:
    """The first and the last request of the last layer, beside one softmax in float64."""
    index = len(batch.layers) - 1
    found = contender.run(index)
    error = max(
        relative_error(
            found[request],
            batch.oracle(batch.layers[index], request, contender.representation),
        )
        for request in {0, batch.cell.batch - 1}
    )
    return Row(
        f"error/{batch.cell.name}/{contender.name}",
        error,
        "of 1",
        f"<= {tolerance}",
        error <= tolerance,
        "one softmax over all keys in float64",
    )


# --- on a GPU ------------------------------------------------------------------------------------
def measured(deadline_s: float) -> list[Row]:
    """Ceilings, answers, times and what tiles cost, until time is up."""
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    progress(f"{name}, torch {torch.__version__}, triton {version('triton')}")
    bytes_per_s = copy_bytes_per_s(device)
    rows = [Row("copy", bytes_per_s / 1e12, "TB/s", None, None, f"1 GiB on {name}, both ways")]
    rows += answers(device)
    for cell in cells():
        if time.monotonic() > deadline_s:
            progress(f"out of time before {cell.name}")
            break
        rows += cell_rows(cell, device, bytes_per_s)
    if time.monotonic() < deadline_s:
        rows += tile_rows(Cell(LLAMA, 16, (8192,)), device, deadline_s)
    return rows


def version(package: str) -> str:
    """Of an installed package."""
    return importlib.import_module(package).__version__  # type: ignore[no-any-return]


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written by a copy of 1 GiB in a second; the ceiling of this machine."""
    source = torch.ones(1 << 28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def run(index: int) -> torch.Tensor:
        return target.copy_(source)

    return 2 * source.nbytes / (graph_us(run, num_layers=1) * 1e-6)


def answers(device: torch.device) -> list[Row]:
    """The shapes of the tests on the GPU itself; memory handed out is full of NaN."""
    rows = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for case in CASES:
            inputs = make_inputs(case, device=device.type)
            arguments = (inputs.plan, inputs.queries, inputs.segments, inputs.live)
            exact = attend_dense(*arguments, scale=inputs.scale)
            for chunk_tokens in (16, None):
                backend = TritonBackend(chunk_tokens=chunk_tokens)
                found = backend.attend(*arguments, scale=inputs.scale)
                seen = exact.lse != -torch.inf
                error = relative_error(found.output, exact.output)
                lse_error = float((found.lse[seen].double() - exact.lse[seen]).abs().max())
                is_ok = error <= OUTPUT_TOLERANCE and lse_error <= LSE_TOLERANCE
                is_ok = is_ok and torch.equal(found.lse == -torch.inf, ~seen)
                against = f"float64; log-sum-exp off by {lse_error:.1e}"
                name = f"answer/{case.name}/{chunk_tokens or 'auto'}"
                rows.append(Row(name, error, "of 1", f"<= {OUTPUT_TOLERANCE}", is_ok, against))
    finally:
        torch.use_deterministic_algorithms(False)
    return rows


def cell_rows(cell: Cell, device: torch.device, bytes_per_s: float) -> list[Row]:
    """All contenders on one batch, and what the issue asks of ours."""
    rows: list[Row] = []
    times: dict[str, float] = {}
    batch = Batch(cell, num_layers_for(cell.k16v8_bytes), device)
    copied = Batch(cell, num_layers_for(cell.copied_bytes), device)
    for name in contenders(batch, interpret=False):
        of = copied if name.startswith("copies/") else batch
        try:
            contender = contenders(of, interpret=False)[name]()
            rows.append(checked(of, contender, OUTPUT_TOLERANCE))
            times[name] = graph_us(contender.run, len(of.layers))
        except Exception as error:
            # One contender must not end the only run on a machine that is lent.
            progress(f"{cell.name} {name}: {type(error).__name__}: {str(error)[:300]}")
            if name.startswith("triton/"):
                against = f"{type(error).__name__}: {error}"[:200]
                rows.append(Row(f"ran/{cell.name}/{name}", 0.0, "of 1", ">= 1", False, against))
            continue
        floor_us = contender.num_bytes / bytes_per_s * 1e6
        against = f"{contender.num_bytes / 1e6:.1f} MB at copy speed: {floor_us:.1f} us"
        rows.append(Row(f"decode/{cell.name}/{name}", times[name], "us", None, None, against))
        progress(f"{cell.name:<32} {name:<20} {times[name]:9.1f} us  ({against})")
    del batch, copied
    gc.collect()
    torch.cuda.empty_cache()
    return [*rows, *verdicts(cell, times, cell.k16v8_bytes / bytes_per_s * 1e6)]


def num_layers_for(layer_bytes: int) -> int:
    """Layers in turn, so that none is found in L2."""
    return max(2, min(MAX_LAYERS, -(-MIN_WORKING_SET_BYTES // layer_bytes)))


def verdicts(cell: Cell, times: dict[str, float], floor_us: float) -> list[Row]:
    """Ours beside its floor and the others; lower is better."""
    if "triton/k16v8" not in times:
        return []
    mine = times["triton/k16v8"]
    is_long = cell.geometry == LLAMA and max(cell.segments) >= 8192 and cell.batch == 16
    rows = [
        judged(
            f"of-floor/{cell.name}",
            mine / floor_us,
            2.0 if is_long else None,
            f"floor by copy speed: {floor_us:.1f} us",
        )
    ]
    if "triton/full" in times:
        limit = 0.9 if is_long and cell.segments == (32768,) else None
        ratio = mine / times["triton/full"]
        rows.append(judged(f"k16v8-of-full/{cell.name}", ratio, limit, "ours in bfloat16"))
    if "triton/unshared" in times:
        limit = 1.1 if cell.batch == 1 and cell.geometry == LLAMA else None
        ratio = mine / times["triton/unshared"]
        rows.append(judged(f"of-unshared/{cell.name}", ratio, limit, "each request for itself"))
    for family in ("copies/", "flashinfer/"):
        others = {name: us for name, us in times.items() if name.startswith(family)}
        if others:
            best = min(others, key=others.__getitem__)
            limit = 1.0 if is_long else None
            against = f"{best}: {others[best]:.1f} us"
            name = f"of-{family.rstrip('/')}/{cell.name}"
            rows.append(judged(name, mine / others[best], limit, against))
    return rows


def judged(name: str, ratio: float, limit: float | None, against: str) -> Row:
    """A ratio, with its target if there is one."""
    if limit is None:
        return Row(name, ratio, "of 1", None, None, against)
    return Row(name, ratio, "of 1", f"<= {limit}", ratio <= limit, against)


def tile_rows(cell: Cell, device: torch.device, deadline_s: float) -> list[Row]:
    """What other tiles and spans would cost."""
    batch = Batch(cell, num_layers_for(cell.k16v8_bytes), device)
    variants: list[tuple[Tiles, int | None]] = [
        *((Tiles(), chunk) for chunk in (None, 256, 512, 1024, 2048)),
        (Tiles(num_stages=4), None),
        (Tiles(num_tokens=128), None),
        (Tiles(num_tokens=32, num_stages=5), None),
        (Tiles(num_warps=8), None),
        (Tiles(num_tokens=128, num_warps=8), None),
        (Tiles(max_rows=16), None),
        (Tiles(max_rows=128, num_warps=8), None),
    ]
    rows = []
    for tiles, chunk_tokens in variants:
        if time.monotonic() > deadline_s:
            break
        name = (
            f"tiles/{cell.name}/rows{tiles.max_rows}-tokens{tiles.num_tokens}-"
            f"warps{tiles.num_warps}-stages{tiles.num_stages}-chunk{chunk_tokens or 'auto'}"
        )
        contender = ours(batch, Representation.K16V8, tiles=tiles, chunk_tokens=chunk_tokens)
        try:
            us = graph_us(contender.run, len(batch.layers))
        except Exception as error:
            # Too much shared memory, for one.
            progress(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        rows.append(Row(name, us, "us", None, None, "the first row of its kind"))
    return rows


def graph_us(run: Callable[[int], torch.Tensor], num_layers: int) -> float:
    """Microseconds for a layer: median over replays of a graph of all layers."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in [*range(num_layers), 0]:
            run(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_layers):
            run(index)
    for _ in range(3):
        graph.replay()
    samples: list[float] = []
    for _ in range(NUM_REPLAYS):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / num_layers)
    return statistics.median(samples)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
