"""Stored responses: asked of the replica that keeps them, and by nobody but their tenant."""

import asyncio
import itertools
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yarl
from aiohttp import web

from cartridge_proto.stores import LocalStore
from cartridge_router.settings import (
    FleetSettings,
    PlacementSettings,
    ResponseSettings,
    TenantSettings,
)
from tests.router.gateway_client import Gateway, Reply, StartGateway, quick_gateway
from tests.router.keys_files import ACME_KEY, BETA_KEY, write_keys
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StartStub, StubEngine
from tests.router.test_workers import running_workers

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": "sample", "input": "When does it open?"}


class Keeper:
    """Answers as vLLM does with its store of responses: in the memory of one process."""

    def __init__(self, name: str) -> None:
        self.stub: StubEngine
        self.kept: dict[str, dict[str, Any]] = {}
        self._ids = (f"resp_{name}_{number}" for number in itertools.count())

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Methods and paths so far, the gateway's question for the extension left out."""
        pairs = zip(self.stub.requests, self.stub.bodies, strict=True)
        return [(request.method, request.path) for request, body in pairs if b"[0]" not in body]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Make, give out, cancel, delete."""
        if request.path == RESPONSES:
            return await self._make(request, json.loads(await request.read()))
        if request.path in {RESPONSES + "/render", "/v1/completions"}:
            body = json.loads(await request.read())
            is_refused = body.get("prompt") == [0] and "kv_transfer_params" in body
            return web.json_response({}, status=500 if is_refused else 200)
        response_id = request.path.removeprefix(RESPONSES + "/").partition("/")[0]
        if response_id not in self.kept:
            return self._absent(response_id)
        return web.json_response(self.kept[response_id])

    async def _make(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.kept:
            return self._absent(previous)
        response_id = next(self._ids)
        made = {"id": response_id, "object": "response", "previous_response_id": previous}
        if "metadata" in body:
            made = {"metadata": body["metadata"], **made}
        self.kept[response_id] = made
        if not body.get("stream"):
            return web.json_response(made)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for kind in ("response.created", "response.in_progress", "response.completed"):
            event = json.dumps({"response": made, "type": kind})
            await response.write(f"event: {kind}\ndata: {event}\n\n".encode())
        return response

    @staticmethod
    def _absent(response_id: str) -> web.Response:
        error = {"message": f"Response with id '{response_id}' not found.", "code": 404}
        return web.json_response({"error": error}, status=404)


async def start_keepers(start_stub: StartStub, count: int = 3) -> list[Keeper]:
    """Engines with a memory each."""
    keepers = [Keeper(f"e{index}") for index in range(count)]
    for keeper in keepers:
        keeper.stub = await start_stub(keeper.answer)
    return keepers


def named(keepers: list[Keeper]) -> list[str]:
    """As settings name them: `e0`, `e1`, …"""
    return [f"e{index}={keeper.stub.url}" for index, keeper in enumerate(keepers)]


def tenants_of(tmp_path: Path) -> TenantSettings:
    """Two of them."""
    return TenantSettings(keys_file=write_keys(tmp_path / "keys.yaml"))


def made_id(reply: Reply) -> str:
    """The id in an answer, streamed or whole."""
    assert reply.status == 200
    if reply.body.startswith(b"event"):
        return str(json.loads(reply.body.splitlines()[1].removeprefix(b"data: "))["response"]["id"])
    return str(reply.json["id"])


async def say(gateway: Gateway, method: str, path: str, body: object = None) -> Reply:
    """A request by any method, its path as it stands."""
    async with gateway.session.request(
        method,
        yarl.URL(gateway.url + path, encoded=True),
        json=body,
        headers=gateway.headers,
        skip_auto_headers=() if body else ("Content-Type",),
    ) as response:
        return Reply(response.status, response.headers, await response.read())


def told(reply: Reply) -> tuple[int, Any, set[str]]:
    """What one can see of a refusal: status, body, names of headers."""
    return reply.status, reply.json, {name.lower() for name in reply.headers}


# --- which replica -------------------------------------------------------------------------------
@pytest.mark.parametrize("has_tenants", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_stays_where_it_is_kept(
    is_stream: bool,
    has_tenants: bool,
    start_stub: StartStub,
    start_gateway: StartGateway,
    tmp_path: Path,
) -> None:
    """Each further turn, and what asks for one, goes to the replica of the first one only."""
    keepers = await start_keepers(start_stub)
    tenants = tenants_of(tmp_path) if has_tenants else TenantSettings()
    gateway = (await start_gateway(quick_gateway(*named(keepers), tenants=tenants))).as_caller(
        ACME_KEY
    )
    holders = set()
    for _ in range(6):
        first = await gateway.post(RESPONSES, {**BODY, "stream": is_stream})
        holder, last = first.headers["x-cartridge-replica"], made_id(first)
        holders.add(holder)
        for _ in range(3):
            reply = await gateway.post(
                RESPONSES, {**BODY, "stream": is_stream, "previous_response_id": last}
            )
            assert reply.headers["x-cartridge-replica"] == holder
            assert reply.headers["x-cartridge-decision"].startswith("stored")
            last = made_id(reply)
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/items")):
            got = await say(gateway, method, f"{RESPONSES}/{last}{path}")
            assert (got.status, got.json["id"]) == (200, last)
    assert len(holders) > 1
    assert {path for keeper in keepers for _, path in keeper.asked} >= {RESPONSES}
    assert sum(len(keeper.asked) for keeper in keepers) == 6 * (1 + 3 + 4)


async def test_an_answer_that_comes_in_pieces_is_learned_from(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Also where its head comes long before its body, and its id is cut in two."""
    has_looked = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"id":"resp')
        await has_looked.wait()
        await response.write(b'_1","x":' + b'"' + b"x" * 100_000 + b'"}')
        return response

    stub, other = await start_stub(answer), await start_stub(Keeper("other").answer)
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}", f"r1={other.url}"))
    while not stub.requests:
        async with gateway.session.post(gateway.url + RESPONSES, json=BODY) as response:
            if response.headers["x-cartridge-replica"] == "r0":
                assert await response.content.readany() == b'{"id":"resp'
                has_looked.set()
            await response.read()
    num_before = len(other.requests)
    assert (await gateway.get(f"{RESPONSES}/resp_1")).status == 200
    assert (stub.requests[-1].path, len(other.requests)) == (f"{RESPONSES}/resp_1", num_before)


