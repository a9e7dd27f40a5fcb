"""An API server that knows EndpointSlices, and how to fail: list, watch, 410, ends in the middle.

Owns a listener on loopback and a kubeconfig for it. Refuses everything else that Kubernetes has.

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

NAMESPACE, SERVICE, TOKEN = "inference", "engines", "token of the tests"


def endpoint(address: str, pod: str | None = None, *, is_ready: bool | None = True) -> Any:
    """One endpoint of a slice."""
    target = {} if pod is None else {"targetRef": {"kind": "Pod", "name": pod, "uid": "u"}}
    return {"addresses": [address], "conditions": {"ready": is_ready}, **target}


def slice_of(name: str, *endpoints: Any, kind: str = "IPv4", port: int | None = 8001) -> Any:
    """A slice as the API server sends it; without endpoints they are null."""
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {}},
        "addressType": kind,
        "endpoints": list(endpoints) or None,
        "ports": [
            {"name": "metrics", "port": 9, "protocol": "TCP"},
            {"name": "http", "port": port},
        ],
    }


class FakeApiServer:
    """Lists `slices` and streams their changes to all watches.

    `lists` and `watches` count; `watched_from` are the versions that watches began at.
    """

    def __init__(self) -> None:
        self.slices: dict[str, Any] = {}
        self.version = 100
        self.num_lists = 0
        self.watched_from: list[str] = []
        self.list_status = 200
        self.watch_status = 200
        self._watches: list[tuple[web.StreamResponse, web.Request, asyncio.Event]] = []
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, port: int = 0) -> None:
        """Listen."""
        app = web.Application()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
        app.router.add_get(path, self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Go away, with all watches."""
        self.break_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def write_kubeconfig(self, folder: Path) -> str:
        """A kubeconfig for this server; returns its path."""
        user = {"name": "gateway", "user": {"token": TOKEN}}
        cluster = {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "gateway"}}
        file = folder / "kubeconfig"
        content = {"users": [user], "clusters": [cluster], "contexts": [context]}
        file.write_text(yaml.safe_dump({**content, "current-context": "fake"}))
        return str(file)

    @property
    def num_watches(self) -> int:
        """Watches that run."""
        return len(self._watches)

    async def put(self, each: Any) -> None:
        """Add or replace a slice."""
        name = each["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = each
        await self.send(kind, each)

    async def delete(self, name: str) -> None:
        """Remove a slice."""
        await self.send("DELETED", self.slices.pop(name))

    async def send(self, kind: str, each: Any) -> None:
        """One event to all watches."""
        self.version += 1
        each["metadata"] = {**each.get("metadata", {}), "resourceVersion": str(self.version)}
        for response, *_ in self._watches:
            await response.write(json.dumps({"type": kind, "object": each}).encode() + b"\n")

    def end_watches(self) -> None:
        """End all watches properly, as a server does after their time."""
        for *_, is_over in self._watches:
            is_over.set()

    def break_watches(self) -> None:
        """Cut all watches in the middle of an event."""
        for _, request, is_over in self._watches:
            if request.transport is not None:
                request.transport.write(b'20\r\n{"type": "MODIF')
                request.transport.close()
            is_over.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        assert request.query["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
        if "watch" in request.query:
            return await self._watch(request)
        self.num_lists += 1
        if self.list_status != 200:
            return web.json_response({"kind": "Status"}, status=self.list_status)
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"metadata": metadata, "items": list(self.slices.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert 0 < int(request.query["timeoutSeconds"]) < 300
        self.watched_from.append(request.query["resourceVersion"])
        if self.watch_status != 200:
            return web.json_response({"kind": "Status"}, status=self.watch_status)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        entry = (response, request, asyncio.Event())
        self._watches.append(entry)
        try:
            await entry[2].wait()
        finally:
            self._watches.remove(entry)
        return response
