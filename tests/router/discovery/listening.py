"""What a source has said: for tests of sources without a gateway.

Owns a record. Refuses to judge it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from cartridge_proto.residency import ReplicaId
from cartridge_router.discovery import Channel


class Listening:
    """The listening end of a channel."""

    def __init__(self) -> None:
        self.lists: list[dict[str, str]] = []
        self.num_failures = 0
        self.channel = Channel(on_listed=self._listed, on_failed=self._failed)

    def _listed(self, urls: Mapping[ReplicaId, str]) -> None:
        self.lists.append({str(name): url for name, url in urls.items()})

    def _failed(self) -> None:
        self.num_failures += 1


@contextlib.asynccontextmanager
async def running(job: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """A source that runs for as long as the block does, and ends when it is cancelled."""
    task = asyncio.create_task(job())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()
