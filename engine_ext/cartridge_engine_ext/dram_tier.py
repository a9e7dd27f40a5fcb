"""What a dram tier is to those who use one: artifacts in sealed memory, held while they are used.

Owns the values and the two interfaces, above (`DramTier`) and below (`ArtifactSource`). Refuses
torch and vLLM, so that a node agent needs neither.
"""

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import Tier

REQUEST_PRIORITY: Final = 1000
"""Loads that a request waits for go before all prefetches."""
MAX_PREFETCH_PRIORITY: Final = 100
OPPORTUNISTIC: Final = 0
"""A prefetch of this priority takes room only from what its tier's policy holds for worth less."""


@dataclass(frozen=True)
class Artifact:
    """A verified artifact in memory; `memories` by blob digest."""

    digest: Digest
    manifest: Manifest
    memories: dict[str, SealedMemory]
    loaded_from: Tier = Tier.REMOTE
    """Where its bytes were when they were loaded; dram = in another process of this machine."""

    @property
    def size_bytes(self) -> int:
        """Bytes of memory it takes."""
        return sum(memory.size_bytes for memory in self.memories.values())

    def close(self) -> None:
        """Give its memory back."""
        for memory in self.memories.values():
            memory.close()


@dataclass(frozen=True)
class Holding:
    """What a tier knows of one artifact; `size_bytes` is `None` before its manifest was read."""

    digest: Digest
    is_ready: bool
    size_bytes: int | None
    num_users: int
    pinned_by: tuple[str, ...]


class ArtifactReader(Protocol):
    """Reads what digests name, and verifies that it is."""

    def read_manifest(self, digest: Digest) -> Manifest:
        """The manifest; raises a `StoreError`."""
        ...

    def read_blob_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill memory of exactly the size of the stored blob; raises a `StoreError`."""
        ...


@runtime_checkable
class ArtifactSource(ArtifactReader, Protocol):
    """A reader that can be told first what will be read: a tier in front of a store."""

    def fetch(self, digest: Digest, deadline_s: float) -> Tier:
        """Bring an artifact's blobs near; returns where they were found.

        Called once for each load, after room was made and before its blobs are read.
        `deadline_s` is `time.monotonic()`. Raises a `StoreError`.
        """
        ...


class StoreSource:
    """A store as it is, without a tier in front."""

    def __init__(self, store: ArtifactReader) -> None:
        self._store = store

    def read_manifest(self, digest: Digest) -> Manifest:
        """The store's."""
        return self._store.read_manifest(digest)

    def fetch(self, digest: Digest, deadline_s: float) -> Tier:
        """Nothing to bring: every blob is read where it is."""
        return Tier.REMOTE

    def read_blob_into(self, digest: Digest, buffer: memoryview) -> None:
        """The store's."""
        self._store.read_blob_into(digest, buffer)


class DramTier(Protocol):
    """Artifacts by digest. All methods may be called from any thread.

    `acquire`, `release`, `poll`, `prefetch` and `expect` never wait for I/O.
    """

    @property
    def capacity_bytes(self) -> int:
        """Bound of its memory."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes taken or reserved."""
        ...

    @property
    def pinned_bytes(self) -> int:
        """Bound of what may be pinned."""
        ...

    def acquire(self, digest: Digest, deadline_s: float, priority: int = REQUEST_PRIORITY) -> bool:
        """Use an artifact until `release`; starts its load if it is not there.

        `deadline_s` is `time.monotonic()`, until which the load may wait for room. A load that
        several want has the latest deadline and the highest priority of all. Returns whether the
        artifact was ready already.
        """
        ...

    def release(self, digest: Digest) -> None:
        """End one use. A load that has not begun and that nobody wants any more is dropped."""
        ...

    def poll(self, digest: Digest) -> Artifact | None:
        """The artifact when it is ready, `None` while it loads; raises a `Refusal`."""
        ...

    def wait(self, digest: Digest, timeout_s: float) -> tuple[Artifact, float]:
        """Block until an acquired artifact is ready; also its load seconds; raises a `Refusal`."""
        ...

    def prefetch(self, digest: Digest, deadline_s: float, priority: int = OPPORTUNISTIC) -> None:
        """Start a load that nobody uses yet; raises a `Refusal` when too many are under way."""
        ...

    def expect(self, digest: Digest, at_s: float) -> None:
        """A hint for eviction: it will be wanted at `at_s` (`time.monotonic()`)."""
        ...

    def pin(
        self, digest: Digest, owner: str, timeout_s: float, priority: int = REQUEST_PRIORITY
    ) -> tuple[Artifact, float]:
        """Load an artifact if need be, and keep it until `owner` unpins it; raises a `Refusal`."""
        ...

    def unpin(self, digest: Digest, owner: str) -> bool:
        """End an owner's pin; whether there was one."""
        ...

    def adopt(self, artifact: Artifact) -> None:
        """Take in an artifact that did not come from a source; raises a `Refusal`."""
        ...

    def evict(self, digest: Digest) -> str | None:
        """Drop an artifact; returns why not, or `None` when it is gone."""
        ...

    def residents(self) -> list[tuple[Artifact, int]]:
        """Ready artifacts and how many use each, least recently used first."""
        ...

    def holding(self, digest: Digest) -> Holding | None:
        """What is known of one artifact; `None` when nothing is."""
        ...

    def holdings(self) -> list[Holding]:
        """All that is ready or on its way, least recently used first."""
        ...

    def close(self) -> None:
        """Stop loading and give all memory back."""
        ...
