"""Listening sockets, and how connections are taken from them: many in one turn of the event loop.

Owns the sockets and the connections that are not with their protocol yet. Refuses to limit them.

uvloop's own servers take one connection a turn, as libuv does: where a turn is long because many
requests are served in it, a burst of new clients waits for as many turns as it has connections.

Source: libuv pull request 3696 ("don't accept() connections in a loop").
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Final

logger = logging.getLogger(__name__)

MAX_IN_A_TURN: Final = 64
"""Connections; the others come in the next one, behind what else is due."""
PAUSE_S: Final = 1.0
"""Without taking any, while the process or the system has no room for one."""
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listening_sockets(
    host: str, port: int, *, backlog: int, reuse_port: bool
) -> list[socket.socket]:
    """Sockets that listen on each address of a host, all on one port. May block for a name.

    Raises:
        OSError: one cannot be listened on; then none is.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # An address of its own, beside the same port of IPv4.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # A free port that was found for the first address is that of all.
            listener.bind((address[0], port or _port(sockets), *address[2:]))
            listener.listen(backlog)
            sockets.append(listener)
        stack.pop_all()
    return sockets


def _port(sockets: list[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1]) if sockets else 0


class Listener:
    """Takes connections until it is closed. For use from one event loop, the running one.

    Args:
        sockets: they listen; closed with it.
        make_protocol: one for each connection.
        tls: `None` = plain.
        handshake_timeout_s: of each connection.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._sockets = sockets
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        for listener in sockets:
            self._loop.add_reader(listener, self._take, listener)

    @property
    def port(self) -> int:
        """The one of all sockets."""
        return _port(self._sockets)

    def close(self) -> None:
        """Take no more; those that the kernel has taken already are served."""
        for listener in self._sockets:
            self._loop.remove_reader(listener)
            timer = self._paused.pop(listener, None)
            if timer is not None:
                timer.cancel()
            while timer is None and self._take(listener) == MAX_IN_A_TURN:
                timer = self._paused.pop(listener, None)
            listener.close()

    async def end(self) -> None:
        """Leave the connections that are not with their protocol yet. `close` comes first."""
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _take(self, listener: socket.socket) -> int:
        """Take connections that wait, at most so many as one turn is for; returns how many."""
        count = 0
        for connection in self._accepted(listener):
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
            count += 1
        return count

    def _accepted(self, listener: socket.socket) -> Iterator[socket.socket]:
        for _ in range(MAX_IN_A_TURN):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.warning("no connection can be taken: %s", os.strerror(error.errno or 0))
                self._loop.remove_reader(listener)
                timer = self._loop.call_later(PAUSE_S, self._go_on, listener)
                self._paused[listener] = timer
                return
            connection.setblocking(False)
            yield connection

    def _go_on(self, listener: socket.socket) -> None:
        del self._paused[listener]
        self._loop.add_reader(listener, self._take, listener)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except (OSError, TimeoutError) as error:
            # What a client did to its own connection; with TLS that is any fault of a handshake.
            logger.debug("a connection did not begin: %r", error)
