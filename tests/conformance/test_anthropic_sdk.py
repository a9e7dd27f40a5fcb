"""The Anthropic SDK for Python, run against a listening gateway."""

import json
from typing import Any

import pytest
from aiohttp import web

from cartridge_proto.stores import LocalStore
from tests.conformance.conftest import See, StartEngine, StartUrl
from tests.conformance.model_engine import MODEL, PROMPT_TOKENS, SAID, WORDS
from tests.router.gateway_client import quick_gateway
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StubEngine


async def test_a_message(see: See, gateway: str) -> None:
    """A whole answer parses, usage included."""
    assert await see("anthropic_sdk", "message", gateway) == [SAID, "end_turn", len(WORDS)]


async def test_a_stream(see: See, gateway: str) -> None:
    """Pieces come one by one as the engine sent them, and the end with the usage."""
    seen = await see("anthropic_sdk", "stream", gateway)
    assert seen == [list(WORDS), "end_turn", len(WORDS)]


async def test_tokens_are_counted_by_an_engine(see: See, gateway: str, engine: StubEngine) -> None:
    """`count_tokens` passes through to an engine."""
    assert await see("anthropic_sdk", "count_tokens", gateway) == PROMPT_TOKENS
    assert engine.requests[-1].path == "/v1/messages/count_tokens"


async def test_models(see: See, gateway: str) -> None:
    """The list parses although it has OpenAI's shape."""
    assert await see("anthropic_sdk", "models", gateway) == [MODEL]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"extra_body": {"temperature": 3}}, ("BadRequestError", 400, "BadRequestError")),
        ({"extra_body": {"cartridge_ids": "x"}}, ("BadRequestError", 400, "invalid_request_error")),
        (
            {"extra_body": {"cartridge_ids": ["absent@1"]}},
            ("NotFoundError", 404, "not_found_error"),
        ),
        ({"model": "other"}, ("NotFoundError", 404, "not_found_error")),
    ],
)
async def test_an_error_has_the_sdk_s_class(
    see: See, gateway: str, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """The engine's refusals and the gateway's arrive in Anthropic's shape."""
    seen = await see("anthropic_sdk", "error", gateway, json.dumps(fields))
    assert seen["body"]["type"] == "error"
    assert (seen["class"], seen["status"], seen["body"]["error"]["type"]) == expected


async def test_an_unknown_key(see: See, gateway: str) -> None:
    """A key of nobody, in `x-api-key`, raises `AuthenticationError`."""
    seen = await see("anthropic_sdk", "error", gateway, "{}", "sk-nobody")
    assert seen["class"] == "AuthenticationError"
    assert seen["body"]["error"]["type"] == "authentication_error"


async def test_no_replica(see: See, start_url: StartUrl) -> None:
    """Without a replica the SDK says that the service is overloaded, and when to come back."""
    url = await start_url(quick_gateway("http://127.0.0.1:9"))
    seen = await see("anthropic_sdk", "error", url, "{}")
    assert (seen["status"], seen["retry_after"]) == (503, "2")
    assert seen["body"]["error"]["type"] == "overloaded_error"


async def test_a_stream_that_breaks_off(
    see: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """The SDK raises what the gateway says in the stream, after the events that came."""
    engine = await start_engine(_die_after_the_first_event)
    seen = await see("anthropic_sdk", "broken_stream", await start_url(quick_gateway(engine.url)))
    assert seen["num_seen"] == 1
    assert seen["body"]["error"]["message"] == "the replica broke off"


async def test_a_cartridge_by_extra_body(
    see: See, start_url: StartUrl, start_engine: StartEngine, store: LocalStore
) -> None:
    """`extra_body` names a Cartridge: an engine without the extension is never asked for it."""
    put_cartridge(store)
    engine = await start_engine()
    url = await start_url(quick_gateway(engine.url, store=store))
    fields = json.dumps({"extra_body": {"cartridge_ids": ["harbour-rules@1"]}})
    seen = await see("anthropic_sdk", "error", url, fields)
    assert (seen["status"], seen["body"]["error"]["type"]) == (503, "overloaded_error")
    assert "/v1/messages" not in [request.path for request in engine.requests]


async def _die_after_the_first_event(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    message: dict[str, Any] = {
        "id": "x",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
    }
    message |= {"stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 0}}
    data = json.dumps({"type": "message_start", "message": message})
    await response.write(f"event: message_start\ndata: {data}\n\n".encode())
    assert request.transport is not None
    request.transport.close()
    return response
