"""Child processes of a load test: started, watched and ended by their ids, on every way out.

Owns their groups, their logs and what an interruption does. Refuses to leave one behind, and to
raise out of a signal handler: that could lose a child that has just been started.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLL_S: Final = 0.1
STOP_TIMEOUT_S: Final = 10.0
LOG_LINES: Final = 15


class LoadTestFailed(Exception):
    """The load test cannot go on; the text says why and where to look."""


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP came."""


@dataclass(frozen=True)
class Child:
    """One process, the leader of a group of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        """The end of what it said."""
        lines = self.log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{self.log} ends:", *lines])


class Children:
    """All processes of one load test. For use from one thread."""

    def __init__(self, log_dir: Path, interrupted: threading.Event) -> None:
        self._log_dir = log_dir
        self._interrupted = interrupted
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        is_heard: bool = False,
    ) -> Child:
        """Start one; its output goes to `NAME.log`, or what is heard goes on to our own."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own modules
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=None if is_heard else output,
                stderr=output,
                start_new_session=True,
            )
            child = Child(name, process, log)
            self._children.append(child)
        return child

    def wait_until(self, what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition while all processes live.

        Raises:
            LoadTestFailed: one has ended, or it takes too long.
            Interrupted: by a signal.
        """
        give_up_s = time.monotonic() + timeout_s
        while not is_true():
            self.check_alive()
            if time.monotonic() > give_up_s:
                raise LoadTestFailed(f"{what}: not so after {timeout_s:g} s; see {self._log_dir}")
            self.pause()

    def printed(self, child: Child, pattern: str, timeout_s: float) -> str:
        """Wait until the log of a process matches; returns the first group."""
        found: list[str] = []

        def has_match() -> bool:
            found.extend(re.findall(pattern, child.log.read_text("utf-8", "replace"), re.M))
            return bool(found)

        self.wait_until(f"{child.name} is ready", has_match, timeout_s)
        return found[0]

    def ended(self, child: Child, timeout_s: float) -> int:
        """Wait for the end of a process; returns its exit status.

        Raises:
            LoadTestFailed: it takes too long.
            Interrupted: by a signal.
        """
        give_up_s = time.monotonic() + timeout_s
        while (status := child.process.poll()) is None:
            if time.monotonic() > give_up_s:
                raise LoadTestFailed(f"{child.name} did not end within {timeout_s:g} s")
            self.pause()
        self._children.remove(child)
        return status

    def check_alive(self) -> None:
        """Raise `LoadTestFailed` when a process has ended."""
        for child in self._children:
            status = child.process.poll()
            if status is not None:
                raise LoadTestFailed(f"{child.name} ended with status {status}; {child.tail()}")

    @property
    def gone(self) -> list[str]:
        """Names of those that have ended by themselves."""
        return [child.name for child in self._children if child.process.poll() is not None]

    def pause(self) -> None:
        """Let a moment pass; raises `Interrupted` after a signal."""
        if self._interrupted.wait(POLL_S):
            raise Interrupted

    def stop(self) -> None:
        """End all groups, politely first."""
        for child in reversed(self._children):
            _signal_group(child, signal.SIGTERM)
        give_up_s = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, give_up_s - time.monotonic()))
            # Also what the leader left behind.
            _signal_group(child, signal.SIGKILL)
            child.process.wait()
        self._children.clear()


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


@contextlib.contextmanager
def running_children(log_dir: Path, interrupted: threading.Event) -> Iterator[Children]:
    """Processes that are ended with the block."""
    children = Children(log_dir, interrupted)
    try:
        yield children
    finally:
        children.stop()


@contextlib.contextmanager
def interruptions() -> Iterator[threading.Event]:
    """SIGINT, SIGTERM and SIGHUP set the event that is yielded, and do nothing else.

    What this process was told to ignore stays ignored, as by `nohup`.
    """
    event = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: event.set())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
