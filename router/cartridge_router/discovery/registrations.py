"""Replicas that name themselves: engines whose lease says where they answer.

Owns how long a replica stays without a lease. Refuses to read Redis: the residency map does, and
believes signed leases only.
"""

import asyncio
import time
from collections.abc import Callable

from cartridge_policies.types import MapMode
from cartridge_proto.residency import ReplicaId
from cartridge_router.discovery import Channel
from cartridge_router.residency_map import ResidencyMap

POLL_S = 0.5
STAY_S = 30.0
"""How long one without a lease stays: a Redis that lost everything gets leases back one by one."""


class Registrations:
    """The live replicas of the residency map that say where they answer."""

    def __init__(
        self,
        residency: ResidencyMap,
        channel: Channel,
        *,
        poll_s: float = POLL_S,
        stay_s: float = STAY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._map = residency
        self._channel = channel
        self._poll_s = poll_s
        self._stay_s = stay_s
        self._clock = clock
        self._urls = dict[ReplicaId, str]()
        self._seen_s = dict[ReplicaId, float]()

    async def run(self) -> None:
        """Look at the map until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._poll_s)

    def look(self) -> None:
        """Take in what the map says now; nothing while it is not known to be true."""
        if self._map.mode is not MapMode.EXACT:
            return
        now_s = self._clock()
        before = dict(self._urls)
        for replica, url in self._map.urls.items():
            self._urls[replica], self._seen_s[replica] = url, now_s
        for replica in [r for r, seen_s in self._seen_s.items() if now_s - seen_s > self._stay_s]:
            del self._urls[replica], self._seen_s[replica]
        if self._urls != before:
            self._channel.on_listed(self._urls)
