"""Traces and logs: what a request leaves behind, and what must not be in it."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cartridge_proto.stores import LocalStore
from cartridge_router.errors import ConfigurationError
from cartridge_router.logs import REQUEST_ID, configure_logging, log_handler
from cartridge_router.settings import LogFormat, LogSettings, TelemetrySettings, load_settings
from tests.integration.span_receiver import SpanReceiver, receiving_spans
from tests.loadtest.cartridge_requests import chat_body
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import start_fleet, start_replicas
from tests.router.gateway_client import StartGateway, quick_gateway, until_true
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StartStub, answer_ok

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
SECRET = "sk-a-key-of-a-client"
PROMPT = "a prompt that nobody else may read"


@pytest.fixture
def receiver() -> Iterator[SpanReceiver]:
    """Takes what gateways export."""
    with receiving_spans() as receiver:
        yield receiver


def attributes_of(span: Span) -> dict[str, Any]:
    """By name: text, number, or list of texts."""
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind or "string_value")
        found[pair.key] = (
            [item.string_value for item in value.values] if kind == "array_value" else value
        )
    return found


async def first_span(receiver: SpanReceiver) -> Span:
    """The span of the client's trace, once it was exported."""

    async def has_come() -> bool:
        return bool(receiver.of_trace(TRACE))

    await until_true(has_come, "the span is exported")
    return receiver.of_trace(TRACE)[0]


# --- traces --------------------------------------------------------------------------------------
async def test_a_request_is_a_span_of_the_clients_trace(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    receiver: SpanReceiver,
) -> None:
    """With the names of the GenAI conventions; the engine gets the gateway's span as parent."""
    manifest = put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store, redis_url)
    telemetry = TelemetrySettings(otlp_endpoint=receiver.endpoint)
    gateway = await start_fleet(start_gateway, clients, store, redis_url, telemetry=telemetry)
    body = {**chat_body(), "cartridge_ids": [manifest.alias]}
    reply = await gateway.post("/v1/chat/completions", body, PARENT)
    assert reply.status == 200

    span = await first_span(receiver)
    assert (span.name, span.kind) == ("chat sample", Span.SpanKind.SPAN_KIND_SERVER)
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"
    found = attributes_of(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.provider.name"] == "vllm"
    assert found["gen_ai.request.model"] == "sample"
    assert found["cartridge.replica"] == "sim-0"
    assert found["http.response.status_code"] == 200
    assert found["cartridge.request_id"] == reply.headers["x-cartridge-request-id"]
    assert len(found["cartridge.digests"]) == 1
    sent = clients[0].replica.requests[-1].headers
    told = {name.lower(): value for name, value in dict(sent).items()}["traceparent"]
    assert told.split("-")[1:3] == [TRACE, span.span_id.hex()]


async def test_without_an_exporter_the_clients_trace_goes_on(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """As it came."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    await gateway.post("/v1/completions", {"model": "sample"}, PARENT)
    assert stub.requests[-1].headers["traceparent"] == PARENT["traceparent"]


async def test_a_failed_request_says_so(
    start_gateway: StartGateway, receiver: SpanReceiver
) -> None:
    """Also one that never got a replica."""
    telemetry = TelemetrySettings(otlp_endpoint=receiver.endpoint)
    gateway = await start_gateway(quick_gateway(telemetry=telemetry))
    await gateway.post("/v1/completions", {"model": "sample"}, PARENT)
    found = attributes_of(await first_span(receiver))
    assert (found["http.response.status_code"], found["error.type"]) == (503, "503")


# --- logs ----------------------------------------------------------------------------------------
@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the gateway logs as JSON while a test runs."""
    stream = io.StringIO()
    handler = log_handler(LogSettings(format=LogFormat.JSON))
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    package = logging.getLogger("cartridge_router")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.DEBUG)
    yield stream
    package.removeHandler(handler)
    package.setLevel(level)


async def test_lines_name_the_request_they_are_about(
    start_stub: StartStub, start_gateway: StartGateway, written: io.StringIO
) -> None:
    """In a field of its own; of two at once each has its own. No key, prompt or answer is there."""

    async def fail(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    stub = await start_stub(fail)
    log = LogSettings(has_requests=True)
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}", logging=log))
    body = {"model": "sample", "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"Authorization": f"Bearer {SECRET}"}
    replies = await asyncio.gather(
        *(gateway.post("/v1/chat/completions", body, headers) for _ in range(2))
    )
    text = written.getvalue()
    lines = [json.loads(line) for line in text.splitlines()]
    for reply in replies:
        about = [
            line for line in lines if line["request_id"] == reply.headers["x-cartridge-request-id"]
        ]
        (summary,) = [line for line in about if "status" in line]
        assert (summary["route"], summary["status"]) == ("/v1/chat/completions", reply.status)
        assert summary["seconds"] > 0
        assert {"time", "level", "logger", "message"} <= summary.keys()
    assert SECRET not in text
    assert PROMPT not in text


async def test_requests_are_logged_only_when_asked_for(
    start_stub: StartStub, start_gateway: StartGateway, written: io.StringIO
) -> None:
    """Most fleets have that elsewhere."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    await gateway.ask()
    assert "seconds" not in written.getvalue()


def test_people_read_text() -> None:
    """The request's id stands behind the logger, where there is one."""
    handler = log_handler(LogSettings())
    assert isinstance(handler, logging.StreamHandler)
    stream = io.StringIO()
    handler.setStream(stream)
    record = logging.LogRecord("cartridge_router.x", logging.INFO, "", 1, "hello", None, None)
    handler.handle(record)
    token = REQUEST_ID.set("abc")
    handler.handle(record)
    REQUEST_ID.reset(token)
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" INFO cartridge_router.x: hello")
    assert second.endswith(" INFO cartridge_router.x [abc]: hello")


def test_the_whole_process_logs_as_the_settings_say() -> None:
    """Level and handler are those of the root."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure_logging(LogSettings(level="warning"))
        assert root.level == logging.WARNING
        assert len(root.handlers) == 1
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_an_endpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    """With the shape that it must have."""
    path = tmp_path / "settings.yaml"
    path.write_text("telemetry: {otlp_endpoint: 'collector'}\nlogging: {level: loud}")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, {}, {})
    assert any("telemetry.otlp_endpoint: must be" in problem for problem in caught.value.problems)
    assert any("logging.level" in problem for problem in caught.value.problems)
