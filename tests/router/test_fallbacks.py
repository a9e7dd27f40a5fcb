"""Requests that go without their Cartridges: with the text, with nothing, or not at all.

Simulated replicas with real receipts, or stubs; whole gateways, real sockets.
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cartridge_loadtest.faults import Faults
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import DEFAULT_INSTRUCTION, ConventionKind, Manifest, Rotation
from cartridge_proto.stores import LocalStore
from cartridge_router.settings import CartridgeSettings, PlacementSettings, TenantSettings
from tests.loadtest.cartridge_requests import chat_body
from tests.loadtest.replica_client import Client, StartReplica
from tests.proto.sample_artifact import engine_of
from tests.router.fleets import named, start_fleet, start_replicas
from tests.router.gateway_client import (
    CHAT,
    TEXT,
    Gateway,
    Reply,
    StartGateway,
    quick_gateway,
    until_true,
)
from tests.router.keys_files import ACME_KEY, write_keys
from tests.router.stored_cartridges import flip_a_bit, put_cartridge
from tests.router.stub_engine import StartStub

ALIAS = "harbour-rules@1"
DOCUMENT = 'The "harbour"\nopens at \\6 — 🚢 ü.'
FRAMED = DEFAULT_INSTRUCTION.replace("{document}", DOCUMENT)
PREFILL, DROP = {"x-cartridge-on-miss": "prefill"}, {"x-cartridge-on-miss": "drop"}
SMALL, LARGE = 5, 400
"""Tokens of Cartridges: by the priors the text of the one is sooner than a load from the store, and
a load of the other sooner than 0.2 s of prefill."""
PRIORS = PlacementSettings(learn_rates=False)


def put_document(
    store: LocalStore, name: str = "harbour-rules", text: str | None = DOCUMENT, **fields: Any
) -> Manifest:
    """A Cartridge whose text is in the store; `None` = is not."""
    manifest = put_cartridge(store, name, **fields)
    if text is None:
        return manifest
    provenance = msgspec.structs.replace(
        manifest.provenance, source_digest=store.put_blob(text.encode())
    )
    return put_cartridge(store, name, **(fields | {"provenance": provenance}))


async def start(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    *,
    cartridges: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Gateway, Client]:
    """A gateway over one replica; both know all Cartridges of the store."""
    clients = await start_replicas(start_replica, 1, store, redis_url, **(engine or {}))
    settings = CartridgeSettings(refresh_s=60.0, **(cartridges or {}))
    fields.setdefault("placement", PRIORS)
    gateway = await start_fleet(
        start_gateway, clients, store, redis_url, cartridges=settings, **fields
    )
    return gateway, clients[0]


def bodies_of(client: Client) -> list[dict[str, Any]]:
    """What an engine was asked for clients, oldest first; not what finds the extension."""
    bodies = [json.loads(each.body.encode("latin-1")) for each in client.replica.requests]
    return [body for body in bodies if body.get("prompt") != [0]]


async def ask(
    gateway: Gateway, headers: dict[str, str] | None = None, *, path: str = CHAT, **fields: Any
) -> Reply:
    """A question with the Cartridge."""
    body = chat_body(cartridge_ids=[ALIAS])
    if path == TEXT:
        body = {"model": "sample", "prompt": "When?", "cartridge_ids": [ALIAS]}
    return await gateway.post(path, body | fields, headers)


def has_gone_by_text(reply: Reply, why: str) -> bool:
    """Whether an answer says that it is from the text, why, and from no Cartridge."""
    assert reply.status == 200, reply.body
    told = reply.headers
    is_bare = not {"x-cartridge-ids", "x-cartridge-digest", "x-cartridge-tier"} & {
        name.lower() for name in told
    }
    return is_bare and told["x-cartridge-decision"].startswith(f"fallback-text ({why}")


# --- sooner --------------------------------------------------------------------------------------
async def test_a_text_that_is_sooner_than_its_cartridge_is_taken(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """A small document in the store only: its text goes, in its place, and the answer says so."""
    put_document(store, num_tokens=SMALL)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    reply = await gateway.post_bytes(
        CHAT,
        b'{"model":"sample","cartridge_ids":["harbour-rules@1"],"temperature":0.50,'
        b'"messages":[ {"role":"user","content":"Wann\\u003f"}],"max_tokens":3}',
        PREFILL,
    )
    assert has_gone_by_text(reply, "predicted 0.0")
    assert "with Cartridges 0.0" in reply.headers["x-cartridge-decision"]
    assert reply.headers["x-cartridge-selection"] == "explicit"
    system = json.dumps({"role": "system", "content": FRAMED}, ensure_ascii=False)
    assert client.replica.requests[-1].body.encode("latin-1").decode() == (
        '{"model":"sample","temperature":0.50,'
        f'"messages":[ {system.replace(", ", ",").replace(": ", ":", 2)},'
        '{"role":"user","content":"Wann\\u003f"}],"max_tokens":3}'
    )
    count = await gateway.metric("cartridge_router_fallbacks_total", kind="text", why="sooner")
    assert count == 1


async def test_a_system_message_of_the_client_s_stays_behind_the_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """One system message, as chat templates want it."""
    put_document(store, num_tokens=SMALL)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When?"}]
    assert has_gone_by_text(await ask(gateway, PREFILL, messages=turns), "predicted")
    assert bodies_of(client)[-1] == {
        "model": "sample",
        "messages": [{"role": "system", "content": f"{FRAMED}\n\nBe brief."}, turns[1]],
    }


async def test_a_completion_begins_with_the_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """As it is, in front of the prompt; a prompt of token ids keeps its Cartridge."""
    put_document(store, num_tokens=SMALL, convention=ConventionKind.DOCUMENT)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    assert has_gone_by_text(await ask(gateway, PREFILL, path=TEXT), "predicted")
    assert bodies_of(client)[-1] == {"model": "sample", "prompt": f"{DOCUMENT}When?"}
    ids = await ask(gateway, PREFILL, path=TEXT, prompt=[1, 2, 3])
    assert (ids.status, ids.headers["x-cartridge-ids"]) == (200, ALIAS)
    body = bodies_of(client)[-1]
    assert body["prompt"] == [1, 2, 3]
    assert "kv_transfer_params" in body


@pytest.mark.parametrize("headers", [{}, {"x-cartridge-on-miss": "fail"}, DROP])
async def test_nothing_changes_where_nobody_asked_for_texts(
    headers: dict[str, str],
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
) -> None:
    """The default: Cartridges are attached, however long that is predicted to take."""
    put_document(store, num_tokens=SMALL)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    reply = await ask(gateway, headers)
    assert (reply.status, reply.headers["x-cartridge-ids"]) == (200, ALIAS)
    assert reply.headers["x-cartridge-decision"] == "cold"
    body = bodies_of(client)[-1]
    assert body["messages"] == chat_body()["messages"]
    assert set(body) == {
        *("model", "messages", "kv_transfer_params", "cache_salt", "chat_template_kwargs")
    }
    assert await gateway.metric("cartridge_router_fallbacks_total") == 0


async def test_a_cartridge_that_is_sooner_is_attached(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Texts may stand in, and need not; the operator's setting counts where a request says none."""
    put_document(store, num_tokens=LARGE)
    gateway, _ = await start(
        start_replica, start_gateway, store, redis_url, cartridges={"on_miss": "prefill"}
    )
    reply = await ask(gateway)
    assert (reply.status, reply.headers["x-cartridge-ids"]) == (200, ALIAS)
    assert reply.headers["x-cartridge-decision"] == "cold"
    assert await gateway.metric("cartridge_router_fallbacks_total") == 0


