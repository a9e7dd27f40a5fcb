"""The OpenAI SDK for Python, run against a listening gateway."""

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web

from cartridge_proto.stores import LocalStore
from cartridge_router.settings import (
    AdmissionSettings,
    ForwardingSettings,
    PlacementSettings,
    TenantSettings,
)
from tests.conformance.conftest import See, StartEngine, StartUrl
from tests.conformance.model_engine import MODEL, PROMPT_TOKENS, SAID, VECTOR, WORDS, answer
from tests.loadtest.replica_client import StartReplica, mark_of
from tests.router.fleets import named, start_replicas
from tests.router.gateway_client import quick_gateway
from tests.router.keys_files import ACME_KEY, write_keys
from tests.router.stored_cartridges import digest_of, put_cartridge
from tests.router.stub_engine import StubEngine, never_answer

TOTAL_TOKENS = PROMPT_TOKENS + len(WORDS)


async def test_a_chat(see: See, gateway: str) -> None:
    """A whole answer parses, usage included."""
    assert await see("openai_sdk", "chat", gateway) == {
        "text": SAID,
        "finish_reason": "stop",
        "total_tokens": TOTAL_TOKENS,
    }


async def test_a_stream(see: See, gateway: str) -> None:
    """Chunks come one by one as the engine sent them, and the usage chunk last."""
    seen = await see("openai_sdk", "stream", gateway)
    assert seen == {"parts": list(WORDS), "total_tokens": TOTAL_TOKENS}


async def test_the_asynchronous_client(see: See, gateway: str) -> None:
    """Twenty streams at once all come to their end."""
    assert await see("openai_sdk", "asynchronous", gateway) == [SAID] * 20


async def test_tools(see: See, gateway: str) -> None:
    """A call of a tool is the same whole and put together from a stream."""
    assert (
        await see("openai_sdk", "tools", gateway) == [["opening_hours", {"place": "harbour"}]] * 2
    )


async def test_completions(see: See, gateway: str) -> None:
    """The older API, whole and in a stream."""
    assert await see("openai_sdk", "completions", gateway) == ["".join(WORDS[:3]), SAID]


async def test_responses(see: See, gateway: str) -> None:
    """A response parses, and its stream has all events from the first to the last."""
    seen = await see("openai_sdk", "responses", gateway)
    assert (seen["whole"], seen["streamed"]) == (SAID, SAID)
    assert seen["kinds"][0] == "response.created"
    assert seen["kinds"][-1] == "response.completed"
    assert seen["kinds"].count("response.output_text.delta") == len(WORDS)


async def test_embeddings(see: See, gateway: str) -> None:
    """Vectors in base64 pass unchanged."""
    assert await see("openai_sdk", "embeddings", gateway) == [list(VECTOR)] * 2


async def test_models(see: See, gateway: str) -> None:
    """The list and one entry parse."""
    assert await see("openai_sdk", "models", gateway) == [[MODEL], MODEL]


async def test_headers_of_an_answer(see: See, gateway: str, engine: StubEngine) -> None:
    """`with_raw_response` shows the gateway's headers; the engine gets none of its fields."""
    seen = await see("openai_sdk", "raw", gateway)
    assert seen["headers"]["x-cartridge-selection"] == "none"
    assert re.fullmatch("[0-9a-f]{32}", seen["request_id"])
    assert "cartridge_ids" not in json.loads(engine.bodies[-1])


async def test_cartridges_by_extra_body(
    see: See, start_url: StartUrl, start_replica: StartReplica, store: LocalStore
) -> None:
    """`extra_body` names a Cartridge: its bytes make the answer, whole and in a stream."""
    manifest = put_cartridge(store)
    replicas = await start_replicas(start_replica, 1, store)
    url = await start_url(quick_gateway(*named(replicas), store=store))
    seen = await see("openai_sdk", "raw", url, "harbour-rules@1")
    mark = mark_of(store, manifest)
    assert mark in seen["text"]
    assert seen["headers"]["x-cartridge-ids"] == "harbour-rules@1"
    streamed = await see("openai_sdk", "cartridge_stream", url, digest_of(manifest))
    assert mark in streamed


