"""A small client over asyncio's transports and a C parser (llhttp, by httptools).

Owns pooled connections, framing and back-pressure. Refuses what replicas are not asked for:
redirects, cookies, proxies, compression, upgrades.

Source: RFC 9112 (HTTP/1.1), section 6.3 for where an answer ends.
"""

import asyncio
import errno
import http
import re
import ssl
import time
from collections import deque
from functools import lru_cache
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

from cartridge_router.upstream import (
    METHODS_WITH_BODY,
    BrokeOff,
    ConnectFailed,
    InvalidAnswer,
    OutOfFiles,
    Question,
    UpstreamError,
)

MAX_HEAD_BYTES: Final = 65_536
"""Of an answer, interim ones included."""
TURNS_TO_CLOSE: Final = 3
"""Of the event loop, until a transport that was aborted has told its protocol."""
_ONE_WRITE_BYTES: Final = 65_536
"""Up to which head and body are joined: a copy is cheaper than a second system call."""
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_PATH: Final = re.compile(r"/[!-~]*")
_WITHOUT_BODY: Final = frozenset({http.HTTPStatus.NO_CONTENT, http.HTTPStatus.NOT_MODIFIED})


class _Address(NamedTuple):
    host: str
    port: int
    is_tls: bool


@lru_cache(4096)
def _address(url: str) -> _Address:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return _Address(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls)


