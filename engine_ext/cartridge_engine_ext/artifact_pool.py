"""The dram tier: verified artifacts in sealed memory, bounded, loaded in the background.

Owns what is loading, ready or failed, who uses it, and the eviction order. Refuses bytes that do
not match their manifest, artifacts that do not fit the engine, and to evict what a request uses.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_proto.compatibility import EngineIdentity, incompatibilities, unsupported
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import FailureReason
from cartridge_proto.safetensors_header import InvalidPayload, check_blob
from cartridge_proto.stores import CorruptStore, LocalStore, NotInStore, StoreError

logger = logging.getLogger(__name__)

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""safetensors dtype name -> torch dtype."""


@dataclass(frozen=True)
class Artifact:
    """A verified artifact in memory; `memories` by blob digest."""

    digest: Digest
    manifest: Manifest
    memories: dict[str, SealedMemory]

    @property
    def size_bytes(self) -> int:
        """Bytes of memory it takes."""
        return sum(memory.size_bytes for memory in self.memories.values())

    def close(self) -> None:
        """Give its memory back."""
        for memory in self.memories.values():
            memory.close()


@dataclass
class _Entry:
    """One digest in the pool: loading (neither artifact nor failure), ready, or failed.

    `done` is set after `on_ready` has returned: before that an artifact is not evicted, so that no
    withdrawal overtakes its announcement.
    """

    reserved_bytes: int = 0
    artifact: Artifact | None = None
    failure: Refusal | None = None
    num_users: int = 0
    load_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


