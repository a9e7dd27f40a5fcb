"""Replicas from DNS: every address of a name is one.

Owns asking again and again. Refuses to believe a lack of answers: names vanish when a resolver is
in trouble, and replicas that are gone show by their probes.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from cartridge_proto.residency import ReplicaId
from cartridge_router.discovery import Channel

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 10.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> addresses; raises `OSError`."""


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Addresses by the resolver of the system, IPv4 and IPv6."""
    loop = asyncio.get_running_loop()
    # typeshed and uvloop type socket addresses for every family; their first part is the address.
    found: list[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(socket_address[0]) for *_, socket_address in found]


class DnsName:
    """The addresses behind `http://name:port`, asked for every `refresh_s` seconds.

    A replica is named `address:port`, which an engine that registers says as its `replica_id`.
    """

    def __init__(
        self,
        url: str,
        channel: Channel,
        *,
        refresh_s: float,
        resolve: Resolve = resolve_by_system,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None  # noqa: S101 - checked with the settings
        assert parts.port is not None  # noqa: S101 - the same
        self._scheme, self._host, self._port = parts.scheme, parts.hostname, parts.port
        self._refresh_s = refresh_s
        self._channel = channel
        self._resolve = resolve

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(self._refresh_s)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                addresses = await self._resolve(self._host, self._port)
        except (OSError, TimeoutError) as error:
            logger.warning("the replicas stay as they are: %s: %r", self._host, error)
            self._channel.on_failed()
            return
        # A link-local address, which has a zone, is good on one machine only.
        whole = sorted({address for address in addresses if "%" not in address})
        self._channel.on_listed(dict(self._replica_at(address) for address in whole))

    def _replica_at(self, address: str) -> tuple[ReplicaId, str]:
        host = f"[{address}]" if ":" in address else address
        return ReplicaId(f"{address}:{self._port}"), f"{self._scheme}://{host}:{self._port}"
