"""Who goes on, who waits and who is turned away: the queue alone, and behind real sockets."""

import asyncio
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.types import Candidate, CostTerm, Decision, MapMode
from cartridge_proto.residency import ReplicaId
from cartridge_router.admission import Admission, Ticket
from cartridge_router.errors import AllReplicasSaturated, NoEligibleReplica, QueueFull, RouterError
from cartridge_router.fleet import NOTHING, ServedModel
from cartridge_router.placement import Placement
from cartridge_router.settings import (
    AdmissionSettings,
    FleetSettings,
    PlacementSettings,
    TenantSettings,
)
from tests.router.fleets import fleet_of
from tests.router.gateway_client import CHAT, Gateway, Reply, StartGateway, quick_gateway
from tests.router.keys_files import write_keys
from tests.router.stub_engine import Handler, StartStub, StubEngine


# --- the queue alone -----------------------------------------------------------------------------
class Desk:
    """An admission over a fleet of one or more healthy replicas with room for `room` each.

    A ticket's `needs` is the name of the one replica that it can go to, or "" for any.
    """

    def __init__(
        self, session: aiohttp.ClientSession, room: int, num_replicas: int = 1, **settings: Any
    ) -> None:
        urls = {ReplicaId(f"r{index}"): f"http://127.0.0.1:{9 + index}" for index in range(8)}
        self.fleet = fleet_of(
            session, dict(itertools.islice(urls.items(), num_replicas)), max_in_flight=room
        )
        for replica in self.fleet.replicas:
            replica.is_healthy = True
        self.admission = Admission(self.fleet, AdmissionSettings(**settings))
        self.served: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def place(self, ticket: Ticket) -> Placement:
        """The first replica with room that meets the needs."""
        able = [r for r in self.fleet.replicas if ticket.needs in ("", r.replica) and r.is_healthy]
        if not able:
            raise NoEligibleReplica("none")
        for replica in able:
            if self.fleet.has_room(replica):
                term = CostTerm("queue_s", 0.0)
                decision = Decision((Candidate(replica.replica, (term,), ()),), "test")
                return Placement(NOTHING, decision, MapMode.EXACT, None, is_certified=True)
        raise AllReplicasSaturated("all busy")

    async def ask(self, name: str, **fields: Any) -> float | None:
        """One request, which runs until its event in `ends` is set; returns how long it waited."""
        wanted: dict[str, Any] = {"model": "m", "tenant": "t", "needs": "", "size_bytes": 1}
        ticket = Ticket(**(wanted | fields))
        placement, queued_s = await self.admission.place(ticket, lambda: self.place(ticket))
        replica = self.fleet.find(placement.replica)
        assert replica is not None
        with self.fleet.in_flight(replica):
            assert replica.num_in_flight <= (self.fleet.max_in_flight or 0)
            self.served.append(name)
            await self.ends.setdefault(name, asyncio.Event()).wait()
        return queued_s

    async def start(self, name: str, **fields: Any) -> asyncio.Task[float | None]:
        """A request that is served or waits by now."""
        task = asyncio.create_task(self.ask(name, **fields), name=name)
        await settled()
        return task

    async def end(self, name: str) -> None:
        """Let one that is served end, and the next one begin."""
        self.ends[name].set()
        await settled()

    @property
    def num_queued(self) -> int:
        """All that wait."""
        return sum(self.admission.num_queued.values())


