"""The nvme tier: artifacts in a bounded local folder that all engines of a machine share.

Owns who fetches what, what is whole, what is used, and what goes first when room is needed. Refuses
to give a name to other bytes, to evict what some process holds, and to grow over its bound.

The folder is a store folder (`blobs`, `manifests`) with `partial` (unfinished blobs and journals)
and `locks` beside it. A manifest is written last: where it is, its blobs were whole. The time of
its file is the artifact's last use. Locks, in the order in which they are taken: those of blobs, by
digest; then `locks/folder`, for moments, whose holder waits for nothing.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cartridge_engine_ext.folder_locks import (
    FileLock,
    Stopped,
    locked,
    try_lock,
    wait_for_lock,
    wait_until_retry,
)
from cartridge_engine_ext.ranged_download import MIN_RANGE_BYTES, PartialBlob
from cartridge_engine_ext.thread_priority import yield_to_serving
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.failpoints import failpoint
from cartridge_proto.manifest import Blob, Manifest, manifest_digest
from cartridge_proto.stores import (
    CorruptStore,
    LocalStore,
    NotInStore,
    Store,
    StoreError,
    StoreUnavailable,
)
from cartridge_proto.stores.local import sync_folder

DEFAULT_RANGE_BYTES = 8 << 20
DEFAULT_NUM_PARALLEL = 4
NUM_ROUNDS = 3
"""Times that a blob is fetched and hashed until it is given up as corrupt."""
_TEMPORARY = ".partial-"

OnProgress = Callable[[int, int], None]
"""Bytes that are here, and bytes of the artifact."""


class TierFull(StoreUnavailable):
    """There is no room: larger than the tier, or all of it is in use, or the disk is full."""


class DiskFailed(StoreUnavailable):
    """The disk of the tier gave an error."""


@dataclass(frozen=True)
class Resident:
    """A whole artifact in the folder; `last_used_s` by the wall clock."""

    digest: Digest
    manifest: Manifest
    last_used_s: float


@dataclass(frozen=True)
class _Victim:
    """Something that may be removed: an artifact, a blob of none, or an unfinished blob."""

    last_used_ns: int
    digest: Digest | None
    blobs: tuple[str, ...]


class NvmeTier:
    """Artifacts up to `capacity_bytes` under `root`. All methods may be called from any thread.

    `on_ready(digest, size_bytes)` is called when an artifact is whole here, `on_evict(digest)`
    before its bytes are removed; both run on the thread that caused them. What other processes do
    to the folder is told by `refresh`. Neither may call the tier.

    Args:
        store: where artifacts come from.
        root: folder on a local disk; made if it is absent.
        capacity_bytes: bound of blobs, whole and unfinished.
        num_parallel: ranges that are fetched at a time.
        range_bytes: size of a range, at least 1 MiB.

    Raises:
        DiskFailed: the folder cannot be used.
    """

    def __init__(
        self,
        *,
        store: Store,
        root: Path,
        capacity_bytes: int,
        num_parallel: int = DEFAULT_NUM_PARALLEL,
        range_bytes: int = DEFAULT_RANGE_BYTES,
        on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
        on_evict: Callable[[Digest], None] = lambda digest: None,
    ) -> None:
        if range_bytes < MIN_RANGE_BYTES:
            raise ValueError(f"ranges of {range_bytes} bytes; at least {MIN_RANGE_BYTES}")
        self.capacity_bytes = capacity_bytes
        self.root = root
        self._store = store
        self._folder = LocalStore(root)
        self._blobs = root / "blobs" / "sha256"
        self._manifests = root / "manifests" / "sha256"
        self._partial = root / "partial"
        self._locks = root / "locks"
        self._num_parallel = num_parallel
        self._range_bytes = range_bytes
        self._on_ready = on_ready
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._announced: set[Digest] = set()
        self._known: dict[Digest, Manifest] = {}
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(
            num_parallel, thread_name_prefix="nvme-fetch", initializer=yield_to_serving
        )
        with _disk(root):
            for folder in (self._blobs, self._manifests, self._partial, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            with self._folder_locked():
                self._remove_leftovers()
        self.refresh()

    # --- fetching ------------------------------------------------------------------------------
    def fetch(
        self,
        manifest: Manifest,
        deadline_s: float,
        on_progress: OnProgress = lambda done_bytes, total_bytes: None,
    ) -> None:
        """Bring an artifact here; it may be evicted again as soon as this returns. See `held`."""
        with self.held(manifest, deadline_s, on_progress):
            pass

    @contextlib.contextmanager
    def held(
        self,
        manifest: Manifest,
        deadline_s: float,
        on_progress: OnProgress = lambda done_bytes, total_bytes: None,
    ) -> Iterator[None]:
        """Bring an artifact here, and let no process evict it until the end of the block.

        One process of the machine fetches a blob, the others wait for it; an interrupted fetch is
        gone on with.

        Args:
            manifest: a verified one.
            deadline_s: `time.monotonic()` until which it must be here.
            on_progress: called on this thread as bytes come, at last with all of them.

        Raises:
            NotInStore: the store has no such blob.
            CorruptStore: what the store has does not hash to its name.
            TierFull, DiskFailed, DeadlinePassed, StoreUnavailable: a later try may succeed.
        """
        digest = Digest(manifest_digest(manifest))
        total_bytes = manifest.payload_bytes
        if total_bytes > self.capacity_bytes:
            raise TierFull(
                f"{digest}: {total_bytes} bytes; the nvme tier holds {self.capacity_bytes}"
            )
        blobs = sorted(manifest.payload, key=lambda blob: blob.sha256)
        locks: dict[str, FileLock] = {}
        try:
            with _disk(self.root):
                while not self._has_all_shared(blobs, locks):
                    self._bring(manifest, blobs, locks, deadline_s, on_progress)
                self._touch(digest)
            on_progress(total_bytes, total_bytes)
            self._announce(digest, total_bytes)
            yield
        finally:
            for name, lock in locks.items():
                # Of a blob that never came nothing is left.
                if not lock.is_shared and not self._is_started(name):
                    lock.remove()
                lock.release()

    def _bring(
        self,
        manifest: Manifest,
        blobs: Sequence[Blob],
        locks: dict[str, FileLock],
        deadline_s: float,
        on_progress: OnProgress,
    ) -> None:
        """One round: lock what is not locked, fetch what is missing, share the locks."""

        def waited() -> None:
            on_progress(sum(map(self._here_bytes, blobs)), manifest.payload_bytes)

        missing = []
        for blob in blobs:
            if blob.sha256 in locks:
                continue
            lock = self._lock_blob(blob, deadline_s, waited)
            locks[blob.sha256] = lock
            if not lock.is_shared:
                missing.append(blob)
        partials = [self._partial_of(blob) for blob in missing]
        with contextlib.ExitStack() as stack:
            self._open_partials(stack, partials, missing, deadline_s)
            present_bytes = manifest.payload_bytes - sum(blob.size_bytes for blob in missing)

            def progressed() -> None:
                done_bytes = present_bytes + sum(partial.finished_bytes for partial in partials)
                on_progress(done_bytes, manifest.payload_bytes)

            progressed()
            for partial in partials:
                self._complete(partial, manifest, deadline_s, progressed)
        if not self._folder.manifest_path(Digest(manifest_digest(manifest))).exists():
            with self._folder_locked():
                self._write_manifest(manifest)
        failpoint("nvme_after_manifest")
        for name, lock in list(locks.items()):
            # One that was lost on the way to shared is looked at again by the next round.
            if not lock.is_shared and not lock.try_share():
                lock.release()
                del locks[name]

    def _has_all_shared(self, blobs: Sequence[Blob], locks: dict[str, FileLock]) -> bool:
        return all(blob.sha256 in locks and locks[blob.sha256].is_shared for blob in blobs)

    def _lock_blob(self, blob: Blob, deadline_s: float, on_wait: Callable[[], None]) -> FileLock:
        """A shared lock of a blob that is here, or an exclusive one of a blob that is not."""
        path = self._lock_path(blob.sha256)
        while True:
            is_here = self._is_here(blob)
            lock = try_lock(path, is_shared=is_here)
            if lock is not None:
                if self._is_here(blob) == is_here:
                    return lock
                lock.release()
            on_wait()
            wait_until_retry(deadline_s, self._stop, f"blob {blob.sha256}: held by another load")

    def _open_partials(
        self,
        stack: contextlib.ExitStack,
        partials: Sequence[PartialBlob],
        missing: Sequence[Blob],
        deadline_s: float,
    ) -> None:
        """Take the room of all missing blobs at once, waiting for it if need be."""
        if not partials:
            return
        needed_bytes = sum(blob.size_bytes for blob in missing)
        while True:
            with self._folder_locked():
                here_bytes = sum(partial.reserved_bytes for partial in partials)
                if self._make_room(needed_bytes - here_bytes):
                    try:
                        for partial in partials:
                            stack.enter_context(partial.opened())
                    except OSError:
                        # A file of full size without its bytes would count as room.
                        for partial in partials:
                            partial.remove()
                        raise
                    return
            try:
                wait_until_retry(deadline_s, self._stop, f"{needed_bytes} bytes: no room")
            except Stopped:
                raise
            except StoreUnavailable as error:
                raise TierFull(
                    f"{needed_bytes} bytes; all {self.capacity_bytes} of the nvme tier are in use"
                ) from error

    def _complete(
        self,
        partial: PartialBlob,
        manifest: Manifest,
        deadline_s: float,
        progressed: Callable[[], None],
    ) -> None:
        """Fetch, hash and name one blob; its partial is kept only where it can be gone on with."""
        try:
            for _ in range(NUM_ROUNDS):
                partial.fetch(
                    self._store,
                    self._executor,
                    num_parallel=self._num_parallel,
                    deadline_s=deadline_s,
                    stop=self._stop,
                    on_progress=progressed,
                )
                if partial.verify_or_forget(manifest):
                    break
            else:
                raise CorruptStore(f"blob {partial.digest}: what the store gives hashes otherwise")
            partial.sync()
        except (NotInStore, CorruptStore, OSError):
            partial.remove()
            raise
        failpoint("nvme_before_rename")
        os.replace(partial.path, self._folder.blob_path(partial.digest))
        failpoint("nvme_after_rename")
        sync_folder(self._blobs)
        partial.remove_journal()

    def _write_manifest(self, manifest: Manifest) -> None:
        try:
            self._folder.put_manifest(manifest)
        except StoreUnavailable as error:
            # The folder is a store to its own code; to callers it is this tier's disk.
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            raise

    # --- reading -------------------------------------------------------------------------------
    def read_blob_into(self, digest: Digest, buffer: memoryview) -> None:
        """Read a blob into private memory of exactly its size, and verify that memory.

        It is not evicted meanwhile; a damaged one is removed, so that it is fetched anew.

        Raises:
            NotInStore: not here.
            CorruptStore: damaged on this disk.
            DiskFailed: the disk gave an error.
        """
        with _disk(self.root):
            path = self._folder.blob_path(digest)
            if not path.exists():
                raise NotInStore(f"not in the nvme tier: {digest}")
            lock = wait_for_lock(
                self._lock_path(digest),
                is_shared=True,
                # Held exclusively only by who evicts it or fetches it anew.
                deadline_s=time.monotonic() + 60,
                stop=self._stop,
            )
            try:
                inode = path.stat().st_ino
                self._folder.read_blob_into(digest, buffer)
            except FileNotFoundError as error:
                raise NotInStore(f"not in the nvme tier: {digest}") from error
            except CorruptStore:
                self._remove_damaged(digest, inode)
                raise
            except NotInStore:
                raise
            except StoreError as error:
                raise DiskFailed(str(error)) from error
            finally:
                lock.release()

    def read_manifest(self, digest: Digest) -> Manifest:
        """The manifest of an artifact that is whole here.

        Raises:
            NotInStore: it is not.
        """
        manifest = self._manifest_of(digest)
        if manifest is None or not all(map(self._is_here, manifest.payload)):
            raise NotInStore(f"not in the nvme tier: {digest}")
        return manifest

    def contains(self, digest: Digest) -> bool:
        """Whether an artifact is whole here, by names and sizes: every read verifies."""
        try:
            self.read_manifest(digest)
        except NotInStore:
            return False
        return True

    def residents(self) -> list[Resident]:
        """All whole artifacts, least recently used first."""
        found = []
        for digest in self._folder.manifest_digests():
            with contextlib.suppress(NotInStore, FileNotFoundError):
                manifest = self.read_manifest(digest)
                last_used_s = self._folder.manifest_path(digest).stat().st_mtime
                found.append(Resident(digest, manifest, last_used_s))
        return sorted(found, key=lambda resident: resident.last_used_s)

    @property
    def used_bytes(self) -> int:
        """Bytes of all blobs in the folder, whole and unfinished, whoever fetched them."""
        return sum(size for _, size in _sizes(self._blobs)) + sum(
            size for name, size in _sizes(self._partial) if not name.endswith(".journal")
        )

    # --- control -------------------------------------------------------------------------------
    def evict(self, digest: Digest) -> str | None:
        """Remove an artifact; returns why not, or `None` when it is gone.

        Blobs that other artifacts here share stay.
        """
        with _disk(self.root), self._folder_locked():
            manifest = self._manifest_of(digest)
            if manifest is None:
                return "not resident"
            victim = self._artifact_victim(digest, manifest)
            with contextlib.ExitStack() as stack:
                own = self._claim(victim, self._owners(), stack)
                if own is None:
                    return "in use"
                self._remove(replace(victim, blobs=own))
        return None

    def refresh(self) -> None:
        """Tell `on_ready` and `on_evict` what other processes have done to the folder.

        Raises:
            DiskFailed: the folder cannot be read.
        """
        # Manifests come and go with the folder locked, so nothing is told against the order.
        with _disk(self.root), self._folder_locked():
            present = {row.digest: row.manifest.payload_bytes for row in self.residents()}
            with self._lock:
                gone = self._announced - present.keys()
            for digest in sorted(gone):
                self._withdraw(digest)
            for digest, size_bytes in sorted(present.items()):
                self._announce(digest, size_bytes)

    def close(self) -> None:
        """Give up all fetches; what they have stays for a later one."""
        self._stop.set()
        # Ranges that wait for a thread see the stop at once.
        self._executor.shutdown(wait=True)

    def check_invariants(self) -> None:
        """For tests: within its bound, and every name is that of its bytes."""
        assert self.used_bytes <= self.capacity_bytes, "over capacity"  # noqa: S101
        for name, size in _sizes(self._blobs):
            self._folder.read_blob_into(Digest(f"sha256:{name}"), memoryview(bytearray(size)))
        for digest in self._folder.manifest_digests():
            self._folder.read_manifest(digest)

    # --- room ----------------------------------------------------------------------------------
    def _make_room(self, size_bytes: int) -> bool:
        """Remove the least recently used until there is room; called with the folder locked."""
        missing_bytes = self.used_bytes + size_bytes - self.capacity_bytes
        if missing_bytes <= 0:
            return True
        owners = self._owners()
        claims: list[_Victim] = []
        with contextlib.ExitStack() as stack:
            for victim in sorted(self._victims(owners), key=lambda victim: victim.last_used_ns):
                own = self._claim(victim, owners, stack)
                if own is None:
                    continue
                claims.append(replace(victim, blobs=own))
                missing_bytes -= sum(map(self._size_of, own))
                if missing_bytes <= 0:
                    for claim in claims:
                        self._remove(claim)
                    return True
        # Nothing is removed in vain.
        return False

    def _owners(self) -> dict[str, set[Digest]]:
        """Blob -> artifacts here that have it."""
        owners: dict[str, set[Digest]] = {}
        for digest in self._folder.manifest_digests():
            manifest = self._manifest_of(digest)
            for blob in manifest.payload if manifest is not None else ():
                owners.setdefault(blob.sha256, set()).add(digest)
        return owners

    def _victims(self, owners: dict[str, set[Digest]]) -> Iterator[_Victim]:
        for digest in self._folder.manifest_digests():
            manifest = self._manifest_of(digest)
            if manifest is not None:
                with contextlib.suppress(FileNotFoundError):
                    yield self._artifact_victim(digest, manifest)
        names = {name for folder in (self._blobs, self._partial) for name, _ in _sizes(folder)}
        for name in {name.removesuffix(".journal") for name in names}:
            if f"sha256:{name}" not in owners:
                yield _Victim(self._last_change_ns(name), None, (f"sha256:{name}",))

    def _artifact_victim(self, digest: Digest, manifest: Manifest) -> _Victim:
        path = self._folder.manifest_path(digest)
        blobs = tuple(blob.sha256 for blob in manifest.payload)
        return _Victim(path.stat().st_mtime_ns, digest, blobs)

    def _last_change_ns(self, name: str) -> int:
        times = [0]
        for folder in (self._blobs, self._partial):
            with contextlib.suppress(FileNotFoundError):
                times.append((folder / name).stat().st_mtime_ns)
        return max(times)

    def _claim(
        self, victim: _Victim, owners: dict[str, set[Digest]], stack: contextlib.ExitStack
    ) -> tuple[str, ...] | None:
        """Lock the blobs that only this victim has; `None` if some process holds one.

        Called with the folder locked: `owners` is true meanwhile, and is what it will be then.
        """
        own = tuple(blob for blob in victim.blobs if owners.get(blob, set()) <= {victim.digest})
        with contextlib.ExitStack() as locks:
            for blob in own:
                lock = try_lock(self._lock_path(blob), is_shared=False)
                if lock is None:
                    return None
                locks.callback(lock.release)
            stack.push(locks.pop_all())
        for blob in victim.blobs:
            if victim.digest is not None:
                owners.get(blob, set()).discard(victim.digest)
        return own

    def _remove(self, victim: _Victim) -> None:
        """Remove what was claimed, its manifest first: none is ever without its bytes."""
        if victim.digest is not None:
            self._withdraw(victim.digest)
            self._folder.manifest_path(victim.digest).unlink(missing_ok=True)
        failpoint("nvme_evicting")
        for blob in victim.blobs:
            self._remove_blob(blob)

    def _remove_blob(self, blob: str) -> None:
        """Remove a blob, whole or unfinished, and its lock's file: the lock is held."""
        stem = blob.removeprefix("sha256:")
        for path in (
            self._blobs / stem,
            self._partial / f"{stem}.journal",
            self._partial / stem,
            self._lock_path(blob),
        ):
            path.unlink(missing_ok=True)

    def _size_of(self, blob: str) -> int:
        """Bytes that a blob takes, whole or unfinished."""
        found = 0
        for folder in (self._blobs, self._partial):
            with contextlib.suppress(FileNotFoundError):
                found += (folder / blob.removeprefix("sha256:")).stat().st_size
        return found

    def _remove_damaged(self, digest: Digest, inode: int) -> None:
        """Remove a blob that is not what its name says, and who says to have it.

        Readers that have it open verify for themselves; a file that took its place meanwhile stays.
        """
        with self._folder_locked():
            path = self._folder.blob_path(digest)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()
                    for owner in self._owners().get(digest, set()):
                        self._withdraw(owner)
                        self._folder.manifest_path(owner).unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what a crash left and nobody can go on with; called with the folder locked."""
        for folder in (self._blobs, self._manifests):
            for path in folder.glob(f"{_TEMPORARY}*"):
                path.unlink(missing_ok=True)
        for path in self._partial.glob("*.journal"):
            lock = try_lock(self._lock_path(f"sha256:{path.stem}"), is_shared=False)
            if lock is not None:
                if not path.with_suffix("").exists():
                    path.unlink(missing_ok=True)
                    lock.remove()
                lock.release()
        for digest in self._folder.manifest_digests():
            manifest = self._manifest_of(digest)
            if manifest is None or not all(map(self._is_here, manifest.payload)):
                self._folder.manifest_path(digest).unlink(missing_ok=True)

    # --- small ---------------------------------------------------------------------------------
    def _announce(self, digest: Digest, size_bytes: int) -> None:
        with self._lock:
            is_new = digest not in self._announced
            self._announced.add(digest)
        if is_new:
            self._on_ready(digest, size_bytes)

    def _withdraw(self, digest: Digest) -> None:
        with self._lock:
            was_there = digest in self._announced
            self._announced.discard(digest)
            self._known.pop(digest, None)
        if was_there:
            self._on_evict(digest)

    def _manifest_of(self, digest: Digest) -> Manifest | None:
        """The manifest in the folder, verified once by this process; a damaged one is none."""
        if not self._folder.manifest_path(digest).exists():
            return None
        manifest = self._known.get(digest)
        if manifest is None:
            try:
                manifest = self._known[digest] = self._folder.read_manifest(digest)
            except StoreError:
                return None
        return manifest

    def _is_here(self, blob: Blob) -> bool:
        path = self._folder.blob_path(parse_digest(blob.sha256))
        try:
            return path.stat().st_size == blob.size_bytes
        except FileNotFoundError:
            return False

    def _is_started(self, blob: str) -> bool:
        stem = blob.removeprefix("sha256:")
        return any((folder / stem).exists() for folder in (self._blobs, self._partial))

    def _here_bytes(self, blob: Blob) -> int:
        """Bytes of a blob that are here, also while another process fetches it."""
        return blob.size_bytes if self._is_here(blob) else self._partial_of(blob).peek_bytes()

    def _partial_of(self, blob: Blob) -> PartialBlob:
        digest = parse_digest(blob.sha256)
        return PartialBlob(self._partial, digest, blob.size_bytes, self._range_bytes)

    def _touch(self, digest: Digest) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._folder.manifest_path(digest))

    def _lock_path(self, blob: str) -> Path:
        return self._locks / blob.removeprefix("sha256:")

    def _folder_locked(self) -> contextlib.AbstractContextManager[None]:
        return locked(self._locks / "folder")


def _sizes(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files of a folder, but for unfinished writes of small files."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
    return found


@contextlib.contextmanager
def _disk(root: Path) -> Iterator[None]:
    """Map errors of the disk; the network's have been mapped by the store.

    Raises:
        TierFull: no room on the disk.
        DiskFailed: anything else.
    """
    try:
        yield
    except OSError as error:
        text = f"nvme tier {root}: {error.strerror or error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise TierFull(text) from error
        raise DiskFailed(text) from error
