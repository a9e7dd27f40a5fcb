"""The other APIs that generate answer as the ordinary prompt: responses and messages."""

import json
from typing import Any

import httpx
import openai
import pytest

from cartridge_engine_ext.build import Source
from cartridge_proto import names
from cartridge_proto.digest import parse_digest
from cartridge_proto.manifest import DEFAULT_INSTRUCTION
from cartridge_router.demo.stack import MODEL_NAME
from tests.integration.fleet import Fleet

pytestmark = pytest.mark.engine

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DOCUMENT = (
    "The Quillon-4 lighthouse was lit in Marbeck in 1953. It has nine lamps and a green door. Its "
    "first keeper was Odo Fenn."
)
QUESTION = "When was the Quillon-4 lighthouse lit?"
SYSTEM = DEFAULT_INSTRUCTION.format(document=DOCUMENT)
NUM_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def cartridge(fleet: Fleet) -> str:
    """A chat Cartridge of the document."""
    built = fleet.builder.build(Source(text=DOCUMENT, name="quillon"))
    fleet.wait_for_catalog(built.manifest.alias, built.digest)
    return built.manifest.alias


def body_of(path: str, *, system: str | None = None, **extra: Any) -> dict[str, Any]:
    """A greedy question, with a system turn of its own or with none."""
    if path == RESPONSES:
        body = {"input": QUESTION, "max_output_tokens": NUM_NEW_TOKENS, "store": False}
        told = {"instructions": system}
    else:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"messages": messages, "max_tokens": NUM_NEW_TOKENS}
        told = {"system": system}
    return {
        "model": MODEL_NAME,
        "temperature": 0,
        **body,
        **(told if system is not None else {}),
        **extra,
    }


def text_of(path: str, response: httpx.Response) -> str:
    """What was generated, of a whole answer or of a stream."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        wanted = "response.output_text.delta" if path == RESPONSES else "content_block_delta"
        deltas = [event["delta"] for event in events if event["type"] == wanted]
        return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
    answer = response.json()
    if path == RESPONSES:
        parts = [item["content"] for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for content in parts for part in content)
    return "".join(part["text"] for part in answer["content"])


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_answer_is_that_of_the_ordinary_prompt(
    fleet: Fleet, cartridge: str, path: str, is_stream: bool
) -> None:
    """The same greedy text as with the document in the system turn; another one without it."""
    ordinary = text_of(path, fleet.post(path, body_of(path, system=SYSTEM)))
    body = body_of(path, stream=is_stream, cartridge_ids=[cartridge])
    response = fleet.post(path, body)
    assert text_of(path, response) == ordinary
    assert "1953" in ordinary
    assert text_of(path, fleet.post(path, body_of(path))) != ordinary
    receipt = fleet.receipt(response.headers[names.HEADER_REQUEST_ID])
    assert receipt["status"] == "served"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_corrupt_cartridge_is_refused_before_the_first_event(
    fleet: Fleet, path: str, is_stream: bool
) -> None:
    """503 with the engine's reason, though a stream's openers had come: no half answer."""
    name = f"broken-{path.rpartition('/')[2]}-{'stream' if is_stream else 'whole'}"
    built = fleet.builder.build(Source(text=f"{DOCUMENT} {name}", name=name))
    blob = fleet.store.blob_path(parse_digest(built.manifest.payload[0].sha256))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.unlink()
    blob.write_bytes(data)
    fleet.wait_for_catalog(built.manifest.alias, built.digest)
    body = body_of(path, stream=is_stream, cartridge_ids=[built.manifest.alias])
    response = fleet.post(path, body)
    assert response.status_code == 503, response.text
    error = response.json()["error"]
    assert "corrupt_artifact" in error["message"]
    assert error["type"] == ("overloaded_error" if path == MESSAGES else "server_error")


def test_the_official_client_reads_responses(fleet: Fleet, cartridge: str) -> None:
    """The openai SDK's own type for them, whole and streamed."""
    client = openai.OpenAI(base_url=f"{fleet.gateway_url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": MODEL_NAME,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": NUM_NEW_TOKENS,
        "store": False,
        "extra_body": {names.FIELD_CARTRIDGE_IDS: [cartridge]},
    }
    whole = client.responses.create(**asked)
    assert "1953" in whole.output_text
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text
