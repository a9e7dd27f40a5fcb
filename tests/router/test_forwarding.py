"""Forwarding: bytes both ways, headers, attempts, and what a client sees when a replica breaks."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yarl
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.faults import Faults
from cartridge_loadtest.simulated_replica import SimulatedReplica
from cartridge_proto.composition import cache_salt, decode_message
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import ConventionKind
from cartridge_proto.stores import LocalStore
from cartridge_router.forwarding import Exchange, _has_room
from cartridge_router.prefix_salts import PrefixSalts
from cartridge_router.settings import FleetSettings, ForwardingSettings, TenantSettings
from tests.loadtest.cartridge_requests import chat_body, until
from tests.loadtest.replica_client import StartReplica, mark_of, quick_settings
from tests.router.fleets import start_fleet, start_replicas
from tests.router.gateway_client import CHAT, TEXT, StartGateway, quick_gateway
from tests.router.keys_files import ACME_KEY, BETA_KEY, write_keys
from tests.router.stored_cartridges import digest_of, flip_a_bit, put_cartridge
from tests.router.stub_engine import StartStub, answer_ok, never_answer

ODD_BODY = (
    b'{ "model":"sample",\t"messages" :[{"role":"user","content":"caf\\u00e9 \xc3\xa9"}],\r\n'
    b'"temperature": 1.0E+0, "seed":123456789012345678901234567890, "x":[ ], "stream" : false}'
)
GONE = "http://127.0.0.1:9"
"""The discard port: nobody listens."""


def received(replica: SimulatedReplica, index: int = -1) -> bytes:
    """The raw body of a request as a replica received it."""
    return replica.requests[index].body.encode("latin-1")


async def read_until_broken_off(response: aiohttp.ClientResponse) -> bytes:
    """What came of an answer; fails when it ends cleanly."""
    data = b""
    try:
        async for chunk in response.content.iter_any():
            data += chunk
    except aiohttp.ClientPayloadError:
        return data
    raise AssertionError(f"the answer ended cleanly: {data!r}")


# --- bytes to the engine -------------------------------------------------------------------------
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/embeddings"])
async def test_a_plain_body_arrives_byte_for_byte(
    start_stub: StartStub, start_gateway: StartGateway, path: str
) -> None:
    """Odd spacing, escapes and numbers beyond a double reach the engine as they were sent."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(path, ODD_BODY)
    assert (reply.status, reply.body) == (200, b"{}")
    assert stub.bodies == [ODD_BODY]
    assert stub.requests[0].path == path


async def test_the_query_string_arrives(start_stub: StartStub, start_gateway: StartGateway) -> None:
    """A query means the same to the engine, escapes included."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    url = yarl.URL(f"{gateway.url}/v1/tokenize?a=%2F%26%2B+%25&b=", encoded=True)
    async with gateway.session.post(url, data=ODD_BODY) as response:
        assert response.status == 200
    assert dict(stub.requests[0].query) == {"a": "/&+ %", "b": ""}


async def test_engine_internal_fields_of_a_client_are_taken_out(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Fields that could name another tenant's KV never reach the engine; the rest does."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    body = (
        b'{"cache_salt":"stolen", "model":"sample" ,"kv_transfer_params": {"cartridges":{}},'
        b' "request_id":"twice", "messages":[], "kv_hints":[1],"cartridge_ids":[], "priority": -1,'
        b'"ec_transfer_params":{}, "\\u0063ache_salt2": 1 , "vllm_xargs":{"a":1} }'
    )
    await gateway.post_bytes(CHAT, body)
    assert stub.bodies == [
        b'{ "model":"sample", "messages":[], "\\u0063ache_salt2": 1 , "vllm_xargs":{"a":1} }'
    ]


@pytest.mark.parametrize("field", ["prompt_embeds", "chat_template"])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/tokenize"])
async def test_what_the_model_reads_is_not_changed_in_silence(
    start_stub: StartStub, start_gateway: StartGateway, path: str, field: str
) -> None:
    """Fields that replace the prompt are refused by name; `null` says nothing."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post(path, {"model": "sample", field: "x"})
    assert (reply.status, reply.error["param"]) == (400, field)
    assert stub.bodies == []
    assert (await gateway.post(path, {"model": "sample", field: None})).status == 200


