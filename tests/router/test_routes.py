"""Routes: what reaches an engine of the model, and how each API's clients read errors."""

import json

import aiohttp
import pytest
from aiohttp import web

from cartridge_proto.manifest import ConventionKind
from cartridge_proto.stores import LocalStore
from cartridge_router.dialects import DIALECTS
from cartridge_router.errors import UpstreamUnavailable
from cartridge_router.request import Route
from cartridge_router.settings import FleetSettings, ForwardingSettings
from tests.router.gateway_client import StartGateway, quick_gateway
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import Handler, StartStub, answer_ok, die_in_a_stream
from tests.router.test_forwarding import read_until_broken_off

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/embeddings", RESPONSES, MESSAGES, COUNT_TOKENS, "/v1/score"),
        *("/v1/rerank", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify"),
        *("/tokenize", "/detokenize", "/v1/something/new?x=1"),
    ],
)
async def test_what_names_a_model_reaches_a_replica_of_it(
    path: str, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Byte for byte, with its path and query."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    body = b'{ "model" :"sample", "input": "caf\\u00e9", "x": 1e400}'
    assert (await gateway.post_bytes(path, body)).status == 200
    assert (stub.bodies, stub.requests[0].path_qs) == ([body], path)
    other = await gateway.post(path, {"model": "unheard-of"})
    assert other.status == 404
    assert len(stub.bodies) == 1


async def test_a_form_names_its_model_too(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Audio comes as a form; it passes as it is, and not to a replica of another model."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    for model, status in (("sample", 200), ("unheard-of", 404)):
        form = aiohttp.FormData()
        form.add_field("file", b"\x00\xffRIFF", filename="a.wav", content_type="audio/wav")
        form.add_field("model", model)
        async with gateway.session.post(
            f"{gateway.url}/v1/audio/transcriptions", data=form
        ) as response:
            assert response.status == status
    (body,) = stub.bodies
    assert b"\x00\xffRIFF" in body
    assert stub.requests[0].content_type == "multipart/form-data"


@pytest.mark.parametrize("quoted", [True, False])
async def test_only_the_heads_of_a_forms_parts_are_read(
    quoted: bool, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """A file called `model`, forms within forms and a million lines mislead nobody."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    boundary = "b-1"
    parts = [
        b'Content-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
        + b"\n" * (900_000),
        b"Content-Type: multipart/mixed; boundary=c\r\n\r\n" + b"--c\r\n" * 3000,
        b'content-disposition: form-data; name="model"\r\n\r\nsample',
    ]
    body = b"".join(b"--b-1\r\n" + part + b"\r\n" for part in parts) + b"--b-1--\r\n"
    told = (
        f'multipart/form-data; boundary="{boundary}"'
        if quoted
        else (f"multipart/form-data; boundary={boundary}")
    )
    path = "/v1/audio/transcriptions"
    assert (await gateway.post_bytes(path, body, {"Content-Type": told})).status == 200
    assert stub.bodies == [body]
    other = body.replace(b"\r\n\r\nsample", b"\r\n\r\nunheard-of")
    assert (await gateway.post_bytes(path, other, {"Content-Type": told})).status == 404
    for broken in (b"", b"--b-1", b"--b-1\r\n" + parts[2], b"--b-1\r\n\r\n--b-1--"):
        # Names no model: any replica will do.
        assert (await gateway.post_bytes(path, broken, {"Content-Type": told})).status == 200


async def test_what_one_replica_keeps_is_found_however_often(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Asking around costs no retries, and one that asked to be left alone is asked as well."""

    async def miss(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def hit(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return web.Response(status=503, headers={"Retry-After": "30"})
        return web.Response(body=b"{}")

    stubs = [await start_stub(handler) for handler in (miss, miss, hit)]
    settings = quick_gateway(
        *(stub.url for stub in stubs),
        forwarding=ForwardingSettings(retry_ratio=0.0, retries_per_s=0.0),
        fleet=FleetSettings(probe_interval_s=60.0),
    )
    gateway = await start_gateway(settings)
    while not stubs[2].bodies:
        await gateway.ask()
    for _ in range(20):
        assert (await gateway.get("/v1/responses/resp_1")).status == 200


async def test_what_one_replica_keeps_is_found(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """A stored response is asked of each replica until one has it; then nobody else is."""

    async def miss(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404, body=b'{"error":{}}')

    async def hit(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"id":"resp_1"}')

    stubs = [await start_stub(miss) for _ in range(4)] + [await start_stub(hit)]
    gateway = await start_gateway(
        quick_gateway(*(stub.url for stub in stubs), fleet=FleetSettings(probe_interval_s=60.0))
    )
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ):
        async with gateway.session.request(method, gateway.url + path) as response:
            assert (response.status, await response.read()) == (200, b'{"id":"resp_1"}')
        request = stubs[-1].requests[-1]
        assert (request.method, request.path, stubs[-1].bodies[-1]) == (method, path, b"")
    assert await gateway.metric("cartridge_router_ejections_total") == 0


async def test_what_nobody_keeps_is_the_engines_404(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """The last one's answer."""

    async def miss(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404, body=b"not here")

    gateway = await start_gateway(quick_gateway(*[(await start_stub(miss)).url for _ in "ab"]))
    reply = await gateway.get("/v1/responses/resp_2")
    assert (reply.status, reply.body) == (404, b"not here")


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_what_changes_a_replica_is_not_for_clients(
    path: str, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """One client must not change what others are answered by."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.post(path, {"model": "sample", "lora_name": "x", "lora_path": "/"})
    assert (reply.status, reply.error["code"]) == (404, "path_not_found")
    assert stub.bodies == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/models", "GET,HEAD"),
        ("DELETE", "/v1/models/sample", "GET,HEAD"),
        ("POST", "/v1/cartridges", "GET,HEAD"),
        ("DELETE", "/v1/cartridges/receipts/1", "GET,HEAD"),
        ("GET", "/v1/cartridges/explain", "POST"),
        ("POST", "/v1/cartridges/other", None),
    ],
)
async def test_what_the_gateway_serves_itself_is_asked_of_no_engine(
    method: str,
    path: str,
    allowed: str | None,
    start_stub: StartStub,
    start_gateway: StartGateway,
) -> None:
    """By another method it is a 405 that names the right one, and beside it a 404."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with gateway.session.request(
        method, gateway.url + path, json={"model": "sample"}
    ) as response:
        assert response.status == (404 if allowed is None else 405)
        assert response.headers.get("allow") == allowed
    assert stub.bodies == []


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", RESPONSES, MESSAGES, COUNT_TOKENS, "/tokenize"],
)
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_what_only_takes_post_says_so(
    path: str, method: str, start_gateway: StartGateway
) -> None:
    """405 with `Allow`; no redirect for a slash too many."""
    gateway = await start_gateway(quick_gateway())
    async with gateway.session.request(method, gateway.url + path) as response:
        assert (response.status, response.headers["allow"]) == (405, "POST")
    async with gateway.session.post(
        f"{gateway.url}/tokenize/", data=b"{}", allow_redirects=False
    ) as response:
        assert response.status == 404


async def test_a_model_can_be_asked_for(start_stub: StartStub, start_gateway: StartGateway) -> None:
    """As SDKs do, also by a name with a slash; an unknown one is a 404."""
    stub = await start_stub(answer_ok)
    stub.adapters = ["org/legal"]
    gateway = await start_gateway(quick_gateway(stub.url))
    for name, parent in (("sample", None), ("org/legal", "sample")):
        reply = await gateway.get(f"/v1/models/{name}")
        assert (reply.json["id"], reply.json.get("parent")) == (name, parent)
        assert {"object": "model", "owned_by": "vllm", "created": 0}.items() <= reply.json.items()
    missing = await gateway.get("/v1/models/unheard-of")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


# --- Cartridges ----------------------------------------------------------------------------------
def streaming(*pieces: bytes) -> Handler:
    """An engine that has the extension, and answers with a stream of these pieces."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if body.get("prompt") == [0]:  # the gateway's question for the extension
            return web.Response(status=500 if "kv_transfer_params" in body else 200, body=b"{}")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_responses_and_messages_take_cartridges(
    path: str, start_stub: StartStub, start_gateway: StartGateway, store: LocalStore
) -> None:
    """As chats do: the system turn is left out of the prompt, the message is put in."""
    put_cartridge(store)
    stub = await start_stub(streaming(b"data: 1\n\n"))
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}", store=store))
    body = {"model": "sample", "stream": True, "cartridge_ids": ["harbour-rules@1"]}
    reply = await gateway.post(path, body)
    assert (reply.status, reply.body) == (200, b"data: 1\n\n")
    sent = json.loads(stub.bodies[-1])
    assert sent["chat_template_kwargs"] == {"cartridge_system_turn": True}
    assert set(sent["kv_transfer_params"]) == {"cartridges"}
    assert "add_special_tokens" not in sent
    put_cartridge(store, "text", seed=1, convention=ConventionKind.DOCUMENT)
    await gateway.has_residents("text@1", {})
    refused = await gateway.post(path, {**body, "cartridge_ids": ["text@1"]})
    assert refused.status == 409
    assert "prompt_convention.kind" in refused.json["error"]["message"]


async def test_several_answers_open_several_times(
    start_stub: StartStub, start_gateway: StartGateway, store: LocalStore
) -> None:
    """With `n` there is a role for each before the failure, which is seen behind them all."""
    put_cartridge(store)
    pieces = [b'data: {"role":0}\n\n', b'data: {"role":1}\n\n', b'data: {"error": {}}\n\n']
    stubs = [await start_stub(streaming(*pieces)) for _ in range(2)]
    gateway = await start_gateway(quick_gateway(*(stub.url for stub in stubs), store=store))
    body = {"model": "sample", "messages": [], "stream": True, "n": 2}
    for _ in range(12):
        reply = await gateway.post(
            "/v1/chat/completions", {**body, "cartridge_ids": ["harbour-rules@1"]}
        )
        # Without a receipt it passes as it came.
        assert (reply.status, reply.body) == (200, b"".join(pieces))
    assert await gateway.metric("cartridge_router_ejections_total") == 1


@pytest.mark.parametrize(
    ("route", "opening", "failure"),
    [
        (Route.CHAT, b'data: {"role":1}\n\n', b'data: {"error": {}}\n\n'),
        (Route.RESPONSES, b"event: response.created\ndata: {}\n\n" * 2, b'data: {"error": {}}\n\n'),
        (
            Route.RESPONSES,
            b"event: response.created\ndata: {}\n\n" * 2,
            b"event: response.failed\ndata: {}\n\n",
        ),
        (
            Route.MESSAGES,
            b"event: message_start\ndata: {}\n\n",
            b'event: error\ndata: {"type":"error"}\n\n',
        ),
    ],
)
def test_failures_behind_the_openers_are_seen(route: Route, opening: bytes, failure: bytes) -> None:
    """The events before say nothing; a token that looks like one is none."""
    dialect = DIALECTS[route]
    assert opening.count(b"\n\n") == dialect.num_openers
    assert dialect.has_failed(opening + failure)
    assert not dialect.has_failed(opening)
    assert not dialect.has_failed(opening + b'data: {"text":"event: error"}\n\n')
    assert not dialect.has_failed(opening + b'data: {"x":"data: {\\"error\\"}"}\n\n')


# --- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
async def test_clients_of_messages_read_errors_in_their_shape(
    path: str, start_gateway: StartGateway
) -> None:
    """Anthropic's SDK raises by `type`; the status is the same."""
    gateway = await start_gateway(quick_gateway())
    reply = await gateway.post(path, {"model": "sample"})
    assert reply.status == 503
    assert set(reply.json) == {"type", "error"}
    assert reply.json["type"] == "error"
    assert set(reply.json["error"]) == {"type", "message"}
    assert reply.json["error"]["type"] == "overloaded_error"
    malformed = await gateway.post_bytes(path, b"{")
    assert malformed.json["error"]["type"] == "invalid_request_error"
    for other, status in ((path, 405), ("/v1/messages/batches/x/y", 405), ("/v1/nothing", 405)):
        async with gateway.session.put(gateway.url + other) as refused:
            assert refused.status == status
            told = await refused.json()
            assert (told.get("type") == "error") is other.startswith(MESSAGES)
            assert "takes" in told["error"]["message"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_broken_stream_ends_in_the_shape_of_its_api(
    path: str, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """One event that the SDK of this API raises for."""
    stub = await start_stub(die_in_a_stream)
    gateway = await start_gateway(quick_gateway(stub.url))
    async with gateway.session.post(gateway.url + path, json={"model": "sample"}) as response:
        data = await read_until_broken_off(response)
    last = data.rstrip(b"\n").rpartition(b"\n\n")[2].splitlines()
    told = json.loads(last[-1].removeprefix(b"data: "))
    assert told["error"]["message"] == "the replica broke off"
    if path == MESSAGES:
        assert (last[0], told["type"]) == (b"event: error", "error")
    else:
        assert (len(last), told["error"]["code"]) == (1, "upstream_unavailable")


def test_an_error_event_may_follow_half_an_event() -> None:
    """A blank line ends what was begun."""
    event = DIALECTS[Route.CHAT].error_event(UpstreamUnavailable("gone"))
    assert event.startswith(b"\n\ndata: {")
    assert event.endswith(b"}\n\n")