class NativeClient:
    """Connections to all replicas.

    Args:
        idle_s: how long one may lie idle; a little less than servers let it.
        read_buffer_bytes: taken from a socket at a time, and so the most of an answer that is
            held for whoever reads it; its replica waits with the rest.
    """

    def __init__(self, *, idle_s: float, read_buffer_bytes: int) -> None:
        self.idle_s = idle_s
        self.read_buffer = memoryview(bytearray(read_buffer_bytes))
        self._idle: dict[object, deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def send(
        self, url: str, question: Question, *, tls: ssl.SSLContext, connect_timeout_s: float
    ) -> "NativeAnswer":
        """As `UpstreamClient.send` says."""
        address = _address(url)
        # A renewed certificate makes another context, whose connections are its own.
        key = (address, tls) if address.is_tls else address
        connection = self._take_idle(key)
        if connection is None:
            connection = await self._connect(key, address, tls, connect_timeout_s)
        return await connection.ask(question)

    async def aclose(self) -> None:
        """As `UpstreamClient.aclose` says."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.end()
        for _ in range(TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    async def _connect(
        self, key: object, address: _Address, tls: ssl.SSLContext, timeout_s: float
    ) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, key, address),
                    address.host,
                    address.port,
                    ssl=tls if address.is_tls else None,
                )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection in {timeout_s:g} s") from error
        except UnicodeError as error:
            raise ConnectFailed(f"{address.host!r} is no name of a host") from error
        except OSError as error:
            kind = OutOfFiles if error.errno in _OUT_OF_FILES else ConnectFailed
            raise kind(f"{type(error).__name__}: {error}") from error
        return connection

    # --- the pool --------------------------------------------------------------------------------
    def _take_idle(self, key: object) -> "_Connection | None":
        idle = self._idle.get(key)
        while idle:
            # The one that was used last: it is the least likely to have been closed.
            connection = idle.pop()
            if not connection.is_ended and time.monotonic() - connection.idle_since_s < self.idle_s:
                return connection
            connection.end()
        return None

    def enter(self, connection: "_Connection") -> None:
        """A connection is open."""
        self._open.add(connection)

    def leave(self, connection: "_Connection", key: object) -> None:
        """It is closed."""
        self._open.discard(connection)
        idle = self._idle.get(key)
        if idle is not None and connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(key, None)

    def put_idle(self, connection: "_Connection", key: object) -> None:
        """It may carry another question."""
        self._idle.setdefault(key, deque()).append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self.idle_s, self._end_idle)

    def _end_idle(self) -> None:
        self._sweep, oldest_s = None, time.monotonic() - self.idle_s
        for idle in list(self._idle.values()):
            for connection in [each for each in idle if each.idle_since_s <= oldest_s]:
                connection.end()
        if any(self._idle.values()):
            self._sweep = asyncio.get_running_loop().call_later(self.idle_s / 2, self._end_idle)


class _Connection(asyncio.BufferedProtocol):
    """One connection: idle, or with one answer under way."""

    def __init__(self, client: NativeClient, key: object, address: _Address) -> None:
        self._client = client
        self._key = key
        host = f"[{address.host}]" if ":" in address.host else address.host
        is_usual = address.port == (443 if address.is_tls else 80)
        self._host = host if is_usual else f"{host}:{address.port}"
        self._transport: asyncio.Transport | None = None
        self._answer: NativeAnswer | None = None
        self._num_answers = 0
        self._is_paused = False
        self.is_ended = False
        self.idle_since_s = 0.0

    # --- for its users ---------------------------------------------------------------------------
    async def ask(self, question: Question) -> "NativeAnswer":
        """Send, and wait for the head of the answer."""
        assert self._transport is not None  # noqa: S101 - connected
        try:
            head = self._head_of(question)
        except UpstreamError:
            self.end()
            raise
        if self.is_ended:
            # Closed in the turns between the connection and this one; nobody is told again.
            raise BrokeOff("closed by the replica at once", is_reused=False)
        answer = self._answer = NativeAnswer(self, is_head=question.method == "HEAD")
        if len(question.body) <= _ONE_WRITE_BYTES:
            self._transport.write(head + question.body)
        else:
            self._transport.writelines([head, question.body])
        try:
            error = await answer.head
        except asyncio.CancelledError:
            self.end()
            raise
        if error is not None:
            raise error
        return answer

    def pause(self) -> None:
        """Take no more from the socket until `resume`."""
        if not self._is_paused and self._transport is not None and not self.is_ended:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Take on."""
        if self._is_paused and self._transport is not None and not self.is_ended:
            self._is_paused = False
            self._transport.resume_reading()

    def end(self) -> None:
        """Close it at once; what is under way breaks off."""
        self.is_ended = True
        if self._transport is not None:
            self._transport.abort()

    def _head_of(self, question: Question) -> bytes:
        if _PATH.fullmatch(question.path) is None:
            raise UpstreamError(f"{question.path!r} is no path that can be asked for")
        lines = [f"{question.method} {question.path} HTTP/1.1\r\nHost: {self._host}\r\n"]
        for name, value in question.headers.items():
            lines.append(f"{name}: {value}\r\n")
        if question.body or question.method in METHODS_WITH_BODY:
            lines.append(f"Content-Length: {len(question.body)}\r\n")
        head = "".join(lines)
        if head.count("\r") != head.count("\r\n") or head.count("\n") != len(lines) + 1:
            raise UpstreamError("a header holds a line break")
        return (head + "\r\n").encode("utf-8", "surrogateescape")

    # --- from the transport ----------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)
        self._client.enter(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are put: one place for all, as each is emptied before the next."""
        return self._client.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes of the answer."""
        data = self._client.read_buffer[:nbytes]
        answer = self._answer
        if answer is None:
            # Nobody asked: whatever this is, it must not become the next answer.
            self.end()
            return
        try:
            answer.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.fail(InvalidAnswer(f"no HTTP answer: {type(error).__name__}"))
            self.end()
            return
        if not answer.has_begun and answer.note_head_bytes(nbytes) > MAX_HEAD_BYTES:
            answer.fail(InvalidAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes"))
            self.end()
        elif answer.is_whole:
            self._finish(answer)
        elif answer.num_buffered_bytes:
            # Until somebody waits for more: what nobody reads stays at the replica.
            self.pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        is_theirs, self.is_ended = not self.is_ended, True
        self._client.leave(self, self._key)
        answer = self._answer
        if answer is None or answer.is_whole:
            return
        if is_theirs and exc is None and answer.is_until_close:
            answer.on_message_complete()
            return
        has_begun = answer.has_begun or answer.num_head_bytes > 0
        is_reused = self._num_answers > 0 and not has_begun
        answer.fail(BrokeOff(f"closed by the replica: {exc!r}", is_reused=is_reused))

    def _finish(self, answer: "NativeAnswer") -> None:
        """All of the answer has come, though it may not be read yet."""
        assert self._transport is not None  # noqa: S101 - it has just received
        self._answer = None
        self._num_answers += 1
        has_sent_all = self._transport.get_write_buffer_size() == 0
        if not answer.can_stay or answer.has_no_body or not has_sent_all or self.is_ended:
            self.end()
            return
        self.resume()
        self.idle_since_s = time.monotonic()
        self._client.put_idle(self, self._key)


class NativeAnswer:
    """One answer; the parser calls it while bytes come."""

    def __init__(self, connection: _Connection, *, is_head: bool) -> None:
        self.status = 0
        self.reason = ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.parser = httptools.HttpResponseParser(self)
        self.head: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()
        """Done when the head has come, or with why it never will."""
        self.has_no_body = is_head
        """Whatever its head says of one."""
        self.has_begun = False
        """The head has come, interim ones not counted."""
        self.is_whole = False
        self.is_until_close = False
        self.can_stay = False
        """The connection may carry another answer behind this one."""
        self.num_head_bytes = 0
        self.num_buffered_bytes = 0
        self._connection = connection
        self._chunks: list[bytes] = []
        self._reader: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self._is_interim = False

    # --- for its reader --------------------------------------------------------------------------
    async def readany(self, wait_s: float | None = None) -> bytes:
        """As `Answer.readany` says."""
        if not self._chunks and not self.is_whole and self._error is None:
            self._connection.resume()
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            # Much cheaper than `asyncio.timeout`, and this is done for each piece of a stream.
            timer = None if wait_s is None else loop.call_later(wait_s, self._wake)
            try:
                await self._reader
            finally:
                self._reader = None
                if timer is not None:
                    timer.cancel()
        if self._chunks or self.is_whole:
            return self.ready()[0]
        if self._error is not None:
            raise self._error
        raise TimeoutError

    def ready(self) -> tuple[bytes, bool]:
        """As `Answer.ready` says."""
        chunks, self._chunks = self._chunks, []
        self.num_buffered_bytes = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks), self.is_whole

    def close(self) -> None:
        """As `Answer.close` says."""
        if not self.is_whole:
            self._connection.end()

    # --- for its connection ----------------------------------------------------------------------
    def note_head_bytes(self, num_bytes: int) -> int:
        """Count bytes that came before the end of the head; returns all so far."""
        self.num_head_bytes += num_bytes
        return self.num_head_bytes

    def fail(self, error: UpstreamError) -> None:
        """It will never be whole."""
        if self.is_whole or self._error is not None:
            return
        self._error = error
        if not self.head.done():
            self.head.set_result(error)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- for the parser --------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """The first bytes of a head."""
        if self.is_whole:
            raise InvalidAnswer("a second answer to one question")

    def on_status(self, status: bytes) -> None:
        """A part of the text behind the status."""
        self.reason += status.decode("utf-8", "surrogateescape")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers.add(
            name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
        )

    def on_headers_complete(self) -> None:
        """The head has come; that of an interim answer says nothing."""
        status = self.parser.get_status_code()
        if status == http.HTTPStatus.SWITCHING_PROTOCOLS:
            raise InvalidAnswer("another protocol, which nobody asked for")
        self._is_interim = status < http.HTTPStatus.OK
        if self._is_interim:
            self.reason, self.headers = "", CIMultiDict()
            return
        self.status, self.has_begun = status, True
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        self.is_until_close = not has_length and status not in _WITHOUT_BODY
        if not self.head.done():
            self.head.set_result(None)
        if self.has_no_body:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        if self.has_no_body:
            return
        self._chunks.append(body)
        self.num_buffered_bytes += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        """The end of the body."""
        if self._is_interim:
            return
        self.is_whole = True
        # The parser knows only now.
        self.can_stay = not self.is_until_close and self.parser.should_keep_alive()
        self._wake()