async def test_explain_tells_both_predictions(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """What would be done, and how long either way would take; nothing is asked of an engine."""
    put_document(store, num_tokens=SMALL)
    put_document(store, "tides", num_tokens=LARGE, seed=1)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    shown = {}
    for alias in (ALIAS, "tides@1"):
        body = chat_body(cartridge_ids=[alias])
        found = (await gateway.post("/v1/cartridges/explain", body, PREFILL)).json
        shown[alias] = found["fallback"]
        total_s = found["placement"]["candidates"][0]["total_s"]
        key = "with_text_s" if alias == ALIAS else "with_cartridges_s"
        assert total_s == found["fallback"][key]
    text, attached = shown[ALIAS], shown["tides@1"]
    assert text["with_text_s"] < text["with_cartridges_s"]
    assert text["instead"].startswith("fallback-text (predicted")
    assert 0 < text["margin"] < 0.5
    assert attached["with_cartridges_s"] < attached["with_text_s"]
    assert (attached["instead"], attached["on_miss"]) == (None, "prefill")
    plain = (await gateway.post("/v1/cartridges/explain", chat_body(cartridge_ids=[ALIAS]))).json
    assert plain["fallback"] == {
        "on_miss": "fail",
        **dict.fromkeys(("instead", "with_cartridges_s", "with_text_s", "margin")),
    }
    assert bodies_of(client) == []


async def test_explain_promises_no_text_to_what_goes_on_from_a_response(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """As the request itself takes none: what it goes on from began without."""
    put_document(store, num_tokens=SMALL)
    gateway, _ = await start(start_replica, start_gateway, store, redis_url)
    body = {"model": "sample", "cartridge_ids": [ALIAS], "input": "x"}
    told = []
    for fields in ({}, {"previous_response_id": "resp_1"}):
        path = "/v1/cartridges/explain?route=/v1/responses"
        reply = await gateway.post(path, {**body, **fields}, PREFILL)
        assert reply.status == 200
        told.append(reply.json["fallback"]["instead"])
    assert told[0].startswith("fallback-text")
    assert told[1] is None


async def test_equal_replicas_take_turns_with_texts_too(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """That two decisions are made on one request does not send all of them to one twin."""
    put_document(store, num_tokens=SMALL)
    clients = await start_replicas(start_replica, 2, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url, placement=PRIORS)
    replies = [await ask(gateway, PREFILL) for _ in range(4)]
    assert all(has_gone_by_text(reply, "predicted") for reply in replies)
    told = [reply.headers["x-cartridge-replica"] for reply in replies]
    assert sorted(told) == ["sim-0", "sim-0", "sim-1", "sim-1"]


@pytest.mark.parametrize(("text_queue_share", "is_text"), [(0.1, False), (1e9, True)])
async def test_a_text_that_is_sooner_keeps_nobody_waiting(
    text_queue_share: float,
    is_text: bool,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
) -> None:
    """While others wait for their first token there, the Cartridge is loaded beside them."""
    put_document(store, num_tokens=SMALL)
    settings = PlacementSettings(learn_rates=False, text_queue_share=text_queue_share)
    gateway, client = await start(
        start_replica, start_gateway, store, redis_url, placement=settings
    )
    client.replica.faults = Faults(hang=True)
    # What the oldest was predicted to take passes; those behind it wait for it.
    waiting = [asyncio.create_task(gateway.post(CHAT, chat_body(stream=True))) for _ in range(2)]
    try:
        await gateway.has_metric("cartridge_router_in_flight", 2)
        body = chat_body(cartridge_ids=[ALIAS])
        shown = (await gateway.post("/v1/cartridges/explain", body, PREFILL)).json["fallback"]
        assert shown["with_text_s"] < shown["with_cartridges_s"]
        assert (shown["instead"] is not None) is is_text
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# --- cannot be had -------------------------------------------------------------------------------
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_receipt_that_says_no_leads_to_the_text(
    path: str,
    is_streamed: bool,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
) -> None:
    """A damaged artifact: the engine fails, also in a stream of status 200, and is asked again."""
    is_text = path == TEXT
    convention = ConventionKind.DOCUMENT if is_text else ConventionKind.SYSTEM_TURN
    flip_a_bit(store, put_document(store, num_tokens=LARGE, convention=convention))
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    reply = await ask(gateway, PREFILL, path=path, stream=is_streamed)
    assert has_gone_by_text(reply, "cartridge_not_served)")
    assert b"error" not in reply.body
    first, second = bodies_of(client)
    assert "kv_transfer_params" in first
    assert not {"kv_transfer_params", "cache_salt", "add_special_tokens"} & set(second)
    said = second["prompt"] if is_text else second["messages"][0]["content"]
    assert said == (f"{DOCUMENT}When?" if is_text else FRAMED)
    why = {"kind": "text", "why": "cartridge_not_served"}
    assert await gateway.metric("cartridge_router_fallbacks_total", **why) == 1
    failed = await ask(gateway, path=path)
    assert (failed.status, failed.error["code"]) == (503, "cartridge_not_served")


async def test_a_load_over_its_deadline_leads_to_the_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """`load_deadline_ms` bounds what is waited for a Cartridge."""
    put_document(store, num_tokens=LARGE)
    gateway, client = await start(
        start_replica,
        start_gateway,
        store,
        redis_url,
        cartridges={"load_deadline_ms": 20},
        engine={"load_s": 5.0},
    )
    assert has_gone_by_text(await ask(gateway, PREFILL), "cartridge_not_served)")
    assert bodies_of(client)[-1]["messages"][0]["content"] == FRAMED


async def test_what_the_engine_does_not_support_leads_to_the_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Keys from before rotation: a 400 as before, but with texts an answer."""
    rope = msgspec.structs.replace(put_document(store).rope, stored_keys=Rotation.PRE)
    put_document(store, num_tokens=LARGE, rope=rope)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    failed = await ask(gateway)
    assert (failed.status, failed.error["code"]) == (400, "invalid_request")
    assert has_gone_by_text(await ask(gateway, PREFILL), "invalid_request)")
    assert bodies_of(client)[-1]["messages"][0]["content"] == FRAMED


async def test_an_incompatible_cartridge_leads_to_the_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """No replica has its model: without texts a 409 as before, with them an answer."""
    identity = engine_of(put_document(store, num_tokens=LARGE))
    model = msgspec.structs.replace(identity.model, config_digest=sha256_digest(b"other"))
    other = msgspec.structs.replace(identity, model=model)
    gateway, client = await start(
        start_replica, start_gateway, store, redis_url, engine={"identity": other}
    )
    assert (await ask(gateway)).error["code"] == "cartridge_incompatible"
    assert has_gone_by_text(await ask(gateway, PREFILL), "cartridge_incompatible)")
    assert [body["messages"][0]["content"] for body in bodies_of(client)] == [FRAMED]
    dropped = await ask(gateway, DROP)
    assert dropped.headers["x-cartridge-decision"] == "fallback-drop (cartridge_incompatible); load"


async def test_engines_without_the_extension_get_the_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore
) -> None:
    """A stock vLLM, and no map: what cannot take a Cartridge reads the text."""
    put_document(store, num_tokens=LARGE)
    clients = await start_replicas(start_replica, 1, None)
    gateway = await start_gateway(quick_gateway(*named(clients), store=store, placement=PRIORS))
    assert (await ask(gateway)).status == 503
    assert has_gone_by_text(await ask(gateway, PREFILL), "no_eligible_replica)")
    assert bodies_of(clients[0])[-1]["messages"][0]["content"] == FRAMED


async def fail_cartridges(request: web.Request) -> web.StreamResponse:
    """An extension whose loads fail in a stream of status 200; a plain request is answered."""
    body = await request.json()
    if "kv_transfer_params" not in body:
        return web.json_response({"ok": True})
    if not body.get("stream"):
        return web.Response(status=500, text="it broke")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices":[]}\n\ndata: {"error": {"message": "no"}}\n\n')
    return response


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_without_receipts_a_failure_leads_to_the_text_too(
    is_streamed: bool,
    start_stub: StartStub,
    start_gateway: StartGateway,
    store: LocalStore,
) -> None:
    """No Redis, no reason: nothing has gone to the client, so it is asked again with the text."""
    put_document(store, num_tokens=LARGE)
    stub = await start_stub(fail_cartridges)
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}", store=store, placement=PRIORS))

    async def is_known() -> bool:
        return (await ask(gateway, stream=is_streamed)).status != 503

    await until_true(is_known, "the extension is found")
    as_it_came = await ask(gateway, stream=is_streamed)
    assert as_it_came.status == (200 if is_streamed else 500)
    assert (b"error" if is_streamed else b"it broke") in as_it_came.body
    reply = await ask(gateway, PREFILL, stream=is_streamed)
    assert has_gone_by_text(reply, "cartridge_not_served)")
    assert reply.body == b'{"ok": true}'
    assert json.loads(stub.bodies[-1])["messages"][0] == {"role": "system", "content": FRAMED}


async def test_dropping_says_so_and_brings_no_text(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """The question alone is answered; the header, the metric and explain tell."""
    flip_a_bit(store, put_document(store, num_tokens=LARGE))
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    reply = await ask(gateway, DROP)
    assert reply.status == 200
    assert reply.headers["x-cartridge-decision"] == "fallback-drop (cartridge_not_served); load"
    assert not {"x-cartridge-ids", "x-cartridge-digest"} & {n.lower() for n in reply.headers}
    assert bodies_of(client)[-1] == chat_body()
    why = {"kind": "drop", "why": "cartridge_not_served"}
    assert await gateway.metric("cartridge_router_fallbacks_total", **why) == 1


# --- no text, no fallback ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "cartridges", "engine", "fields"),
    [
        (None, {}, {}, {}),
        (DOCUMENT, {"max_text_bytes": 10}, {}, {}),
        (DOCUMENT, {}, {"max_model_len": LARGE + 50}, {"max_tokens": 100}),
    ],
    ids=["no text", "too large", "does not fit"],
)
async def test_without_a_text_that_can_be_used_it_fails(
    text: str | None,
    cartridges: dict[str, Any],
    engine: dict[str, Any],
    fields: dict[str, Any],
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
) -> None:
    """Never silently without: an answer from neither Cartridge nor text would be a wrong one."""
    flip_a_bit(store, put_document(store, text=text, num_tokens=LARGE))
    gateway, client = await start(
        start_replica, start_gateway, store, redis_url, cartridges=cartridges, engine=engine
    )
    reply = await ask(gateway, PREFILL, **fields)
    assert (reply.status, reply.error["code"]) == (503, "cartridge_not_served")
    assert len(bodies_of(client)) == 1
    assert await gateway.metric("cartridge_router_fallbacks_total") == 0


@pytest.mark.parametrize("text", [None, DOCUMENT])
async def test_a_sooner_text_that_cannot_be_used_leaves_the_cartridge(
    text: str | None,
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
) -> None:
    """It is attached, later than the text would have been."""
    put_document(store, text=text, num_tokens=SMALL)
    gateway, _ = await start(
        start_replica, start_gateway, store, redis_url, cartridges={"max_text_bytes": 10}
    )
    reply = await ask(gateway, PREFILL)
    assert (reply.status, reply.headers["x-cartridge-ids"]) == (200, ALIAS)


# --- who may, and what is refused ----------------------------------------------------------------
async def test_a_hidden_cartridge_s_text_is_as_hidden(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """404, as for one that does not exist; no text goes to an engine, whatever is asked for."""
    put_document(store)
    put_document(store, "secret", text="a secret", seed=1, readers=("other",))
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    for headers in (PREFILL, DROP):
        seen, absent = [
            await gateway.post(CHAT, chat_body(cartridge_ids=[alias]), headers)
            for alias in ("secret@1", "absent@1")
        ]
        assert (seen.status, seen.error["code"]) == (404, "cartridge_not_found")
        assert seen.body == absent.body.replace(b"absent", b"secret")
    assert bodies_of(client) == []


async def test_the_header_takes_three_words(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Others are a 400 that names it."""
    put_document(store)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    for word in ("", "PREFILL", "text"):
        reply = await ask(gateway, {"x-cartridge-on-miss": word})
        assert (reply.status, reply.error["param"]) == (400, "x-cartridge-on-miss")
        assert "fail, prefill, drop" in reply.error["message"]
    assert bodies_of(client) == []


async def test_a_tenant_s_text_has_the_tenant_s_salt(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """The engine's prefix cache tells no other tenant that the document was read."""
    put_document(store, num_tokens=SMALL)
    keys = write_keys(tmp_path / "keys.yaml", {"acme": {}}, {ACME_KEY: "acme"})
    gateway, client = await start(
        start_replica, start_gateway, store, redis_url, tenants=TenantSettings(keys_file=keys)
    )
    acme = gateway.as_caller(ACME_KEY)
    assert (await acme.post(CHAT, chat_body())).status == 200
    assert has_gone_by_text(await ask(acme, PREFILL), "predicted")
    plain, text = bodies_of(client)
    assert plain["cache_salt"] == text["cache_salt"]
    assert text["messages"][0]["content"] == FRAMED


# --- what is learned -----------------------------------------------------------------------------
async def test_regret_is_counted_and_logged(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A Cartridge that comes much later than its text was predicted to; a quick one is silent."""
    put_document(store, num_tokens=LARGE)
    gateway, client = await start(start_replica, start_gateway, store, redis_url)
    ratio = "cartridge_router_regret_ratio"
    with caplog.at_level(logging.INFO, "cartridge_router.observations"):
        assert (await ask(gateway, PREFILL, stream=True)).status == 200
        await gateway.has_metric(f"{ratio}_count", 1)
        client.replica.faults = Faults(delay_s=0.6)
        assert (await ask(gateway, PREFILL, stream=True)).status == 200
        await gateway.has_metric(f"{ratio}_count", 2)
    assert await gateway.metric(f"{ratio}_bucket", le="1.05") <= 1
    assert "s to the first token with Cartridges, predicted" in caplog.text
    assert (await ask(gateway, stream=True)).status == 200
    assert await gateway.metric(f"{ratio}_count") == 2


async def test_cartridges_that_keep_coming_late_give_way_to_texts(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """The margin is learned: what was attached at first, by a narrow win, is not any more."""
    put_document(store, num_tokens=20)
    gateway, client = await start(
        start_replica,
        start_gateway,
        store,
        redis_url,
        placement=PlacementSettings(learn_rates=False, prediction_spread=0.0),
    )
    assert (await ask(gateway)).status == 200
    await gateway.has_residents(ALIAS, {"sim-0": "dram"})
    first = await ask(gateway, PREFILL, stream=True)
    assert first.headers["x-cartridge-ids"] == ALIAS
    client.replica.faults = Faults(delay_s=0.2)

    async def has_given_way() -> bool:
        reply = await ask(gateway, PREFILL, stream=True)
        return reply.headers["x-cartridge-decision"].startswith("fallback-text (predicted")

    await until_true(has_given_way, "the text is taken")