async def settled() -> None:
    """Some turns of the event loop: whatever can go on without time has."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_that_waits_goes_on_when_another_ends(session: aiohttp.ClientSession) -> None:
    """First come, first served among equals; the wait is told, and nothing is left behind."""
    desk = Desk(session, room=1)
    first = await desk.start("first")
    waiting = [await desk.start(name) for name in ("second", "third")]
    assert (desk.served, desk.num_queued) == (["first"], 2)
    for name in ("first", "second", "third"):
        await desk.end(name)
    assert desk.served == ["first", "second", "third"]
    assert await first is None
    waits_s = [await task for task in waiting]
    assert all(wait_s is not None and wait_s > 0 for wait_s in waits_s)
    assert (desk.num_queued, desk.fleet.replicas[0].num_in_flight) == (0, 0)


async def test_a_higher_priority_goes_first(session: aiohttp.ClientSession) -> None:
    """Whenever it came; equals keep their order."""
    desk = Desk(session, room=1)
    tasks = [await desk.start("first")]
    for name, priority in (("low", -3), ("a", 0), ("high", 7), ("b", 0)):
        tasks.append(await desk.start(name, priority=priority))
    for name in ("first", "high", "a", "b", "low"):
        await desk.end(name)
    assert desk.served == ["first", "high", "a", "b", "low"]
    await asyncio.gather(*tasks)


async def test_tenants_take_turns(session: aiohttp.ClientSession) -> None:
    """One who sent much before does not keep another waiting for all of it."""
    desk = Desk(session, room=1)
    tasks = [await desk.start("first")]
    tasks += [
        await desk.start(name, tenant=name[0])
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    ]
    expected = ["first", "a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    for name in expected:
        await desk.end(name)
    assert desk.served == expected
    await asyncio.gather(*tasks)


async def test_who_left_without_being_served_is_not_charged(
    session: aiohttp.ClientSession,
) -> None:
    """A tenant whose requests ran out of time has its turn all the same."""
    desk = Desk(session, room=1)
    tasks = [await desk.start("first")]
    given_up = [await desk.start(f"lost{index}", tenant="a") for index in range(20)]
    tasks += [await desk.start(f"b{index}", tenant="b") for index in range(4)]
    for task in given_up:
        task.cancel()
    tasks += [await desk.start(f"a{index}", tenant="a") for index in range(2)]
    expected = ["first", "b0", "a0", "b1", "a1", "b2", "b3"]
    for name in expected:
        await desk.end(name)
    assert desk.served == expected
    await asyncio.gather(*tasks)


async def test_who_comes_while_others_wait_does_not_overtake_them(
    session: aiohttp.ClientSession,
) -> None:
    """Room that is free for a moment belongs to the one whose turn it is."""
    desk = Desk(session, room=1)
    tasks = [await desk.start("first"), await desk.start("waits")]
    desk.ends["first"].set()
    tasks.append(await desk.start("comes"))
    assert desk.served == ["first", "waits"]
    await desk.end("waits")
    await desk.end("comes")
    await asyncio.gather(*tasks)


async def test_one_that_must_wait_for_its_replica_keeps_nobody_else(
    session: aiohttp.ClientSession,
) -> None:
    """Room that the first in the queue cannot use goes to one who can; its own is kept for it."""
    desk = Desk(session, room=1, num_replicas=2)
    tasks = [await desk.start("on r0", needs="r0"), await desk.start("on r1", needs="r1")]
    tasks += [await desk.start("next r0", needs="r0"), await desk.start("any")]
    await desk.end("on r1")
    assert desk.served[2:] == ["any"]
    tasks.append(await desk.start("late"))
    await desk.end("on r0")
    assert desk.served[3:] == ["next r0"]
    await desk.end("any")
    assert desk.served[4:] == ["late"]
    await desk.end("next r0")
    await desk.end("late")
    await asyncio.gather(*tasks)


async def test_models_wait_apart(session: aiohttp.ClientSession) -> None:
    """A queue for one model does not hold up a request for another."""
    desk = Desk(session, room=1, num_replicas=2)
    for replica, model in zip(desk.fleet.replicas, ("m", "other"), strict=True):
        replica.models = {model: ServedModel(max_model_len=None)}
    tasks = [await desk.start("m1", needs="r0"), await desk.start("m2", needs="r0")]
    tasks.append(await desk.start("o1", model="other", needs="r1"))
    assert desk.served == ["m1", "o1"]
    assert desk.admission.num_queued == {"m": 1}
    for name in ("m1", "m2", "o1"):
        await desk.end(name)
    await asyncio.gather(*tasks)


async def test_room_that_was_granted_to_one_who_left_is_given_on(
    session: aiohttp.ClientSession,
) -> None:
    """Cancelled between the grant and its turn on the event loop, it keeps no slot."""
    desk = Desk(session, room=1)
    first, second = await desk.start("first"), await desk.start("second")
    third = await desk.start("third")
    desk.ends["first"].set()
    for _ in range(10):
        await asyncio.sleep(0)
        if first.done() and desk.fleet.replicas[0].num_in_flight:
            break
    # Here the room is held for the second, which has not run yet.
    assert desk.served == ["first"]
    second.cancel()
    await settled()
    assert desk.served == ["first", "third"]
    await desk.end("third")
    await asyncio.gather(first, third)
    assert (desk.num_queued, desk.fleet.replicas[0].num_in_flight) == (0, 0)


async def test_those_who_wait_are_told_when_nobody_can_serve_them_any_more(
    session: aiohttp.ClientSession,
) -> None:
    """When the last replica is away they need not wait until their time is over."""
    desk = Desk(session, room=1)
    first, second = await desk.start("first"), await desk.start("second")
    desk.fleet.note_connect_failure(desk.fleet.replicas[0])
    await desk.end("first")
    with pytest.raises(NoEligibleReplica):
        await second
    await first


@pytest.mark.parametrize(
    ("settings", "tickets", "limit"),
    [
        ({"max_queued": 2}, [{"tenant": "a"}, {"tenant": "b"}, {"tenant": "c"}], "2 requests"),
        ({"max_queued_per_tenant": 2}, [{}, {}, {}], "2 requests of tenant t"),
        ({"max_queued_bytes": 10}, [{"size_bytes": 5}] * 3, "10 bytes"),
        # Bytes are counted over all models.
        ({"max_queued_bytes": 10}, [{}, {"model": "n", "size_bytes": 10}], "10 bytes"),
    ],
)
async def test_a_full_queue_takes_no_more(
    session: aiohttp.ClientSession,
    settings: dict[str, Any],
    tickets: list[dict[str, Any]],
    limit: str,
) -> None:
    """The error names the bound; those who wait are not touched, and room is room again."""
    desk = Desk(session, room=1, **settings)
    tasks = [await desk.start("first")]
    *fitting, last = tickets
    for index, ticket in enumerate(fitting):
        tasks.append(await desk.start(str(index), **ticket))
    with pytest.raises(QueueFull, match=limit) as caught:
        await desk.ask("last", **last)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    assert desk.num_queued == len(fitting)
    # One more at another's cost: each bound counts only those who still wait.
    tasks[1].cancel()
    await settled()
    tasks.append(await desk.start("last", **last))
    assert desk.num_queued == len(fitting)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_how_long_to_stay_away_follows_from_how_fast_the_queue_moves(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten who wait and a grant each two seconds make some seconds, never above a minute."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    desk = Desk(session, room=1, max_queued=10)
    names = [f"n{index:02}" for index in range(40)]
    tasks = [await desk.start(name) for name in names[:11]]
    for ending, coming in zip(names, names[11:], strict=False):
        now_s += 2.0
        await desk.end(ending)
        tasks.append(await desk.start(coming))
    with pytest.raises(QueueFull) as caught:
        await desk.ask("last")
    assert caught.value.retry_after_s is not None
    assert 10 <= caught.value.retry_after_s <= 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class History:
    """Random arrivals, ends, cancellations and replicas that go and come."""

    def __init__(self, session: aiohttp.ClientSession, seed: int) -> None:
        self.dice = random.Random(seed)
        self.desk = Desk(session, room=2, num_replicas=3, max_queued=6, max_queued_per_tenant=4)
        self.tasks: dict[str, asyncio.Task[float | None]] = {}

    @property
    def running(self) -> list[str]:
        """Those that are being served."""
        return [name for name in self.desk.served if not self.tasks[name].done()]

    async def step(self, name: str) -> None:
        """One thing that happens."""
        what = self.dice.choice(["ask", "ask", "ask", "end", "end", "cancel", "go", "come"])
        if what == "ask":
            self.tasks[name] = asyncio.create_task(
                self.desk.ask(
                    name,
                    needs=self.dice.choice(["", "", "r0", "r1"]),
                    tenant=self.dice.choice("ab"),
                    priority=self.dice.choice([-1, 0, 5]),
                )
            )
        elif what == "end" and self.running:
            self.desk.ends[self.dice.choice(self.running)].set()
        elif what == "cancel" and self.tasks:
            self.dice.choice(list(self.tasks.values())).cancel()
        elif what in {"go", "come"}:
            self.dice.choice(self.desk.fleet.replicas).is_healthy = what == "come"
        if self.dice.random() < 0.7:
            await settled()

    async def finish(self) -> None:
        """Let all be served; whoever is not waits for somebody who is."""
        for replica in self.desk.fleet.replicas:
            replica.is_healthy = True
        await settled()
        while left := [task for task in self.tasks.values() if not task.done()]:
            running = self.running
            assert running, f"{len(left)} wait, and nobody is served"
            await self.desk.end(running[0])


async def run_history(seed: int) -> None:
    """A history, and what must hold at its end."""
    async with aiohttp.ClientSession() as session:
        history = History(session, seed)
        for step in range(60):
            await history.step(str(step))
        await history.finish()
        for task in history.tasks.values():
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, RouterError)
        assert history.desk.admission.num_queued == {}
        assert history.desk.admission._num_bytes == 0
        assert [replica.num_in_flight for replica in history.desk.fleet.replicas] == [0, 0, 0]


@given(seed=st.integers(0, 1 << 32))
def test_no_history_loses_a_slot_or_a_request(seed: int) -> None:
    """Limits hold throughout; at the end nobody waits, and nothing is counted."""
    asyncio.run(run_history(seed))


# --- behind real sockets -------------------------------------------------------------------------
class GatedEngine:
    """A handler that answers one request for each `let_one_go`."""

    def __init__(self) -> None:
        self._gate = asyncio.Semaphore(0)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Wait, then say which body came."""
        await self._gate.acquire()
        return web.json_response({"object": "chat.completion"})

    def let_one_go(self) -> None:
        """Answer the one that has waited longest, or the next one."""
        self._gate.release()


