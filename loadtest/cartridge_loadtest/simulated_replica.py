"""A simulated vLLM API server with the Cartridge extension: its HTTP side and its command.

Owns the routes and the record of received requests. Refuses to hide that it is a simulation: every
answer says so.

`python -m cartridge_loadtest.simulated_replica --model NAME [--store DIR …]`
"""

import asyncio
import logging
import re
import signal
import sys
import time
import uuid
from collections import deque
from typing import Any, Final

import msgspec
from aiohttp import web

from cartridge_loadtest.faults import Faults, answer_with_fault, json_response
from cartridge_loadtest.openai_bodies import (
    DONE,
    Answer,
    Endpoint,
    GenerationRequest,
    RequestRefused,
    error_body,
    event,
    internal_error_body,
    models_body,
    parse_request,
    role_event,
    split_text,
)
from cartridge_loadtest.replica_arguments import ReplicaArguments, parse_arguments
from cartridge_loadtest.simulated_engine import (
    EngineSettings,
    Generation,
    SimulatedEngine,
    VirtualPrefixFailed,
)
from cartridge_proto.names import FIELD_RECEIPT, HEADER_REQUEST_ID
from cartridge_proto.residency import Receipt

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 << 20
MAX_RECORDED_REQUESTS: Final = 200
SHUTDOWN_TIMEOUT_S: Final = 0.05
"""Grace of open requests at `stop`; 0 would mean for ever to aiohttp."""
_REQUEST_ID = re.compile(r"[!-~]{1,64}")


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generating request as it was received; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: str
    """The raw bytes, one character each (latin-1)."""


