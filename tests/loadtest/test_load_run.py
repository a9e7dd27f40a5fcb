"""The whole command: a fleet is started, loaded, judged and ended, also when it is interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cartridge_loadtest.children import Children, LoadTestFailed
from cartridge_loadtest.open_loop_records import RequestRecord, read_lines
from cartridge_loadtest.run_summary import METRICS, Run, Slo, measured
from cartridge_loadtest.started_fleet import dram_bytes_for
from tests.loadtest.test_locustfile import MODEL, simulated_replica

COMMAND = [sys.executable, "-m", "cartridge_loadtest"]
SMALL = ["--num-replicas", "2", "--num-cartridges", "6", "--drain-s", "10"]


def load_test(*arguments: str, status: int) -> str:
    """Run the command to its end; returns what it printed."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    give_up_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below one."""
    found: dict[int, str] = {}
    for folder in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, folder.read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found |= {child: command} | descendants(child)
    return found


@pytest.mark.services
def test_the_report_says_what_the_rows_say(tmp_path: Path) -> None:
    """Results are those of the rows, the page shows them, and a missed target is status 1."""
    targets = tmp_path / "targets.toml"
    # No TTFT is 0; the others hold on any machine.
    targets.write_text(
        "[slo]\nttft_s = 50\n[generator]\nlate_p99_s = 50\n"
        "[targets]\nttft_p50_s = 0\nerror_ratio = 0\nreplicas_at_end_ratio = 1\n"
    )
    printed = load_test(
        *(*SMALL, "--duration-s", "4", "--out", str(tmp_path), "--targets", str(targets)),
        *("--fault", 'sim-1={"delay_s": 0.01}'),
        status=1,
    )
    records = read_lines(tmp_path / "rows.jsonl", RequestRecord)
    results = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    run = Run(
        records=records,
        num_planned=len((tmp_path / "plan.jsonl").read_text().splitlines()),
        duration_s=4.0,
        slo=Slo(ttft_s=50),
        replicas=("sim-0", "sim-1"),
    )
    assert {name: row["value"] for name, row in results.items()} == measured(run)
    missed = [name for name, row in results.items() if row["ok"] is False]
    assert missed == ["ttft_p50_s"]
    assert re.search(r"^MISSED ttft_p50_s", printed, re.MULTILINE)
    # The chain behind it: all were answered, by both, from tiers that the gateway named.
    assert run.num_planned == len(records) > 0
    assert {each.replica for each in records} == {"sim-0", "sim-1"}
    assert {each.tier for each in records} >= {"remote", "dram"}
    assert all(each.terms_s for each in records)
    page = (tmp_path / "report.html").read_text()
    assert "sim-1: {&#34;delay_s&#34;: 0.01}" in page
    assert page.count("<svg") == 6
    assert not re.search(r'(?:src|href)="(?!#)', page)
    for name in METRICS:
        value = results[name]["value"]
        assert value is not None
        assert f"{value:.4g}" in page.partition(f"<code>{name}</code>")[2][:200]


@pytest.mark.services
def test_a_server_that_runs_already_is_loaded_too(tmp_path: Path) -> None:
    """`--host` starts nothing; the model is asked for; all targets reached is status 0."""
    targets = tmp_path / "targets.toml"
    targets.write_text("[generator]\nlate_p99_s = 50\n[targets]\nerror_ratio = 0\n")
    with simulated_replica() as url:
        printed = load_test(
            *("--host", url, "--cartridges", "rules@1", "--duration-s", "1"),
            *("--out", str(tmp_path), "--targets", str(targets)),
            status=0,
        )
    assert "PASS" in printed
    assert f"{url}, model {MODEL}" in (tmp_path / "report.html").read_text()
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["locust.log"]


@pytest.mark.services
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interruption_ends_everything_that_was_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C or a closed terminal: Redis, replicas, gateway and Locust are gone, status 130."""
    # Under nohup, where tests may run, a closed terminal ends nothing.
    command = ["env", "--default-signal", *COMMAND, *SMALL, "--duration-s", "100"]
    command += ["--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            rows = tmp_path / "rows.jsonl"
            wait_for(lambda: rows.exists() and rows.stat().st_size > 0, "a request has ended")
            started = descendants(process.pid)
            told = "\n".join(started.values())
            for part in ("valkey-server", "simulated_replica", "cartridge_router", "locust"):
                assert part in told
            process.send_signal(number)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    assert [told for pid, told in started.items() if is_running(pid)] == []


@pytest.mark.parametrize(("sizes", "expected"), [([5], 5), ([9, 1], 9), ([1] * 100, 35)])
def test_every_cartridge_has_room_in_a_started_replica(sizes: list[int], expected: int) -> None:
    """About a third of all fit, and the largest in any case."""
    assert dram_bytes_for(sizes) == expected


def test_results_need_a_folder(tmp_path: Path) -> None:
    """Where there is none and none can be made, that is said, with status 2."""
    file = tmp_path / "file"
    file.touch()
    assert "File exists" in load_test("--out", str(file), status=2)


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    """A group is ended as a whole, though its leader has ended by itself."""
    children = Children(tmp_path, threading.Event())
    child = children.start("parent", ["sh", "-c", "sleep 1000 & echo started $!"])
    grandchild = int(children.printed(child, r"^started (\d+)$", 30))
    wait_for(lambda: children.gone == ["parent"], "the leader has ended")
    assert is_running(grandchild)
    children.stop()
    wait_for(lambda: not is_running(grandchild), "the grandchild is gone")


def test_a_child_that_ends_too_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    """Waiting for something that cannot come any more fails at once."""
    children = Children(tmp_path, threading.Event())
    child = children.start("replica", ["sh", "-c", "echo no such model; exit 3"])
    with pytest.raises(LoadTestFailed, match=r"replica ended with status 3; (.|\n)*no such model"):
        children.printed(child, r"^ready$", 60)
    children.stop()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--targets", os.devnull + "/none"], "none"),
        (["--trace", os.devnull], "two requests at least"),
        (["--trace", os.devnull + "/none"], "Not a directory"),
        (["--rate", "0"], "a rate and a duration"),
        (["--drain-s", "-1"], "patience"),
        (["--host", "http://127.0.0.1:1"], "does not answer"),
        (["--fault", "sim-9={}"], "'sim-9' is none of the replicas"),
        (["--host", "http://127.0.0.1:1", "--fault", "sim-0={}"], "'sim-0' is none"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], part: str
) -> None:
    """Status 2 and one line of why."""
    printed = load_test(*arguments, "--out", str(tmp_path), status=2)
    assert part in printed
    assert not (tmp_path / "logs").exists()
