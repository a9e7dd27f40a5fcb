"""Hostile and heavy clients, on raw sockets: what they may take of a gateway, and what not."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from aiohttp import web

from cartridge_router.doors import most_connections
from cartridge_router.settings import Settings
from tests.loadtest.cartridge_requests import until
from tests.router.gateway_client import Gateway, StartGateway, quick_gateway
from tests.router.gateway_process import running_process
from tests.router.stub_engine import StartStub, answer_ok

BODY = b'{"model":"sample","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


def with_clients(settings: Settings, **changes: object) -> Settings:
    """Settings with other limits for clients."""
    clients = msgspec.structs.replace(settings.clients, **changes)
    return msgspec.structs.replace(settings, clients=clients)


@contextlib.asynccontextmanager
async def connected(
    gateway: Gateway,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a gateway."""
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the gateway closes, or resets."""
    data = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            while chunk := await reader.read(65_536):
                data += chunk
    return data


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """One answer with a Content-Length: its status line and body."""
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(
            line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        body = await reader.readexactly(int(fields[b"content-length"]))
    return head.split(b"\r\n", 1)[0] + b" " + body


# --- heads ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("beginning", [b"", b"P", HEAD, HEAD + b"X-Slow: 1"])
async def test_a_head_that_does_not_come_ends_its_connection(
    beginning: bytes, start_gateway: StartGateway
) -> None:
    """Slowloris: nothing, a letter, or headers without an end; counted."""
    gateway = await start_gateway(with_clients(quick_gateway(), head_timeout_s=0.2))
    async with connected(gateway) as (reader, writer):
        writer.write(beginning)
        assert await read_all(reader) == b""
    refused = "cartridge_router_refused_connections_total"
    await gateway.has_metric(refused, 1, reason="head_timeout")


async def test_a_letter_now_and_then_is_no_excuse(start_gateway: StartGateway) -> None:
    """The time is for the whole head."""
    gateway = await start_gateway(with_clients(quick_gateway(), head_timeout_s=0.3))
    async with connected(gateway) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for letter in HEAD:
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.02)
        assert await read_all(reader) == b""


async def test_a_second_request_has_its_own_time(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """An idle connection stays open for longer than a head may take; a begun head does not."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(with_clients(quick_gateway(stub.url), head_timeout_s=2.0))
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    async with connected(gateway) as (reader, writer):
        for _ in range(2):
            writer.write(request)
            assert await read_answer(reader) == b"HTTP/1.1 200 OK {}"
            await asyncio.sleep(2.5)
        writer.write(request[:20])
        assert await read_all(reader) == b""


async def test_a_long_answer_is_not_a_long_head(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """The clock of the head is not the answer's."""

    async def slow(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(2.5)
        return web.Response(body=b"{}")

    stub = await start_stub(slow)
    gateway = await start_gateway(with_clients(quick_gateway(stub.url), head_timeout_s=2.0))
    assert (await gateway.ask()).status == 200


# --- bodies --------------------------------------------------------------------------------------
QUICK = {"body_grace_s": 0.2, "body_bytes_per_s": 100}


@pytest.mark.parametrize("sent", [b"", BODY[:10]])
async def test_a_body_that_does_not_come_is_a_408(
    sent: bytes, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """With how much came and how much must; no engine is asked."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(with_clients(quick_gateway(stub.url), **QUICK))
    async with connected(gateway) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + sent)
        answer = await read_answer(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer
    assert b"%d bytes of the body came" % len(sent) in answer
    assert stub.bodies == []
    await gateway.is_idle()


async def test_a_slow_body_that_keeps_the_rate_is_taken(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Slower than the grace, faster than the least rate."""
    stub = await start_stub(answer_ok)
    body = BODY[:-1] + b" " * 100 + b"}"
    clients = {"body_grace_s": 1.0, "body_bytes_per_s": 25}
    gateway = await start_gateway(with_clients(quick_gateway(stub.url), **clients))
    async with connected(gateway) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for begin in range(0, len(body), 20):
            writer.write(body[begin : begin + 20])
            await asyncio.sleep(0.2)
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")
    assert stub.bodies == [body]


async def test_a_body_that_comes_after_its_answer_is_no_head(
    start_gateway: StartGateway,
) -> None:
    """The connection lies idle afterwards, as long as any other."""
    gateway = await start_gateway(with_clients(quick_gateway(), head_timeout_s=1.0))
    async with connected(gateway) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n")
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 404 ")
        writer.write(b"x" * 20)
        await asyncio.sleep(1.5)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")


# --- numbers -------------------------------------------------------------------------------------
async def test_too_many_connections_are_shed(start_gateway: StartGateway) -> None:
    """503 with `Retry-After` at once; when one goes the next is served."""
    gateway = await start_gateway(with_clients(quick_gateway(), max_connections=3))
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(gateway)) for _ in range(3)]
        async with connected(gateway) as (reader, _):
            answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer
        assert b'"code":"too_many_connections"' in answer
        held[0][1].close()
        await held[0][1].wait_closed()
        async with connected(gateway) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")


async def test_more_than_a_hundred_requests_at_once(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Neither side has a hidden limit, such as a client library's hundred connections."""
    has_all = asyncio.Event()

    async def together(_: web.Request) -> web.StreamResponse:
        if stub.num_open == 150:
            has_all.set()
        await has_all.wait()
        return web.Response(body=b"{}")

    stub = await start_stub(together)
    gateway = await start_gateway(quick_gateway(stub.url))
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(gateway)) for _ in range(150)]
        for _, writer in held:
            writer.write(request)
        answers = [await read_answer(reader) for reader, _ in held]
    assert answers == [b"HTTP/1.1 200 OK {}"] * 150


