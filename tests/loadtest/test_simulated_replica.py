"""The simulated replica as an OpenAI server: shapes, streams, errors, faults and its record."""

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from cartridge_loadtest.faults import Faults
from cartridge_loadtest.openai_bodies import Endpoint
from cartridge_loadtest.simulated_replica import SimulatedReplica
from cartridge_proto.stores import LocalStore
from tests.loadtest.cartridge_requests import chat_body, until
from tests.loadtest.replica_client import MODEL, StartReplica, quick_settings

CHAT, TEXT = Endpoint.CHAT.value, Endpoint.TEXT.value
PLAIN = "simulated answer without cartridges"
SETTINGS = quick_settings(None)


def events_of(data: bytes) -> list[Any]:
    """Parsed events of a whole stream; `[DONE]` stays text."""
    events = data.decode().removesuffix("\n\n").split("\n\n")
    texts = [event.removeprefix("data: ") for event in events]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def test_it_describes_itself_as_vllm_does(start_replica: StartReplica) -> None:
    """Health is an empty 200, and the model list has vLLM's fields."""
    client = await start_replica(SETTINGS)
    assert await client.get("/health") == (200, b"")
    status, body = await client.get("/v1/models")
    models = json.loads(body)
    assert (status, models["object"]) == (200, "list")
    card = models["data"][0]
    assert (card["id"], card["object"], card["owned_by"]) == (MODEL, "model", "vllm")
    assert card["max_model_len"] == SETTINGS.max_model_len


async def test_its_metrics_are_vllm_s_gauges(start_replica: StartReplica) -> None:
    """The three gauges that a gateway reads carry the model's name."""
    client = await start_replica(SETTINGS)
    _, body = await client.get("/metrics")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="{MODEL}"}} 0.0' in body.decode()


async def test_a_running_request_shows_in_the_gauges(start_replica: StartReplica) -> None:
    """While one request runs and another waits for its slot, the gauges say so."""
    slow = dataclasses.replace(SETTINGS, ttft_s=60.0, max_num_seqs=1)
    client = await start_replica(slow)
    posts = [asyncio.create_task(client.post(CHAT, chat_body())) for _ in range(2)]
    engine = client.replica.engine
    await until(lambda: (engine.num_running, engine.num_waiting) == (1, 1), "one runs, one waits")
    _, body = await client.get("/metrics")
    assert "vllm:num_requests_running" in body.decode()
    assert f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 1.0' in body.decode()
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
    await until(lambda: (engine.num_running, engine.num_waiting) == (0, 0), "both gone")
    assert engine.kv_cache_usage == 0.0


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_plain_answer_says_that_no_cartridge_was_used(
    start_replica: StartReplica, path: str
) -> None:
    """Both endpoints answer whole bodies with the plain marker and count prompt words."""
    client = await start_replica(SETTINGS)
    status, body = await client.post(path, chat_body(prompt="one two three"))
    answer = json.loads(body)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert (status, text, choice["finish_reason"]) == (200, PLAIN, "stop")
    assert answer["usage"]["prompt_tokens"] == (4 if path == CHAT else 3)
    assert answer["usage"]["completion_tokens"] == SETTINGS.num_tokens
    assert answer["kv_transfer_params"] is None