# --- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 3}, ("BadRequestError", 400, "400", "BadRequestError")),
        (
            {"extra_body": {"cartridge_ids": "x"}},
            ("BadRequestError", 400, "invalid_request", "invalid_request_error"),
        ),
        (
            {"extra_body": {"cartridge_ids": ["absent@1"]}},
            ("NotFoundError", 404, "cartridge_not_found", "invalid_request_error"),
        ),
        ({"model": "other"}, ("NotFoundError", 404, "model_not_found", "invalid_request_error")),
    ],
)
async def test_an_error_has_the_sdk_s_class(
    see: See, gateway: str, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """The engine's refusals and the gateway's arrive as the SDK's own, with code and type."""
    seen = await see("openai_sdk", "error", gateway, json.dumps(fields))
    assert (seen["class"], seen["status"], seen["code"], seen["type"]) == expected
    assert re.fullmatch("[0-9a-f]{32}", seen["request_id"])


async def test_an_unknown_key(see: See, gateway: str) -> None:
    """A key of nobody raises `AuthenticationError`, which does not say the key."""
    seen = await see("openai_sdk", "error", gateway, "{}", "sk-nobody")
    assert (seen["class"], seen["code"]) == ("AuthenticationError", "invalid_api_key")
    assert "sk-nobody" not in seen["message"]


async def test_a_tenant_at_its_limit(
    see: See, start_url: StartUrl, engine: StubEngine, tmp_path: Any
) -> None:
    """The second request of a minute that has one raises `RateLimitError` with `Retry-After`."""
    keys = write_keys(
        tmp_path / "keys.yaml", {"acme": {"limits": {"requests_per_minute": 1}}}, {ACME_KEY: "acme"}
    )
    url = await start_url(quick_gateway(engine.url, tenants=TenantSettings(keys_file=keys)))
    assert await see("openai_sdk", "error", url, "{}") is None
    seen = await see("openai_sdk", "error", url, "{}")
    assert (seen["class"], seen["code"]) == ("RateLimitError", "rate_limit_exceeded")
    assert 0 < int(seen["retry_after"]) <= 120


async def test_retry_after_is_honoured(
    see: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """The SDK waits as long as the gateway says, and its second try is answered."""
    num_asked = 0

    async def busy_once(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            return web.json_response({"error": {}}, status=429, headers={"Retry-After": "3"})
        return await answer(request)

    engine = await start_engine(busy_once)
    url = await start_url(quick_gateway(engine.url))
    seen = await see("openai_sdk", "retried", url)
    # The SDK's own pause before a first retry is half a second.
    assert (seen["text"], seen["waited_s"] >= 3) == (SAID, True)
    assert num_asked == 2


async def test_no_replica(see: See, start_url: StartUrl) -> None:
    """Without a replica the SDK raises what it has for 5xx, and knows when to come back."""
    url = await start_url(quick_gateway("http://127.0.0.1:9"))
    seen = await see("openai_sdk", "error", url, "{}")
    assert (seen["class"], seen["status"]) == ("InternalServerError", 503)
    assert (seen["code"], seen["retry_after"]) == ("no_eligible_replica", "2")


async def test_all_replicas_are_busy(
    see: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """A saturated fleet raises `RateLimitError` with the gateway's own code."""
    engine = await start_engine(never_answer)
    url = await start_url(
        quick_gateway(
            engine.url,
            placement=PlacementSettings(max_in_flight=1),
            admission=AdmissionSettings(max_queued=0),
        )
    )
    first = asyncio.create_task(see("openai_sdk", "error", url, "{}", "", "20"))
    async with asyncio.timeout(30):
        while not engine.num_open:  # noqa: ASYNC110 - asked of another process
            await asyncio.sleep(0.01)
    seen = await see("openai_sdk", "error", url, "{}")
    assert (seen["class"], seen["code"]) == ("RateLimitError", "all_replicas_saturated")
    await engine.stop()
    assert (await first)["class"] in ("InternalServerError", "APITimeoutError")


async def test_the_client_s_own_time_limit(
    see: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """A client that gives up raises `APITimeoutError`, and the engine is let go."""
    engine = await start_engine(never_answer)
    url = await start_url(quick_gateway(engine.url))
    assert await see("openai_sdk", "error", url, "{}", "", "1") == {"class": "APITimeoutError"}
    async with asyncio.timeout(10):
        await engine.gone.wait()


async def test_the_gateway_s_time_limit(
    see: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """An engine that does not begin is a 504 for the SDK."""
    engine = await start_engine(never_answer)
    forwarding = ForwardingSettings(first_byte_timeout_s=0.2, max_attempts=1)
    url = await start_url(quick_gateway(engine.url, forwarding=forwarding))
    seen = await see("openai_sdk", "error", url, "{}")
    assert (seen["class"], seen["code"]) == ("InternalServerError", "upstream_timeout")


async def test_a_stream_that_breaks_off(
    see: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """The SDK raises what the gateway says in the stream, after the chunks that came."""
    engine = await start_engine(_die_after_a_chunk)
    url = await start_url(quick_gateway(engine.url))
    seen = await see("openai_sdk", "broken_stream", url)
    assert seen == {"class": "APIError", "message": "the replica broke off", "num_seen": 1}


async def _die_after_a_chunk(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    await response.write(f"data: {json.dumps({**chunk, 'choices': []})}\n\n".encode())
    assert request.transport is not None
    request.transport.close()
    return response
