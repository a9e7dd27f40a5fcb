"""What a connection may do before and between its requests: limits that aiohttp's server has not.

Owns the time a request's head may take, the number of connections, and how much of an answer waits
in memory for a client that does not read. Refuses to know HTTP: aiohttp's protocol reads it.
"""

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator
from typing import cast

from aiohttp import StreamReader

_BUSY_BODY = (
    b'{"error":{"message":"too many connections","type":"server_error","param":null,'
    b'"code":"too_many_connections"}}'
)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
)


_SPARE_FILES = 128
"""Of the process's open files, for everything but connections."""


def most_connections() -> int:
    """Connections of clients that the limit of open files allows; each may need one upstream."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (limit - _SPARE_FILES) // 2)


class Doors:
    """All connections of one listener.

    Args:
        max_connections: more are answered 503 and closed.
        head_timeout_s: from the connection, or the first byte of a later request, to its last
            header.
        write_buffer_bytes: of an answer that wait in memory; the replica waits with them.
        on_refused: called with why a connection was closed: `head_timeout` or `too_many`.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        head_timeout_s: float,
        write_buffer_bytes: int,
        on_refused: Callable[[str], None],
    ) -> None:
        self.max_connections = max_connections
        self.head_timeout_s = head_timeout_s
        self.write_buffer_bytes = write_buffer_bytes
        self.on_refused = on_refused
        self._open: dict[asyncio.BaseTransport, _Door] = {}
        self.has_emptied = asyncio.Event()
        """Set while no connection is served."""
        self.has_emptied.set()

    def before(
        self, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> Callable[[], asyncio.Protocol]:
        """The protocol factory of a listener whose connections `make_protocol` would serve."""
        return lambda: _Door(self, cast("asyncio.Protocol", make_protocol()))

    @property
    def num_open(self) -> int:
        """Connections that are served."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Whether there may be no more."""
        return len(self._open) >= self.max_connections

    def enter(self, transport: asyncio.BaseTransport, door: "_Door") -> None:
        """A connection is served."""
        self._open[transport] = door
        self.has_emptied.clear()

    def leave(self, transport: asyncio.BaseTransport) -> None:
        """It is over."""
        self._open.pop(transport, None)
        if not self._open:
            self.has_emptied.set()

    def close_idle(self) -> None:
        """Close the connections on which no request is answered."""
        for transport, door in list(self._open.items()):
            if not door.is_serving:
                transport.close()

    def cut(self) -> None:
        """End all connections at once, and with them their requests."""
        for door in list(self._open.values()):
            door.abort()

    @contextlib.contextmanager
    def request(
        self, transport: asyncio.BaseTransport | None, body: StreamReader
    ) -> Iterator[None]:
        """A request whose head was read, for as long as it is answered."""
        door = self._open.get(transport) if transport is not None else None
        if door is None:
            yield
            return
        door.begin_request(body)
        try:
            yield
        finally:
            door.end_request()


class _Door(asyncio.Protocol):
    """Between the transport of a connection and aiohttp's protocol for it."""

    __slots__ = ("_body", "_doors", "_inner", "_is_refused", "_timer", "_transport", "is_serving")

    def __init__(self, doors: Doors, inner: asyncio.Protocol) -> None:
        self._doors = doors
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_serving = False
        """Between a request's head and the end of its answer."""
        self._is_refused = False
        self._body: StreamReader | None = None
        """Of the last request; an answer may be out before all of it has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve the connection, or say that there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        if self._doors.is_full:
            self._is_refused = True
            self._doors.on_refused("too_many")
            self._transport.write(_BUSY)
            self._transport.close()
            return
        self._doors.enter(transport, self)
        self._transport.set_write_buffer_limits(high=self._doors.write_buffer_bytes)
        self._await_head()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; the first after an answer begin another head."""
        if self._is_refused:
            return
        is_between = not self.is_serving and (self._body is None or self._body.is_eof())
        if is_between and self._timer is None:
            self._await_head()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """As aiohttp says."""
        return None if self._is_refused else self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._stop_timer()
        if self._is_refused or self._transport is None:
            return
        self._doors.leave(self._transport)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        if not self._is_refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        if not self._is_refused:
            self._inner.resume_writing()

    def abort(self) -> None:
        """End the connection, without what was not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def begin_request(self, body: StreamReader) -> None:
        """The head has come."""
        self._body = body
        self.is_serving = True
        self._stop_timer()

    def end_request(self) -> None:
        """The answer is out; the connection may lie idle as long as aiohttp lets it."""
        self.is_serving = False

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._doors.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self._doors.on_refused("head_timeout")
        self.abort()