def test_the_number_follows_the_open_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may need another one upstream; some files are for other things."""
    for limit, most in ((1024, 448), (20_000, 9936), (10, 1)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert most_connections() == most


# --- answers that are not read -------------------------------------------------------------------
async def test_an_unread_answer_waits_at_the_replica(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Back-pressure: what an engine sends to a client that does not read is bounded."""
    num_sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 10_000 + b"\n\n")
            num_sent += 10_000

    stub = await start_stub(flood)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with connected(gateway) as (_, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        seen = -1
        async with asyncio.timeout(60):
            while num_sent != seen or not num_sent:
                seen = num_sent
                await asyncio.sleep(2.0)
        # Kernel buffers of two connections are in it.
        assert num_sent < 16 << 20
    await until(lambda: stub.num_open == 0, "the replica's connection is closed")
    await gateway.is_idle()


async def test_clients_that_do_not_read_take_little_memory_each(
    start_stub: StartStub, session: aiohttp.ClientSession
) -> None:
    """Some buffers and the objects of two connections; aiohttp alone would hold 64 KiB more."""
    num_clients, num_sent, is_over = 60, 0, asyncio.Event()

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        # More than kernels keep for a client that says it has no room.
        for _ in range(800):
            await response.write(b"data: " + b"x" * 20_000 + b"\n\n")
            num_sent += 1
        await is_over.wait()
        return response

    stub = await start_stub(flood)
    async with (
        running_process(session, f"r0={stub.url}", environment={}) as process,
        contextlib.AsyncExitStack() as stack,
    ):
        await process.gateway.is_idle()
        before = resident_bytes(process.pid)
        address = urlsplit(process.gateway.url)
        for _ in range(num_clients):
            client = stack.enter_context(socket.socket())
            # What a kernel keeps for it is not the gateway's, and takes long to fill.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (address.hostname, address.port))
            await loop.sock_sendall(client, HEAD + LENGTH + b"\r\n" + BODY)
        seen = -1
        async with asyncio.timeout(60):
            while num_sent != seen or stub.num_open < num_clients:
                seen = num_sent
                await asyncio.sleep(2.0)
        assert 0 < num_sent < 800 * num_clients
        assert (resident_bytes(process.pid) - before) / num_clients < 75_000
        is_over.set()
        process.send(signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Memory of a process, as `ps` shows it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_a_client_that_never_reads_is_cut_off(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """It holds a replica's connection and its tenant's place no longer than `write_timeout_s`."""

    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 10_000 + b"\n\n")

    stub = await start_stub(flood)
    gateway = await start_gateway(
        with_clients(quick_gateway(f"r0={stub.url}"), write_timeout_s=0.5)
    )
    async with connected(gateway) as (_, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        async with asyncio.timeout(20):
            await stub.gone.wait()
        await gateway.is_idle()
    assert await gateway.metric("cartridge_router_broken_answers_total") == 0


# --- what two parsers could read differently -----------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n",
        HEAD + LENGTH + b"Content-Length: 5\r\n\r\n",
        HEAD + b"Content-Length: +32\r\n\r\n",
        HEAD + b"Content-Length: 3 2\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n",
        HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n",
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n",
        HEAD + b" Transfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Content-Length\x00: 32\r\n\r\n",
        HEAD + b"X: a\rContent-Length: 32\r\n\r\n",
        HEAD + b"X-Y: a\x00b\r\n" + LENGTH + b"\r\n",
        b"POST /v1/chat/completions HTTP/1.1\nHost: x\n" + LENGTH + b"\r\n",
        b"POST /v1/chat/completions HTTP/9.1\r\nHost: x\r\n" + LENGTH + b"\r\n",
        b"P\x00ST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\r\n",
    ],
    ids=lambda head: repr(head[-44:]),
)
async def test_smuggling_is_a_400(
    head: bytes, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Lengths, encodings and spaces that two parsers could read differently reach no engine."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(with_clients(quick_gateway(stub.url), **QUICK))
    async with connected(gateway) as (reader, writer):
        writer.write(head + BODY)
        answer = await read_all(reader)
    assert answer.split(b"\r\n", 1)[0].endswith(b" 400 Bad Request"), answer
    assert stub.bodies == []


async def test_a_chunked_body_arrives(start_stub: StartStub, start_gateway: StartGateway) -> None:
    """The control of the cases above: what is said clearly is served."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with connected(gateway) as (reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")
    assert stub.bodies == [BODY]