class ArtifactPool:
    """Verified artifacts up to `capacity_bytes`. All methods may be called from any thread.

    `on_ready(digest, size_bytes)` is called when an artifact can be used, `on_evict(digest)` before
    its memory is given back; both run on the thread that caused them.
    """

    def __init__(
        self,
        *,
        store: LocalStore,
        engine: EngineIdentity,
        capacity_bytes: int,
        num_loaders: int,
        on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
        on_evict: Callable[[Digest], None] = lambda digest: None,
    ) -> None:
        self._store = store
        self._engine = engine
        self.capacity_bytes = capacity_bytes
        self._on_ready = on_ready
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._entries: OrderedDict[Digest, _Entry] = OrderedDict()
        self._is_closed = False
        self._executor = ThreadPoolExecutor(num_loaders, thread_name_prefix="artifact-loader")

    # --- use -----------------------------------------------------------------------------------
    def acquire(self, digest: Digest, deadline_s: float) -> bool:
        """Use an artifact until `release`; starts its load if it is not there.

        Args:
            digest: the artifact.
            deadline_s: `time.monotonic()` until which a load may wait for room.

        Returns:
            Whether it was ready already.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.failure is not None:
                # A failed load is tried again; who still uses the failed one is counted on.
                entry = _Entry(num_users=entry.num_users if entry is not None else 0)
                self._entries[digest] = entry
                if self._is_closed:
                    entry.failure = _closed()
                    entry.done.set()
                else:
                    self._executor.submit(self._load, digest, entry, deadline_s)
            self._entries.move_to_end(digest)
            entry.num_users += 1
            return entry.artifact is not None

    def release(self, digest: Digest) -> None:
        """End one use."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return
            entry.num_users = max(0, entry.num_users - 1)
            if entry.num_users == 0 and entry.failure is not None:
                del self._entries[digest]
            self._freed.notify_all()

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
        """Take in an artifact that did not come from the store (the self-test's)."""
        with self._lock:
            entry = _Entry(reserved_bytes=artifact.size_bytes, artifact=artifact)
            entry.done.set()
            self._entries[artifact.digest] = entry

    # --- control -------------------------------------------------------------------------------
    def evict(self, digest: Digest) -> str | None:
        """Drop an artifact; returns why not, or `None` when it is gone."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return "not resident"
            if entry.artifact is None or not entry.done.is_set():
                return "loading"
            if entry.num_users:
                return f"in use by {entry.num_users} requests"
            del self._entries[digest]
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

    @property
    def used_bytes(self) -> int:
        """Bytes taken or reserved."""
        with self._lock:
            return self._used_bytes()

    def close(self) -> None:
        """Stop loading and give all memory back; loads that wait for room are given up."""
        with self._lock:
            self._is_closed = True
            self._freed.notify_all()
        self._executor.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            entries, self._entries = list(self._entries.values()), OrderedDict()
            for entry in entries:
                if entry.artifact is None and entry.failure is None:
                    entry.failure = _closed()
                entry.done.set()
        for entry in entries:
            if entry.artifact is not None:
                entry.artifact.close()

    def check_invariants(self) -> None:
        """For tests: sizes add up and nobody holds what is not there."""
        with self._lock:
            assert self._used_bytes() <= self.capacity_bytes, "over capacity"  # noqa: S101
            for digest, entry in self._entries.items():
                assert entry.num_users >= 0, digest  # noqa: S101
                assert entry.artifact is None or entry.failure is None, digest  # noqa: S101
                if entry.artifact is not None:
                    assert entry.reserved_bytes == entry.artifact.size_bytes, digest  # noqa: S101

    # --- loading -------------------------------------------------------------------------------
    def _load(self, digest: Digest, entry: _Entry, deadline_s: float) -> None:
        started_s = time.monotonic()
        try:
            artifact = self._fetch(digest, entry, deadline_s)
        except Refusal as refusal:
            logger.warning("artifact %s refused: %s", digest, refusal)
            self._fail(digest, entry, refusal)
        except Exception as error:
            logger.exception("artifact %s could not be loaded", digest)
            internal = Refusal(FailureReason.INTERNAL, f"{type(error).__name__}: {error}")
            self._fail(digest, entry, internal)
        else:
            with self._lock:
                entry.load_s = time.monotonic() - started_s
                entry.artifact = artifact
            self._on_ready(digest, artifact.size_bytes)
        finally:
            with self._lock:
                entry.done.set()
                self._freed.notify_all()

    def _fail(self, digest: Digest, entry: _Entry, refusal: Refusal) -> None:
        with self._lock:
            entry.failure = refusal
            entry.reserved_bytes = 0
            if entry.num_users == 0 and self._entries.get(digest) is entry:
                del self._entries[digest]

    def _fetch(self, digest: Digest, entry: _Entry, deadline_s: float) -> Artifact:
        try:
            manifest = self._store.read_manifest(digest)
        except NotInStore as error:
            # The words of `claims` for an artifact that the scope may not see.
            detail = f"{digest} is not in the store"
            raise Refusal(FailureReason.UNKNOWN_ARTIFACT, detail) from error
        except StoreError as error:
            raise Refusal(FailureReason.CORRUPT_ARTIFACT, str(error)) from error
        refused = unsupported(manifest)
        if refused:
            raise Refusal(FailureReason.UNSUPPORTED, "; ".join(map(str, refused)))
        mismatches = incompatibilities(manifest, self._engine)
        if mismatches:
            raise Refusal(FailureReason.INCOMPATIBLE, "; ".join(map(str, mismatches)))
        self._reserve(entry, manifest.payload_bytes, deadline_s)
        memories: dict[str, SealedMemory] = {}
        try:
            for blob in manifest.payload:
                memories[blob.sha256] = self._read_blob(manifest, blob.sha256, blob.size_bytes)
        except BaseException:
            for memory in memories.values():
                memory.close()
            raise
        return Artifact(digest, manifest, memories)

    def _read_blob(self, manifest: Manifest, digest: str, size_bytes: int) -> SealedMemory:
        def fill(buffer: memoryview) -> None:
            self._store.read_blob_into(parse_digest(digest), buffer)
            check_blob(manifest, digest, buffer)
            _check_finite(manifest, digest, buffer)

        try:
            return SealedMemory(size_bytes, fill)
        except NotInStore as error:
            raise Refusal(FailureReason.UNKNOWN_ARTIFACT, str(error)) from error
        except (CorruptStore, InvalidPayload) as error:
            raise Refusal(FailureReason.CORRUPT_ARTIFACT, str(error)) from error

    # --- room ----------------------------------------------------------------------------------
    def _used_bytes(self) -> int:
        return sum(entry.reserved_bytes for entry in self._entries.values())

    def _reserve(self, entry: _Entry, size_bytes: int, deadline_s: float) -> None:
        if size_bytes > self.capacity_bytes:
            raise Refusal(
                FailureReason.CAPACITY,
                f"{size_bytes} bytes; the dram tier holds {self.capacity_bytes}",
            )
        while True:
            with self._lock:
                victims = self._victims(size_bytes)
                if victims is not None:
                    for digest in victims:
                        del self._entries[digest]
                    # The victims' bytes stay counted until their memory is really free.
                    freed_bytes = sum(victim.reserved_bytes for victim in victims.values())
                    entry.reserved_bytes = max(size_bytes, freed_bytes)
            if victims is None:
                self._wait_for_room(size_bytes, deadline_s)
                continue
            for victim in victims.values():
                self._dispose(victim)
            with self._lock:
                entry.reserved_bytes = size_bytes
                self._freed.notify_all()
            return

    def _wait_for_room(self, size_bytes: int, deadline_s: float) -> None:
        with self._lock:
            has_room = self._freed.wait_for(
                lambda: self._is_closed or self._victims(size_bytes) is not None,
                max(0.0, deadline_s - time.monotonic()),
            )
            if self._is_closed:
                raise _closed()
        if not has_room:
            raise Refusal(
                FailureReason.CAPACITY,
                f"{size_bytes} bytes; all {self.capacity_bytes} of the dram tier are in use",
            )

    def _victims(self, size_bytes: int) -> dict[Digest, _Entry] | None:
        """Least recently used artifacts whose memory makes room; `None` when there is not enough.

        Called with the lock held.
        """
        missing = self._used_bytes() + size_bytes - self.capacity_bytes
        victims: dict[Digest, _Entry] = {}
        for digest, entry in self._entries.items():
            if missing <= 0:
                break
            if entry.artifact is not None and entry.done.is_set() and entry.num_users == 0:
                victims[digest] = entry
                missing -= entry.reserved_bytes
        return victims if missing <= 0 else None

    def _dispose(self, entry: _Entry) -> None:
        if entry.artifact is not None:
            self._on_evict(entry.artifact.digest)
            entry.artifact.close()
            with self._lock:
                self._freed.notify_all()


def _closed() -> Refusal:
    return Refusal(FailureReason.NOT_READY, "the dram tier was closed")


def tensor_view(
    buffer: memoryview | bytearray, dtype: str, shape: Sequence[int], begin: int, end: int
) -> torch.Tensor:
    """A tensor over bytes [begin, end) of a writable buffer, without a copy."""
    count = (end - begin) // TORCH_DTYPES[dtype].itemsize
    flat = torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype], count=count, offset=begin)
    return flat.reshape(list(shape))


def _check_finite(manifest: Manifest, digest: str, buffer: memoryview) -> None:
    for name, tensor in manifest.tensors.items():
        if tensor.blob != digest:
            continue
        values = tensor_view(buffer, tensor.dtype, tensor.shape, *tensor.byte_range)
        # A float8 type has no isfinite of its own.
        if not bool(values.to(torch.float32).isfinite().all()):
            raise InvalidPayload(f"tensor {name}: NaN or infinity")
