"""The HTTP surface: routes, statuses, OpenAI errors, response headers and the dry run."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cartridge_loadtest.faults import Faults
from cartridge_policies.cost import TERMS
from cartridge_proto.manifest import ConventionKind
from cartridge_proto.residency import Tier
from cartridge_proto.stores import LocalStore
from cartridge_router.settings import CartridgeSettings, FleetSettings, PlacementSettings
from tests.loadtest.cartridge_requests import chat_body
from tests.loadtest.replica_client import StartReplica, mark_of
from tests.router.fleets import named, start_fleet, start_replicas
from tests.router.gateway_client import CHAT, TEXT, Gateway, StartGateway, quick_gateway
from tests.router.stored_cartridges import digest_of, put_cartridge
from tests.router.stub_engine import StartStub, answer_ok

EXPLAIN = "/v1/cartridges/explain"


@pytest.fixture
async def fleet(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> Gateway:
    """A gateway over two registered replicas, with two Cartridges for chats and one for text."""
    put_cartridge(store, "harbour-rules", num_tokens=5)
    put_cartridge(store, "ferry-times", num_tokens=7, seed=1)
    put_cartridge(store, "raw-text", num_tokens=3, seed=2, convention=ConventionKind.DOCUMENT)
    clients = await start_replicas(start_replica, 2, store, redis_url)
    return await start_fleet(
        start_gateway,
        clients,
        store,
        redis_url,
        cartridges=CartridgeSettings(refresh_s=0.05, allow_uncertified_composition=True),
    )


# --- answers with Cartridges ---------------------------------------------------------------------
@pytest.mark.parametrize(("path", "alias"), [(CHAT, "harbour-rules@1"), (TEXT, "raw-text@1")])
async def test_the_answer_is_made_from_the_named_bytes(
    fleet: Gateway, store: LocalStore, path: str, alias: str
) -> None:
    """By alias or by digest, the engine answers from exactly that artifact."""
    digest = store.resolve(alias)
    mark = mark_of(store, store.read_manifest(digest))
    for name in (alias, digest):
        reply = await fleet.ask(name, path=path)
        assert (reply.status, mark in reply.text) == (200, True)
        assert reply.headers["x-cartridge-ids"] == alias


async def test_the_order_of_a_set_is_the_client_s(fleet: Gateway, store: LocalStore) -> None:
    """A pair and its reverse are read in their own order and have two identities."""
    names = ["harbour-rules@1", "ferry-times@1"]
    marks = [mark_of(store, store.read_manifest(store.resolve(name))) for name in names]
    pair, swapped = await fleet.ask(*names), await fleet.ask(*names[::-1])
    assert "+".join(marks) in pair.text
    assert "+".join(marks[::-1]) in swapped.text
    assert pair.headers["x-cartridge-digest"] != swapped.headers["x-cartridge-digest"]
    assert pair.headers["x-cartridge-ids"] == ",".join(names)


async def test_the_header_names_cartridges_too(fleet: Gateway, store: LocalStore) -> None:
    """`x-cartridge-ids` works for clients that cannot add a field; the field wins over it."""
    headers = {"x-cartridge-ids": " harbour-rules@1 , ferry-times@1"}
    reply = await fleet.post(CHAT, chat_body(), headers)
    assert reply.headers["x-cartridge-ids"] == "harbour-rules@1,ferry-times@1"
    explicit = await fleet.post(CHAT, chat_body(cartridge_ids=[]), headers)
    assert explicit.headers["x-cartridge-selection"] == "none"
    assert "without cartridges" in explicit.text


async def test_the_response_says_what_was_decided(fleet: Gateway) -> None:
    """A Cartridge's answer carries ids, identity, replica, tier, decision, age and overhead."""
    first = await fleet.ask("harbour-rules@1")
    told = first.headers
    assert told["x-cartridge-tier"] == Tier.REMOTE
    assert told["x-cartridge-decision"] == "cold"
    assert told["x-cartridge-selection"] == "explicit"
    assert re.fullmatch("sha256:[0-9a-f]{64}", told["x-cartridge-digest"])
    assert re.fullmatch(r"\d+", told["x-cartridge-map-age-ms"])
    assert re.fullmatch(r"\d+\.\d\d", told["x-cartridge-overhead-ms"])
    assert re.fullmatch("[0-9a-f]{32}", told["x-cartridge-request-id"])
    holder = told["x-cartridge-replica"]
    await fleet.has_residents("harbour-rules@1", {holder: "dram"})
    warm = await fleet.ask("harbour-rules@1")
    assert warm.headers["x-cartridge-replica"] == holder
    assert warm.headers["x-cartridge-tier"] == Tier.DRAM
    assert warm.headers["x-cartridge-decision"] == "resident"
    assert warm.headers["x-cartridge-digest"] == told["x-cartridge-digest"]


