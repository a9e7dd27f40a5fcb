"""Replicas from Kubernetes: the ready endpoints of a Service, by its EndpointSlices.

Owns the list, the watch that follows it, and the thread for both: the official client blocks.
Refuses to go on from the middle: after every end of a watch everything is listed anew.

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/ (efficient detection of
changes), https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import kubernetes
import msgspec
import urllib3
from kubernetes.watch.watch import iter_resp_lines

from cartridge_proto.residency import ReplicaId
from cartridge_router.discovery import Channel

logger = logging.getLogger(__name__)

SERVICE_LABEL = "kubernetes.io/service-name"
WATCH_S = 60
"""The API server ends a watch after so long; a connection that died unnoticed ends with it."""
TIMEOUTS_S = (3.0, 10.0)
"""To connect; and between two reads, in a watch beyond its length."""
RETRY_S = 1.0
MAX_RETRY_S = 30.0

_ERRORS = (
    kubernetes.client.ApiException,
    kubernetes.config.ConfigException,
    urllib3.exceptions.HTTPError,
    msgspec.MsgspecError,
    OSError,
)
"""What the official client raises when the API server is away or does not answer as it should."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """Whose endpoints are replicas. `kubeconfig` is a file; `None` = this pod's own account."""

    namespace: str
    name: str
    port_name: str
    scheme: str
    kubeconfig: str | None


class _Part(msgspec.Struct, frozen=True, rename="camel"):
    """Base of what is read of the API's objects: open, since the API grows."""


class _Metadata(_Part, frozen=True):
    name: str = ""
    resource_version: str = ""


class _Target(_Part, frozen=True):
    kind: str = ""
    name: str = ""


class _Conditions(_Part, frozen=True):
    ready: bool | None = None
    """Unknown counts as ready, says the API."""


class _Endpoint(_Part, frozen=True):
    addresses: list[str] | None = None
    conditions: _Conditions = _Conditions()
    target_ref: _Target = _Target()


class _Port(_Part, frozen=True):
    name: str | None = None
    port: int | None = None


