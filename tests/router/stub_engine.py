"""An engine that says what a test tells it to: for answers that no simulated replica gives.

Owns health, the model list and a record of what it received. Refuses to know Cartridges.
"""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StubEngine:
    """A server on a loopback port; `handler` answers what is asked. The body is already read.

    While `is_hung` nothing is answered. `adapters` are listed as vLLM lists LoRA adapters of the
    model.
    """

    def __init__(self, handler: Handler, *, model: str = "sample") -> None:
        self.url = ""
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.num_open = 0
        self.adapters: list[str] = []
        self.is_hung = False
        self.lists_no_models = False
        self.gone = asyncio.Event()
        self._handler = handler
        self._model = model
        self._runner: web.AppRunner | None = None

    async def start(self, context: ssl.SSLContext | None = None) -> str:
        """Listen, with TLS if there is a context; returns the URL."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.05, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        port = self._runner.addresses[0][1]
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{port}"
        return self.url

    async def stop(self) -> None:
        """Stop listening and cut all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        if self.is_hung:
            await asyncio.Event().wait()
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        if self.lists_no_models:
            return web.json_response({"object": "list", "data": []})
        entries: list[dict[str, Any]] = [
            {"id": self._model, "object": "model", "max_model_len": 4096, "parent": None}
        ]
        entries += [
            {"id": name, "object": "model", "max_model_len": None, "parent": self._model}
            for name in self.adapters
        ]
        return web.Response(body=json.dumps({"object": "list", "data": entries}).encode())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.is_hung:
            await asyncio.Event().wait()
        self.bodies.append(await request.read())
        self.requests.append(request)
        self.num_open += 1
        try:
            return await self._handler(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise
        finally:
            self.num_open -= 1


StartStub = Callable[[Handler], Awaitable[StubEngine]]


async def answer_ok(_: web.Request) -> web.StreamResponse:
    """An empty JSON object."""
    return web.Response(body=b"{}", content_type="application/json")


async def never_answer(_: web.Request) -> web.StreamResponse:
    """Wait for ever."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


async def die_in_a_stream(request: web.Request) -> web.StreamResponse:
    """One event with a name, then a cut connection."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"event: x\ndata: 1\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response
