"""The Locust user, run headless by Locust itself against a simulated replica in its own process."""

import contextlib
import csv
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import cartridge_loadtest

LOCUSTFILE = Path(cartridge_loadtest.__path__[0]) / "locustfile.py"
MODEL = "smollm2-135m-instruct"

pytestmark = pytest.mark.services


@contextlib.contextmanager
def simulated_replica() -> Iterator[str]:
    """URL of a simulated replica in a process of its own."""
    command = [sys.executable, "-m", "cartridge_loadtest.simulated_replica", "--model", MODEL]
    with subprocess.Popen(
        [*command, "--num-tokens", "4", "--ttft-s", "0.02", "--itl-s", "0.01"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, url = process.stdout.readline().strip().partition(" ")
            assert ready == "ready"
            yield url
        finally:
            process.terminate()


def run_locust(url: str, folder: Path, *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status of a short run, and its rows by name."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url]
    load = ["-u", "2", "-r", "2", "-t", "3s", "--csv", str(folder / "run"), "--only-summary"]
    done = subprocess.run(
        [*command, *load, *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    with (folder / "run_stats.csv").open(newline="") as file:
        return done.returncode, {row["Name"]: row for row in csv.DictReader(file)}


def test_it_reports_ttft_itl_and_total(tmp_path: Path) -> None:
    """Three rows: a TTFT and a total for each answer, three gaps for its four chunks."""
    with simulated_replica() as url:
        status, rows = run_locust(url, tmp_path, "--cartridges", "rules@1,rules@1+prices@2")
        with urllib.request.urlopen(f"{url}/sim/requests", timeout=10) as response:  # noqa: S310
            recorded = json.load(response)
    assert status == 0
    assert set(rows) == {"ttft", "itl", "total", "Aggregated"}
    count = int(rows["total"]["Request Count"])
    assert count > 0
    assert int(rows["ttft"]["Request Count"]) == count
    assert int(rows["itl"]["Request Count"]) == 3 * count
    assert all(row["Failure Count"] == "0" for row in rows.values())
    # The replica sleeps this long at least: 20 ms before the first chunk, 10 ms before the others.
    assert float(rows["ttft"]["Min Response Time"]) >= 20.0
    assert float(rows["total"]["Min Response Time"]) >= 50.0
    bodies = [json.loads(entry["body"]) for entry in recorded]
    asked = {tuple(body["cartridge_ids"]) for body in bodies}
    assert asked == {("rules@1",), ("rules@1", "prices@2")}
    assert all(body["stream"] is True for body in bodies)


def test_a_stream_without_its_end_is_a_failure(tmp_path: Path) -> None:
    """Connections cut in the middle fail `total`, add no `ttft` row, and fail the run."""
    with simulated_replica() as url:
        fault = urllib.request.Request(  # noqa: S310
            f"{url}/sim/faults", data=b'{"die_after_chunks": 2}', method="POST"
        )
        urllib.request.urlopen(fault, timeout=10).close()  # noqa: S310
        status, rows = run_locust(url, tmp_path)
    assert status == 1
    assert rows["total"]["Failure Count"] == rows["total"]["Request Count"]
    assert "ttft" not in rows
