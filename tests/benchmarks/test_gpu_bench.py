"""The harness of `bench/gpu.sh` checks answers and judges times; it has no GPU here and times none.

Owns the smoke run through Triton's interpreter, and the arithmetic of floors and verdicts.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cartridge_kernels.plan import Representation
from tests.benchmarks import bench_gpu_kernels as bench
from tests.benchmarks.gpu_cells import Batch, Cell, Contender, contenders, ours
from tests.kernels.attention_cases import CASES

ROOT = Path(__file__).parents[2]
MIDDLE = Cell(bench.LLAMA, 16, (8192,))


def test_interpreted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU all batches are computed in small and answer for float64; nothing is timed."""
    out = tmp_path / "deeper" / "rows.json"
    assert bench.main(["--interpret", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert {row["unit"] for row in rows} == {"of 1"}
    names = [row["name"] for row in rows]
    for cell in bench.tiny_cells():
        for contender in ("triton/k16v8", "triton/full", "triton/unshared", "copies/default"):
            assert f"error/{cell.name}/{contender}" in names
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == len(names)


def test_the_command_without_a_gpu() -> None:
    """It ends with 2 and says what it needs and how to try it without."""
    done = subprocess.run(
        [ROOT / "bench" / "gpu.sh"],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "no CUDA device" in done.stderr
    assert "pip install torch" in done.stderr
    assert "--interpret" in done.stderr


def test_without_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench.main([]) == 2
    assert "pip install 'triton" in capsys.readouterr().err


def test_wrong_answers_are_missed() -> None:
    """A contender that is wrong for one request only misses its target."""
    batch = Batch(bench.tiny_cells()[0], 1, torch.device("cpu"))
    right = ours(batch, Representation.K16V8, interpret=True)

    def run(index: int) -> torch.Tensor:
        found = right.run(index).clone()
        found[-1] *= 1.05
        return found

    assert bench.checked(batch, right, 1e-5).ok
    wrong = dataclasses.replace(right, run=run)
    assert bench.checked(batch, wrong, 8e-3).ok is False
    nothing = dataclasses.replace(right, run=lambda index: right.run(index) * torch.nan)
    assert bench.checked(batch, nothing, 8e-3).ok is False


def test_layers_have_other_numbers() -> None:
    """A contender that reads another layer's tensors is wrong."""
    batch = Batch(bench.tiny_cells()[0], 2, torch.device("cpu"))
    right = ours(batch, Representation.FULL, interpret=True)
    other = Contender(right.name, right.representation, lambda index: right.run(0), 1)
    assert bench.checked(batch, other, 0.1).ok is False


def test_bytes_of_a_layer() -> None:
    """What a floor counts: 16 requests over 8192 shared tokens, with 256 of their own."""
    live = 16 * 256 * 8 * 128 * 4
    small = 16 * 32 * 128 * 6
    assert MIDDLE.full_bytes == 8192 * 8 * 128 * 4 + live + small
    assert MIDDLE.k16v8_bytes == 8192 * 8 * 128 * 3 + live + small
    assert MIDDLE.copied_bytes == 16 * 8192 * 8 * 128 * 4 + live + small


@pytest.fixture
def interpreted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, with the programs interpreted and a clock that stands at 7."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def seven(run: Callable[[int], torch.Tensor], num_layers: int) -> float:
        for index in range(num_layers):
            run(index)
        return 7.0

    monkeypatch.setattr(bench, "graph_us", seven)
    monkeypatch.setattr(bench, "MIN_WORKING_SET_BYTES", 1)


@pytest.mark.usefixtures("interpreted_clock")
def test_a_cell_on_the_way_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Each contender that runs is checked, timed and judged; one that cannot run ends nothing."""
    cell = bench.tiny_cells()[1]
    rows = {row.name: row for row in bench.cell_rows(cell, torch.device("cpu"), 1e9)}
    for contender in ("triton/k16v8", "triton/full", "triton/unshared"):
        assert rows[f"error/{cell.name}/{contender}"].ok
        assert rows[f"decode/{cell.name}/{contender}"].value == 7.0
    assert rows[f"k16v8-of-full/{cell.name}"].value == 1.0
    assert rows[f"of-floor/{cell.name}"].value == pytest.approx(7e-6 * 1e9 / cell.k16v8_bytes)
    assert "copies/cudnn" in capsys.readouterr().err
    assert f"decode/{cell.name}/copies/cudnn" not in rows


@pytest.mark.usefixtures("interpreted_clock")
def test_a_failure_of_ours_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the programs themselves do not run, that is a row and a miss."""
    cell = bench.tiny_cells()[0]

    def failing(batch: Batch, *, interpret: bool) -> dict[str, Callable[[], Contender]]:
        def make() -> Contender:
            raise RuntimeError("no such instruction")

        return {"triton/k16v8": make}

    monkeypatch.setattr(bench, "contenders", failing)
    (row,) = bench.cell_rows(cell, torch.device("cpu"), 1e9)
    assert row.ok is False
    assert "no such instruction" in row.against


@pytest.mark.usefixtures("interpreted_clock")
def test_answers_and_tiles_on_the_way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of the tests are answered, and other tiles are timed until time is up."""
    monkeypatch.setattr(bench, "CASES", CASES[:4])
    answers = bench.answers(torch.device("cpu"))
    assert len(answers) == 2 * 4
    assert all(row.ok for row in answers)
    assert not torch.are_deterministic_algorithms_enabled()
    tiles = bench.tile_rows(bench.tiny_cells()[0], torch.device("cpu"), time.monotonic() + 600)
    assert len({row.name for row in tiles}) == len(tiles) == 12
    assert bench.tile_rows(bench.tiny_cells()[0], torch.device("cpu"), 0.0) == []


def test_verdicts() -> None:
    """Ratios to the floor, to bfloat16 and to the best of each family, with the issue's targets."""
    times = {
        "triton/k16v8": 30.0,
        "triton/full": 40.0,
        "copies/flash": 200.0,
        "copies/cudnn": 150.0,
        "flashinfer/cascade": 25.0,
    }
    rows = {row.name.split("/")[0]: row for row in bench.verdicts(MIDDLE, times, 10.0)}
    assert (rows["of-floor"].value, rows["of-floor"].ok) == (3.0, False)
    assert rows["k16v8-of-full"].value == 0.75
    assert (rows["of-copies"].value, rows["of-copies"].ok) == (0.2, True)
    assert "copies/cudnn" in rows["of-copies"].against
    assert (rows["of-flashinfer"].value, rows["of-flashinfer"].ok) == (1.2, False)
    short = dataclasses.replace(MIDDLE, segments=(512,))
    assert all(row.ok is None for row in bench.verdicts(short, times, 10.0))


def test_working_sets_do_not_fit_into_l2() -> None:
    """Every cell has enough layers that none is still in L2 when its turn comes again."""
    for cell in bench.cells():
        for num_bytes in (cell.k16v8_bytes, cell.copied_bytes):
            assert bench.num_layers_for(num_bytes) * num_bytes > 2 * 50e6


def test_flashinfer_is_compared_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cascade where all requests read one segment, ours over its wrappers everywhere."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    one, several = (
        set(contenders(Batch(cell, 1, torch.device("cpu")), interpret=False))
        for cell in bench.tiny_cells()
    )
    assert one - several == {"flashinfer/cascade"}
    assert "flashinfer/by-plan" in several
