"""The dram tier of one process: a bounded pool of verified artifacts, loaded in the background.

Owns what is queued, loading, ready or failed, who uses or pins it, and the loader threads. Refuses
bytes that do not match their manifest, to evict what is used or pinned, and to hold a thread for a
load that waits for room.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from cartridge_engine_ext.dram_tier import (
    OPPORTUNISTIC,
    REQUEST_PRIORITY,
    Artifact,
    ArtifactReader,
    ArtifactSource,
    Holding,
    StoreSource,
)
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.eviction import EvictionPolicy, LeastRecentlyUsed
from cartridge_engine_ext.folder_locks import DeadlinePassed
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_engine_ext.thread_priority import yield_to_serving
from cartridge_proto.codecs import CodecUnavailable, read_decoded_blob
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Blob, Manifest
from cartridge_proto.residency import FailureReason
from cartridge_proto.safetensors_header import InvalidPayload, check_blob
from cartridge_proto.stores import NotInStore, StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

MAX_PREFETCHES = 256
"""Loads under way that nobody uses."""
MAX_OWNERS = 64
"""Owners of pins on one artifact."""


MAX_EXAMINED = 100_000
"""Artifacts whose insides need no second look."""


class _NobodyWaits(Refusal):
    """A load is given up because no request needs it; untrue once one does."""


class _State(Enum):
    QUEUED = auto()
    """A loader has yet to look at it."""
    LOADING = auto()
    """A loader has it."""
    WAITING = auto()
    """Its size is known, and there is no room."""
    READY = auto()
    FAILED = auto()


@dataclass
class _Entry:
    """One digest in the pool.

    `done` is set after `on_ready` has returned: before that an artifact is not evicted, so that no
    withdrawal overtakes its announcement.
    """

    digest: Digest
    order: int
    deadline_s: float
    priority: int
    num_users: int = 0
    is_prefetch: bool = False
    state: _State = _State.QUEUED
    manifest: Manifest | None = None
    reserved_bytes: int = 0
    artifact: Artifact | None = None
    failure: Refusal | None = None
    started_s: float | None = None
    load_s: float = 0.0
    pinned_by: set[str] = field(default_factory=set)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_evictable(self) -> bool:
        return (
            self.state is _State.READY
            and self.done.is_set()
            and not self.num_users
            and not self.pinned_by
        )

    def is_wanted(self, now_s: float) -> bool:
        return self.num_users > 0 or (self.is_prefetch and now_s < self.deadline_s)

    def as_holding(self) -> Holding:
        size_bytes = self.manifest.decoded_bytes if self.manifest is not None else None
        return Holding(
            digest=self.digest,
            is_ready=self.state is _State.READY,
            size_bytes=size_bytes if self.artifact is None else self.artifact.size_bytes,
            num_users=self.num_users,
            pinned_by=tuple(sorted(self.pinned_by)),
        )


class DramPool:
    """Verified artifacts up to `capacity_bytes`; a `DramTier`.

    A load reserves what it takes at most: with the stored bytes of a blob that is being decoded.

    `admit(manifest)` may refuse an artifact before its blobs are read, `check(manifest, blob
    digest, buffer)` after each was read and hashed; both raise, `admit` a `Refusal`, `check` an
    `InvalidPayload`. `on_ready(digest, size_bytes)` is called when an artifact can be used,
    `on_failed(digest, reason)` when its load has failed, `on_evict(digest)` before its memory is
    given back, `on_pin(digest, is_pinned)` when its first pin comes or its last one goes,
    `on_shortage()` when a load begins to wait for room. They run on the thread that caused them,
    without the pool's lock.
    """

    def __init__(
        self,
        *,
        source: ArtifactReader,
        capacity_bytes: int,
        num_loaders: int,
        pinned_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        admit: Callable[[Manifest], None] = lambda manifest: None,
        check: Callable[[Manifest, str, memoryview], None] = lambda manifest, digest, buffer: None,
        on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
        on_failed: Callable[[Digest, FailureReason], None] = lambda digest, reason: None,
        on_evict: Callable[[Digest], None] = lambda digest: None,
        on_pin: Callable[[Digest, bool], None] = lambda digest, is_pinned: None,
        on_shortage: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source if isinstance(source, ArtifactSource) else StoreSource(source)
        self._capacity_bytes = capacity_bytes
        self._pinned_bytes = capacity_bytes // 2 if pinned_bytes is None else pinned_bytes
        self._policy = policy or LeastRecentlyUsed()
        self._admit = admit
        self._check = check
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_evict = on_evict
        self._on_pin = on_pin
        self._on_shortage = on_shortage
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pin_lock = threading.Lock()
        self._examined: set[Digest] = set()
        self._entries: OrderedDict[Digest, _Entry] = OrderedDict()
        self._num_entries_made = 0
        self._is_closed = False
        self._loaders = [
            threading.Thread(target=self._run_loader, name=f"artifact-loader-{n}", daemon=True)
            for n in range(num_loaders)
        ]
        for loader in self._loaders:
            loader.start()

    @property
    def capacity_bytes(self) -> int:
        """Bound of its memory."""
        return self._capacity_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bound of what may be pinned."""
        return self._pinned_bytes

    # --- use -----------------------------------------------------------------------------------
    def acquire(self, digest: Digest, deadline_s: float, priority: int = REQUEST_PRIORITY) -> bool:
        """Use an artifact until `release`; starts its load if it is not there.

        Args:
            digest: the artifact.
            deadline_s: `time.monotonic()` until which a load may wait for room.
            priority: loads of a higher one go first.

        Returns:
            Whether it was ready already.
        """
        with self._lock:
            entry = self._want(digest, deadline_s, priority)
            entry.num_users += 1
            if entry.artifact is not None:
                self._policy.touch(digest, entry.reserved_bytes)
            return entry.artifact is not None

    def prefetch(self, digest: Digest, deadline_s: float, priority: int = OPPORTUNISTIC) -> None:
        """Start a load that nobody uses yet. It is given up at its deadline if it has not begun.

        Raises:
            Refusal: more than `MAX_PREFETCHES` are under way.
        """
        with self._lock:
            if self._is_closed:
                raise _closed()
            entry = self._entries.get(digest)
            if entry is not None and entry.state is _State.READY:
                return
            num_idle = sum(
                1
                for other in self._entries.values()
                if not other.num_users and other.state is not _State.READY
            )
            if num_idle >= MAX_PREFETCHES:
                raise Refusal(
                    FailureReason.CAPACITY, f"prefetches: the limit is {MAX_PREFETCHES} at a time"
                )
            self._want(digest, deadline_s, priority).is_prefetch = True

    def _want(self, digest: Digest, deadline_s: float, priority: int) -> _Entry:
        """The entry of a digest, new ones queued. Called with the lock held."""
        entry = self._entries.get(digest)
        if entry is None or entry.state is _State.FAILED:
            # A failed load is tried again; who still uses the failed one is counted on.
            num_users = entry.num_users if entry is not None else 0
            self._num_entries_made += 1
            entry = _Entry(digest, self._num_entries_made, deadline_s, priority, num_users)
            self._entries[digest] = entry
            if self._is_closed:
                # Kept for its users, unlike what `_settle` ends.
                entry.state, entry.failure = _State.FAILED, _closed()
                entry.done.set()
        entry.deadline_s = max(entry.deadline_s, deadline_s)
        entry.priority = max(entry.priority, priority)
        self._entries.move_to_end(digest)
        if entry.state in _UNBEGUN:
            self._changed.notify_all()
        return entry

    def release(self, digest: Digest) -> None:
        """End one use. A load that has not begun and that nobody wants any more is dropped."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return
            entry.num_users = max(0, entry.num_users - 1)
            if entry.num_users == 0:
                if entry.state is _State.FAILED:
                    del self._entries[digest]
                elif entry.state in _UNBEGUN and not entry.is_wanted(time.monotonic()):
                    self._settle(entry, _unwanted(digest))
                # Loaders sleep through the releases of every request but those that make room.
                if any(other.state is _State.WAITING for other in self._entries.values()):
                    self._changed.notify_all()

    def poll(self, digest: Digest) -> Artifact | None:
        """The artifact when it is ready, `None` while it loads. Never blocks on I/O.

        Raises:
            Refusal: the load failed, or nobody asked for it.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                raise Refusal(FailureReason.INTERNAL, f"{digest} was not acquired")
            if entry.failure is not None:
                raise entry.failure
            return entry.artifact

    def wait(self, digest: Digest, timeout_s: float) -> tuple[Artifact, float]:
        """Block until an acquired artifact is ready; also returns its load time in seconds.

        Raises:
            Refusal: the load failed, or was not done in time.
        """
        with self._lock:
            entry = self._entries.get(digest)
        if entry is None or not entry.done.wait(timeout_s):
            raise Refusal(FailureReason.DEADLINE, f"{digest} was not loaded in {timeout_s:.3f} s")
        # This entry's own end: by now another acquire may have started the load anew.
        with self._lock:
            if entry.failure is not None:
                raise entry.failure
            if entry.artifact is None:
                raise Refusal(FailureReason.INTERNAL, f"{digest}: its load ended with nothing")
            return entry.artifact, entry.load_s

    def adopt(self, artifact: Artifact) -> None:
        """Take in an artifact that did not come from the source (the self-test's), and its memory.

        One that is here already is kept, and the given memory is closed.

        Raises:
            Refusal: there is no room for it; its memory is closed.
        """
        digest, size_bytes = artifact.digest, artifact.size_bytes
        with self._lock:
            before = self._entries.get(digest)
            is_known = before is not None and before.state is not _State.FAILED
            victims = None if is_known or self._is_closed else self._victims(size_bytes)
            if victims is not None:
                num_users = before.num_users if before is not None else 0
                self._num_entries_made += 1
                entry = _Entry(digest, self._num_entries_made, 0.0, REQUEST_PRIORITY, num_users)
                entry.state = _State.LOADING
                self._take_room(entry, size_bytes, victims)
                self._entries[digest] = entry
        if victims is None:
            artifact.close()
            if is_known:
                return
            raise self._no_room(size_bytes)
        self._dispose_all(victims)
        with self._lock:
            entry.reserved_bytes = size_bytes
            entry.artifact, entry.manifest = artifact, artifact.manifest
            entry.state = _State.READY
            self._policy.touch(digest, size_bytes)
            entry.done.set()
            self._changed.notify_all()

    # --- control -------------------------------------------------------------------------------
    def expect(self, digest: Digest, at_s: float) -> None:
        """A hint for eviction: an artifact will be wanted at `at_s` (`time.monotonic()`)."""
        with self._lock:
            self._policy.expect(digest, at_s)

    def pin(
        self, digest: Digest, owner: str, timeout_s: float, priority: int = REQUEST_PRIORITY
    ) -> tuple[Artifact, float]:
        """Load an artifact if it is not there, and keep it until `owner` unpins it.

        Pinning twice is pinning once. Blocks until it is loaded; returns what `wait` does.

        Raises:
            Refusal: the load failed or took too long, or a limit of pins is reached.
        """
        self.acquire(digest, time.monotonic() + timeout_s, priority)
        try:
            artifact, load_s = self.wait(digest, timeout_s)
            with self._pin_lock:
                if self._add_pin(digest, owner):
                    self._on_pin(digest, True)
        finally:
            self.release(digest)
        return artifact, load_s

    def _add_pin(self, digest: Digest, owner: str) -> bool:
        """Note a pin; whether it is the first one of its artifact."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.artifact is None:
                raise _closed()
            if owner in entry.pinned_by:
                return False
            if len(entry.pinned_by) >= MAX_OWNERS:
                raise Refusal(FailureReason.CAPACITY, f"owner: the limit is {MAX_OWNERS} owners")
            if not entry.pinned_by:
                taken = sum(
                    other.reserved_bytes for other in self._entries.values() if other.pinned_by
                )
                if taken + entry.reserved_bytes > self._pinned_bytes:
                    raise Refusal(
                        FailureReason.CAPACITY,
                        f"pinned_bytes: {taken} bytes are pinned, {entry.reserved_bytes} more pass "
                        f"the limit of {self._pinned_bytes}",
                    )
            entry.pinned_by.add(owner)
            return len(entry.pinned_by) == 1

    def unpin(self, digest: Digest, owner: str) -> bool:
        """End an owner's pin; returns whether there was one."""
        with self._pin_lock:
            with self._lock:
                entry = self._entries.get(digest)
                if entry is None or owner not in entry.pinned_by:
                    return False
                entry.pinned_by.discard(owner)
                is_last = not entry.pinned_by
                self._changed.notify_all()
            if is_last:
                self._on_pin(digest, False)
            return True

    def evict(self, digest: Digest) -> str | None:
        """Drop an artifact; returns why not, or `None` when it is gone."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.state is _State.FAILED:
                return "not resident"
            if entry.state is not _State.READY or not entry.done.is_set():
                return "loading"
            if entry.num_users:
                return f"in use by {entry.num_users} requests"
            if entry.pinned_by:
                return f"pinned by {', '.join(sorted(entry.pinned_by))}"
            self._remove(entry, is_evicted=False)
        self._dispose(entry)
        return None

    def residents(self) -> list[tuple[Artifact, int]]:
        """Ready artifacts and how many requests use each, least recently used first."""
        with self._lock:
            return [
                (entry.artifact, entry.num_users)
                for entry in self._entries.values()
                if entry.artifact is not None
            ]

    def holding(self, digest: Digest) -> Holding | None:
        """What is known of one artifact; `None` when it is neither here nor on its way."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.state is _State.FAILED:
                return None
            return entry.as_holding()

    def holdings(self) -> list[Holding]:
        """All that is ready or on its way, least recently used first."""
        with self._lock:
            return [
                entry.as_holding()
                for entry in self._entries.values()
                if entry.state is not _State.FAILED
            ]

    def shortage(self) -> tuple[int, list[Holding]]:
        """Bytes that the first load in line misses, and what could be given back for it.

        The holdings are used but not pinned, what should go first in front. 0 and none when no
        load waits.
        """
        with self._lock:
            now_s = time.monotonic()
            waiting = [e for e in self._in_line() if e.state is _State.WAITING]
            if not waiting or waiting[0].manifest is None:
                return 0, []
            free = self._capacity_bytes - self._used_bytes()
            idle = sum(e.reserved_bytes for e in self._entries.values() if e.is_evictable)
            missing = max(0, waiting[0].manifest.loading_bytes - free - idle)
            used = [
                entry
                for entry in self._entries.values()
                if entry.state is _State.READY and entry.num_users and not entry.pinned_by
            ]
            used.sort(key=lambda entry: self._policy.rank(entry.digest, now_s))
            return missing, [entry.as_holding() for entry in used]

    @property
    def used_bytes(self) -> int:
        """Bytes taken or reserved."""
        with self._lock:
            return self._used_bytes()

    def close(self) -> None:
        """Stop loading and give all memory back; loads that wait for room are given up."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        for loader in self._loaders:
            loader.join()
        with self._lock:
            entries, self._entries = list(self._entries.values()), OrderedDict()
            for entry in entries:
                if entry.artifact is None and entry.failure is None:
                    entry.state, entry.failure = _State.FAILED, _closed()
                entry.done.set()
        for entry in entries:
            if entry.artifact is not None:
                entry.artifact.close()

    def check_invariants(self) -> None:
        """For tests: sizes add up, limits hold, and nobody holds what is not there."""
        with self._lock:
            assert self._used_bytes() <= self._capacity_bytes, "over capacity"  # noqa: S101
            pinned = sum(e.reserved_bytes for e in self._entries.values() if e.pinned_by)
            assert pinned <= self._pinned_bytes, "over pinned_bytes"  # noqa: S101
            for digest, entry in self._entries.items():
                is_ready = entry.state is _State.READY
                assert entry.digest == digest  # noqa: S101
                assert entry.num_users >= 0, digest  # noqa: S101
                assert is_ready == (entry.artifact is not None), digest  # noqa: S101
                assert (entry.failure is not None) == (entry.state is _State.FAILED)  # noqa: S101
                assert is_ready or not entry.pinned_by, digest  # noqa: S101
                assert entry.state not in _UNBEGUN or not entry.reserved_bytes  # noqa: S101
                if entry.artifact is not None:
                    assert entry.reserved_bytes == entry.artifact.size_bytes, digest  # noqa: S101

    # --- the loaders' line -----------------------------------------------------------------------
    def _run_loader(self) -> None:
        yield_to_serving()
        while True:
            entry = self._take_next()
            if entry is None:
                return
            self._load(entry)

    def _take_next(self) -> _Entry | None:
        """Wait for a load that can go on; `None` when the pool closes."""
        with self._lock:
            while not self._is_closed:
                now_s = time.monotonic()
                line = self._in_line()
                for entry in line:
                    is_expired = entry.deadline_s <= now_s
                    if entry.state is _State.QUEUED or is_expired or self._has_room(entry):
                        entry.state = _State.LOADING
                        return entry
                deadlines = [entry.deadline_s for entry in line]
                self._changed.wait(min(deadlines) - now_s if deadlines else None)
        return None

    def _in_line(self) -> list[_Entry]:
        """Loads that no loader has, in their order. Called with the lock held."""
        line = [entry for entry in self._entries.values() if entry.state in _UNBEGUN]
        return sorted(line, key=lambda entry: (-entry.priority, entry.order))

    def _load(self, entry: _Entry) -> None:
        """Take a load as far as it goes: to its end, or to where it waits for room."""
        digest = entry.digest
        if entry.started_s is None:
            entry.started_s = time.monotonic()
        try:
            artifact = self._advance(entry)
        except Refusal as refusal:
            logger.warning("artifact %s refused: %s", digest, str(refusal))
            self._fail(entry, refusal)
            return
        except Exception as error:
            logger.exception("artifact %s could not be loaded", digest)
            internal = Refusal(FailureReason.INTERNAL, f"{type(error).__name__}: {error}")
            self._fail(entry, internal)
            return
        if artifact is None:
            self._on_shortage()
            return
        with self._lock:
            entry.load_s = time.monotonic() - entry.started_s
            # What was stored has been decoded: its room is free.
            entry.reserved_bytes = artifact.size_bytes
            entry.artifact = artifact
            entry.state = _State.READY
            self._policy.touch(digest, artifact.size_bytes)
            self._changed.notify_all()
        try:
            self._on_ready(digest, artifact.size_bytes)
        except Exception:
            logger.exception("artifact %s: what follows its load failed", digest)
        with self._lock:
            entry.done.set()
            self._changed.notify_all()

    def _fail(self, entry: _Entry, refusal: Refusal) -> None:
        with self._lock:
            is_for_request = entry.num_users > 0 and entry.priority >= REQUEST_PRIORITY
            if isinstance(refusal, _NobodyWaits) and is_for_request:
                # A request came while this was decided: it is worth the load.
                entry.state = _State.QUEUED
                self._changed.notify_all()
                return
            self._settle(entry, refusal)
        try:
            self._on_failed(entry.digest, refusal.reason)
        except Exception:
            logger.exception("artifact %s: what follows its failure failed", entry.digest)

    def _settle(self, entry: _Entry, refusal: Refusal) -> None:
        """End a load with a refusal. Called with the lock held."""
        # Without its traceback, whose frames would keep the bytes that were read.
        entry.state, entry.failure = _State.FAILED, Refusal(refusal.reason, refusal.detail)
        entry.reserved_bytes = 0
        if entry.num_users == 0 and self._entries.get(entry.digest) is entry:
            del self._entries[entry.digest]
        entry.done.set()
        self._changed.notify_all()

    def _advance(self, entry: _Entry) -> Artifact | None:
        """The loaded artifact, or `None` when it has to wait for room."""
        with self._lock:
            if not entry.is_wanted(time.monotonic()):
                raise _unwanted(entry.digest)
        if entry.manifest is None:
            entry.manifest = self._examine(entry.digest)
        if not self._reserve(entry, entry.manifest.loading_bytes):
            return None
        return self._read(entry, entry.manifest)

    def _examine(self, digest: Digest) -> Manifest:
        """Read the manifest, and refuse what will not be served before anything is moved."""
        try:
            manifest = self._source.read_manifest(digest)
        except StoreError as error:
            # The words of `claims` for an artifact that the scope may not see.
            raise _store_refusal(error, f"{digest} is not in the store") from error
        self._admit(manifest)
        if manifest.loading_bytes > self._capacity_bytes:
            raise Refusal(
                FailureReason.CAPACITY,
                f"{manifest.loading_bytes} bytes to load; the dram tier holds "
                f"{self._capacity_bytes}",
            )
        return manifest

    def _read(self, entry: _Entry, manifest: Manifest) -> Artifact:
        memories: dict[str, SealedMemory] = {}
        try:
            tier = self._source.fetch(entry.digest, entry.deadline_s)
            for blob in manifest.payload:
                memories[blob.sha256] = self._read_blob(entry.digest, manifest, blob)
        except BaseException as error:
            for memory in memories.values():
                memory.close()
            if isinstance(error, StoreError):
                raise _store_refusal(error, str(error)) from error
            if isinstance(error, InvalidPayload):
                raise Refusal(FailureReason.CORRUPT_ARTIFACT, str(error)) from error
            if isinstance(error, CodecUnavailable):
                raise Refusal(FailureReason.UNSUPPORTED, str(error)) from error
            raise
        if len(self._examined) < MAX_EXAMINED:
            self._examined.add(entry.digest)
        return Artifact(entry.digest, manifest, memories, tier)

    def _read_blob(self, digest: Digest, manifest: Manifest, blob: Blob) -> SealedMemory:
        """Sealed memory with a blob's decoded bytes; what is stored is in memory meanwhile.

        Room for both was reserved.

        Bytes are hashed on every load. What follows from them and the manifest, header, tensors and
        numbers, is the same each time and looked at once.
        """

        def fill(buffer: memoryview) -> None:
            read_decoded_blob(self._source, blob, buffer)
            if digest not in self._examined:
                check_blob(manifest, blob.sha256, buffer)
                self._check(manifest, blob.sha256, buffer)

        return SealedMemory(blob.decoded_bytes, fill)

    # --- room ----------------------------------------------------------------------------------
    def _used_bytes(self) -> int:
        return sum(entry.reserved_bytes for entry in self._entries.values())

    def _reserve(self, entry: _Entry, size_bytes: int) -> bool:
        """Take room, and evict for it; False when the load waits for room from now on."""
        with self._lock:
            victims = self._victims(size_bytes) if self._is_first(entry) else None
            if victims is None:
                if self._is_closed:
                    raise _closed()
                if entry.deadline_s <= time.monotonic():
                    raise self._no_room(size_bytes)
                entry.state = _State.WAITING
                if not entry.is_wanted(time.monotonic()):
                    raise _unwanted(entry.digest)
                return False
            self._refuse_poor_trade(entry, size_bytes, victims)
            self._take_room(entry, size_bytes, victims)
        self._dispose_all(victims)
        with self._lock:
            entry.reserved_bytes = size_bytes
            self._changed.notify_all()
        return True

    def _refuse_poor_trade(
        self, entry: _Entry, size_bytes: int, victims: dict[Digest, _Entry]
    ) -> None:
        if entry.priority > OPPORTUNISTIC or not victims:
            return
        now_s = time.monotonic()
        if not self._policy.admits(entry.digest, size_bytes, list(victims), now_s):
            raise _NobodyWaits(
                FailureReason.CAPACITY,
                f"priority: {entry.priority} takes no room from {len(victims)} artifacts that are "
                "worth more",
            )

    def _take_room(self, entry: _Entry, size_bytes: int, victims: dict[Digest, _Entry]) -> None:
        """Count an entry's bytes instead of its victims'. Called with the lock held."""
        for victim in victims.values():
            self._remove(victim, is_evicted=True)
        # The victims' bytes stay counted until their memory is really free.
        freed_bytes = sum(victim.reserved_bytes for victim in victims.values())
        entry.reserved_bytes = max(size_bytes, freed_bytes)

    def _has_room(self, entry: _Entry) -> bool:
        """Whether a waiting load could take room now. Called with the lock held."""
        if entry.manifest is None or not self._is_first(entry):
            return False
        return self._victims(entry.manifest.loading_bytes) is not None

    def _is_first(self, entry: _Entry) -> bool:
        """Whether no load of higher priority waits for room. Called with the lock held."""
        return not any(
            other.state is _State.WAITING and other.priority > entry.priority
            for other in self._entries.values()
        )

    def _no_room(self, size_bytes: int) -> Refusal:
        return Refusal(
            FailureReason.CAPACITY,
            f"{size_bytes} bytes; all {self._capacity_bytes} of the dram tier are in use",
        )

    def _victims(self, size_bytes: int) -> dict[Digest, _Entry] | None:
        """What the policy lets go to make room; `None` when there is not enough.

        Called with the lock held.
        """
        missing = self._used_bytes() + size_bytes - self._capacity_bytes
        victims: dict[Digest, _Entry] = {}
        if missing <= 0:
            return victims
        idle = [entry for entry in self._entries.values() if entry.is_evictable]
        if sum(entry.reserved_bytes for entry in idle) < missing:
            return None
        now_s = time.monotonic()
        idle.sort(key=lambda entry: self._policy.rank(entry.digest, now_s))
        for entry in idle:
            if missing <= 0:
                break
            victims[entry.digest] = entry
            missing -= entry.reserved_bytes
        return victims

    def _remove(self, entry: _Entry, *, is_evicted: bool) -> None:
        """Called with the lock held."""
        del self._entries[entry.digest]
        self._policy.forget(entry.digest, is_evicted=is_evicted)

    def _dispose_all(self, victims: dict[Digest, _Entry]) -> None:
        for victim in victims.values():
            self._dispose(victim)

    def _dispose(self, entry: _Entry) -> None:
        if entry.artifact is not None:
            try:
                self._on_evict(entry.digest)
            except Exception:
                logger.exception("artifact %s: what precedes its eviction failed", entry.digest)
            entry.artifact.close()
            with self._lock:
                self._changed.notify_all()


_UNBEGUN = (_State.QUEUED, _State.WAITING)


def _closed() -> Refusal:
    return Refusal(FailureReason.NOT_READY, "the dram tier was closed")


def _unwanted(digest: Digest) -> _NobodyWaits:
    return _NobodyWaits(FailureReason.DEADLINE, f"{digest}: nobody waits for it any more")


def _store_refusal(error: StoreError, absent: str) -> Refusal:
    if isinstance(error, NotInStore):
        return Refusal(FailureReason.UNKNOWN_ARTIFACT, absent)
    if isinstance(error, DeadlinePassed):
        return Refusal(FailureReason.DEADLINE, str(error))
    if isinstance(error, StoreUnavailable):
        return Refusal(FailureReason.NOT_READY, f"store: {error}")
    return Refusal(FailureReason.CORRUPT_ARTIFACT, str(error))