async def test_a_chat_stream_starts_with_the_role_and_ends_with_done(
    start_replica: StartReplica,
) -> None:
    """The first chunk carries the role only, the last the finish reason, then `[DONE]`."""
    client = await start_replica(SETTINGS)
    _, body = await client.post(CHAT, chat_body(stream=True))
    events = events_of(body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1] == "[DONE]"
    contents = [event["choices"][0]["delta"]["content"] for event in events[1:-1]]
    assert "".join(contents) == PLAIN
    assert len(contents) == SETTINGS.num_tokens
    finish = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert finish == [None] * (len(finish) - 1) + ["stop"]
    assert not any("usage" in event for event in events[:-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_comes_last_when_it_is_asked_for(
    start_replica: StartReplica, path: str
) -> None:
    """`stream_options.include_usage` adds one chunk without choices before `[DONE]`."""
    client = await start_replica(SETTINGS)
    body = chat_body(prompt="a b", stream=True, stream_options={"include_usage": True})
    events = events_of((await client.post(path, body))[1])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == SETTINGS.num_tokens


async def test_max_tokens_bounds_the_pieces_and_keeps_the_marker_whole(
    start_replica: StartReplica,
) -> None:
    """With `max_tokens` 3 the marker comes in three chunks."""
    client = await start_replica(SETTINGS)
    _, body = await client.post(TEXT, {"prompt": "x", "stream": True, "max_tokens": 3})
    texts = [event["choices"][0]["text"] for event in events_of(body)[:-1]]
    assert len(texts) == 3
    assert "".join(texts) == PLAIN


async def test_logprobs_are_negative_and_the_same_each_time(start_replica: StartReplica) -> None:
    """Chat and text logprobs have OpenAI's shapes, and repeat exactly."""
    client = await start_replica(SETTINGS)
    body = chat_body(prompt="x", logprobs=True, top_logprobs=2)
    first, again = [(await client.post(CHAT, body))[1] for _ in range(2)]
    content = json.loads(first)["choices"][0]["logprobs"]["content"]
    assert content == json.loads(again)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == PLAIN
    for entry in content:
        assert -1.0 <= entry["logprob"] < 0.0
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 2
    _, text_body = await client.post(TEXT, {"prompt": "x", "logprobs": 0})
    logprobs = json.loads(text_body)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [entry["logprob"] for entry in content]
    assert logprobs["text_offset"][0] == 0
    assert [list(top) for top in logprobs["top_logprobs"]] == [[t] for t in logprobs["tokens"]]


async def test_the_official_client_reads_it(start_replica: StartReplica) -> None:
    """The `openai` SDK parses models, whole answers and streams of both endpoints."""
    client = await start_replica(SETTINGS)
    async with openai.AsyncOpenAI(
        base_url=client.url + "/v1", api_key="none", max_retries=0
    ) as sdk:
        assert [model.id async for model in sdk.models.list()] == [MODEL]
        whole = await sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], logprobs=True
        )
        assert whole.choices[0].message.content == PLAIN
        stream = await sdk.completions.create(model=MODEL, prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == PLAIN


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        (CHAT, {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404, "other"),
        (CHAT, {"model": MODEL}, 400, "required"),
        (CHAT, {"model": MODEL, "messages": "hello"}, 400, "messages"),
        (TEXT, {"model": MODEL}, 400, "required"),
        (TEXT, {"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, {"model": MODEL, "prompt": "x " * 9000}, 400, "maximum context length is 8192"),
    ],
)
async def test_bad_requests_get_openai_errors(
    start_replica: StartReplica, path: str, body: object, status: int, part: str
) -> None:
    """An error names what is wrong, and repeats its status as `code`."""
    client = await start_replica(SETTINGS)
    answered, data = await client.post(path, body)
    error = json.loads(data)["error"]
    assert (answered, error["code"]) == (status, status)
    assert part in error["message"]


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000, b""])
async def test_malformed_json_is_a_400(start_replica: StartReplica, data: bytes) -> None:
    """Bytes that are not JSON, or nest without end, are refused and the server lives."""
    client = await start_replica(SETTINGS)
    assert (await client.post_bytes(CHAT, data)).status == 400
    assert (await client.get("/health"))[0] == 200


async def test_received_bytes_are_recorded_as_they_came(start_replica: StartReplica) -> None:
    """Body bytes and headers of generating requests can be read back, 200 at most."""
    client = await start_replica(SETTINGS)
    data = b'{ "prompt":"\xc3\xa9", "temperature": 1.0e0, "x":[ ] }'
    await client.post_bytes(TEXT, data)
    await client.get("/health")
    recorded = json.loads((await client.get("/sim/requests"))[1])
    assert [entry["path"] for entry in recorded] == [TEXT]
    assert recorded[0]["body"].encode("latin-1") == data
    assert recorded[0]["headers"]["content-type"] == "application/json"
    assert client.replica.requests.maxlen == 200


async def test_a_status_fault_answers_it_with_retry_after(start_replica: StartReplica) -> None:
    """A 503 fault set at run time carries `Retry-After`; an empty object ends it."""
    client = await start_replica(SETTINGS)
    status, _ = await client.post("/sim/faults", {"status": 503, "retry_after_s": 0.5})
    assert status == 204
    response = await client.post_bytes(CHAT, json.dumps(chat_body()).encode())
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    await client.post("/sim/faults", {})
    assert (await client.post(CHAT, chat_body()))[0] == 200