async def test_a_trusted_client_keeps_its_engine_fields(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """With `trust_client_fields` only `cartridge_ids` is taken out, and nothing is refused."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url, trust_client_fields=True))
    kept = b'{"model":"sample","cache_salt":"mine","priority":1,"chat_template":"x"'
    await gateway.post_bytes(CHAT, kept + b',"cartridge_ids":[]}')
    assert stub.bodies == [kept + b"}"]


async def test_trust_is_each_tenant_s_own(
    start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """One may send engine fields, and another's are taken out or refused."""
    stub = await start_stub(answer_ok)
    file = write_keys(tmp_path / "keys.yaml", {"acme": {"is_trusted": True}, "beta": {}})
    gateway = await start_gateway(quick_gateway(stub.url, tenants=TenantSettings(keys_file=file)))
    salted = b'{"model":"sample","cache_salt":"mine"}'
    for key in (ACME_KEY, BETA_KEY):
        assert (await gateway.as_caller(key).post_bytes(CHAT, salted)).status == 200
    salt = PrefixSalts(None).of("beta")
    assert stub.bodies == [salted, f'{{"model":"sample","cache_salt":"{salt}"}}'.encode()]
    statuses = [
        (await gateway.as_caller(key).post(path, {"model": "sample", "chat_template": "x"})).status
        for key in (ACME_KEY, BETA_KEY)
        for path in (CHAT, "/v1/cartridges/explain")
    ]
    assert statuses == [200, 200, 400, 400]


async def test_a_cartridge_request_changes_only_what_the_gateway_owns(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore
) -> None:
    """The engine gets the client's bytes, then the message, its salt and the template switch."""
    manifest = put_cartridge(store)
    client = await start_replica(quick_settings(store))
    gateway = await start_gateway(quick_gateway(f"sim-0={client.url}", store=store))
    sent = (
        b'{"cartridge_ids":["harbour-rules@1"], "model":"sample","cache_salt":"stolen",'
        b'"messages":[ {"role":"user","content":"\\u00e9"} ], "seed":1e400 ,'
        b'"chat_template_kwargs":{"enable_thinking": false}}'
    )
    reply = await gateway.post_bytes(CHAT, sent)
    assert reply.status == 200
    data = received(client.replica)
    kept = b'{ "model":"sample","messages":[ {"role":"user","content":"\\u00e9"} ], "seed":1e400'
    assert data.startswith(kept)
    added = json.loads(b"{" + data.removeprefix(kept).strip().removeprefix(b","))
    message = decode_message(added.pop("kv_transfer_params").pop("cartridges"))
    assert [item.digest for item in message.items] == [digest_of(manifest)]
    assert message.request_id == reply.headers["x-cartridge-request-id"]
    assert added == {
        "cache_salt": cache_salt(Digest(message.composition)),
        "chat_template_kwargs": {"enable_thinking": False, "cartridge_system_turn": True},
    }


async def test_a_completion_with_a_cartridge_gets_no_special_tokens(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore
) -> None:
    """A BOS in the middle of the sequence is switched off, whatever the client said."""
    put_cartridge(store, convention=ConventionKind.DOCUMENT)
    client = await start_replica(quick_settings(store))
    gateway = await start_gateway(quick_gateway(f"sim-0={client.url}", store=store))
    reply = await gateway.ask("harbour-rules@1", path=TEXT, add_special_tokens=True)
    assert reply.status == 200
    body = json.loads(received(client.replica))
    assert body["add_special_tokens"] is False
    assert "chat_template_kwargs" not in body


async def test_template_arguments_that_are_no_object_are_a_400(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore
) -> None:
    """`chat_template_kwargs` that cannot be merged is refused by its name."""
    put_cartridge(store)
    client = await start_replica(quick_settings(store))
    gateway = await start_gateway(quick_gateway(f"sim-0={client.url}", store=store))
    reply = await gateway.ask("harbour-rules@1", chat_template_kwargs=[1])
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


async def test_a_compressed_body_is_announced_as_what_is_sent(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """A gzip body is unpacked to be read, so the engine is not told that it is gzip."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(CHAT, gzip.compress(ODD_BODY), {"Content-Encoding": "gzip"})
    assert reply.status == 200
    assert stub.bodies == [ODD_BODY]
    assert "content-encoding" not in stub.requests[0].headers


# --- headers -------------------------------------------------------------------------------------
async def test_request_headers_are_filtered(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """End-to-end headers pass; hop-by-hop ones, credentials and the gateway's own do not."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    sent = {
        "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Session-Id": "s-1",
        "Authorization": "Bearer secret",
        "X-Cartridge-Policy": "round_robin",
        "X-Request-Id": "from-the-client",
        "X-Vllm-Priority": "-1",
        "X-Data-Parallel-Rank": "1",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
    }
    reply = await gateway.post_bytes(CHAT, ODD_BODY, sent)
    got = stub.requests[0].headers
    assert (got["traceparent"], got["x-session-id"]) == (sent["Traceparent"], "s-1")
    dropped = ["authorization", "x-cartridge-policy", "x-hop", "te", "proxy-authorization"]
    for name in [*dropped, "x-vllm-priority", "x-data-parallel-rank"]:
        assert name not in got
    assert got["x-request-id"] == reply.headers["x-cartridge-request-id"] != "from-the-client"
    assert got["host"] == stub.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("sent", "is_said_back"),
    [
        ("order 17: ~!", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("caf\u00e9", False),
        ("a\tb", False),
    ],
)
async def test_a_client_s_request_id_is_said_back_if_short_and_printable(
    start_stub: StartStub, start_gateway: StartGateway, sent: str, is_said_back: bool
) -> None:
    """Engines get an id of the gateway's in any case, so equal ids of clients never meet there."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    replies = [await gateway.post_bytes(CHAT, ODD_BODY, {"X-Request-Id": sent}) for _ in range(2)]
    own = [reply.headers["x-cartridge-request-id"] for reply in replies]
    assert [request.headers["x-request-id"] for request in stub.requests] == own
    assert own[0] != own[1]
    expected = [sent, sent] if is_said_back else own
    assert [reply.headers["x-request-id"] for reply in replies] == expected


async def test_the_gateway_does_not_ask_for_compression_by_itself(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """An engine sees `Accept-Encoding` only when the client sent one."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with gateway.session.post(
        gateway.url + CHAT, data=ODD_BODY, skip_auto_headers=["accept-encoding"]
    ) as response:
        assert response.status == 200
    await gateway.post_bytes(CHAT, ODD_BODY, {"Accept-Encoding": "br"})
    assert [request.headers.get("accept-encoding") for request in stub.requests] == [None, "br"]