async def test_a_plain_answer_names_no_cartridge(fleet: Gateway) -> None:
    """Without Cartridges there is a replica and a decision, and no ids, identity or tier."""
    reply = await fleet.ask()
    assert reply.headers["x-cartridge-decision"] == "load"
    assert reply.headers["x-cartridge-selection"] == "none"
    for name in ("x-cartridge-ids", "x-cartridge-digest", "x-cartridge-tier"):
        assert name not in reply.headers


async def test_an_uncertified_pair_says_so(fleet: Gateway) -> None:
    """Isolated artifacts that the operator lets join are marked in the decision."""
    reply = await fleet.ask("harbour-rules@1", "ferry-times@1")
    assert reply.headers["x-cartridge-decision"] == "cold; uncertified"


# --- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"model":"sample"',
        b'{"model":"sample"} {}',
        b'{"model":"sample","model":"other"}',
        b'{"model":"sample","mod\\u0065l":"other"}',
        b'{"model":"\xff"}',
        b'{"model":"\\q"}',
        b'{"model":"\\ud800"}',
        b'{"model":NaN}',
        b"[" * 100_000,
        b'{"model":"sample","x":' + b"[" * 100_000,
        b'{"model":3}',
        b'{"messages":[]}',
        b'{"model":"sample","cartridge_ids":"harbour-rules@1"}',
        b'{"model":"sample","cartridge_ids":[1]}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/embeddings", EXPLAIN])