async def test_an_unknown_fault_is_refused(start_replica: StartReplica) -> None:
    """A misspelt fault is a 400 that names it."""
    client = await start_replica(SETTINGS)
    status, body = await client.post("/sim/faults", {"explode": True})
    assert status == 400
    assert b"explode" in body


async def test_an_unhealthy_replica_says_so(start_replica: StartReplica) -> None:
    """The `unhealthy` fault makes `/health` answer 503."""
    client = await start_replica(SETTINGS, faults=Faults(unhealthy=True))
    assert (await client.get("/health"))[0] == 503


async def test_a_hanging_replica_never_answers_and_still_stops(
    start_replica: StartReplica,
) -> None:
    """A request to a hanging replica waits until the replica is stopped, then breaks."""
    client = await start_replica(SETTINGS, faults=Faults(hang=True))
    post = asyncio.create_task(client.post(CHAT, chat_body()))
    await until(lambda: len(client.replica.requests) == 1, "the request arrived")
    assert not post.done()
    await client.replica.stop()
    with pytest.raises(aiohttp.ClientError):
        await post


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_dying_replica_cuts_the_connection(
    start_replica: StartReplica, is_streaming: bool
) -> None:
    """`die_after_chunks` ends a stream without `[DONE]`, and a whole answer before its head."""
    client = await start_replica(SETTINGS, faults=Faults(die_after_chunks=3))
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
        await client.post(CHAT, chat_body(stream=is_streaming))
    assert (await client.get("/health"))[0] == 200


async def test_a_stopped_replica_refuses_and_its_port_can_serve_again(
    start_replica: StartReplica,
) -> None:
    """After `stop` connections are refused; a new replica on the same port answers."""
    client = await start_replica(SETTINGS)
    await client.replica.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get("/health")
    port = int(client.url.rsplit(":", 1)[1])
    again = await start_replica(SETTINGS, port=port)
    assert again.url == client.url
    assert (await again.get("/health"))[0] == 200


async def test_a_taken_port_is_an_error_at_start(start_replica: StartReplica) -> None:
    """Starting on a port in use raises, and leaves nothing running."""
    client = await start_replica(SETTINGS)
    port = int(client.url.rsplit(":", 1)[1])
    second = SimulatedReplica(SETTINGS, port=port)
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()


async def test_a_client_that_leaves_ends_its_generation(start_replica: StartReplica) -> None:
    """The engine notices a closed connection and counts an aborted request."""
    client = await start_replica(dataclasses.replace(SETTINGS, ttft_s=60.0))
    post = asyncio.create_task(client.post(CHAT, chat_body(stream=True)))
    await until(lambda: client.replica.engine.num_running == 1, "the request runs")
    post.cancel()
    await until(lambda: client.replica.engine.num_aborted == 1, "the request was aborted")
    state = json.loads((await client.get("/sim/state"))[1])
    assert (state["running"], state["aborted"]) == (0, 1)


def test_the_command_serves_until_it_is_told_to_stop(store: LocalStore) -> None:
    """The command prints its URL, answers, and ends with status 0 on SIGTERM."""
    command = [sys.executable, "-m", "cartridge_loadtest.simulated_replica", "--model", MODEL]
    with subprocess.Popen(
        [*command, "--store", str(store.root), "--ttft-s", "0", "--num-tokens", "2"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, url = process.stdout.readline().strip().partition(" ")
            assert ready == "ready"
            with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as sdk:
                answer = sdk.completions.create(model=MODEL, prompt="hello")
            assert answer.choices[0].text == PLAIN
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def test_a_broken_identity_file_is_a_usage_error(tmp_path: Path) -> None:
    """A wrong `--identity` ends the command with status 2 and names the flag."""
    path = tmp_path / "identity.json"
    path.write_text('{"model": 3}')
    command = [sys.executable, "-m", "cartridge_loadtest.simulated_replica", "--model", MODEL]
    done = subprocess.run(
        [*command, "--identity", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--identity" in done.stderr
