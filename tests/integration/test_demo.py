"""`make demo` as a user runs it, with its own two engines. Slow: `make test-all`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEMO = [sys.executable, "-m", "cartridge_router", "demo"]
TIMEOUT_S = 1200


def _descendants(work: Path) -> list[str]:
    """Command lines of all processes that were started with this temporary folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"TMPDIR={work}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary folder names every process of the demo."""
    yield {**os.environ, "TMPDIR": str(tmp_path)}
    assert _descendants(tmp_path) == [], "the demo left processes behind"


@pytest.mark.timeout(TIMEOUT_S)
def test_demo_with_real_engines(tmp_path: Path, environment: dict[str, str]) -> None:
    """Every row is equal, the longest document is answered sooner warm, and nothing stays."""
    out = tmp_path / "demo.json"
    result = subprocess.run(
        [*DEMO, "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().splitlines()[-1] == "demo: ok"
    rows = json.loads(out.read_text())
    assert len(rows) == 8
    assert all(row["equal"] for row in rows)
    longest = max(
        (row for row in rows if row["ttft_plain_s"] is not None),
        key=lambda row: row["num_cartridge_tokens"],
    )
    assert longest["ttft_warm_s"] < longest["ttft_plain_s"]


@pytest.mark.timeout(TIMEOUT_S)
def test_interrupt_while_engines_start(environment: dict[str, str]) -> None:
    """Ctrl-C in the middle of two engines' start ends everything, with status 130."""
    with subprocess.Popen(
        DEMO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "tokens  sha256:" in line:  # the engines are starting, a Cartridge is built
                demo.send_signal(signal.SIGINT)
                break
        rest = demo.stdout.read()
    assert demo.returncode == 130, rest
    assert "nothing is left running" in rest