class SimulatedReplica:
    """A server on a loopback port: `url = await replica.start()`, later `await replica.stop()`.

    Port 0 takes a free one. `stop` gives up the lease, cuts open connections and cancels handlers.
    A replica starts once; to simulate a restart make another with the same port.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.engine = SimulatedEngine(settings)
        self.faults = faults or Faults()
        self.requests: deque[RecordedRequest] = deque(maxlen=MAX_RECORDED_REQUESTS)
        self._settings = settings
        self._host = host
        self._port = port
        self._created = int(time.time())
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen, join the fleet, and return the URL without a slash at its end."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post(Endpoint.CHAT, self._generate),
                web.post(Endpoint.TEXT, self._generate),
                web.post("/sim/faults", self._set_faults),
                web.get("/sim/requests", self._list_requests),
                web.get("/sim/state", self._show_state),
            ]
        )
        # vLLM ends a generation when its client goes: handlers are cancelled here too.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError:
            await self.stop()
            raise
        await self.engine.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening and leave the fleet; does nothing when it never started."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            await self.engine.stop()

    # --- what an operator asks ------------------------------------------------------------------
    async def _health(self, _: web.Request) -> web.Response:
        await self.engine.register()
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _models(self, _: web.Request) -> web.Response:
        await self.engine.register()
        settings = self._settings
        return json_response(models_body(settings.model, settings.context_tokens, self._created))

    async def _metrics(self, _: web.Request) -> web.Response:
        rows = {
            "num_requests_running": self.engine.num_running,
            "num_requests_waiting": self.engine.num_waiting,
            "kv_cache_usage_perc": self.engine.kv_cache_usage,
        }
        label = self._settings.model.replace("\\", "\\\\").replace('"', '\\"')
        lines = []
        for name, value in rows.items():
            lines.append(f"# TYPE vllm:{name} gauge")
            lines.append(f'vllm:{name}{{engine="0",model_name="{label}"}} {float(value)}')
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    # --- what a test asks -----------------------------------------------------------------------
    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults = msgspec.json.decode(await request.read(), type=Faults)
        except msgspec.DecodeError as error:
            return json_response(error_body(400, "BadRequestError", str(error)), status=400)
        return web.Response(status=204)

    async def _list_requests(self, _: web.Request) -> web.Response:
        return json_response(list(self.requests))

    async def _show_state(self, _: web.Request) -> web.Response:
        engine = self.engine
        return json_response(
            {
                "running": engine.num_running,
                "waiting": engine.num_waiting,
                "aborted": engine.num_aborted,
                "registered": engine.identity is not None,
                "epoch": engine.epoch,
                "dram_bytes": engine.tier.used_bytes,
                "resident": list(engine.tier.residents()),
            }
        )

    # --- generation ----------------------------------------------------------------------------
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self._record(request, data)
        faulty = await answer_with_fault(self.faults)
        if faulty is not None:
            return faulty
        await self.engine.register()
        try:
            parsed = parse_request(Endpoint(request.path), data)
            self._check(parsed)
        except RequestRefused as refusal:
            return json_response(refusal.body, status=refusal.status)
        request_id = _request_id(request)
        async with self.engine.admit(parsed):
            if parsed.is_streaming:
                return await self._stream(request, parsed, request_id)
            return await self._answer_whole(request, parsed, request_id)

    def _check(self, request: GenerationRequest) -> None:
        if request.model is not None and request.model != self._settings.model:
            message = (
                f"The model `{request.model}` does not exist. "
                f"Valid aliases: {self._settings.model}."
            )
            raise RequestRefused(404, "NotFoundError", message, "model")
        # As in vLLM, the API server counts live tokens only; the engine counts virtual ones too.
        limit = self._settings.context_tokens
        if request.num_live_tokens + (request.max_tokens or 1) > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{request.max_tokens or 1} output tokens and your prompt contains "
                f"{request.num_live_tokens} input tokens. Please reduce one of them."
            )
            raise RequestRefused(400, "BadRequestError", message, "input_tokens")

    async def _answer_whole(
        self, request: web.Request, parsed: GenerationRequest, request_id: str
    ) -> web.StreamResponse:
        if self.faults.die_after_chunks is not None:
            return _abort(request, web.Response())
        try:
            generation = await self.engine.prefill(parsed)
        except VirtualPrefixFailed as failure:
            logger.info("request %s failed: %s", request_id, failure)
            return json_response(internal_error_body(), status=500)
        answer = self._answer(parsed, request_id, generation)
        await asyncio.sleep(self._settings.itl_s * (len(answer.pieces) - 1))
        return json_response(answer.whole_body())

    async def _stream(
        self, request: web.Request, parsed: GenerationRequest, request_id: str
    ) -> web.StreamResponse:
        """Stream as vLLM does: the head at once, the role with the first token.

        A failed load comes as an error event inside a stream whose status says 200.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        answer_id = _answer_id(parsed.endpoint, request_id)
        try:
            generation = await self.engine.prefill(parsed)
        except VirtualPrefixFailed as failure:
            logger.info("request %s failed: %s", request_id, failure)
            chunks = [event(internal_error_body()), DONE]
            if parsed.endpoint is Endpoint.CHAT:
                chunks.insert(0, role_event(answer_id, self._created, self._settings.model))
            for chunk in chunks:
                await response.write(chunk)
            return response
        answer = self._answer(parsed, request_id, generation)
        if parsed.endpoint is Endpoint.CHAT:
            await response.write(role_event(answer_id, answer.created, answer.model))
        num_chunks = len(answer.pieces)
        dies_after = self.faults.die_after_chunks
        for index in range(num_chunks if dies_after is None else min(dies_after, num_chunks)):
            if index > 0:
                await asyncio.sleep(self._settings.itl_s)
            await response.write(answer.content_event(index))
        if dies_after is not None:
            return _abort(request, response)
        if parsed.includes_usage:
            await response.write(answer.usage_event())
        await response.write(DONE)
        return response

    def _answer(self, request: GenerationRequest, request_id: str, made: Generation) -> Answer:
        max_pieces = min(self._settings.num_tokens, request.max_tokens or self._settings.num_tokens)
        return Answer(
            request=request,
            answer_id=_answer_id(request.endpoint, request_id),
            created=int(time.time()),
            model=self._settings.model,
            pieces=split_text(made.text, max_pieces),
            kv_transfer_params=_receipt_params(made.receipt),
        )

    def _record(self, request: web.Request, data: bytes) -> None:
        self.requests.append(
            RecordedRequest(
                path=request.path_qs,
                headers={
                    name.lower(): ", ".join(request.headers.getall(name))
                    for name in request.headers
                },
                body=data.decode("latin-1"),
            )
        )


def _abort(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Cut the connection without a proper end; the response only satisfies aiohttp."""
    if request.transport is not None:
        request.transport.abort()
    return response


def _request_id(request: web.Request) -> str:
    """The caller's request id where it can be one, as in vLLM; otherwise a random one."""
    given = request.headers.get(HEADER_REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _answer_id(endpoint: Endpoint, request_id: str) -> str:
    return f"{'chatcmpl' if endpoint is Endpoint.CHAT else 'cmpl'}-{request_id}"


def _receipt_params(receipt: Receipt | None) -> dict[str, Any] | None:
    return None if receipt is None else {FIELD_RECEIPT: msgspec.to_builtins(receipt)}


# --- command -----------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; prints `ready http://host:port` when listening."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    asyncio.run(_serve(arguments))
    return 0


async def _serve(arguments: ReplicaArguments) -> None:
    replica = SimulatedReplica(arguments.engine, host=arguments.host, port=arguments.port)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopped.set)
    url = await replica.start()
    try:
        sys.stdout.write(f"ready {url}\n")
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await replica.stop()


if __name__ == "__main__":
    sys.exit(main())
