"""Failover on real sockets: who is asked next, who is left alone, and what a client sees of it."""

import asyncio
import contextlib
import gzip

import aiohttp
import pytest
from aiohttp import web

from cartridge_router.settings import FleetSettings, ForwardingSettings
from tests.router.gateway_client import CHAT, StartGateway, quick_gateway, until_true
from tests.router.stub_engine import Handler, StartStub, answer_ok, die_in_a_stream, never_answer
from tests.router.test_forwarding import ODD_BODY, read_until_broken_off

SELDOM = FleetSettings(probe_interval_s=60.0)


def answer_with(status: int, **headers: str) -> Handler:
    """Always this status, with a body that names it."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=b"%d from the engine" % status, headers=headers)

    return answer


def cut_used_connections() -> Handler:
    """Answer on fresh connections; close the others as soon as something comes."""
    seen: set[asyncio.Transport] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if request.transport in seen:
            request.transport.abort()
        seen.add(request.transport)
        return web.Response(body=b"{}", content_type="application/json")

    return answer


def stream(*pieces: bytes, pause_s: float, headers: dict[str, str] | None = None) -> Handler:
    """An event stream with a pause before each piece but the first."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream"} | (headers or {})
        )
        await response.prepare(request)
        await response.write(pieces[0])
        for piece in pieces[1:]:
            await asyncio.sleep(pause_s)
            await response.write(piece)
        return response

    return answer