BODY = json.dumps({"model": "sample", "messages": []}).encode()


def ask(
    gateway: Gateway, name: str = "", headers: dict[str, str] | None = None
) -> asyncio.Task[Reply]:
    """A chat request under way; `name` is in its body."""
    body = json.dumps({"model": "sample", "messages": [], "user": name}).encode()
    return asyncio.create_task(gateway.post_bytes(CHAT, body, headers or {}))


async def start_narrow(
    start_gateway: StartGateway,
    start_stub: StartStub,
    handler: Handler,
    **admission: Any,
) -> tuple[Gateway, StubEngine]:
    """A gateway in front of one engine that takes one request at a time."""
    stub = await start_stub(handler)
    gateway = await start_gateway(
        quick_gateway(
            stub.url,
            placement=PlacementSettings(max_in_flight=1),
            admission=AdmissionSettings(**admission),
        )
    )
    return gateway, stub


async def test_a_request_waits_for_room_and_says_how_long(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """One at a time reaches the engine; those who wait are counted by model."""
    engine = GatedEngine()
    gateway, stub = await start_narrow(start_gateway, start_stub, engine.answer)
    first = ask(gateway)
    await gateway.has_metric("cartridge_router_in_flight", 1)
    second = ask(gateway)
    await gateway.has_metric("cartridge_router_queued", 1, model="sample")
    assert len(stub.requests) == 1
    engine.let_one_go()
    reply = await first
    assert (reply.status, "x-cartridge-queued-ms" in reply.headers) == (200, False)
    engine.let_one_go()
    reply = await second
    assert (reply.status, int(reply.headers["x-cartridge-queued-ms"]) >= 0) == (200, True)
    assert await gateway.metric("cartridge_router_queue_seconds_count") == 1
    assert await gateway.metric("cartridge_router_queued") == 0
    assert await gateway.metric("cartridge_router_overhead_seconds_count") == 2


async def test_a_queued_client_that_leaves_is_gone_at_once(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """The engine never hears of it, and its place is free."""
    engine = GatedEngine()
    gateway, stub = await start_narrow(start_gateway, start_stub, engine.answer)
    first = ask(gateway, "first")
    await gateway.has_metric("cartridge_router_in_flight", 1)
    leaving = ask(gateway, "leaving")
    await gateway.has_metric("cartridge_router_queued", 1)
    leaving.cancel()
    await gateway.has_metric("cartridge_router_queued", 0)
    engine.let_one_go()
    assert (await first).status == 200
    await gateway.is_idle()
    assert [json.loads(body)["user"] for body in stub.bodies] == ["first"]


async def test_who_waits_too_long_is_told_to_come_again(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """429 with Retry-After: there are replicas, and they are busy."""
    gateway, stub = await start_narrow(
        start_gateway, start_stub, GatedEngine().answer, max_wait_s=0.05
    )
    first = ask(gateway)
    await gateway.has_metric("cartridge_router_in_flight", 1)
    reply = await gateway.post_bytes(CHAT, BODY)
    assert (reply.status, reply.error["code"]) == (429, "queue_timeout")
    assert int(reply.headers["retry-after"]) > 0
    assert len(stub.requests) == 1
    first.cancel()
    await gateway.is_idle()


async def test_a_full_queue_is_a_429(start_gateway: StartGateway, start_stub: StartStub) -> None:
    """With the bound in the message."""
    gateway, _ = await start_narrow(start_gateway, start_stub, GatedEngine().answer, max_queued=1)
    asking = [ask(gateway)]
    await gateway.has_metric("cartridge_router_in_flight", 1)
    asking.append(ask(gateway))
    await gateway.has_metric("cartridge_router_queued", 1)
    reply = await gateway.post_bytes(CHAT, BODY)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert "no more than 1 requests for sample" in reply.error["message"]
    assert int(reply.headers["retry-after"]) > 0
    for task in asking:
        task.cancel()
    await gateway.is_idle()


async def test_a_deadline_ends_the_wait_in_the_queue(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """504: the client said how long it would wait."""
    gateway, stub = await start_narrow(start_gateway, start_stub, GatedEngine().answer)
    first = ask(gateway)
    await gateway.has_metric("cartridge_router_in_flight", 1)
    reply = await gateway.post_bytes(CHAT, BODY, {"x-cartridge-deadline-ms": "50"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert len(stub.requests) == 1
    first.cancel()
    await gateway.is_idle()


async def test_a_deadline_ends_the_wait_for_the_engine(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """The engine is told to stop, and is not blamed: it is asked again at once."""
    engine = GatedEngine()
    stub = await start_stub(engine.answer)
    gateway = await start_gateway(
        quick_gateway(stub.url, fleet=FleetSettings(probe_interval_s=0.05, num_request_failures=1))
    )
    for _ in range(2):
        reply = await gateway.post_bytes(CHAT, BODY, {"x-cartridge-deadline-ms": "50"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    async with asyncio.timeout(10):
        await stub.gone.wait()
    await gateway.is_idle()
    assert await gateway.metric("cartridge_router_ejections_total") == 0
    engine.let_one_go()
    reply = await gateway.post_bytes(CHAT, BODY, {"x-cartridge-deadline-ms": "60000"})
    assert reply.status == 200


@pytest.mark.parametrize("is_on", [True, False])
async def test_what_cannot_be_in_time_is_refused_at_once(
    is_on: bool, start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """Once first tokens were compared with predictions; no engine works for it."""

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await asyncio.sleep(0.1)
        await response.prepare(request)
        for _ in range(2):
            await response.write(b'data: {"choices":[]}\n\n')
        return response

    stub = await start_stub(slow)
    admission = AdmissionSettings(reject_hopeless=is_on)
    gateway = await start_gateway(quick_gateway(stub.url, admission=admission))
    body = {"model": "sample", "messages": [{"role": "user", "content": "x" * 40}], "stream": True}
    in_a_hurry = {"x-cartridge-deadline-ms": "20"}
    hasty = await gateway.post(CHAT, body, in_a_hurry)
    assert (hasty.status, len(stub.bodies)) == (504, 1)
    for _ in range(30):
        assert (await gateway.post(CHAT, body)).status == 200
    hasty = await gateway.post(CHAT, body, in_a_hurry)
    assert (hasty.status, hasty.error["code"]) == (504, "deadline_exceeded")
    assert len(stub.bodies) == 31 + (not is_on)
    assert ("no replica is expected" in hasty.error["message"]) is is_on
    patient = await gateway.post(CHAT, body, {"x-cartridge-deadline-ms": "60000"})
    assert patient.status == 200
    await gateway.is_idle()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 100_000}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklG" * 100_000, "format": "wav"}}


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 80_000}]}, 504),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 200),
        (CHAT, {"messages": [{"role": "user", "content": [SOUND]}]}, 200),
        ("/tokenize", {"prompt": "word " * 80_000}, 200),
        ("/v1/messages/count_tokens", {"messages": [{"content": "word " * 80_000}]}, 200),
    ],
    ids=["text", "image", "sound", "tokenize", "count"],
)
async def test_what_is_long_and_soon_done_is_not_taken_for_hopeless(
    path: str,
    fields: dict[str, Any],
    status: int,
    start_gateway: StartGateway,
    start_stub: StartStub,
) -> None:
    """A body's size says nothing of images and sounds, nor where nothing is prefilled."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await asyncio.sleep(0.02)
        await response.prepare(request)
        for _ in range(2):
            await response.write(b'data: {"choices":[]}\n\n')
        return response

    stub = await start_stub(answer)
    placement = PlacementSettings(learn_rates=False, prefill_base_s=0.02, prefill_s_per_token=0.005)
    gateway = await start_gateway(quick_gateway(stub.url, placement=placement))
    body = {"model": "sample", "messages": [{"role": "user", "content": "x"}], "stream": True}
    for _ in range(30):
        assert (await gateway.post(CHAT, body)).status == 200
    reply = await gateway.post(
        path, {"model": "sample", **fields}, {"x-cartridge-deadline-ms": "20000"}
    )
    assert reply.status == status


async def test_priorities_of_clients_order_the_queue(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """Where everybody is one tenant, anybody may ask for any of them."""
    engine = GatedEngine()
    gateway, stub = await start_narrow(start_gateway, start_stub, engine.answer)
    asking = [ask(gateway, "first")]
    await gateway.has_metric("cartridge_router_in_flight", 1)
    for index, (name, priority) in enumerate((("low", "-5"), ("normal", "0"), ("high", "+10"))):
        asking.append(ask(gateway, name, {"x-cartridge-priority": priority}))
        await gateway.has_metric("cartridge_router_queued", index + 1)
    for _ in asking:
        engine.let_one_go()
    assert [reply.status for reply in await asyncio.gather(*asking)] == [200] * 4
    assert [json.loads(body)["user"] for body in stub.bodies] == ["first", "high", "normal", "low"]


@pytest.mark.parametrize(
    ("header", "value", "takes"),
    [
        ("x-cartridge-priority", "11", "-10 to 10"),
        ("x-cartridge-priority", "-11", "-10 to 10"),
        ("x-cartridge-priority", "high", "-10 to 10"),
        ("x-cartridge-priority", "1" * 5000, "-10 to 10"),
        ("x-cartridge-priority", "", "-10 to 10"),
        ("x-cartridge-deadline-ms", "0", "1 to 86400000"),
        ("x-cartridge-deadline-ms", "1.5", "1 to 86400000"),
        ("x-cartridge-policy", "fastest", "cartridge_aware"),
        ("x-cartridge-explain", "maybe", "1, true, 0, false"),
    ],
)
async def test_a_header_that_cannot_be_read_is_a_400_that_names_it(
    header: str, value: str, takes: str, start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """And what it takes; no engine is asked."""
    stub = await start_stub(GatedEngine().answer)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(CHAT, BODY, {header: value})
    assert (reply.status, reply.error["param"]) == (400, header)
    assert takes in reply.error["message"]
    assert stub.requests == []


async def test_a_tenant_may_not_go_above_its_priority(
    start_gateway: StartGateway, start_stub: StartStub, tmp_path: Path
) -> None:
    """Its own is in the list of tenants; without one it may only step back."""
    engine = GatedEngine()
    stub = await start_stub(engine.answer)
    keys = write_keys(
        tmp_path / "keys.yaml",
        tenants={"plain": {}, "ahead": {"max_priority": 5}},
        keys={"cr-plain": "plain", "cr-ahead": "ahead"},
    )
    gateway = await start_gateway(quick_gateway(stub.url, tenants=TenantSettings(keys_file=keys)))

    async def status(key: str, priority: str) -> int:
        sent = gateway.as_caller(key)
        reply = await sent.post_bytes(CHAT, BODY, {"x-cartridge-priority": priority})
        return reply.status

    for _ in range(3):
        engine.let_one_go()
    assert await status("cr-plain", "1") == 400
    assert await status("cr-plain", "0") == 200
    assert await status("cr-plain", "-10") == 200
    assert await status("cr-ahead", "5") == 200
    assert await status("cr-ahead", "6") == 400


async def test_a_request_may_name_its_policy_and_have_it_explained(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """The answer then tells the costs of the candidates, which add up; engines see no header."""
    engine = GatedEngine()
    stubs = [await start_stub(engine.answer) for _ in range(2)]
    gateway = await start_gateway(
        quick_gateway(*(f"r{index}={stub.url}" for index, stub in enumerate(stubs)))
    )
    engine.let_one_go()
    plain = await gateway.post_bytes(CHAT, BODY)
    assert "x-cartridge-explanation" not in plain.headers
    for _ in range(2):
        engine.let_one_go()
        headers = {"x-cartridge-policy": "round_robin", "x-cartridge-explain": "1"}
        reply = await gateway.post_bytes(CHAT, BODY, headers)
        assert reply.headers["x-cartridge-decision"].startswith("round-robin")
        candidates = json.loads(reply.headers["x-cartridge-explanation"])
        assert {candidate["replica"] for candidate in candidates} == {"r0", "r1"}
        assert candidates[0]["replica"] == reply.headers["x-cartridge-replica"]
        for candidate in candidates:
            assert sum(candidate["terms"].values()) == pytest.approx(candidate["total_s"])
    for stub in stubs:
        assert all("x-cartridge-policy" not in request.headers for request in stub.requests)
    reply = await gateway.post_bytes(
        "/v1/cartridges/explain", BODY, {"x-cartridge-policy": "least_loaded"}
    )
    assert reply.json["placement"]["decision"].startswith("least-loaded")


async def test_a_saturated_fleet_with_a_dying_engine_keeps_nobody(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """Those who wait for an engine that goes away are answered 503 soon."""
    gateway, stub = await start_narrow(start_gateway, start_stub, GatedEngine().answer)
    first = ask(gateway)
    await gateway.has_metric("cartridge_router_in_flight", 1)
    second = ask(gateway)
    await gateway.has_metric("cartridge_router_queued", 1)
    await stub.stop()
    assert (await first).status == 502
    reply = await second
    assert (reply.status, reply.error["code"]) in {
        (503, "no_eligible_replica"),
        (502, "upstream_unavailable"),
    }


async def test_ids_in_the_queue_are_bounded_labels(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """A model that only clients name is counted as "other"."""
    stub = await start_stub(GatedEngine().answer)
    stub.lists_no_models = True
    gateway = await start_gateway(
        quick_gateway(stub.url, placement=PlacementSettings(max_in_flight=1))
    )
    first = ask(gateway)
    await gateway.has_metric("cartridge_router_in_flight", 1)
    names = ["made-up-1", "made-up-2"]
    asking = [
        asyncio.create_task(gateway.post_bytes(CHAT, json.dumps({"model": name}).encode()))
        for name in names
    ]
    await gateway.has_metric("cartridge_router_queued", 2, model="other")
    for task in (first, *asking):
        task.cancel()
    await gateway.is_idle()
