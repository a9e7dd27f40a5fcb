"""Moves a request to a replica and the answer back, as bytes.

Owns attempts before the first byte, the headers both ways, and what a client sees when a replica
breaks off. Refuses to choose a replica, and to retry once a byte has gone to the client.
"""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from cartridge_proto.names import (
    HEADER_DECISION,
    HEADER_PREFIX,
    HEADER_REPLICA,
    HEADER_REQUEST_ID,
    HEADER_TIER,
)
from cartridge_proto.residency import FailureReason, ReceiptStatus, ReplicaId, Tier
from cartridge_router.errors import (
    CartridgeNotServed,
    ContextTooLong,
    IncompatibleCartridge,
    InvalidRequest,
    RouterError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from cartridge_router.fleet import Fleet
from cartridge_router.receipts import ReceiptBook
from cartridge_router.request import Route
from cartridge_router.settings import ForwardingSettings

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES = 65_536
MAX_FIRST_BYTES = 1 << 20

_ERROR_EVENT: Final = re.compile(rb'(?:^|\n)data: ?\{"error"')

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_OWN_REQUEST: Final = frozenset(
    # A compressed body was unpacked to be read, and goes on unpacked.
    {"host", "content-length", "content-encoding", "expect", "authorization", HEADER_REQUEST_ID}
)
_NOT_ADDED: Final = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that the client library would make up; an engine sees them only from the client."""
_OWN_RESPONSE: Final = frozenset({"server", "date", HEADER_REQUEST_ID})

_ERROR_OF_REASON: Final[dict[FailureReason, type[RouterError]]] = {
    FailureReason.INCOMPATIBLE: IncompatibleCartridge,
    FailureReason.QUARANTINED: IncompatibleCartridge,
    FailureReason.CONTEXT_LENGTH: ContextTooLong,
    FailureReason.UNSUPPORTED: InvalidRequest,
}


@dataclass(frozen=True)
class Outgoing:
    """What goes to a replica; `replicas` in the order they are tried.

    With a `composition` (its identity) a failure may have a receipt that explains it.
    """

    request_id: str
    path: str
    body: bytes
    replicas: tuple[ReplicaId, ...]
    composition: str | None
    tiers: Mapping[ReplicaId, Tier]
    """Predicted tier of the Cartridges on each replica; empty without any."""


class Exchange:
    """What is learned while a request is forwarded; `headers` go to the client."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)
        self.num_retries = 0
        self.first_byte_s: float | None = None

    def note_first_byte(self, replica: ReplicaId, tier: Tier | None) -> None:
        """An answer begins; it may come from another replica than the first one chosen."""
        self.first_byte_s = time.monotonic()
        self.headers[HEADER_REPLICA] = replica
        if tier is not None:
            self.headers[HEADER_TIER] = tier.value
        if self.num_retries:
            self.headers[HEADER_DECISION] += f"; retries={self.num_retries}"


class Forwarder:
    """Forwards over one pooled client session."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        fleet: Fleet,
        receipts: ReceiptBook,
        settings: ForwardingSettings,
        receipt_wait_s: float,
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._receipts = receipts
        self._settings = settings
        self._receipt_wait_s = receipt_wait_s
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=None
        )

    async def forward(
        self, request: web.Request, outgoing: Outgoing, exchange: Exchange
    ) -> web.StreamResponse:
        """Send to the first replica that takes it, and relay the answer.

        Raises:
            UpstreamUnavailable: none of the replicas could be reached.
            UpstreamTimeout: one took the request and did not begin to answer in time.
            RouterError: the engine refused the Cartridges; the receipt says why.
        """
        failures: list[str] = []
        for replica in outgoing.replicas[: self._settings.max_attempts]:
            exchange.num_retries = len(failures)
            if replica in outgoing.tiers:
                self._receipts.expect(outgoing.request_id, outgoing.tiers[replica])
            with self._fleet.in_flight(replica):
                try:
                    upstream = await self._send(request, outgoing, replica)
                except aiohttp.ClientError as error:
                    logger.warning("request %s: %s failed: %r", outgoing.request_id, replica, error)
                    self._fleet.note_connect_failure(replica)
                    failures.append(f"{replica}: {error!r}")
                    continue
                except TimeoutError as error:
                    raise self._late(replica) from error
                async with upstream:
                    return await self._relay(request, upstream, outgoing, exchange, replica)
        raise UpstreamUnavailable(f"no replica could be reached ({'; '.join(failures)})")

    async def _send(
        self, request: web.Request, outgoing: Outgoing, replica: ReplicaId
    ) -> aiohttp.ClientResponse:
        async with asyncio.timeout(self._settings.first_byte_timeout_s):
            return await self._session.request(
                request.method,
                self._fleet.url(replica) + outgoing.path,
                data=outgoing.body,
                headers=_request_headers(request.headers, outgoing.request_id),
                skip_auto_headers=_NOT_ADDED,
                timeout=self._timeout,
                allow_redirects=False,
            )

    def _late(self, replica: ReplicaId) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"{replica} did not begin to answer in {self._settings.first_byte_timeout_s:g} s"
        )

    async def _relay(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        outgoing: Outgoing,
        exchange: Exchange,
        replica: ReplicaId,
    ) -> web.StreamResponse:
        is_stream = upstream.content_type == "text/event-stream"
        first = b""
        if outgoing.composition is not None:
            first = await self._first_bytes(upstream, outgoing, replica, is_stream=is_stream)
            if upstream.status >= 500 or (is_stream and _ERROR_EVENT.search(first)):
                await self._raise_from_receipt(outgoing, replica)
        exchange.note_first_byte(replica, outgoing.tiers.get(replica))
        response = web.StreamResponse(
            status=upstream.status,
            reason=upstream.reason,
            headers=_response_headers(upstream.headers, exchange.headers),
        )
        await response.prepare(request)
        chunk = first
        while True:
            if chunk:
                await response.write(chunk)
            try:
                chunk = await self._next_chunk(upstream)
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning("request %s: %s broke off: %r", outgoing.request_id, replica, error)
                await _break_off(request, response, is_stream=is_stream)
                return response
            if not chunk:
                break
        await response.write_eof()
        return response

    async def _first_bytes(
        self,
        upstream: aiohttp.ClientResponse,
        outgoing: Outgoing,
        replica: ReplicaId,
        *,
        is_stream: bool,
    ) -> bytes:
        """The beginning of an answer, before anything goes to the client.

        vLLM answers a stream with 200 before it knows whether the Cartridges load. The first token
        or the failure is in the first event, or in the second of a chat, behind the role; both
        are sent together, so nothing is held back.
        """
        try:
            async with asyncio.timeout(self._settings.first_byte_timeout_s):
                if is_stream:
                    num_events = 2 if outgoing.path.startswith(Route.CHAT) else 1
                    first = b""
                    while first.count(b"\n\n") < num_events and len(first) < MAX_FIRST_BYTES:
                        chunk = await upstream.content.readany()
                        if not chunk:
                            break
                        first += chunk
                    return first
                if upstream.status >= 500:
                    return await upstream.content.read(MAX_ERROR_BYTES)
        except aiohttp.ClientError as error:
            raise UpstreamUnavailable(
                f"{replica} broke off before the answer: {error!r}"
            ) from error
        except TimeoutError as error:
            raise self._late(replica) from error
        return b""

    async def _next_chunk(self, upstream: aiohttp.ClientResponse) -> bytes:
        async with asyncio.timeout(self._settings.idle_timeout_s):
            return await upstream.content.readany()

    async def _raise_from_receipt(self, outgoing: Outgoing, replica: ReplicaId) -> None:
        """Turn an engine's failure into the reason it gave; returns when it gave none."""
        receipt = await self._receipts.wait(outgoing.request_id, self._receipt_wait_s)
        if receipt is None or receipt.status is not ReceiptStatus.FAILED or receipt.reason is None:
            return
        error = _ERROR_OF_REASON.get(receipt.reason, CartridgeNotServed)
        raise error(f"{replica} did not serve the Cartridges: {receipt.reason}: {receipt.detail}")


def _end_to_end(received: Mapping[str, str], own: frozenset[str]) -> CIMultiDict[str]:
    """Headers without hop-by-hop ones, those named in `Connection`, and the gateway's own."""
    named = {part.strip().lower() for part in received.get("connection", "").split(",")}
    dropped = _HOP_BY_HOP | own | named
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in received.items():
        lower = name.lower()
        if lower not in dropped and not lower.startswith(HEADER_PREFIX):
            headers.add(name, value)
    return headers


def _request_headers(received: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    headers = _end_to_end(received, _OWN_REQUEST)
    headers[HEADER_REQUEST_ID] = request_id
    return headers


def _response_headers(received: Mapping[str, str], own: Mapping[str, str]) -> CIMultiDict[str]:
    headers = _end_to_end(received, _OWN_RESPONSE)
    headers.update(own)
    return headers


async def _break_off(
    request: web.Request, response: web.StreamResponse, *, is_stream: bool
) -> None:
    """Say in the stream that it is incomplete, then close without the clean end."""
    if is_stream:
        event = {
            "error": {
                "message": "the replica broke off",
                "type": "server_error",
                "param": None,
                "code": "upstream_unavailable",
            }
        }
        try:
            await response.write(b"\n\ndata: " + msgspec.json.encode(event) + b"\n\n")
        except ConnectionError:
            logger.info("the client was gone before the replica broke off")
    if request.transport is not None:
        # close() flushes the event first; the missing last chunk tells an HTTP client the rest.
        request.transport.close()
