"""The OpenAI SDK for Node.js, run against a listening gateway."""

import asyncio
import json
import re
from typing import Any

import pytest

from cartridge_proto.stores import LocalStore
from tests.conformance.conftest import NODE, RunProgram, See, StartEngine, StartUrl
from tests.conformance.model_engine import MODEL, PROMPT_TOKENS, SAID, VECTOR, WORDS
from tests.loadtest.replica_client import StartReplica, mark_of
from tests.router.fleets import named, start_replicas
from tests.router.gateway_client import quick_gateway
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import never_answer

PROGRAM = str(NODE.parents[1] / "tests" / "conformance" / "node" / "openai_sdk.mjs")
TOTAL_TOKENS = PROMPT_TOKENS + len(WORDS)


@pytest.fixture
def see_node(run_program: RunProgram) -> See:
    """Run one case of the program; returns what it saw."""
    assert (NODE / "node_modules").is_dir(), f"{NODE} is missing: run .ci/clients"

    async def run(case: str, *arguments: str) -> Any:
        return json.loads(await run_program("node", PROGRAM, str(NODE), case, *arguments))

    return run


async def test_a_chat(see_node: See, gateway: str) -> None:
    """A whole answer parses, usage included."""
    assert await see_node("chat", gateway) == [SAID, TOTAL_TOKENS]


async def test_a_stream(see_node: See, gateway: str) -> None:
    """Chunks come one by one as the engine sent them, and the usage chunk last."""
    assert await see_node("stream", gateway) == [list(WORDS), TOTAL_TOKENS]


async def test_responses(see_node: See, gateway: str) -> None:
    """A response parses, and its stream has all events from the first to the last."""
    seen = await see_node("responses", gateway)
    assert seen["text"] == SAID
    assert (seen["kinds"][0], seen["kinds"][-1]) == ("response.created", "response.completed")


async def test_embeddings(see_node: See, gateway: str) -> None:
    """Vectors in base64 pass unchanged."""
    assert await see_node("embeddings", gateway) == [list(VECTOR)] * 2


async def test_models(see_node: See, gateway: str) -> None:
    """The list and one entry parse."""
    assert await see_node("models", gateway) == [[MODEL], MODEL]


async def test_a_cartridge(
    see_node: See, start_url: StartUrl, start_replica: StartReplica, store: LocalStore
) -> None:
    """A field that the SDK does not know names a Cartridge: its bytes make the answer."""
    manifest = put_cartridge(store)
    replicas = await start_replicas(start_replica, 1, store)
    url = await start_url(quick_gateway(*named(replicas), store=store))
    seen = await see_node("raw", url, "harbour-rules@1")
    assert mark_of(store, manifest) in seen["text"]
    assert seen["headers"]["x-cartridge-ids"] == "harbour-rules@1"
    assert re.fullmatch("[0-9a-f]{32}", seen["request_id"])


@pytest.mark.parametrize(
    ("fields", "key", "expected"),
    [
        ({"temperature": 3}, "", ("BadRequestError", 400, 400)),
        ({"cartridge_ids": "x"}, "", ("BadRequestError", 400, "invalid_request")),
        ({"cartridge_ids": ["absent@1"]}, "", ("NotFoundError", 404, "cartridge_not_found")),
        ({}, "sk-nobody", ("AuthenticationError", 401, "invalid_api_key")),
    ],
)
async def test_an_error_has_the_sdk_s_class(
    see_node: See, gateway: str, fields: dict[str, Any], key: str, expected: tuple[Any, ...]
) -> None:
    """The engine's refusals and the gateway's arrive as the SDK's own, with their code."""
    seen = await see_node("error", gateway, json.dumps(fields), key)
    assert (seen["class"], seen["status"], seen["code"]) == expected


async def test_no_replica(see_node: See, start_url: StartUrl) -> None:
    """Without a replica the SDK raises what it has for 5xx, and knows when to come back."""
    url = await start_url(quick_gateway("http://127.0.0.1:9"))
    seen = await see_node("error", url, "{}")
    assert (seen["class"], seen["status"]) == ("InternalServerError", 503)
    assert (seen["code"], seen["retry_after"]) == ("no_eligible_replica", "2")


async def test_the_client_s_own_time_limit(
    see_node: See, start_url: StartUrl, start_engine: StartEngine
) -> None:
    """A client that gives up raises its own time-out, and the engine is let go."""
    engine = await start_engine(never_answer)
    url = await start_url(quick_gateway(engine.url))
    assert await see_node("aborted", url) == "APIConnectionTimeoutError"
    async with asyncio.timeout(10):
        await engine.gone.wait()
