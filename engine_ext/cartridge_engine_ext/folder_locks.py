"""Locks that the processes of one machine share through files: shared or exclusive, by flock.

Owns taking, waiting, and the removal of a lock's file. Refuses network file systems' semantics: the
folder is on a local disk, and a crash of the holder releases.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cartridge_proto.stores import StoreUnavailable

_POLL_S = 0.02


class DeadlinePassed(StoreUnavailable):
    """Something was not done in time."""


class Stopped(StoreUnavailable):
    """The tier was closed meanwhile."""


class FileLock:
    """A held lock. Of one open file, so two of one process exclude each other too."""

    def __init__(self, path: Path, descriptor: int, *, is_shared: bool) -> None:
        self.path = path
        self.is_shared = is_shared
        self._descriptor = descriptor

    def try_share(self) -> bool:
        """From exclusive to shared; `False` if another process took it in between: it is lost.

        The kernel gives the exclusive lock up before it takes the shared one.
        """
        self.is_shared = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self._descriptor).st_nlink > 0

    def remove(self) -> None:
        """Remove the file of an exclusive lock; who waits for it opens a new one."""
        assert not self.is_shared  # noqa: S101 - a fault of this program
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others have it; may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def try_lock(path: Path, *, is_shared: bool) -> FileLock | None:
    """Take a lock, unless somebody holds it in a way that excludes it.

    Raises:
        OSError: the file cannot be made.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            is_current = os.fstat(descriptor).st_nlink > 0
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        if is_current:
            return FileLock(path, descriptor, is_shared=is_shared)
        # Its file was removed between open and lock.
        os.close(descriptor)


def wait_for_lock(
    path: Path, *, is_shared: bool, deadline_s: float, stop: threading.Event
) -> FileLock:
    """Take a lock, waiting for it until `deadline_s` on the monotonic clock.

    Raises:
        DeadlinePassed: it was not free in time.
        Stopped: `stop` was set.
        OSError: the file cannot be made.
    """
    while True:
        lock = try_lock(path, is_shared=is_shared)
        if lock is not None:
            return lock
        wait_until_retry(deadline_s, stop, f"{path.name}: held by another load")


def wait_until_retry(deadline_s: float, stop: threading.Event, what: str) -> None:
    """Pause before something is tried again.

    Raises:
        DeadlinePassed: there is no time left; `what` says for what.
        Stopped: `stop` was set.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlinePassed(f"{what} until the deadline")
    if stop.wait(min(_POLL_S, left_s)):
        raise Stopped(f"{what}; the nvme tier was closed")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock for a moment; holders of this one never wait for anything else.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
