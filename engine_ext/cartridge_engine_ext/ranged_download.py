"""One blob, fetched in ranges into a file that another process can go on with.

Owns the partial file, the journal of its finished ranges, the order of fetching and the check of
the whole. Refuses to be the blob's name: who calls gives it one after `verify_or_forget` agreed.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from pathlib import Path

import msgspec

from cartridge_engine_ext.folder_locks import DeadlinePassed, Stopped, wait_until_retry
from cartridge_proto.digest import Digest
from cartridge_proto.failpoints import failpoint
from cartridge_proto.manifest import Manifest
from cartridge_proto.stores import Store, StoreUnavailable

MIN_RANGE_BYTES = 1 << 20
NUM_TRIES = 4
"""Times that a range is asked for while the store is unavailable."""
_FIRST_PAUSE_S = 0.1
_PIECE_BYTES = 1 << 20


class _JournalHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a journal; the lines after it are numbers of ranges."""

    size_bytes: int
    range_bytes: int


class PartialBlob:
    """The unfinished file of one blob and its journal; the caller holds the blob's lock.

    What the journal says is believed only as far as what to fetch: the whole is hashed at the end.
    """

    def __init__(self, folder: Path, digest: Digest, size_bytes: int, range_bytes: int) -> None:
        stem = digest.removeprefix("sha256:")
        self.path = folder / stem
        self.digest = digest
        self._journal_path = folder / f"{stem}.journal"
        self._size_bytes = size_bytes
        self._range_bytes = range_bytes
        self._lock = threading.Lock()
        self._finished: set[int] = set()
        self._file = -1
        self._journal = -1

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the file takes on the disk already."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def finished_bytes(self) -> int:
        """Bytes of the ranges that are there."""
        with self._lock:
            return sum(end - begin for begin, end in map(self._bounds, self._finished))

    def peek_bytes(self) -> int:
        """About how many bytes the process that fetches it has; for progress only."""
        try:
            num_lines = self._journal_path.read_bytes().count(b"\n")
        except OSError:
            return 0
        return min(max(0, num_lines - 1) * self._range_bytes, self._size_bytes)

    def missing(self) -> list[int]:
        """Numbers of the ranges that are still to be fetched, ascending."""
        num_ranges = -(-self._size_bytes // self._range_bytes)
        with self._lock:
            return [index for index in range(num_ranges) if index not in self._finished]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open or make both files, with the disk's room for the whole.

        Raises:
            OSError: of the disk.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        head = msgspec.json.encode(_JournalHead(self._size_bytes, self._range_bytes)) + b"\n"
        try:
            self._file = os.open(self.path, flags, 0o644)
            is_whole_size = os.fstat(self._file).st_size == self._size_bytes
            if self._size_bytes and not is_whole_size:
                os.ftruncate(self._file, 0)
                os.posix_fallocate(self._file, 0, self._size_bytes)
            self._journal = os.open(self._journal_path, flags | os.O_APPEND, 0o644)
            self._finished = self._read_journal(head) if is_whole_size else set()
            if not self._finished:
                os.ftruncate(self._journal, 0)
                os.write(self._journal, head)
            yield
        finally:
            for descriptor in (self._file, self._journal):
                if descriptor >= 0:
                    os.close(descriptor)
            self._file = self._journal = -1

    def write(self, index: int, data: memoryview) -> None:
        """Put a range in its place, and note that it is there. From any thread.

        Raises:
            OSError: of the disk.
        """
        begin, _ = self._bounds(index)
        failpoint("nvme_before_range")
        position = 0
        while position < len(data):
            position += os.pwrite(self._file, data[position:], begin + position)
        failpoint("nvme_after_range")
        with self._lock:
            os.write(self._journal, f"{index}\n".encode())
            self._finished.add(index)
        failpoint("nvme_after_journal")

    def fetch(
        self,
        store: Store,
        executor: Executor,
        *,
        num_parallel: int,
        deadline_s: float,
        stop: threading.Event,
        on_progress: Callable[[], None],
    ) -> None:
        """Fetch the missing ranges, `num_parallel` at a time.

        Raises:
            StoreError: by its kinds; what was fetched stays for the next try.
            DeadlinePassed: not done at `deadline_s` (monotonic).
            OSError: of the disk.
        """
        ended = threading.Event()

        def check() -> None:
            if stop.is_set() or ended.is_set():
                raise Stopped(f"blob {self.digest}: its load was given up")
            if time.monotonic() > deadline_s:
                raise DeadlinePassed(
                    f"blob {self.digest}: {self.finished_bytes} of {self._size_bytes} bytes were "
                    "fetched until the deadline"
                )

        def submit(index: int) -> Future[None]:
            try:
                return executor.submit(self._fetch_range, store, index, check, deadline_s, stop)
            except RuntimeError as error:
                raise Stopped(f"blob {self.digest}: its load was given up") from error

        waiting = self.missing()[::-1]
        running: set[Future[None]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < num_parallel:
                    running.add(submit(waiting.pop()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    on_progress()
        finally:
            # Nothing writes into the file any more when this returns.
            ended.set()
            wait(running)

    def verify_or_forget(self, manifest: Manifest) -> bool:
        """Hash the whole file; if it is wrong, forget the ranges that are, by the tensors' digests.

        A part that no tensor covers (the header) has no digest of its own: it is forgotten when all
        tensors are right. Of an encoded blob everything is: tensors' digests are of other bytes.

        Raises:
            OSError: of the disk.
        """
        failpoint("nvme_before_verify")
        if self._hash(0, self._size_bytes) == self.digest:
            failpoint("nvme_after_verify")
            return True
        wrong = self._wrong_spans(manifest)
        with self._lock:
            for begin, end in wrong:
                first, last = begin // self._range_bytes, (end - 1) // self._range_bytes
                self._finished -= set(range(first, last + 1))
            os.ftruncate(self._journal, 0)
            head = msgspec.json.encode(_JournalHead(self._size_bytes, self._range_bytes))
            lines = [head, *(str(index).encode() for index in sorted(self._finished))]
            os.write(self._journal, b"\n".join(lines) + b"\n")
        return False

    def _wrong_spans(self, manifest: Manifest) -> list[tuple[int, int]]:
        """Bytes [begin, end) of a file with the wrong digest that may be what is wrong in it."""
        if any(blob.sha256 == self.digest and blob.encoding for blob in manifest.payload):
            return [(0, self._size_bytes)]
        spans = sorted(
            (tensor.byte_range, tensor.sha256)
            for tensor in manifest.tensors.values()
            if tensor.blob == self.digest
        )
        wrong = [
            span for span, digest in spans if span[0] < span[1] and self._hash(*span) != digest
        ]
        if wrong:
            return wrong
        # Between, before and behind the tensors.
        edges = [0, *(edge for span, _ in spans for edge in span), self._size_bytes]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return [(begin, end) for begin, end in gaps if begin < end]

    def sync(self) -> None:
        """Let the bytes outlive a crash of the machine."""
        os.fsync(self._file)
        failpoint("nvme_after_fsync")

    def remove(self) -> None:
        """Remove both files, as far as they are there."""
        self._journal_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def remove_journal(self) -> None:
        """Remove the journal of a file that has got its name."""
        self._journal_path.unlink(missing_ok=True)

    def _fetch_range(
        self,
        store: Store,
        index: int,
        check: Callable[[], None],
        deadline_s: float,
        stop: threading.Event,
    ) -> None:
        begin, end = self._bounds(index)
        buffer = memoryview(bytearray(end - begin))

        def arrived(count: int) -> None:
            check()

        pause_s = _FIRST_PAUSE_S
        for num_left in reversed(range(NUM_TRIES)):
            check()
            try:
                store.read_unverified_range(
                    self.digest, begin, buffer, size_bytes=self._size_bytes, on_bytes=arrived
                )
            except (DeadlinePassed, Stopped):
                raise
            except StoreUnavailable:
                if num_left == 0:
                    raise
                retry_s = time.monotonic() + pause_s
                while time.monotonic() < retry_s:
                    check()
                    wait_until_retry(deadline_s, stop, f"blob {self.digest}: not fetched")
                pause_s *= 2
            else:
                self.write(index, buffer)
                return

    def _bounds(self, index: int) -> tuple[int, int]:
        begin = index * self._range_bytes
        return begin, min(begin + self._range_bytes, self._size_bytes)

    def _read_journal(self, head: bytes) -> set[int]:
        """Ranges that an earlier try finished; none if the journal is another download's."""
        size = os.fstat(self._journal).st_size
        data = os.pread(self._journal, min(size, 1 << 24), 0)
        if not data.startswith(head):
            return set()
        num_ranges = -(-self._size_bytes // self._range_bytes)
        # The last line may be torn.
        lines = data[len(head) :].split(b"\n")[:-1]
        numbers = {int(line) for line in lines if line.isdigit() and len(line) < 16}
        return {number for number in numbers if number < num_ranges}

    def _hash(self, begin: int, end: int) -> str:
        hasher = hashlib.sha256()
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while begin < end:
            count = os.preadv(self._file, [buffer[: min(_PIECE_BYTES, end - begin)]], begin)
            if count == 0:
                break
            hasher.update(buffer[:count])
            begin += count
        return "sha256:" + hasher.hexdigest()