class _Slice(_Part, frozen=True):
    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(_Part, frozen=True):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Event(_Part, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(_Part, frozen=True):
    code: int = 0
    message: str = ""


class _WatchRefused(Exception):
    """The API server ended a watch with an error: mostly 410, it no longer knows from where."""


class EndpointSlices:
    """The ready endpoints of one Service, for as long as `run` does.

    A replica is named for its pod, which an engine that registers says as its `replica_id`; an
    endpoint that is no pod, by its address and port.
    """

    def __init__(self, service: Service, channel: Channel, *, retry_s: float = RETRY_S) -> None:
        self._service = service
        self._channel = channel
        self._retry_s = retry_s
        self._num_failures = 0

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                await self._follow()
            except (*_ERRORS, _WatchRefused) as error:
                text = " ".join(str(error).split())[:500]
                logger.warning("the replicas stay as they are: Kubernetes: %s", text)
                self._channel.on_failed()
                self._num_failures += 1
            pause_s = self._retry_s * 2 ** min(self._num_failures, 16)
            await asyncio.sleep(min(pause_s, MAX_RETRY_S * self._retry_s))

    async def _follow(self) -> None:
        """One list and one watch, on a thread that ends with this call."""
        loop = asyncio.get_running_loop()
        reader = _Reader(self._service, lambda urls: loop.call_soon_threadsafe(self._take, urls))
        executor = ThreadPoolExecutor(1, "endpoint-slices")
        following = loop.run_in_executor(executor, reader.follow)
        try:
            await asyncio.shield(following)
        finally:
            reader.stop()
            await asyncio.wait([following])
            # That of a watch which was shut down concerns nobody.
            following.exception()
            executor.shutdown(wait=False)

    def _take(self, urls: Mapping[ReplicaId, str]) -> None:
        self._num_failures = 0
        self._channel.on_listed(urls)


class _Reader:
    """One list and the watch after it. `follow` blocks; `stop`, from another thread, ends it."""

    def __init__(self, service: Service, say: Callable[[Mapping[ReplicaId, str]], Any]) -> None:
        self._service = service
        self._say = say
        self._watch: Any = None
        self._is_stopped = False

    def follow(self) -> None:
        """Say what is there, and again with each change, until the watch ends.

        Raises:
            _WatchRefused: by the API server, in the watch.
            Exception: one of `_ERRORS`.
        """
        with _api_client(self._service.kubeconfig) as api_client:
            api = kubernetes.client.DiscoveryV1Api(api_client)
            listed = self._list(api)
            slices = {each.metadata.name: each for each in listed.items or ()}
            self._say(replicas_of(slices, self._service))
            for event in self._events(api, listed.metadata.resource_version):
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    raise _WatchRefused(f"{status.code}: {status.message}")
                if event.type == "BOOKMARK":
                    continue
                changed = msgspec.json.decode(event.object, type=_Slice)
                if event.type == "DELETED":
                    slices.pop(changed.metadata.name, None)
                else:
                    slices[changed.metadata.name] = changed
                self._say(replicas_of(slices, self._service))

    def stop(self) -> None:
        """Let `follow` return soon. Idempotent."""
        self._is_stopped = True
        # It may be over in this moment, or not have begun.
        with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):
            self._watch.shutdown()

    def _list(self, api: Any) -> _SliceList:
        answer = self._ask(api, read_timeout_s=TIMEOUTS_S[1])
        try:
            return msgspec.json.decode(answer.data, type=_SliceList)
        finally:
            answer.release_conn()

    def _events(self, api: Any, resource_version: str) -> Iterator[_Event]:
        self._watch = self._ask(
            api,
            read_timeout_s=WATCH_S + TIMEOUTS_S[1],
            watch=True,
            resource_version=resource_version,
            timeout_seconds=WATCH_S,
        )
        try:
            # Asked to stop before there was anything to shut down.
            if not self._is_stopped:
                for line in iter_resp_lines(self._watch):
                    yield msgspec.json.decode(line, type=_Event)
        finally:
            self._watch.close()

    def _ask(self, api: Any, *, read_timeout_s: float, **fields: Any) -> Any:
        """The raw answer: the client's own models refuse a slice without endpoints, a known fault.

        Its bytes are read by whoever asked.
        """
        return api.list_namespaced_endpoint_slice(
            self._service.namespace,
            label_selector=f"{SERVICE_LABEL}={self._service.name}",
            _preload_content=False,
            _request_timeout=(TIMEOUTS_S[0], read_timeout_s),
            **fields,
        )


@contextlib.contextmanager
def _api_client(kubeconfig: str | None) -> Iterator[Any]:
    """A client with the account as it is now: tokens and certificates are renewed in place."""
    configuration = kubernetes.client.Configuration()
    # The next round is the next attempt, and says that this one failed.
    configuration.retries = False
    if kubeconfig is None:
        kubernetes.config.load_incluster_config(client_configuration=configuration)
    else:
        kubernetes.config.load_kube_config(kubeconfig, client_configuration=configuration)
    with kubernetes.client.ApiClient(configuration) as api_client:
        try:
            yield api_client
        finally:
            # Which the client itself leaves open.
            api_client.rest_client.pool_manager.clear()


def replicas_of(slices: Mapping[str, _Slice], service: Service) -> dict[ReplicaId, str]:
    """Name -> base URL of the ready endpoints; of a pod with several addresses the IPv4 one."""
    urls: dict[ReplicaId, str] = {}
    ordered = sorted(slices.values(), key=lambda each: (each.address_type, each.metadata.name))
    for each in ordered:
        port = next((p.port for p in each.ports or () if (p.name or "") == service.port_name), None)
        if port is None:
            continue
        for endpoint in each.endpoints or ():
            if endpoint.conditions.ready is False or not endpoint.addresses:
                continue
            address = endpoint.addresses[0]
            host = f"[{address}]" if ":" in address else address
            is_pod = endpoint.target_ref.kind == "Pod"
            name = endpoint.target_ref.name if is_pod else f"{address}:{port}"
            urls.setdefault(ReplicaId(name), f"{service.scheme}://{host}:{port}")
    return urls
