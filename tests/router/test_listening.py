"""How connections are taken: many in a turn, on all addresses, also when files run out."""

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from cartridge_router import listening
from cartridge_router.app import running_gateway
from cartridge_router.listening import MAX_IN_A_TURN, Listener, listening_sockets
from tests.router.gateway_client import quick_gateway

NUM_CLIENTS = MAX_IN_A_TURN


def sockets_of(host: str = "127.0.0.1", port: int = 0, **fields: Any) -> list[socket.socket]:
    """Listening sockets with a usual backlog."""
    return listening_sockets(host, port, **{"backlog": 1024, "reuse_port": False, **fields})


class Turns:
    """Counts turns of the running event loop, and the connections that begin in each."""

    def __init__(self) -> None:
        self.begun = Counter[int]()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self._turn += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        """Count no more."""
        self._handle.cancel()

    def make_protocol(self) -> asyncio.Protocol:
        """One that notes when its connection begins."""
        turns = self

        class Noting(asyncio.Protocol):
            """Notes it."""

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                turns.begun[turns._turn] += 1
                transport.close()

        return Noting()

    async def have_begun(self, count: int) -> None:
        """Wait for so many connections."""
        async with asyncio.timeout(10):
            while self.begun.total() < count:  # noqa: ASYNC110 - a turn each
                await asyncio.sleep(0)


@contextlib.contextmanager
def clients_of(address: Any, count: int) -> Iterator[None]:
    """Connections that the kernel has taken, and nobody else yet."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(contextlib.closing(socket.create_connection(address)))
        yield


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_burst_of_clients_is_taken_in_one_turn(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """However long a turn is, the last of them waits no longer than the first."""

    async def main() -> None:
        turns, sockets = Turns(), sockets_of()
        with clients_of(sockets[0].getsockname(), NUM_CLIENTS):
            listener = Listener(sockets, turns.make_protocol, tls=None, handshake_timeout_s=1.0)
            await turns.have_begun(NUM_CLIENTS)
            listener.close()
            await listener.end()
        turns.stop()
        assert len(turns.begun) == 1

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_those_beyond_a_turn_come_in_the_next() -> None:
    """So that what else is due is not kept waiting."""
    turns, sockets = Turns(), sockets_of()
    with clients_of(sockets[0].getsockname(), 3 * NUM_CLIENTS):
        listener = Listener(sockets, turns.make_protocol, tls=None, handshake_timeout_s=1.0)
        await turns.have_begun(3 * NUM_CLIENTS)
        listener.close()
        await listener.end()
    turns.stop()
    assert max(turns.begun.values()) == NUM_CLIENTS


class FullSocket(socket.socket):
    """Has no file for a connection the first time."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """As told by the system, once; then as always."""
        if not self.num_refused:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_a_file_it_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection waits in the kernel meanwhile, and nobody turns in circles."""
    monkeypatch.setattr(listening, "PAUSE_S", 0.05)
    (plain,) = sockets_of()
    full = FullSocket(fileno=plain.detach())
    full.setblocking(False)
    turns = Turns()
    with clients_of(full.getsockname(), 1):
        listener = Listener([full], turns.make_protocol, tls=None, handshake_timeout_s=1.0)
        await turns.have_begun(1)
        listener.close()
        await listener.end()
    turns.stop()
    assert full.num_refused == 1


async def test_closed_in_its_pause_it_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done with a socket that is gone."""
    monkeypatch.setattr(listening, "PAUSE_S", 0.05)
    (plain,) = sockets_of()
    full = FullSocket(fileno=plain.detach())
    full.setblocking(False)
    turns = Turns()
    with clients_of(full.getsockname(), 1):
        listener = Listener([full], turns.make_protocol, tls=None, handshake_timeout_s=1.0)
        async with asyncio.timeout(10):
            while not full.num_refused:  # noqa: ASYNC110 - a turn each
                await asyncio.sleep(0)
        listener.close()
        await listener.end()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await turns.have_begun(1)
    turns.stop()


def test_every_address_of_a_host_has_the_same_port() -> None:
    """A free one is found once; one address that is taken leaves none behind."""
    sockets = sockets_of("localhost")
    with contextlib.ExitStack() as stack:
        for each in sockets:
            stack.enter_context(each)
        assert len({each.getsockname()[1] for each in sockets}) == 1
        with pytest.raises(OSError, match="in use"):
            sockets_of("localhost", sockets[0].getsockname()[1])


async def test_a_client_in_the_kernels_queue_is_answered_at_the_end() -> None:
    """Its request had come when the listener closed, although nobody had taken it yet."""
    async with running_gateway(quick_gateway(), None) as url:
        host, port = url.removeprefix("http://").split(":")
        late = socket.create_connection((host, int(port)))
        late.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    late.settimeout(5)
    with late:
        assert b"200 OK" in await asyncio.to_thread(late.recv, 4096)