# --- another replica -----------------------------------------------------------------------------
async def test_a_reset_of_a_reused_connection_is_not_seen(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Servers close idle connections: sent again at once, to the same replica, without a count."""
    stub = await start_stub(cut_used_connections())
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}", fleet=SELDOM))
    replies = [await gateway.ask() for _ in range(4)]
    assert [reply.status for reply in replies] == [200] * 4
    assert len(stub.bodies) > 4
    assert await gateway.metric("cartridge_router_upstream_retries_total") == 0
    assert (await gateway.get("/ready")).json["replicas"]["healthy"] == ["r0"]
    await gateway.is_idle()


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_failed_answer_goes_to_the_next(
    status: int, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """The client gets the answer of the one that works."""
    stubs = [await start_stub(answer_with(status)), await start_stub(answer_ok)]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    gateway = await start_gateway(quick_gateway(*names, fleet=SELDOM))
    for _ in range(4):
        reply = await gateway.ask()
        assert (reply.status, reply.headers["x-cartridge-replica"]) == (200, "r1")
    assert stubs[0].bodies
    assert await gateway.metric("cartridge_router_upstream_retries_total") == len(stubs[0].bodies)
    await gateway.is_idle()


async def test_when_all_fail_the_last_answer_is_the_client_s(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """As the engine gave it, body and all."""
    stubs = [await start_stub(answer_with(500)) for _ in range(2)]
    gateway = await start_gateway(quick_gateway(*(stub.url for stub in stubs), fleet=SELDOM))
    reply = await gateway.ask()
    assert (reply.status, reply.body) == (500, b"500 from the engine")
    assert [len(stub.bodies) for stub in stubs] == [1, 1]


@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_is_carried_to_one_other_replica(
    status: int, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Of three replicas that push back two are asked; `Retry-After` and body are the engine's."""
    handler = answer_with(status, **{"Retry-After": "17"})
    stubs = [await start_stub(handler) for _ in range(3)]
    gateway = await start_gateway(quick_gateway(*(stub.url for stub in stubs), fleet=SELDOM))
    reply = await gateway.ask()
    assert (reply.status, reply.headers["retry-after"]) == (status, "17")
    assert reply.body == b"%d from the engine" % status
    assert sum(len(stub.bodies) for stub in stubs) == 2


async def test_who_pushes_back_is_left_alone_for_as_long(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """While the other one can serve; its `Retry-After` is honoured."""
    stubs = [
        await start_stub(answer_with(503, **{"Retry-After": "20"})),
        await start_stub(answer_ok),
    ]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    gateway = await start_gateway(quick_gateway(*names, fleet=SELDOM))
    for _ in range(6):
        assert (await gateway.ask()).status == 200
    assert len(stubs[0].bodies) == 1


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_what_is_wrong_with_the_request_is_asked_once(
    status: int, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """4xx is the client's, and says nothing about a replica, however often it comes."""
    stubs = [await start_stub(answer_with(status)) for _ in range(2)]
    gateway = await start_gateway(quick_gateway(*(stub.url for stub in stubs), fleet=SELDOM))
    replies = [await gateway.ask() for _ in range(12)]
    assert {reply.status for reply in replies} == {status}
    assert [len(stub.bodies) for stub in stubs] == [6, 6]
    assert await gateway.metric("cartridge_router_ejections_total") == 0


async def test_the_retry_budget_ends_retries(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """With none saved up but one, the second failure is the client's."""
    stubs = [await start_stub(answer_with(500)), await start_stub(answer_with(500))]
    settings = quick_gateway(
        *(stub.url for stub in stubs),
        forwarding=ForwardingSettings(retry_ratio=0.0, retries_per_s=0.0),
        fleet=SELDOM,
    )
    gateway = await start_gateway(settings)
    for _ in range(5):
        assert (await gateway.ask()).status == 500
    assert sum(len(stub.bodies) for stub in stubs) == 6


# --- left alone ----------------------------------------------------------------------------------
async def test_five_failures_in_a_row_eject_a_replica(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """It is not asked any more, though it answers its probes; the metric says so."""
    stubs = [await start_stub(answer_with(500)), await start_stub(answer_ok)]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    gateway = await start_gateway(quick_gateway(*names))
    for _ in range(30):
        assert (await gateway.ask()).status == 200
    assert len(stubs[0].bodies) == 5
    assert await gateway.metric("cartridge_router_ejections_total", replica="r0") == 1
    explained = (await gateway.post("/v1/cartridges/explain", {"model": "sample"})).json
    assert [row["replica"] for row in explained["placement"]["candidates"]] == ["r1"]


async def test_answers_that_break_off_are_failures_in_a_row(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Each began with 200; the one replica that ends its answers stays."""
    stubs = [await start_stub(die_in_a_stream), await start_stub(answer_ok)]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    gateway = await start_gateway(quick_gateway(*names))
    for _ in range(20):
        async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
            with contextlib.suppress(aiohttp.ClientPayloadError):
                await response.read()
    assert len(stubs[0].bodies) == 5
    assert await gateway.metric("cartridge_router_ejections_total", replica="r0") == 1


async def test_a_fleet_that_fails_as_a_whole_is_asked_on(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Of two replicas that always fail one is ejected; a single one never is."""
    stub = await start_stub(answer_with(500))
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}"))
    for _ in range(8):
        assert (await gateway.ask()).status == 500
    assert await gateway.metric("cartridge_router_ejections_total") == 0


async def test_a_hung_engine_loses_new_traffic(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """An engine that takes connections and says nothing, as one that is stopped.

    Long before two probes have failed: their timeout is that of a busy engine.
    """
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    fleet = FleetSettings(probe_timeout_s=60.0)
    gateway = await start_gateway(quick_gateway(*names, fleet=fleet))
    assert {(await gateway.ask()).headers["x-cartridge-replica"] for _ in range(4)} == {"r0", "r1"}
    stubs[0].is_hung = True

    async def is_left_alone() -> bool:
        explained = (await gateway.post("/v1/cartridges/explain", {"model": "sample"})).json
        return [row["replica"] for row in explained["placement"]["candidates"]] == ["r1"]

    await until_true(is_left_alone, "r0 is left alone")


def test_the_settings_leave_a_hung_engine_within_two_seconds() -> None:
    """It hangs right after a probe was answered; the next one is unanswered for long enough."""
    fleet = FleetSettings()
    assert fleet.probe_interval_s + fleet.suspect_after_s <= 2.0


# --- streams -------------------------------------------------------------------------------------
QUICK = ForwardingSettings(keep_alive_s=0.1)
COMMENT = b": keep-alive\n\n"


async def test_an_idle_stream_gets_comments(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Between events, so that nobody in between thinks the stream dead; events stay as they are."""
    go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: 2\n\n")
        return response

    stub = await start_stub(answer)
    gateway = await start_gateway(quick_gateway(stub.url, forwarding=QUICK))
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        data = b""
        async with asyncio.timeout(10):
            while data.count(COMMENT) < 2:
                data += await response.content.readany()
        go_on.set()
        data += await response.read()
    assert data.replace(COMMENT, b"") == b"data: 1\n\ndata: 2\n\n"


async def test_comments_do_not_prolong_a_silence(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """After `idle_timeout_s` it is ended, however many comments went out."""
    forwarding = ForwardingSettings(keep_alive_s=0.05, idle_timeout_s=0.4)
    stub = await start_stub(stream(b"data: 1\n\n", b"data: 2\n\n", pause_s=60.0))
    gateway = await start_gateway(quick_gateway(stub.url, forwarding=forwarding))
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        data = await read_until_broken_off(response)
    assert 1 <= data.count(COMMENT) <= 8
    assert b"upstream_unavailable" in data


@pytest.mark.parametrize(
    ("pieces", "headers"),
    [
        ((b"data: 1", b" and more\n\n"), {}),
        ((gzip.compress(b"data: 1\n\n") + b"\n\n", b"rest"), {"Content-Encoding": "gzip"}),
    ],
    ids=["within an event", "compressed"],
)
async def test_nothing_is_put_where_it_would_spoil(
    pieces: tuple[bytes, ...],
    headers: dict[str, str],
    start_stub: StartStub,
    start_gateway: StartGateway,
) -> None:
    """Half an event and compressed bytes go on as they came, however long the pause."""
    stub = await start_stub(stream(*pieces, pause_s=0.4, headers=headers))
    gateway = await start_gateway(quick_gateway(stub.url, forwarding=QUICK))
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        assert await response.read() == b"".join(pieces)


async def test_a_stream_that_is_not_one_gets_no_comments(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """A whole answer that takes its time has nothing added."""

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await asyncio.sleep(0.4)
        await response.write(b"{}")
        return response

    stub = await start_stub(slow)
    gateway = await start_gateway(quick_gateway(stub.url, forwarding=QUICK))
    assert (await gateway.ask()).body == b"{}"


async def test_a_broken_answer_is_counted(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """A compressed stream is cut without our event, which would not be compressed."""
    piece = gzip.compress(b"data: 1\n\n")

    async def die(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
        )
        await response.prepare(request)
        await response.write(piece)
        assert request.transport is not None
        request.transport.abort()
        return response

    stub = await start_stub(die)
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}"))
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        assert await read_until_broken_off(response) == piece
    assert await gateway.metric("cartridge_router_broken_answers_total", replica="r0") == 1


# --- clients that leave --------------------------------------------------------------------------
async def test_a_client_that_leaves_while_another_replica_is_asked(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """The second upstream connection is closed, and nothing stays in flight."""
    stubs = [await start_stub(answer_with(500)), await start_stub(never_answer)]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    gateway = await start_gateway(quick_gateway(*names, fleet=SELDOM))
    asking = [asyncio.create_task(gateway.ask()) for _ in range(2)]
    await gateway.has_metric("cartridge_router_in_flight", 2, replica="r1")
    assert len(stubs[0].bodies) == 1, "one of the two came from there"
    for task in asking:
        task.cancel()
    async with asyncio.timeout(10):
        await stubs[1].gone.wait()
    await gateway.is_idle()
