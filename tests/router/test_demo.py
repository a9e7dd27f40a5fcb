"""The demo with simulated engines, as a person runs it: to the end, and interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services


def command(out: Path) -> list[str]:
    """The demo with simulated engines, as a child process."""
    return [sys.executable, "-m", "cartridge_router", "demo", "--engine", "sim", "--out", str(out)]


def environment(tmp_path: Path) -> dict[str, str]:
    """Everything that the demo writes goes below `tmp_path`, which marks its processes too."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def processes_of(tmp_path: Path) -> list[str]:
    """Command lines of all processes that name this test's folder, or work in it."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                about = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
                about += bytes((folder / "cwd").readlink())
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(tmp_path).encode() in about and state != "Z":
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_the_demo_shows_the_whole_chain(tmp_path: Path) -> None:
    """Status 0, `demo: ok` last, every row equal, answers named as simulated, nothing left."""
    out = tmp_path / "demo.json"
    done = subprocess.run(
        command(out),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "demo: ok"
    assert "Simulated engines" in done.stdout
    rows = json.loads(out.read_text())
    assert len(rows) >= 7
    assert [row["equal"] for row in rows] == [True] * len(rows)
    fields = {"question", "cartridge_ids", "equal", "replica", "tier", "decision"}
    fields |= {"ttft_plain_s", "ttft_cold_s", "ttft_warm_s"}
    assert all(fields <= row.keys() for row in rows)
    assert {row["route"] for row in rows} == {"chat", "completions"}
    assert max(len(row["cartridge_ids"]) for row in rows) == 2
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """When everything runs, Ctrl-C ends all of it with status 130."""
    with subprocess.Popen(
        command(tmp_path / "demo.json"),
        env={**environment(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert any("gateway: http" in line for line in process.stdout)
            # The demo, Redis, two replicas and the gateway.
            assert len(processes_of(tmp_path)) >= 5
            process.send_signal(number)
            rest = process.stdout.read()
            assert process.wait(timeout=60) == 130, rest
            assert "Traceback" not in rest
        finally:
            # Politely: the demo has children of its own to end.
            process.terminate()
    assert processes_of(tmp_path) == []
