"""The simulated host memory of one replica: which artifacts are in it, bounded in bytes.

Owns single-flight loads, least-recently-used eviction and the order of publication: a row appears
after the bytes are usable and is gone before they are. Refuses to know stores, Redis and HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest


class PayloadTooLarge(Exception):
    """An artifact that would not fit in the empty tier."""


@dataclass(frozen=True, kw_only=True)
class LoadedArtifact:
    """A verified artifact; `payload_digest` was computed over the bytes that were read."""

    manifest: Manifest
    payload_digest: Digest
    size_bytes: int


class ResidencyNotes(Protocol):
    """Where the tier says what it holds: a publisher, or the engine until it has one."""

    def put(self, digest: Digest, size_bytes: int) -> None:
        """The artifact is usable."""

    async def withdraw(self, digest: Digest) -> None:
        """The artifact is about to go; returns when readers can know."""


class DramTier:
    """Artifacts in memory, used from one event loop.

    `fetch` reads and verifies an artifact; its errors reach every waiter and nothing is kept.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        fetch: Callable[[Digest], Awaitable[LoadedArtifact]],
        notes: ResidencyNotes,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._fetch = fetch
        self._notes = notes
        self._residents: dict[Digest, LoadedArtifact] = {}  # least recently used first
        self._loads: dict[Digest, asyncio.Task[LoadedArtifact]] = {}
        self._space = asyncio.Lock()

    def residents(self) -> dict[Digest, LoadedArtifact]:
        """What is usable now, least recently used first."""
        return dict(self._residents)

    def is_resident(self, digest: Digest) -> bool:
        """Whether `load` would return without a fetch."""
        return digest in self._residents

    async def load(self, digest: Digest) -> LoadedArtifact:
        """The artifact, fetched at most once however many ask; counts as its latest use.

        A caller that gives up does not end the load for the others.

        Raises:
            PayloadTooLarge: it is larger than the whole tier.
        """
        resident = self._residents.pop(digest, None)
        if resident is not None:
            self._residents[digest] = resident
            return resident
        task = self._loads.get(digest)
        if task is None:
            task = asyncio.create_task(self._load_and_keep(digest), name=f"load {digest}")
            self._loads[digest] = task
            task.add_done_callback(lambda done: self._forget(digest, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the loads under way and wait for their end."""
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_invariants(self) -> None:
        """Raise `AssertionError` when the accounts do not add up."""
        held = sum(artifact.size_bytes for artifact in self._residents.values())
        if not held <= self.used_bytes <= self.capacity_bytes:
            raise AssertionError(
                f"{held} bytes held, {self.used_bytes} accounted, {self.capacity_bytes} allowed"
            )

    def _forget(self, digest: Digest, task: asyncio.Task[LoadedArtifact]) -> None:
        del self._loads[digest]
        if not task.cancelled():
            # Every waiter may have given up; an error that nobody awaits is not news then.
            task.exception()

    async def _load_and_keep(self, digest: Digest) -> LoadedArtifact:
        artifact = await self._fetch(digest)
        if artifact.size_bytes > self.capacity_bytes:
            raise PayloadTooLarge(
                f"{digest}: {artifact.size_bytes} bytes in a tier of {self.capacity_bytes}"
            )
        async with self._space:
            while self.used_bytes + artifact.size_bytes > self.capacity_bytes:
                await self._evict_one()
            self.used_bytes += artifact.size_bytes
            self._residents[digest] = artifact
            self._notes.put(digest, artifact.size_bytes)
        return artifact

    async def _evict_one(self) -> None:
        victim, artifact = next(iter(self._residents.items()))
        # Out of sight first, so that no request that comes meanwhile counts on it.
        del self._residents[victim]
        try:
            await self._notes.withdraw(victim)
        finally:
            self.used_bytes -= artifact.size_bytes