async def test_response_headers_are_filtered(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Each `Set-Cookie` passes; hop-by-hop headers and a forged decision do not."""

    async def answer(_: web.Request) -> web.StreamResponse:
        response = web.Response(status=201, reason="Made", body=b"{}")
        response.headers.add("Set-Cookie", "a=1")
        response.headers.add("Set-Cookie", "b=2")
        response.headers.update(
            {
                "X-Cartridge-Digest": "forged",
                "X-Request-Id": "forged",
                "X-Cartridge-Request-Id": "forged",
                "Keep-Alive": "timeout=5",
                "Connection": "X-Hop",
                "X-Hop": "1",
                "X-Engine": "stub",
            }
        )
        return response

    stub = await start_stub(answer)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(CHAT, ODD_BODY)
    assert (reply.status, reply.headers["x-engine"]) == (201, "stub")
    assert reply.headers.getall("set-cookie") == ["a=1", "b=2"]
    assert reply.headers["x-request-id"] == reply.headers["x-cartridge-request-id"] != "forged"
    assert len(reply.headers.getall("x-request-id")) == 1
    for name in ("x-cartridge-digest", "keep-alive", "x-hop"):
        assert name not in reply.headers


async def test_a_compressed_answer_passes_unopened(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Bytes of a gzip answer and its header reach the client as they were."""
    packed = gzip.compress(b'{"choices":[]}', mtime=0)

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    stub = await start_stub(answer)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(CHAT, ODD_BODY, {"Accept-Encoding": "gzip"})
    assert (reply.headers["content-encoding"], reply.body) == ("gzip", packed)


# --- answers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_an_engine_s_4xx_passes_unchanged(
    start_stub: StartStub, start_gateway: StartGateway, status: int
) -> None:
    """Status, body and `Retry-After` of an engine's own refusal reach the client."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, body=b'{"object": "error"}', headers={"Retry-After": "7"}
        )

    stub = await start_stub(refuse)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post_bytes(CHAT, ODD_BODY)
    assert (reply.status, reply.body) == (status, b'{"object": "error"}')
    assert reply.headers["retry-after"] == "7"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_passes_event_by_event(
    start_stub: StartStub, start_gateway: StartGateway, path: str
) -> None:
    """A chunk reaches the client while the engine still works on the next."""
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    stub = await start_stub(stream)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with gateway.session.post(gateway.url + path, data=ODD_BODY) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        assert response.headers["x-cartridge-replica"] == stub.url.removeprefix("http://")
        go_on.set()
        assert await response.read() == b"data: [DONE]\n\n"


# --- attempts ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("buffered", "more", "has_room"),
    [(0, 16_000, True), (0, 16_384, False), (4096, 12_000, True), (4097, 1, False)],
)
def test_a_write_has_no_time_limit_only_where_it_cannot_wait(
    buffered: int, more: int, has_room: bool
) -> None:
    """Not above the high mark afterwards, and not between the marks before: it may be paused."""

    class Transport(asyncio.Transport):
        def get_write_buffer_size(self) -> int:
            return buffered

        def get_write_buffer_limits(self) -> tuple[int, int]:
            return 4096, 16_384

    assert _has_room(Transport(), more) is has_room


async def test_a_gone_replica_s_request_goes_to_the_next(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """A replica that ended between two probes costs a retry, not the request."""
    replicas = [await start_replica(quick_settings(None)) for _ in range(2)]
    settings = quick_gateway(
        *(f"r{index}={client.url}" for index, client in enumerate(replicas)),
        fleet=FleetSettings(probe_interval_s=60.0),
    )
    gateway = await start_gateway(settings)
    await replicas[0].replica.stop()
    replies = [await gateway.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert {reply.headers["x-cartridge-replica"] for reply in replies} == {"r1"}
    decisions = [reply.headers["x-cartridge-decision"] for reply in replies]
    assert [decision.endswith("; retries=1") for decision in decisions].count(True) == 1
    assert await gateway.metric("cartridge_router_upstream_retries_total") == 1
    assert (await gateway.get("/ready")).json["replicas"]["healthy"] == ["r1"]
    await gateway.is_idle()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_connection_that_is_cut_before_the_answer_goes_to_the_next(
    start_stub: StartStub, start_gateway: StartGateway, is_stream: bool
) -> None:
    """An engine that closes without a byte is like one that is gone."""

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    stubs = [await start_stub(cut), await start_stub(answer_ok)]
    settings = quick_gateway(
        *(f"r{index}={stub.url}" for index, stub in enumerate(stubs)),
        fleet=FleetSettings(probe_interval_s=60.0),
    )
    gateway = await start_gateway(settings)
    reply = await gateway.ask(stream=is_stream)
    assert (reply.status, reply.headers["x-cartridge-replica"]) == (200, "r1")
    # Perhaps twice to the first: over a connection that a probe had used, and over a fresh one.
    assert set(stubs[0].bodies) == set(stubs[1].bodies)
    assert len(stubs[1].bodies) == 1
    await gateway.is_idle()


async def test_when_all_are_gone_the_client_may_retry(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """The last replica failing is a 502 with `Retry-After`; then, known unhealthy, a 503."""
    client = await start_replica(quick_settings(None))
    settings = quick_gateway(f"r0={client.url}", fleet=FleetSettings(probe_interval_s=60.0))
    gateway = await start_gateway(settings)
    await client.replica.stop()
    first, second = await gateway.ask(), await gateway.ask()
    assert (first.status, first.error["code"]) == (502, "upstream_unavailable")
    assert (second.status, second.error["code"]) == (503, "no_eligible_replica")
    assert int(first.headers["retry-after"]) > 0
    assert int(second.headers["retry-after"]) > 0
    assert await gateway.metric("cartridge_router_upstream_retries_total") == 0
    await gateway.is_idle()


async def test_no_more_replicas_are_tried_than_the_setting_says(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """With `max_attempts` 2 the third replica is not asked."""

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    stubs = [await start_stub(cut) for _ in range(3)]
    settings = quick_gateway(
        *(stub.url for stub in stubs),
        forwarding=ForwardingSettings(max_attempts=2),
        fleet=FleetSettings(probe_interval_s=60.0),
    )
    gateway = await start_gateway(settings)
    assert (await gateway.ask()).status == 502
    assert sum(bool(stub.bodies) for stub in stubs) == 2


async def test_an_answer_that_is_not_http_is_a_502(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """An engine that speaks garbage gives an OpenAI error, and nothing stays in flight."""

    async def speak_garbage(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"EHLO\r\n\r\n")
        request.transport.close()
        return web.Response()

    stub = await start_stub(speak_garbage)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.ask()
    assert (reply.status, reply.error["code"]) == (502, "upstream_unavailable")
    await gateway.is_idle()


async def test_a_slow_first_byte_is_a_504(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """An engine that takes the request and never answers is given up, and is told so."""
    stub = await start_stub(never_answer)
    settings = quick_gateway(stub.url, forwarding=ForwardingSettings(first_byte_timeout_s=0.2))
    gateway = await start_gateway(settings)
    reply = await gateway.ask()
    assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
    async with asyncio.timeout(10):
        await stub.gone.wait()
    await gateway.is_idle()


# --- breaking off --------------------------------------------------------------------------------
async def test_a_replica_that_dies_in_a_stream_leaves_an_error_and_no_done(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """The client gets what came, an error event, no `[DONE]`, and no clean end."""
    client = await start_replica(quick_settings(None), faults=Faults(die_after_chunks=3))
    gateway = await start_gateway(quick_gateway(f"r0={client.url}"))
    body = chat_body(stream=True)
    async with gateway.session.post(gateway.url + CHAT, json=body) as response:
        data = await read_until_broken_off(response)
    events = [event for event in data.decode().split("\n\n") if event.strip()]
    assert len(events) == 1 + 3 + 1
    last = json.loads(events[-1].strip().removeprefix("data: "))
    assert last["error"]["code"] == "upstream_unavailable"
    assert b"[DONE]" not in data
    await gateway.is_idle()


async def test_a_replica_that_dies_in_a_whole_answer_does_not_end_cleanly(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Half a JSON body reaches the client as an incomplete answer, without a text of ours in it."""

    async def die(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 100
        await response.prepare(request)
        await response.write(b'{"choices":')
        assert request.transport is not None
        request.transport.close()
        return response

    stub = await start_stub(die)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        data = await read_until_broken_off(response)
    assert data == b'{"choices":'
    await gateway.is_idle()


async def test_a_silence_within_a_stream_is_ended(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """After `idle_timeout_s` without a byte the stream gets an error event and is cut."""

    async def fall_silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return await never_answer(request)

    stub = await start_stub(fall_silent)
    settings = quick_gateway(stub.url, forwarding=ForwardingSettings(idle_timeout_s=0.2))
    gateway = await start_gateway(settings)
    async with gateway.session.post(gateway.url + CHAT, data=ODD_BODY) as response:
        data = await read_until_broken_off(response)
    assert data.startswith(b"data: 1\n\n")
    assert b'"error"' in data
    async with asyncio.timeout(10):
        await stub.gone.wait()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_ends_the_work_at_the_engine(
    start_stub: StartStub, start_gateway: StartGateway, is_stream: bool
) -> None:
    """A closed client connection closes the engine's, and the request is in flight no more."""
    has_begun = asyncio.Event()

    async def work(request: web.Request) -> web.StreamResponse:
        if is_stream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
        has_begun.set()
        return await never_answer(request)

    stub = await start_stub(work)
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}"))
    asking = asyncio.create_task(gateway.ask(stream=is_stream))
    async with asyncio.timeout(10):
        await has_begun.wait()
    assert await gateway.metric("cartridge_router_in_flight", replica="r0") == 1
    asking.cancel()
    async with asyncio.timeout(10):
        await stub.gone.wait()
    await gateway.is_idle()
    await gateway.has_metric("cartridge_router_requests_total", 1, status="499")


# --- engines that do not serve the Cartridges ----------------------------------------------------
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_corrupt_blob_is_an_error_with_the_engine_s_reason(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    path: str,
    is_stream: bool,
) -> None:
    """One flipped bit: 503 that says so, streamed or not; the replica lives and serves the next."""
    convention = ConventionKind.SYSTEM_TURN if path == CHAT else ConventionKind.DOCUMENT
    flip_a_bit(store, put_cartridge(store, "broken", convention=convention))
    whole = put_cartridge(store, "whole", seed=1, convention=convention)
    client = await start_replica(quick_settings(store, redis_url))
    gateway = await start_gateway(
        quick_gateway(f"sim-0={client.url}", store=store, redis_url=redis_url)
    )
    await gateway.has_registered("sim-0")
    reply = await gateway.ask("broken@1", path=path, stream=is_stream)
    assert (reply.status, reply.error["code"]) == (503, "cartridge_not_served")
    assert "sim-0" in reply.error["message"]
    assert "corrupt_artifact" in reply.error["message"]
    assert reply.headers["content-type"] == "application/json"
    after = await gateway.ask("whole@1", path=path)
    assert (after.status, mark_of(store, whole) in after.text) == (200, True)
    await gateway.is_idle()


async def test_an_unexplained_failure_passes_as_the_engine_gave_it(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore
) -> None:
    """Without Redis no receipt comes: the engine's 500 reaches the client unchanged."""
    flip_a_bit(store, put_cartridge(store))
    client = await start_replica(quick_settings(store))
    gateway = await start_gateway(quick_gateway(f"sim-0={client.url}", store=store))
    reply = await gateway.ask("harbour-rules@1")
    assert reply.status == 500
    assert reply.json["error"]["message"] == "Internal server error"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_replica_that_dies_before_the_first_token_is_a_502(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, is_stream: bool
) -> None:
    """With Cartridges nothing has gone to the client yet, so it gets a status and not a wreck."""
    put_cartridge(store)
    client = await start_replica(quick_settings(store))
    gateway = await start_gateway(quick_gateway(f"sim-0={client.url}", store=store))
    assert (await gateway.ask("harbour-rules@1")).status == 200
    client.replica.faults = Faults(die_after_chunks=0)
    reply = await gateway.ask("harbour-rules@1", stream=is_stream)
    assert (reply.status, reply.error["code"]) == (502, "upstream_unavailable")
    await gateway.is_idle()


async def test_a_cartridge_stream_without_a_first_token_in_time_is_a_504(
    start_stub: StartStub, start_gateway: StartGateway, store: LocalStore
) -> None:
    """A 200 whose stream stays empty is given up while there is still a status to give."""
    put_cartridge(store)

    async def be_silent(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        if body.get("prompt") == [0]:
            is_plain = "kv_transfer_params" not in body
            return web.Response(status=200 if is_plain else 500, body=b"{}")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return await never_answer(request)

    stub = await start_stub(be_silent)
    settings = quick_gateway(
        stub.url, store=store, forwarding=ForwardingSettings(first_byte_timeout_s=0.2)
    )
    gateway = await start_gateway(settings)
    reply = await gateway.ask("harbour-rules@1", stream=True)
    assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
    await gateway.is_idle()
    await until(lambda: stub.num_open == 0, "the engine was told")


async def test_an_unreachable_replica_is_never_chosen(start_gateway: StartGateway) -> None:
    """A fleet in which nobody answers gives a 503 that names each replica."""
    gateway = await start_gateway(quick_gateway(f"r0={GONE}"))
    reply = await gateway.ask()
    assert (reply.status, reply.error["code"]) == (503, "no_eligible_replica")
    assert "r0: unhealthy" in reply.error["message"]


async def test_the_clients_trace_reaches_the_engines_message(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """VLLM drops the header unless it traces itself, so the message to the extension carries it."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for headers, expected in (
        ({"traceparent": traceparent}, traceparent),
        ({"traceparent": "nonsense"}, None),
        ({}, None),
    ):
        body = {**chat_body(), "cartridge_ids": ["harbour-rules@1"]}
        reply = await gateway.post(CHAT, body, headers)
        assert reply.status == 200
        sent = json.loads(received(clients[0].replica))
        assert sent["kv_transfer_params"]["cartridges"]["traceparent"] == expected


# --- where a stream's first token is -------------------------------------------------------------
@given(
    stream=st.lists(st.sampled_from([b"data: x\n\n", b"data: y\r\n\r\n", b": ok\n\n"]), max_size=5),
    cuts=st.lists(st.integers(1, 9)),
)
def test_events_are_counted_however_they_are_cut(stream: list[bytes], cuts: list[int]) -> None:
    """The blank line that ends one may come in two pieces."""
    exchange, rest = Exchange({}), b"".join(stream)
    for cut in cuts:
        exchange.count_events(rest[:cut])
        rest = rest[cut:]
    exchange.count_events(rest)
    assert exchange.num_events == len(stream)
