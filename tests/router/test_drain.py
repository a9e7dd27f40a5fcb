"""How a gateway ends: unready first, then closed, then gone, and no request lost on the way."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from cartridge_router.app import drain_of, running_gateway
from cartridge_router.drain import Drain
from cartridge_router.settings import (
    DrainSettings,
    ForwardingSettings,
    PlacementSettings,
    UpstreamClientName,
)
from tests.router.gateway_client import CHAT, Gateway, quick_gateway, until_true
from tests.router.gateway_process import running_process
from tests.router.stub_engine import Handler, StartStub, StubEngine, answer_ok, never_answer
from tests.router.test_forwarding import ODD_BODY, read_until_broken_off

FIRST, LAST = b"data: first\n\n", b"data: [DONE]\n\n"
LONG = "60"
QUICK_END = DrainSettings(settle_s=0.0, grace_s=0.1)


def stream_until(go_on: asyncio.Event) -> Handler:
    """An event stream that ends when the test says so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(FIRST)
        await go_on.wait()
        await response.write(LAST)
        return response

    return answer


def environment(settle_s: str, grace_s: str = LONG) -> dict[str, str]:
    """Settings of a process."""
    return {
        "CARTRIDGE_ROUTER_DRAIN__SETTLE_S": settle_s,
        "CARTRIDGE_ROUTER_DRAIN__GRACE_S": grace_s,
    }


async def is_draining(gateway: Gateway) -> bool:
    """Whether it says so."""
    reply = await gateway.get("/ready")
    return (reply.status, reply.json["status"]) == (503, "draining")


async def is_closed(gateway: Gateway) -> bool:
    """Whether nobody listens any more."""
    try:
        await gateway.get("/health")
    except aiohttp.ClientConnectionError:
        return True
    return False


@contextlib.asynccontextmanager
async def begun_stream(gateway: Gateway) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream whose first event has come."""
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        assert await response.content.readany() == FIRST
        yield response


async def test_sigterm_is_unready_at_once_and_loses_nothing(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Requests are accepted for the settle time, a stream goes on after it, the status is 0."""
    go_on = asyncio.Event()
    stub = await start_stub(stream_until(go_on))
    async with (
        running_process(session, stub.url, environment=environment("1")) as process,
        begun_stream(process.gateway) as early,
    ):
        gateway = process.gateway
        assert (await gateway.get("/ready")).status == 200
        process.send(signal.SIGTERM)
        await until_true(lambda: is_draining(gateway), "unready")
        reply = await gateway.get("/health")
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        async with begun_stream(gateway) as late:
            await until_true(lambda: is_closed(gateway), "the listener is closed")
            go_on.set()
            for response in (early, late):
                assert await response.content.read() == LAST
        assert await process.ended() == 0