async def test_what_is_not_known_is_asked_of_all_and_remembered(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """As after a restart of the gateway, or where another one made it: by every kind of request."""
    keepers = await start_keepers(start_stub)
    settings = quick_gateway(*named(keepers))
    made_by = await start_gateway(settings)
    for ask_index in range(2):
        response_id = made_id(await made_by.post(RESPONSES, BODY))
        other = await start_gateway(settings)
        before = sum(len(keeper.asked) for keeper in keepers)
        for _ in range(6):
            if ask_index:
                reply = await other.post(RESPONSES, {**BODY, "previous_response_id": response_id})
                assert reply.json["previous_response_id"] == response_id
            else:
                reply = await other.get(f"{RESPONSES}/{response_id}")
            assert reply.status == 200
        # The first of them by three replicas at most, the others by one each.
        assert sum(len(keeper.asked) for keeper in keepers) - before <= 3 + 5
    absent = await made_by.post(RESPONSES, {**BODY, "previous_response_id": "resp_none"})
    assert (absent.status, absent.json["error"]["code"]) == (404, 404)


async def test_a_404_is_not_believed_while_one_could_not_be_asked(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """What is asked of all may be kept by the one that does not answer."""
    keepers = await start_keepers(start_stub, 2)
    fleet = FleetSettings(probe_interval_s=60.0, probe_timeout_s=60.0, num_failures=1000)
    gateway = await start_gateway(quick_gateway(*named(keepers), fleet=fleet))
    await keepers[0].stub.stop()
    reply = await gateway.get(f"{RESPONSES}/resp_none")
    assert (reply.status, reply.error["code"]) == (503, "response_unavailable")
    assert reply.headers["Retry-After"] == "2"


async def test_a_holder_that_is_away_is_a_503(
    start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """Not a 404: it may come back with what it keeps; nobody else is asked in its place."""
    keepers = await start_keepers(start_stub, 2)
    gateway = (
        await start_gateway(quick_gateway(*named(keepers), tenants=tenants_of(tmp_path)))
    ).as_caller(ACME_KEY)
    first = await gateway.post(RESPONSES, BODY)
    response_id, holder = made_id(first), first.headers["x-cartridge-replica"]
    keeper = keepers[int(holder[1:])]
    other = keepers[1 - int(holder[1:])]
    num_before = len(other.asked)
    keeper.stub.is_hung = True
    await keeper.stub.stop()
    for is_noticed in (False, True):
        if is_noticed:
            await gateway.has_metric("cartridge_router_replica_healthy", 0, replica=holder)
        for reply in (
            await gateway.get(f"{RESPONSES}/{response_id}"),
            await say(gateway, "POST", f"{RESPONSES}/{response_id}/cancel"),
            await gateway.post(RESPONSES, {**BODY, "previous_response_id": response_id}),
        ):
            assert (reply.status, reply.error["code"]) == (503, "response_unavailable")
            assert reply.headers["Retry-After"] == "2"
            assert "away" in reply.error["message"]
    assert len(other.asked) == num_before


async def test_a_holder_that_is_full_is_waited_for(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """The other replica has room, and not the response."""
    keepers = await start_keepers(start_stub, 2)
    gateway = await start_gateway(
        quick_gateway(*named(keepers), placement=PlacementSettings(max_in_flight=1))
    )
    first = await gateway.post(RESPONSES, BODY)
    holder = first.headers["x-cartridge-replica"]
    replies = await asyncio.gather(
        *(
            gateway.post(RESPONSES, {**BODY, "previous_response_id": made_id(first)})
            for _ in range(5)
        )
    )
    assert {reply.headers["x-cartridge-replica"] for reply in replies} == {holder}
    assert {reply.status for reply in replies} == {200}


async def test_what_is_no_id_is_refused_by_name(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """`null` says nothing."""
    (keeper,) = await start_keepers(start_stub, 1)
    gateway = await start_gateway(quick_gateway(*named([keeper])))
    reply = await gateway.post(RESPONSES, {**BODY, "previous_response_id": 5})
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    assert keeper.asked == []
    assert (await gateway.post(RESPONSES, {**BODY, "previous_response_id": None})).status == 200


# --- whose ---------------------------------------------------------------------------------------
@pytest.fixture
async def keepers(start_stub: StartStub) -> list[Keeper]:
    """Two engines."""
    return await start_keepers(start_stub, 2)


@pytest.fixture
async def shared(keepers: list[Keeper], start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    """A gateway of two tenants."""
    return await start_gateway(quick_gateway(*named(keepers), tenants=tenants_of(tmp_path)))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/{}"),
        ("GET", "/v1/responses/{}?stream=true&starting_after=0"),
        ("GET", "/v1/responses/{}/input_items"),
        ("GET", "/v1/responses%2F{}"),
        ("GET", "/v1/%72esponses/{}"),
        ("DELETE", "/v1/responses/{}"),
        ("POST", "/v1/responses/{}/cancel"),
        ("POST", "/v1/responses/{}%2Fcancel"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/%72esponses"),
        ("POST", "/v1/responses/render"),
    ],
)
async def test_a_response_of_another_tenant_is_an_absent_one(
    method: str, path: str, keepers: list[Keeper], shared: Gateway
) -> None:
    """The same status, body and headers, but for the id; and no engine is asked."""
    acme, beta = shared.as_caller(ACME_KEY), shared.as_caller(BETA_KEY)
    response_id = made_id(await acme.post(RESPONSES, BODY))
    absent_id = response_id[:-1] + "x"

    async def ask(gateway: Gateway, wanted: str) -> Reply:
        body = None if "{}" in path else {**BODY, "previous_response_id": wanted}
        return await say(gateway, method, path.format(wanted), body)

    assert (await ask(acme, response_id)).status == 200
    num_before = [len(keeper.asked) for keeper in keepers]
    foreign, absent = await ask(beta, response_id), await ask(beta, absent_id)
    assert (foreign.status, foreign.error["code"]) == (404, "response_not_found")
    status, body, headers = told(absent)
    body["error"]["message"] = body["error"]["message"].replace(absent_id, response_id)
    assert told(foreign) == (status, body, headers)
    assert [len(keeper.asked) for keeper in keepers] == num_before


async def test_an_id_in_what_a_client_sends_makes_it_no_owner(
    keepers: list[Keeper], shared: Gateway
) -> None:
    """Ids are read where engines put them: what an answer repeats of its request is none."""
    beta = shared.as_caller(BETA_KEY)
    for keeper in keepers:
        keeper.kept["resp_old"] = {"id": "resp_old"}
    made = await beta.post(RESPONSES, {**BODY, "metadata": {"id": "resp_old"}})
    assert made.body.startswith(b'{"metadata": {"id": "resp_old"}')
    assert (await beta.get(f"{RESPONSES}/resp_old")).status == 404


async def test_a_response_that_is_forgotten_is_an_absent_one(
    start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """With tenants nobody else could say whose it is; the newest are known."""
    (keeper,) = await start_keepers(start_stub, 1)
    settings = quick_gateway(
        *named([keeper]),
        tenants=tenants_of(tmp_path),
        responses=ResponseSettings(max_known=2),
    )
    gateway = (await start_gateway(settings)).as_caller(ACME_KEY)
    made = [made_id(await gateway.post(RESPONSES, BODY)) for _ in range(3)]
    statuses = [(await gateway.get(f"{RESPONSES}/{each}")).status for each in made]
    assert statuses == [404, 200, 200]


async def test_another_gateway_does_not_know_whose_a_response_is(
    keepers: list[Keeper], start_gateway: StartGateway, tmp_path: Path
) -> None:
    """So it answers as for an absent one, to whoever asks."""
    settings = quick_gateway(*named(keepers), tenants=tenants_of(tmp_path))
    one, other = await start_gateway(settings), await start_gateway(settings)
    response_id = made_id(await one.as_caller(ACME_KEY).post(RESPONSES, BODY))
    for key in (ACME_KEY, BETA_KEY):
        reply = await other.as_caller(key).get(f"{RESPONSES}/{response_id}")
        assert (reply.status, reply.error["code"]) == (404, "response_not_found")


async def test_all_workers_know_what_one_has_learned(
    session: aiohttp.ClientSession, keepers: list[Keeper], tmp_path: Path
) -> None:
    """Whichever of three processes is asked, by its tenant and by another one."""
    file = write_keys(tmp_path / "keys.yaml")
    async with running_workers(
        session, *named(keepers), CARTRIDGE_ROUTER_TENANTS__KEYS_FILE=file
    ) as process:
        acme = process.gateway.as_caller(ACME_KEY)
        first = await acme.post(RESPONSES, BODY)
        response_id, holder = made_id(first), first.headers["x-cartridge-replica"]
        for _ in range(12):
            # A connection of its own each time: the kernel chooses the worker.
            async with aiohttp.ClientSession() as fresh:
                gateway = Gateway(fresh, process.gateway.url)
                got = await gateway.as_caller(ACME_KEY).post(
                    RESPONSES, {**BODY, "previous_response_id": response_id}
                )
                assert (got.status, got.headers["x-cartridge-replica"]) == (200, holder)
                reply = await gateway.as_caller(BETA_KEY).get(f"{RESPONSES}/{response_id}")
                assert reply.status == 404
        process.send(signal.SIGTERM)
        assert await process.ended() == 0


# --- with Cartridges -----------------------------------------------------------------------------
async def test_cartridges_are_of_one_request(
    start_stub: StartStub, start_gateway: StartGateway, store: LocalStore
) -> None:
    """A further turn reads them if it names them again, at the replica that keeps the first one."""
    put_cartridge(store)
    keepers = await start_keepers(start_stub, 2)
    gateway = await start_gateway(quick_gateway(*named(keepers), store=store))
    asked = {**BODY, "cartridge_ids": ["harbour-rules@1"]}
    first = await gateway.post(RESPONSES, asked)
    keeper = keepers[int(first.headers["x-cartridge-replica"][1:])]
    further = {"previous_response_id": made_id(first)}
    for _ in range(4):
        reply = await gateway.post(RESPONSES, {**asked, **further})
        assert reply.headers["x-cartridge-replica"] == first.headers["x-cartridge-replica"]
        assert reply.headers["x-cartridge-ids"] == "harbour-rules@1"
        assert "kv_transfer_params" in json.loads(keeper.stub.bodies[-1])
        plain = await gateway.post(RESPONSES, {**BODY, **further})
        assert plain.status == 200
        assert "x-cartridge-ids" not in plain.headers
        assert "kv_transfer_params" not in json.loads(keeper.stub.bodies[-1])
