"""The machine of the history test: a store, a shared nvme folder, workers, and what kills them.

Owns the processes, the random moments of kills, and the files of the history. Refuses to judge.
"""

import contextlib
import json
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from cartridge_proto.stores import LocalStore
from tests.engine_ext.artifact_history import ALIASES, HistoryModel, calls_of, universe
from tests.engine_ext.history_worker import Birth, Fault, History, move_alias, publish
from tests.engine_ext.stored_artifacts import WAIT_S

CONTROLLER = -1
"""Number of the "worker" that publishes before all others begin."""
FAILPOINTS = (
    *("before_write", "after_write", "after_fsync", "before_rename", "after_rename"),
    *("nvme_before_range", "nvme_after_range", "nvme_after_journal", "nvme_before_verify"),
    *("nvme_after_verify", "nvme_after_fsync", "nvme_before_rename", "nvme_after_rename"),
    *("nvme_after_manifest", "nvme_evicting"),
)
FAILING = ":error"
"""End of a failpoint at which the disk fails instead."""


class WorkerEnded(Exception):
    """A worker ended that nobody had killed."""


@dataclass
class Running:
    """A worker process, as the controller sees it."""

    birth: Birth
    pidfd: int
    channel: socket.socket
    lines: TextIO
    is_killed: bool = False

    def tell(self, **message: Any) -> None:
        """Ask for something; a worker that is dying does not hear it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.lines.write(json.dumps(message) + "\n")
            self.lines.flush()

    def hear(self) -> bool:
        """Whether it has answered; False when it is gone."""
        try:
            return bool(self.lines.readline())
        except ConnectionResetError:
            return False

    def kill(self) -> None:
        """SIGKILL; does nothing when it is gone."""
        self.is_killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait_for_end(self) -> None:
        """Until the process is gone; its descriptors are given back."""
        assert select.select([self.pidfd], [], [], WAIT_S)[0], f"{self.birth} does not end"
        os.close(self.pidfd)
        # What was not sent goes nowhere.
        with contextlib.suppress(OSError):
            self.lines.close()
        self.channel.close()


@dataclass
class Machine:
    """Workers over shared folders. `seed` decides operations, kills and failpoints."""

    root: Path
    nursery: "subprocess.Popen[str]"
    listener: socket.socket
    seed: int
    fault: Fault = Fault.NONE
    workers: dict[int, Running] = field(default_factory=dict)
    deaths: dict[tuple[int, int], int] = field(default_factory=dict)
    failing: set[tuple[int, int]] = field(default_factory=set)
    num_kills: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    # --- workers ---------------------------------------------------------------------------------
    def start(self, worker: int, *, boot: int = 0, failpoint: str = "") -> None:
        """Start a worker, for the first time or once more."""
        birth = Birth(str(self.root), worker, boot, self.seed, failpoint, self.fault)
        if failpoint.endswith(FAILING):
            self.failing.add((worker, boot))
        assert self.nursery.stdin is not None
        assert self.nursery.stdout is not None
        self.nursery.stdin.write(json.dumps(asdict(birth)) + "\n")
        self.nursery.stdin.flush()
        pidfd = os.pidfd_open(int(self.nursery.stdout.readline()))
        channel, _ = self.listener.accept()
        running = Running(birth, pidfd, channel, channel.makefile("rw"))
        assert running.hear(), f"{birth} did not start"
        self.workers[worker] = running

    def run(self, num_operations: int, *, num_kills: int = 0) -> None:
        """Let all workers run at the same time, and kill some; ends when all have done theirs."""
        for running in self.workers.values():
            running.tell(do="run", num_operations=num_operations)
        with selectors.DefaultSelector() as selector:
            for running in self.workers.values():
                selector.register(running.channel, selectors.EVENT_READ, running)
            while selector.get_map():
                pause_s = self._random.uniform(0.005, 0.1) if num_kills else WAIT_S
                ready = selector.select(pause_s)
                if not ready:
                    assert num_kills, f"{[key.data.birth for key in selector.get_map().values()]}"
                    num_kills -= 1
                    key = self._random.choice(list(selector.get_map().values()))
                    key.data.kill()
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    if not key.data.hear():
                        again = self._start_again(key.data, self.draw_failpoint())
                        again.tell(do="run", num_operations=1 + num_operations // 3)
                        selector.register(again.channel, selectors.EVENT_READ, again)

    def _start_again(self, gone: Running, failpoint: str = "") -> Running:
        """The next boot of a worker that was killed."""
        birth = gone.birth
        gone.wait_for_end()
        self.deaths[birth.worker, birth.boot] = time.monotonic_ns()
        if not gone.is_killed and not birth.failpoint:
            raise WorkerEnded(f"{birth} ended by itself: see the output of the nursery")
        self.num_kills += 1
        self.start(birth.worker, boot=birth.boot + 1, failpoint=failpoint)
        return self.workers[birth.worker]

    def draw_failpoint(self) -> str:
        """No failpoint, or one; of those one in three makes the disk fail."""
        if self._random.random() < 0.5:
            return ""
        end = FAILING if self._random.random() < 1 / 3 else ""
        return self._random.choice(FAILPOINTS) + end

    def look(self) -> None:
        """Let all workers come to rest, and write down what they hold then."""
        for asked in ("settle", "tell"):
            for running in self.workers.values():
                running.tell(do=asked)
            for worker in self.workers:
                while not self.workers[worker].hear():
                    # What it loads in the background has come to its failpoint.
                    self._start_again(self.workers[worker]).tell(do=asked)

    def stop(self) -> None:
        """Kill all that runs."""
        for running in self.workers.values():
            running.kill()
            running.wait_for_end()
        self.workers.clear()

    # --- the history -----------------------------------------------------------------------------
    def publish_first(self) -> None:
        """Half of the universe, and an alias for each name, before any worker starts."""
        store = LocalStore(self.root / "store")
        history = History(self.root / "history", CONTROLLER, 0)
        for made in universe()[::2]:
            publish(history, store, made)
        for number, alias in enumerate(ALIASES):
            move_alias(history, store, alias, universe()[2 * number])
        history.close()

    def model(self) -> HistoryModel:
        """The model of all that was written down so far."""
        lines: list[str] = []
        for path in sorted((self.root / "history").iterdir()):
            lines += path.read_text().splitlines()
        calls, quiet = calls_of(lines, self.deaths)
        return HistoryModel(calls, quiet, self.failing)


@contextlib.contextmanager
def running_nursery(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """The process that forks workers; what workers say on stderr goes to `folder`."""
    with (
        (folder / "nursery.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine_ext.history_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as nursery,
    ):
        try:
            yield nursery
        finally:
            nursery.kill()


@contextlib.contextmanager
def running_machine(
    root: Path, nursery: "subprocess.Popen[str]", *, seed: int, fault: Fault = Fault.NONE
) -> Iterator[Machine]:
    """A machine without workers; all are killed at the end."""
    (root / "history").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s"))
        listener.listen()
        listener.settimeout(WAIT_S)
        machine = Machine(root, nursery, listener, seed, fault)
        machine.publish_first()
        try:
            yield machine
        finally:
            machine.stop()