async def test_a_second_signal_ends_at_once(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Whatever still runs, in the settle time and after it."""
    stub = await start_stub(stream_until(asyncio.Event()))
    async with (
        running_process(session, stub.url, environment=environment(LONG)) as process,
        begun_stream(process.gateway) as stream,
    ):
        process.send(signal.SIGTERM)
        await until_true(lambda: is_draining(process.gateway), "unready")
        process.send(signal.SIGTERM)
        check_last_words(await read_until_broken_off(stream))
        assert await process.ended() == 0


async def test_ctrl_c_skips_the_settle_time(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """The listener closes at once; what runs may finish, unless Ctrl-C comes again."""
    go_on = asyncio.Event()
    stub = await start_stub(stream_until(go_on))
    async with (
        running_process(session, stub.url, environment=environment(LONG)) as process,
        begun_stream(process.gateway) as stream,
    ):
        process.send(signal.SIGINT)
        await until_true(lambda: is_closed(process.gateway), "the listener is closed")
        go_on.set()
        assert await stream.content.read() == LAST
        assert await process.ended() == 0


async def test_an_idle_gateway_ends_when_the_settle_time_is_over(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Connections that lie idle, or have sent half a head, hold nothing up."""
    stub = await start_stub(answer_ok)
    async with running_process(session, stub.url, environment=environment("0")) as process:
        assert (await process.gateway.ask()).status == 200
        host, port = process.gateway.url.removeprefix("http://").split(":")
        half_reader, half = await asyncio.open_connection(host, int(port))
        half.write(b"GET /health HTTP/1.1\r\n")
        process.send(signal.SIGTERM)
        assert await process.ended() == 0
        assert await half_reader.read() == b""
        half.close()


def check_last_words(said: bytes) -> None:
    """What a cut stream says after its last event: one error, behind a blank line, no `[DONE]`."""
    assert said.startswith(b"\n\ndata: {")
    assert said.endswith(b"}\n\n")
    assert json.loads(said.strip().removeprefix(b"data: "))["error"]["code"] == "gateway_ending"


@pytest.mark.parametrize("client", UpstreamClientName)
async def test_what_takes_longer_than_the_grace_is_cut_off(
    session: aiohttp.ClientSession,
    start_stub: StartStub,
    client: UpstreamClientName,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client is told that the answer is not whole, and the replica is left."""
    stub = await start_stub(stream_until(asyncio.Event()))
    settings = quick_gateway(
        stub.url, drain=QUICK_END, forwarding=ForwardingSettings(client=client)
    )
    async with contextlib.AsyncExitStack() as stack:
        async with running_gateway(settings, None) as url:
            stream = await stack.enter_async_context(begun_stream(Gateway(session, url)))
            # Read as it comes: aiohttp's client drops what it has not given out at a bad end.
            reading = asyncio.create_task(read_until_broken_off(stream))
        check_last_words(await reading)
    async with asyncio.timeout(10):
        await stub.gone.wait()
    assert "1 requests are cut off" in caplog.text


async def test_a_request_without_an_answer_is_refused_at_the_end(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Nothing of it has gone out: the client may ask elsewhere."""
    stub = await start_stub(never_answer)
    async with running_gateway(quick_gateway(stub.url, drain=QUICK_END), None) as url:
        asking = asyncio.create_task(Gateway(session, url).post_bytes(CHAT, ODD_BODY))
        await until_true(lambda: has_come(stub), "the engine works on it")
    reply = await asking
    assert (reply.status, reply.error["code"]) == (503, "gateway_ending")
    assert reply.headers["Retry-After"] == "2"


async def test_who_waits_for_room_is_refused_at_the_end(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Whoever had the room is cut, and nobody gets it after that."""
    stub = await start_stub(never_answer)
    settings = quick_gateway(
        stub.url, drain=QUICK_END, placement=PlacementSettings(max_in_flight=1)
    )
    async with running_gateway(settings, None) as url:
        gateway = Gateway(session, url)
        asking = [asyncio.create_task(gateway.post_bytes(CHAT, ODD_BODY)) for _ in range(3)]
        await gateway.has_metric("cartridge_router_queued", 2)
    for reply in await asyncio.gather(*asking):
        assert (reply.status, reply.error["code"]) == (503, "gateway_ending")
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    ("path", "headers"), [(CHAT, {"Content-Encoding": "gzip"}), (CHAT, {"Content-Type": "x/y"})]
)
async def test_what_takes_no_events_is_only_cut(
    path: str, headers: dict[str, str], session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Nothing is put into what the engine compressed, nor into what is no stream of events."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        await response.write(b"half")
        await asyncio.Event().wait()
        return response

    stub = await start_stub(half)
    async with contextlib.AsyncExitStack() as stack:
        async with running_gateway(quick_gateway(stub.url, drain=QUICK_END), None) as url:
            answer = await stack.enter_async_context(session.post(url + path, data=ODD_BODY))
            assert await answer.content.readany() == b"half"
            reading = asyncio.create_task(read_until_broken_off(answer))
        assert await reading == b""


async def test_a_client_that_does_not_read_holds_nothing_up(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Its buffers are full: it is left without last words."""

    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65_536 + b"\n\n")

    stub = await start_stub(flood)
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(20):
            async with running_gateway(quick_gateway(stub.url, drain=QUICK_END), None) as url:
                await stack.enter_async_context(session.post(url + CHAT, data=ODD_BODY))
        async with asyncio.timeout(10):
            await stub.gone.wait()


async def has_come(stub: StubEngine) -> bool:
    """Whether a request has come to an engine."""
    return bool(stub.requests)


async def test_a_request_whose_bytes_have_come_is_answered(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Also where the listener closes in the same moment, on a connection that was idle."""
    stub = await start_stub(answer_ok)
    drain = drain_of(quick_gateway())
    async with running_gateway(quick_gateway(stub.url), None, drain) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(request)
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(request)
    assert b"200 OK" in await reader.read()
    writer.close()


@pytest.mark.parametrize("must_settle", [True, False])
async def test_the_stages_come_in_order(must_settle: bool) -> None:
    """Nothing is waited for longer than it is needed."""
    drain, has_ended = Drain(DrainSettings(settle_s=60.0, grace_s=60.0)), asyncio.Event()
    settling = asyncio.create_task(drain.settle())
    await asyncio.sleep(0)
    assert (drain.is_begun, settling.done()) == (False, False)
    drain.begin(must_settle=must_settle)
    assert drain.is_begun
    if must_settle:
        assert (await asyncio.wait([settling], timeout=0.05))[0] == set()
        drain.begin()
    began_s = time.monotonic()
    await settling
    finishing = asyncio.create_task(drain.finish(has_ended))
    if not must_settle:
        assert (await asyncio.wait([finishing], timeout=0.05))[0] == set()
        has_ended.set()
    await finishing
    assert time.monotonic() - began_s < 30