async def test_a_malformed_body_is_a_400(
    start_stub: StartStub, start_gateway: StartGateway, path: str, data: bytes
) -> None:
    """What is not one unambiguous JSON object with a model never reaches an engine."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(path, data)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert stub.bodies == []


async def test_a_body_over_the_limit_is_a_413(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """With a length in the head or without one; a body of exactly the limit passes."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url, max_body_bytes=100))
    body = b'{"model":"sample"}'.ljust(100)

    async def in_chunks() -> AsyncIterator[bytes]:
        yield body
        yield b" "

    assert (await gateway.post_bytes(CHAT, body)).status == 200
    for path in (CHAT, EXPLAIN):
        reply = await gateway.post_bytes(path, body + b" ")
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert "100" in reply.error["message"]
        async with gateway.session.post(gateway.url + path, data=in_chunks()) as response:
            assert response.status == 413
            assert b'"request_too_large"' in await response.read()
    assert stub.bodies == [body]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v2/models", 404), ("POST", "/", 404), ("GET", CHAT, 405)],
)
async def test_an_unknown_path_or_method_is_an_openai_error(
    start_gateway: StartGateway, method: str, path: str, status: int
) -> None:
    """A wrong address is answered in the shape that OpenAI clients read."""
    gateway = await start_gateway(quick_gateway())
    async with gateway.session.request(method, gateway.url + path) as response:
        error: dict[str, Any] = (await response.json())["error"]
        assert (response.status, error["type"]) == (status, "invalid_request_error")
        assert path in error["message"]
        assert response.headers.get("allow", "POST") == "POST"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../sleep",
        "/v1/%2e%2e/reset_prefix_cache",
        "/v1/x/..%2f..%2fsleep",
        "/v1/.%2e/%2e./v1/embeddings",
        "/v1/..\\sleep",
        "/v1/%2E%2E%5Csleep",
        "/v1/./embeddings",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter/",
        "/v1/%6coad_lora_adapter",
        "/v1/cartridges/receipts/../../../sleep",
    ],
)
async def test_nobody_leaves_v1_or_operates_an_engine(
    start_stub: StartStub, start_gateway: StartGateway, path: str
) -> None:
    """What an engine would read as another address, or as a change for everybody, is unknown."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model":"sample"}'
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 "))
    assert stub.requests == []


async def test_an_unknown_model_is_a_404(fleet: Gateway) -> None:
    """A model that no replica has ever served is not found, and `model` is named."""
    reply = await fleet.ask(model="gpt-4")
    assert (reply.status, reply.error["param"]) == (404, "model")
    assert reply.error["code"] == "model_not_found"


async def test_an_error_carries_the_request_id(fleet: Gateway) -> None:
    """Whoever reports a failure can name the request."""
    reply = await fleet.ask("unknown@1")
    assert reply.status == 404
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-cartridge-request-id"])


# --- what is known -------------------------------------------------------------------------------
async def test_health_needs_nobody_and_ready_needs_a_replica(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """A gateway without a healthy replica works, but is not ready until one comes."""
    clients = await start_replicas(start_replica, 1, None)
    clients[0].replica.faults = Faults(unhealthy=True)
    gateway = await start_gateway(quick_gateway(*named(clients)))
    assert (await gateway.get("/health")).json == {"status": "ok"}
    assert (await gateway.get("/ready")).status == 503
    clients[0].replica.faults = Faults()
    await gateway.has_metric("cartridge_router_replica_healthy", 1)
    ready = await gateway.get("/ready")
    assert (ready.status, ready.json["replicas"]["healthy"]) == (200, ["sim-0"])
    assert ready.json["residency"] == {"mode": "fallback", "age_s": None}


async def test_each_model_is_listed_once_with_its_smallest_limit(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """Two replicas of one model are one entry; a prompt must fit the smaller."""
    clients = [
        *(await start_replicas(start_replica, 1, None, max_model_len=4096)),
        *(await start_replicas(start_replica, 1, None, max_model_len=2048)),
        *(await start_replicas(start_replica, 1, None, model="other")),
    ]
    gateway = await start_gateway(quick_gateway(*named(clients)))
    listed = (await gateway.get("/v1/models")).json
    assert listed["object"] == "list"
    assert [(entry["id"], entry["max_model_len"]) for entry in listed["data"]] == [
        ("other", 8192),
        ("sample", 2048),
    ]


async def test_an_adapter_is_listed_with_its_base_model(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """As vLLM lists it, so that clients can tell it from a base model."""
    stub = await start_stub(answer_ok)
    stub.adapters = ["legal"]
    gateway = await start_gateway(quick_gateway(stub.url))
    listed = (await gateway.get("/v1/models")).json["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [
        ("legal", "sample"),
        ("sample", None),
    ]


async def test_cartridges_are_listed_with_their_residency(
    fleet: Gateway, store: LocalStore
) -> None:
    """Each alias shows identity, size, convention, and the replicas where it is ready."""
    reply = await fleet.ask("harbour-rules@1")
    holder = reply.headers["x-cartridge-replica"]
    await fleet.has_residents("harbour-rules@1", {holder: "dram"})
    entries = {entry["id"]: entry for entry in (await fleet.get("/v1/cartridges")).json["data"]}
    assert sorted(entries) == ["ferry-times@1", "harbour-rules@1", "raw-text@1"]
    entry, manifest = (
        entries["harbour-rules@1"],
        store.read_manifest(store.resolve("harbour-rules@1")),
    )
    assert entry["digest"] == digest_of(manifest)
    assert (entry["num_tokens"], entry["size_bytes"]) == (5, manifest.payload_bytes)
    assert entry["prompt_convention"] == "system_turn"
    assert entries["ferry-times@1"]["residency"] == []


async def test_the_receipt_of_a_request_can_be_read(fleet: Gateway) -> None:
    """By its request id; another id is a 404."""
    reply = await fleet.ask("harbour-rules@1")
    path = f"/v1/cartridges/receipts/{reply.headers['x-cartridge-request-id']}"
    await fleet.has_metric("cartridge_router_receipts_total", 1, status="served")
    receipt = (await fleet.get(path)).json
    assert receipt["status"] == "served"
    assert receipt["replica"] == reply.headers["x-cartridge-replica"]
    assert receipt["num_virtual_tokens"] == 5
    assert [item["tier"] for item in receipt["items"]] == ["remote"]
    unknown = await fleet.get("/v1/cartridges/receipts/none")
    assert (unknown.status, unknown.error["code"]) == (404, "receipt_not_found")


# --- the dry run ---------------------------------------------------------------------------------
async def test_explain_shows_the_terms_of_every_candidate(fleet: Gateway) -> None:
    """Terms add up to each total, and candidates come best first."""
    reply = await fleet.post(EXPLAIN, chat_body(cartridge_ids=["harbour-rules@1"]))
    placement = reply.json["placement"]
    assert (reply.status, placement["map_mode"]) == (200, "exact")
    totals = []
    for candidate in placement["candidates"]:
        assert sum(candidate["terms"].values()) == pytest.approx(candidate["total_s"])
        assert set(candidate["terms"]) == set(TERMS)
        assert candidate["tiers"] == ["remote"]
        totals.append(candidate["total_s"])
    assert totals == sorted(totals)
    assert len(totals) == 2
    assert placement["candidates"][0]["replica"] == placement["replica"]
    assert reply.json["selection"]["num_tokens"] == 5


async def test_explain_names_the_replica_that_the_request_gets(fleet: Gateway) -> None:
    """With one copy in the fleet the dry run and the request agree, and nothing is forwarded."""
    holder = (await fleet.ask("harbour-rules@1")).headers["x-cartridge-replica"]
    await fleet.has_residents("harbour-rules@1", {holder: "dram"})
    explained = await fleet.post(EXPLAIN, chat_body(cartridge_ids=["harbour-rules@1"]))
    candidates = explained.json["placement"]["candidates"]
    assert [candidate["tiers"] for candidate in candidates] == [["dram"], ["remote"]]
    assert explained.json["placement"]["decision"] == "resident"
    reply = await fleet.ask("harbour-rules@1")
    assert candidates[0]["replica"] == reply.headers["x-cartridge-replica"] == holder


async def test_explain_takes_the_route_from_the_query(fleet: Gateway) -> None:
    """A Cartridge for completions is explained under their route; an unknown route is a 400."""
    body = {"model": "sample", "prompt": "x", "cartridge_ids": ["raw-text@1"]}
    assert (await fleet.post(f"{EXPLAIN}?route={TEXT}", body)).status == 200
    assert (await fleet.post(EXPLAIN, body)).status == 409
    wrong = await fleet.post(f"{EXPLAIN}?route=/v1/nothing", body)
    assert (wrong.status, wrong.error["param"]) == (400, "route")


async def test_explain_refuses_as_the_request_would(fleet: Gateway) -> None:
    """The dry run gives the status and the error of the real request."""
    body = chat_body(cartridge_ids=["unknown@1"])
    explained, real = await fleet.post(EXPLAIN, body), await fleet.post(CHAT, body)
    assert (explained.status, explained.body) == (real.status, real.body)
    assert explained.status == 404


# --- policies that are set -----------------------------------------------------------------------
async def test_round_robin_takes_turns(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """With the policy `round_robin` three replicas are asked in turn."""
    clients = await start_replicas(start_replica, 3, None)
    settings = quick_gateway(
        *named(clients),
        placement=PlacementSettings(policy="round_robin"),
        fleet=FleetSettings(probe_interval_s=60.0),
    )
    gateway = await start_gateway(settings)
    asked = [(await gateway.ask()).headers["x-cartridge-replica"] for _ in range(6)]
    assert asked == ["sim-0", "sim-1", "sim-2"] * 2


async def test_a_body_that_cannot_be_unpacked_is_a_400(fleet: Gateway) -> None:
    """Bytes that are not in the encoding they claim are the client's fault."""
    reply = await fleet.post_bytes(CHAT, b"not gzip", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
