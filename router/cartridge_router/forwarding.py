"""Moves a request to a replica and the answer back, as bytes.

Owns attempts before the first byte, the headers both ways, and what a client sees when a replica
breaks off. Refuses to choose a replica, and to retry once a byte has gone to the client.
"""

import asyncio
import contextlib
import email.utils
import http
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from multidict import CIMultiDict
from opentelemetry import trace
from opentelemetry.propagate import inject

from cartridge_policies.loads import Booking
from cartridge_policies.never_worse import Comparison
from cartridge_policies.types import Candidate, Demand
from cartridge_proto.digest import Digest
from cartridge_proto.names import (
    HEADER_API_KEY,
    HEADER_AUTHORIZATION,
    HEADER_DECISION,
    HEADER_ENGINE_PRIORITY,
    HEADER_ENGINE_RANK,
    HEADER_PREFIX,
    HEADER_REPLICA,
    HEADER_REQUEST_ID,
    HEADER_TIER,
    HEADER_X_API_KEY,
)
from cartridge_proto.residency import FailureReason, ReceiptStatus, ReplicaId, Tier
from cartridge_router.attempts import Attempts
from cartridge_router.dialects import Dialect
from cartridge_router.errors import (
    CartridgeNotServed,
    ContextTooLong,
    DeadlineExceeded,
    GatewayEnding,
    IncompatibleCartridge,
    InvalidRequest,
    ResponseUnavailable,
    RouterError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from cartridge_router.fleet import Fleet, Replica
from cartridge_router.observations import Observations
from cartridge_router.receipts import ReceiptBook
from cartridge_router.response_book import HeadReader
from cartridge_router.retry_budget import RetryBudget
from cartridge_router.settings import ForwardingSettings
from cartridge_router.telemetry import Metrics
from cartridge_router.tls import EngineLogin
from cartridge_router.upstream import (
    Answer,
    BrokeOff,
    ConnectFailed,
    OutOfFiles,
    Question,
    UpstreamClient,
    UpstreamError,
    content_type,
)

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES = 65_536
MAX_FIRST_BYTES = 1 << 20
MAX_IDLE_RESETS = 3
"""Connections from the pool that may break on one request without a word."""
IDLE_RESET_S = 1.0
"""One that breaks later has not lain idle: the engine worked on the request."""

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_USUAL_CONNECTION: Final = frozenset({"keep-alive", "close"})
"""What names no header."""
_OWN_REQUEST: Final = _HOP_BY_HOP | frozenset(
    # A compressed body was unpacked to be read, and goes on unpacked.
    {"host", "content-length", "content-encoding", "expect", HEADER_REQUEST_ID}
    | {HEADER_AUTHORIZATION, HEADER_X_API_KEY, HEADER_API_KEY}
    | {HEADER_ENGINE_PRIORITY, HEADER_ENGINE_RANK}
)
_OWN_RESPONSE: Final = _HOP_BY_HOP | frozenset({"server", "date", HEADER_REQUEST_ID})

_ERROR_OF_REASON: Final[dict[FailureReason, type[RouterError]]] = {
    FailureReason.INCOMPATIBLE: IncompatibleCartridge,
    FailureReason.QUARANTINED: IncompatibleCartridge,
    FailureReason.CONTEXT_LENGTH: ContextTooLong,
    FailureReason.UNSUPPORTED: InvalidRequest,
}


_PUSHED_BACK: Final = frozenset(
    {http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE}
)
_FAILED: Final = frozenset(
    {
        http.HTTPStatus.INTERNAL_SERVER_ERROR,
        http.HTTPStatus.BAD_GATEWAY,
        http.HTTPStatus.GATEWAY_TIMEOUT,
    }
)
_ITS_OWN: Final = frozenset(
    {FailureReason.NOT_READY, FailureReason.CAPACITY, FailureReason.INTERNAL}
)
"""Reasons that another replica may not have."""
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_END_BYTES: Final = 3
"""Of the longest of them all but one."""
_FRAME_BYTES: Final = 32
"""At most, around one chunk of a body."""
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_DEFAULT_RETRY_AFTER_S: Final = 1.0


class _Failed(Exception):
    """A replica did not answer, and nothing has gone to the client.

    `answer` is what the client is told when no other replica can be asked; `None` for a 502.
    """

    def __init__(self, text: str, answer: RouterError | None = None) -> None:
        super().__init__(text)
        self.answer = answer


@dataclass(frozen=True)
class Outgoing:
    """What goes to a replica; `candidates` in the order they are tried.

    With a `composition` (its identity) a failure may have a receipt that explains it.
    """

    request_id: str
    path: str
    body: bytes
    dialect: Dialect
    candidates: tuple[Candidate, ...]
    demand: Demand
    composition: str | None
    is_lookup: bool
    """One replica has what is asked for, and nobody knows which: 404 is asked of the next."""
    has_holder: bool
    """Only the one replica has it."""
    is_streamed: bool
    """Events are asked for: the first token can be seen."""
    num_openers: int
    """Events of a stream that come before anything is known of the answer."""
    deadline_s: float | None = None
    """The client's own for the first byte, by `time.monotonic`; `None` without one."""
    comparison: Comparison | None = None
    """Of Cartridges and their texts, where both could be."""
    is_text: bool = False
    """Texts stand in for Cartridges."""
    has_other_way: bool = False
    """Without its Cartridges it could still be answered: no failure is passed on as it came."""
    on_created: Callable[[str, ReplicaId], None] | None = None
    """Called with the id of the response that is made, before the client learns of it."""

    def unavailable(self, attempts: Attempts) -> RouterError:
        """Why no replica answered."""
        failures = "; ".join(attempts.failures)
        if self.has_holder:
            return ResponseUnavailable(f"the replica that keeps the response is away ({failures})")
        if self.is_lookup:
            return ResponseUnavailable(f"not all replicas could be asked ({failures})")
        return UpstreamUnavailable(f"no replica could be reached ({failures})")

    def tiers(self, candidate: Candidate) -> dict[Digest, Tier]:
        """Where a candidate is thought to read each artifact from."""
        digests = (artifact.digest for artifact in self.demand.artifacts)
        return dict(zip(digests, candidate.tiers, strict=True))


class Exchange:
    """What is learned while a request is forwarded; `headers` go to the client."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)
        self.num_retries = 0
        self.answer: web.StreamResponse | None = None
        """What has begun to go to the client."""
        self.takes_events = False
        """Whether it is a stream into which events can be put."""
        self.first_byte_s: float | None = None
        self.awaits_token = False
        """A stream has begun, and its first token has not come."""
        self.num_events = 0
        """Of the stream, until then."""
        self._last_bytes = b""

    def count_events(self, chunk: bytes) -> None:
        """More of the stream has come; the end of an event may lie in two pieces."""
        seen = self._last_bytes + chunk
        self.num_events += _num_events(seen) - _num_events(self._last_bytes)
        self._last_bytes = seen[-_END_BYTES:]

    def answer_from(self, candidate: Candidate, booking: Booking, sent_s: float) -> None:
        """A replica has taken the request; it may be another than the first one chosen."""
        self.candidate, self.booking, self.sent_s = candidate, booking, sent_s

    def note_first_byte(self) -> None:
        """Its answer begins."""
        self.first_byte_s = time.monotonic()
        self.headers[HEADER_REPLICA] = self.candidate.replica
        if self.candidate.slowest_tier is not None:
            self.headers[HEADER_TIER] = self.candidate.slowest_tier.value
        if self.num_retries:
            self.headers[HEADER_DECISION] += f"; retries={self.num_retries}"


class _WithFirstBytes(web.StreamResponse):
    """Sends its head together with the first bytes of the body, which are there already.

    aiohttp's own `Response` does so; each write is a system call, the dearest part of a request.
    """

    _send_headers_immediately = False


@dataclass(frozen=True, kw_only=True)
class _Passing:
    """An answer on its way, behind its first bytes."""

    request: web.Request
    response: web.StreamResponse
    upstream: Answer
    replica: ReplicaId
    exchange: Exchange
    head: HeadReader | None
    is_good: bool
    """Its status is no error."""
    is_whole: bool
    """The first bytes were all of it."""
    is_between_events: bool
    """The first bytes ended where an event does."""


class Forwarder:
    """Forwards with one client."""

    def __init__(
        self,
        *,
        client: UpstreamClient,
        login: EngineLogin,
        fleet: Fleet,
        receipts: ReceiptBook,
        settings: ForwardingSettings,
        metrics: Metrics,
        observations: Observations,
        receipt_wait_s: float,
        write_timeout_s: float,
    ) -> None:
        self._client = client
        self._login = login
        self._fleet = fleet
        self._receipts = receipts
        self._metrics = metrics
        self._observations = observations
        self._receipt_wait_s = receipt_wait_s
        self._running: set[asyncio.Timeout] = set()
        self._budget = RetryBudget(ratio=settings.retry_ratio, per_s=settings.retries_per_s)
        self.configure(settings, write_timeout_s)

    def configure(self, settings: ForwardingSettings, write_timeout_s: float) -> None:
        """Forward what comes by other settings."""
        self._settings = settings
        self._write_timeout_s = write_timeout_s
        self._budget.configure(ratio=settings.retry_ratio, per_s=settings.retries_per_s)

    async def forward(
        self, request: web.Request, outgoing: Outgoing, exchange: Exchange
    ) -> web.StreamResponse:
        """Send to the first replica that takes it, and relay the answer.

        Until a byte has gone to the client, another replica may take the place of one that failed
        or pushed back.

        Raises:
            UpstreamUnavailable: no replica could be reached.
            UpstreamTimeout: one took the request and did not begin to answer in time.
            GatewayEnding: `cut` came before the answer.
            RouterError: the engine refused the Cartridges; the receipt says why.
        """
        try:
            async with asyncio.timeout(None) as running:
                self._running.add(running)
                try:
                    return await self._try_replicas(request, outgoing, exchange)
                finally:
                    self._running.discard(running)
        except TimeoutError as error:
            if not running.expired():
                raise
            ending = GatewayEnding("the gateway ends, and the answer was not whole")
            if exchange.answer is None:
                raise ending from error
            dialect = outgoing.dialect if exchange.takes_events else None
            await _break_off(request, exchange.answer, ending, dialect)
            return exchange.answer

    def cut(self) -> None:
        """Break off all that runs: streams say so, what has not begun to be answered is refused."""
        if self._running:
            logger.warning("%d requests are cut off", len(self._running))
            self._metrics.cut_answers.inc(len(self._running))
        for running in list(self._running):
            running.reschedule(0.0)

    async def _try_replicas(
        self, request: web.Request, outgoing: Outgoing, exchange: Exchange
    ) -> web.StreamResponse:
        self._budget.note_request()
        candidates = {candidate.replica: candidate for candidate in outgoing.candidates}
        attempts = Attempts(tuple(candidates), self._budget)
        for replica in attempts:
            candidate = candidates[replica]
            target = self._fleet.find(replica)
            if target is None:
                attempts.pass_over(f"{replica} was removed")
                continue
            if attempts.failures and not self._fleet.has_room(target):
                attempts.pass_over(f"{replica} is full by now")
                continue
            exchange.num_retries, sent_s = len(attempts.failures), time.monotonic()
            if candidate.slowest_tier is not None:
                self._receipts.expect(outgoing.request_id, candidate.slowest_tier)
            with self._fleet.in_flight(
                target,
                outgoing.demand,
                outgoing.tiers(candidate),
                is_streamed=outgoing.is_streamed,
            ) as booking:
                try:
                    with contextlib.closing(
                        await self._send(request, outgoing, target)
                    ) as upstream:
                        if not self._is_passed_on(upstream, outgoing, attempts, replica):
                            exchange.answer_from(candidate, booking, sent_s)
                            return await self._relay(request, upstream, outgoing, exchange)
                except _Failed as failed:
                    logger.warning("request %s: %s", outgoing.request_id, failed)
                    if not attempts.go_on(str(failed)):
                        raise failed.answer or outgoing.unavailable(attempts) from failed
        raise outgoing.unavailable(attempts)

    async def _send(self, request: web.Request, outgoing: Outgoing, target: Replica) -> Answer:
        """Send to one replica.

        Raises:
            _Failed: it cannot be reached, or broke off.
            UpstreamTimeout, DeadlineExceeded: it did not begin to answer in time.
        """
        replica = target.replica
        try:
            async with asyncio.timeout(self._first_byte_wait_s(outgoing)):
                return await self._send_afresh(request, outgoing, target)
        except ConnectFailed as error:
            self._fleet.note_connect_failure(target)
            raise _Failed(f"{replica}: {error!r}") from error
        except OutOfFiles as error:
            raise _Failed(f"{replica}: {error!r}") from error
        except UpstreamError as error:
            self._note_failure(replica)
            raise _Failed(f"{replica}: {error!r}") from error
        except TimeoutError as error:
            raise self._late(replica, outgoing) from error

    async def _send_afresh(
        self, request: web.Request, outgoing: Outgoing, target: Replica
    ) -> Answer:
        """Send; once more where the connection lay idle and was closed, as servers do.

        The next one from the pool may be another such: a few are used up.
        """
        question = self._question(request, outgoing)
        for _ in range(MAX_IDLE_RESETS):
            sent_s = time.monotonic()
            try:
                return await self._send_once(question, target)
            except BrokeOff as error:
                if not error.is_reused or time.monotonic() - sent_s > IDLE_RESET_S:
                    raise
        return await self._send_once(question, target)

    async def _send_once(self, question: Question, target: Replica) -> Answer:
        return await self._client.send(
            target.url,
            question,
            tls=self._login.context,
            connect_timeout_s=self._settings.connect_timeout_s,
        )

    def _question(self, request: web.Request, outgoing: Outgoing) -> Question:
        headers = _request_headers(request.headers, outgoing.request_id)
        headers.update(self._login.headers)
        if trace.get_current_span().is_recording():
            # The engine's spans hang below the gateway's; without one below the client's.
            inject(headers)
        return Question(request.method, outgoing.path, headers, outgoing.body)

    def _is_passed_on(
        self,
        upstream: Answer,
        outgoing: Outgoing,
        attempts: Attempts,
        replica: ReplicaId,
    ) -> bool:
        """Judge a replica by the status of its answer; whether the next one is asked instead.

        4xx says nothing about a replica, and a failure with Cartridges nothing before its receipt.

        Raises:
            ResponseUnavailable: none that could be asked has it, and some could not.
        """
        status = upstream.status
        if status in _PUSHED_BACK:
            self._fleet.outliers.note_busy(replica, _retry_after_s(upstream.headers))
            return attempts.go_on(f"{replica} answered {status}", is_push_back=True)
        if status in _FAILED and outgoing.composition is None:
            self._note_failure(replica)
            return attempts.go_on(f"{replica} answered {status}")
        if not outgoing.is_lookup or status != http.HTTPStatus.NOT_FOUND:
            return False
        if attempts.ask_next(f"{replica} answered {status}"):
            return True
        if attempts.has_unheard:
            # It may be where nobody could ask: a 404 would say that it is gone.
            raise outgoing.unavailable(attempts)
        return False

    def _note_failure(self, replica: ReplicaId) -> None:
        if self._fleet.outliers.note_failure(replica):
            logger.warning("replica %s is ejected for a while: it fails again and again", replica)
            self._metrics.ejections.labels(replica).inc()

    def _first_byte_wait_s(self, outgoing: Outgoing) -> float:
        """How long a replica may take from now on; not above 0 when the client has given up."""
        longest_s = self._settings.first_byte_timeout_s
        if outgoing.deadline_s is None:
            return longest_s
        return min(longest_s, outgoing.deadline_s - time.monotonic())

    def _late(self, replica: ReplicaId, outgoing: Outgoing) -> RouterError:
        if outgoing.deadline_s is not None and time.monotonic() >= outgoing.deadline_s:
            # Says how much of a hurry the client is in, and nothing about the replica.
            return DeadlineExceeded(f"{replica} did not begin to answer before the deadline")
        self._note_failure(replica)
        return UpstreamTimeout(
            f"{replica} did not begin to answer in {self._settings.first_byte_timeout_s:g} s"
        )

    async def _relay(
        self,
        request: web.Request,
        upstream: Answer,
        outgoing: Outgoing,
        exchange: Exchange,
    ) -> web.StreamResponse:
        passing = await self._begin(request, upstream, outgoing, exchange)
        is_whole = passing.is_whole or await self._pass_rest(passing, outgoing)
        if is_whole and passing.is_good:
            # Not before its end: a replica that breaks off each answer has answered none.
            self._fleet.outliers.note_success(passing.replica)
        return passing.response

    async def _begin(
        self,
        request: web.Request,
        upstream: Answer,
        outgoing: Outgoing,
        exchange: Exchange,
    ) -> _Passing:
        """Pass on the head of an answer and what has come of its body.

        On its own, because nothing holds these first bytes while the rest goes.
        """
        replica = exchange.candidate.replica
        is_stream = content_type(upstream.headers) == "text/event-stream"
        is_good = upstream.status < http.HTTPStatus.BAD_REQUEST
        first = b""
        if outgoing.composition is not None:
            first = await self._first_bytes(upstream, outgoing, replica, is_stream=is_stream)
            if upstream.status in _FAILED or (is_stream and outgoing.dialect.has_failed(first)):
                await self._raise_from_receipt(outgoing, replica)
                self._note_failure(replica)
                if outgoing.has_other_way:
                    raise CartridgeNotServed(f"{replica} failed, and sent no receipt")
                is_good = False
        exchange.note_first_byte()
        exchange.awaits_token = is_stream and is_good
        ready, is_whole = upstream.ready()
        first += ready
        self._look_for_token(outgoing, exchange, first)
        head = _head_reader(outgoing, replica, is_stream=is_stream) if is_good else None
        response = (_WithFirstBytes if first or is_whole else web.StreamResponse)(
            status=upstream.status,
            reason=upstream.reason,
            headers=_response_headers(upstream.headers, exchange.headers),
        )
        await response.prepare(request)
        exchange.answer = response
        # Nothing can be put between events of a stream that the engine has compressed.
        is_plain = "content-encoding" not in upstream.headers
        exchange.takes_events = is_stream and is_plain and not is_whole
        if head is not None:
            head.take(first)
        if first or is_whole:
            await self._write(request, response, first, is_last=is_whole)
        return _Passing(
            request=request,
            response=response,
            upstream=upstream,
            replica=replica,
            exchange=exchange,
            head=head,
            is_good=is_good,
            is_whole=is_whole,
            is_between_events=_is_between_events(first),
        )

    async def _pass_rest(self, passing: _Passing, outgoing: Outgoing) -> bool:
        """Pass on the rest of an answer; whether it came to its end."""
        request, response, replica = passing.request, passing.response, passing.replica
        is_open, is_between_events = passing.exchange.takes_events, passing.is_between_events
        silent_s = 0.0
        while True:
            try:
                chunk, silent_s = await self._next_chunk(
                    passing.upstream, silent_s, can_wait=is_open and is_between_events
                )
                self._look_for_token(outgoing, passing.exchange, chunk)
            except (UpstreamError, TimeoutError) as error:
                logger.warning("request %s: %s broke off: %r", outgoing.request_id, replica, error)
                self._note_failure(replica)
                self._metrics.broken_answers.labels(replica).inc()
                broken = UpstreamUnavailable("the replica broke off")
                await _break_off(request, response, broken, outgoing.dialect if is_open else None)
                return False
            if not chunk:
                passing.exchange.takes_events = False
                await self._write(request, response, b"", is_last=True)
                return True
            is_between_events = _is_between_events(chunk)
            if passing.head is not None and not passing.head.is_done:
                passing.head.take(chunk)
            await self._write(request, response, chunk)

    def _look_for_token(self, outgoing: Outgoing, exchange: Exchange, chunk: bytes) -> None:
        """Note when the first token of a stream is there: behind the events that say nothing."""
        if not exchange.awaits_token or chunk is _KEEP_ALIVE:
            return
        exchange.count_events(chunk)
        if exchange.num_events <= outgoing.num_openers:
            return
        exchange.awaits_token, now_s = False, time.monotonic()
        exchange.booking.note_first_token(now_s)
        if not exchange.num_retries:
            self._observations.note_first_token(
                exchange.candidate,
                outgoing.demand,
                exchange.booking,
                now_s - exchange.sent_s,
                comparison=outgoing.comparison,
                is_text=outgoing.is_text,
            )

    async def _first_bytes(
        self,
        upstream: Answer,
        outgoing: Outgoing,
        replica: ReplicaId,
        *,
        is_stream: bool,
    ) -> bytes:
        """The beginning of an answer, before anything goes to the client.

        vLLM answers a stream with 200 before it knows whether the Cartridges load. The first token
        or the failure is in the first event behind the dialect's openers; those say nothing.
        """
        try:
            async with asyncio.timeout(self._first_byte_wait_s(outgoing)):
                if is_stream:
                    first = b""
                    num_events = outgoing.num_openers + 1
                    while _num_events(first) < num_events and len(first) < MAX_FIRST_BYTES:
                        chunk = await upstream.readany()
                        if not chunk:
                            break
                        first += chunk
                    return first
                if upstream.status >= 500:
                    return await _read(upstream, MAX_ERROR_BYTES)
        except UpstreamError as error:
            # So ends a stream whose API has no event for it.
            await self._raise_from_receipt(outgoing, replica)
            self._note_failure(replica)
            text = f"{replica} broke off before the answer: {error!r}"
            answer = CartridgeNotServed(text) if outgoing.has_other_way else None
            raise _Failed(text, answer) from error
        except TimeoutError as error:
            raise self._late(replica, outgoing) from error
        return b""

    async def _next_chunk(
        self, upstream: Answer, silent_s: float, *, can_wait: bool
    ) -> tuple[bytes, float]:
        """The next bytes and 0; or, if `can_wait`, a comment, and for how long nothing came.

        Raises:
            TimeoutError: none came within `idle_timeout_s`.
        """
        left_s = self._settings.idle_timeout_s - silent_s
        wait_s = min(left_s, self._settings.keep_alive_s) if can_wait else left_s
        try:
            return await upstream.readany(wait_s), 0.0
        except TimeoutError:
            if wait_s >= left_s:
                raise
        return _KEEP_ALIVE, silent_s + wait_s

    async def _write(
        self,
        request: web.Request,
        response: web.StreamResponse,
        data: bytes,
        *,
        is_last: bool = False,
    ) -> None:
        """Send to the client, which must read some of it in time.

        Raises:
            ConnectionResetError: it does not, or is gone.
        """
        transport, write = request.transport, response.write_eof if is_last else response.write
        if transport is not None and _has_room(transport, len(data)):
            await write(data)
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await write(data)
                # aiohttp itself waits for the client once in 64 KiB only.
                await request.writer.drain()
        except TimeoutError as error:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("the client does not read its answer") from error

    async def _raise_from_receipt(self, outgoing: Outgoing, replica: ReplicaId) -> None:
        """Turn an engine's failure into the reason it gave; returns when it gave none."""
        receipt = await self._receipts.wait(outgoing.request_id, replica, self._receipt_wait_s)
        if receipt is None or receipt.status is not ReceiptStatus.FAILED or receipt.reason is None:
            return
        text = f"{replica} did not serve the Cartridges: {receipt.reason}: {receipt.detail}"
        error = _ERROR_OF_REASON.get(receipt.reason, CartridgeNotServed)(text)
        error.is_from_receipt = True
        if receipt.reason in _ITS_OWN:
            raise _Failed(text, error)
        raise error


def _head_reader(outgoing: Outgoing, replica: ReplicaId, *, is_stream: bool) -> HeadReader | None:
    """What looks for the id of a response that is made; `None` where none is."""
    on_created = outgoing.on_created
    if on_created is None:
        return None
    return HeadReader(is_stream=is_stream, on_id=lambda made: on_created(made, replica))


def _has_room(transport: asyncio.Transport, num_bytes: int) -> bool:
    """Whether so many bytes of an answer can be written without waiting for the client."""
    low, high = transport.get_write_buffer_limits()
    size = transport.get_write_buffer_size()
    # Above the low mark it may be waiting already.
    return size <= low and size + num_bytes + _FRAME_BYTES <= high


async def _read(upstream: Answer, most_bytes: int) -> bytes:
    """The beginning of a body, or all of it."""
    data = b""
    while len(data) < most_bytes and (chunk := await upstream.readany()):
        data += chunk
    return data


def _num_events(data: bytes) -> int:
    return sum(data.count(end) for end in _EVENT_ENDS)


def _is_between_events(chunk: bytes) -> bool:
    return not chunk or chunk.endswith(_EVENT_ENDS)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """How long a replica asks to be left alone: seconds, or a date."""
    text = headers.get("retry-after", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return _DEFAULT_RETRY_AFTER_S


def _end_to_end(received: Mapping[str, str], own: frozenset[str]) -> CIMultiDict[str]:
    """Headers without hop-by-hop ones, those named in `Connection`, and the gateway's own."""
    connection = received.get("connection")
    if connection is not None and connection.lower() not in _USUAL_CONNECTION:
        own = own | {part.strip().lower() for part in connection.split(",")}
    return CIMultiDict(
        [
            (name, value)
            for name, value in received.items()
            if (lower := name.lower()) not in own and not lower.startswith(HEADER_PREFIX)
        ]
    )


def _request_headers(received: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    headers = _end_to_end(received, _OWN_REQUEST)
    headers[HEADER_REQUEST_ID] = request_id
    return headers


def _response_headers(received: Mapping[str, str], own: Mapping[str, str]) -> CIMultiDict[str]:
    headers = _end_to_end(received, _OWN_RESPONSE)
    headers.update(own)
    return headers


async def _break_off(
    request: web.Request,
    response: web.StreamResponse,
    why: RouterError,
    dialect: Dialect | None,
) -> None:
    """Say in the stream that it is incomplete, if it takes events, then close it uncleanly."""
    if dialect is not None:
        try:
            await response.write(dialect.error_event(why))
        except ConnectionError:
            logger.info("the client was gone before its answer broke off")
    if request.transport is not None:
        # close() flushes the event first; the missing last chunk tells an HTTP client the rest.
        request.transport.close()
