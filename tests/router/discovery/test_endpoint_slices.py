"""Replicas from Kubernetes: what its API server says, through everything that befalls a watch."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cartridge_router.app import running_gateway
from cartridge_router.discovery.endpoint_slices import EndpointSlices, Service
from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import FleetSettings, KubernetesSettings, Settings
from tests.loadtest.cartridge_requests import until
from tests.router.discovery.fake_api_server import (
    NAMESPACE,
    SERVICE,
    FakeApiServer,
    endpoint,
    slice_of,
)
from tests.router.discovery.listening import Listening, running
from tests.router.gateway_client import StartGateway, quick_gateway, until_true
from tests.router.stub_engine import StartStub, answer_ok

TWO = {"engine-0": "http://10.0.0.1:8001", "engine-1": "http://10.0.0.2:8001"}


@pytest.fixture
async def api() -> AsyncIterator[FakeApiServer]:
    """An API server with one slice of two pods."""
    server = FakeApiServer()
    await server.start()
    pods = [endpoint("10.0.0.1", "engine-0"), endpoint("10.0.0.2", "engine-1")]
    await server.put(slice_of("a", *pods))
    yield server
    await server.stop()


@pytest.fixture
def listening() -> Listening:
    """What the source says."""
    return Listening()


@pytest.fixture
def source(api: FakeApiServer, listening: Listening, tmp_path: Path) -> EndpointSlices:
    """The source, which tries again at once."""
    service = Service(
        namespace=NAMESPACE,
        name=SERVICE,
        port_name="http",
        scheme="http",
        kubeconfig=api.write_kubeconfig(tmp_path),
    )
    return EndpointSlices(service, listening.channel, retry_s=0.01)


async def is_watched(api: FakeApiServer) -> None:
    """Wait for a watch."""
    await until(lambda: api.num_watches == 1, "watched")


async def test_ready_endpoints_are_replicas(
    api: FakeApiServer, listening: Listening, source: EndpointSlices
) -> None:
    """Of all slices of the service; each change is followed in one watch, from the list on."""
    async with running(source.run):
        await is_watched(api)
        assert (listening.lists[-1], api.watched_from) == (TWO, ["101"])
        not_ready = endpoint("10.0.0.2", "engine-1", is_ready=False)
        await api.put(slice_of("a", endpoint("10.0.0.1", "engine-0"), not_ready))
        await until(lambda: list(listening.lists[-1]) == ["engine-0"], "not ready is out")
        await api.put(slice_of("b", endpoint("10.0.1.1", is_ready=None)))
        await until(lambda: "10.0.1.1:8001" in listening.lists[-1], "a second slice")
        await api.send("BOOKMARK", {})
        await api.put(slice_of("a"))
        await until(lambda: list(listening.lists[-1]) == ["10.0.1.1:8001"], "emptied")
        await api.delete("b")
        await until(lambda: listening.lists[-1] == {}, "deleted")
    assert (api.num_lists, len(api.watched_from), listening.num_failures) == (1, 1, 0)


async def test_of_two_addresses_of_a_pod_one_is_used(
    api: FakeApiServer, listening: Listening, source: EndpointSlices
) -> None:
    """IPv4 first, IPv6 where there is no other; without the named port there is none."""
    await api.put(slice_of("0", endpoint("fd00::1", "engine-0"), kind="IPv6"))
    await api.put(slice_of("1", endpoint("fd00::3", "engine-3"), kind="IPv6"))
    await api.put(slice_of("2", endpoint("10.0.0.9", "engine-9"), port=None))
    async with running(source.run):
        await is_watched(api)
    assert listening.lists == [TWO | {"engine-3": "http://[fd00::3]:8001"}]


async def test_after_every_end_of_a_watch_all_is_listed_anew(
    api: FakeApiServer, listening: Listening, source: EndpointSlices
) -> None:
    """A proper end is no failure, a broken one is; what changed in between is seen."""
    async with running(source.run):
        await is_watched(api)
        api.end_watches()
        await until(lambda: api.num_lists == 2 and api.num_watches == 1, "listed and watched again")
        assert listening.num_failures == 0
        # Not told to any watch: only a list can show it.
        api.slices["c"] = slice_of("c", endpoint("10.0.0.3", "engine-2"))
        api.break_watches()
        await until(lambda: api.num_lists == 3 and api.num_watches == 1, "once more")
        assert listening.num_failures == 1
        assert set(listening.lists[-1]) == {"engine-0", "engine-1", "engine-2"}


async def test_a_version_that_is_gone_is_listed_anew(
    api: FakeApiServer, listening: Listening, source: EndpointSlices
) -> None:
    """410 in the watch or as its answer: the replicas stay, and the next list is believed."""
    async with running(source.run):
        await is_watched(api)
        gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
        await api.send("ERROR", gone)
        await until(lambda: api.num_lists == 2, "listed again")
        api.watch_status = 410
        api.end_watches()
        await until(lambda: listening.num_failures >= 3, "refused again and again")
        assert listening.lists[-1] == TWO
        api.watch_status = 200
        await is_watched(api)
    assert all(each == TWO for each in listening.lists)


@pytest.mark.parametrize("status", [403, 500])
async def test_an_api_server_that_is_away_takes_nobody_away(
    status: int, api: FakeApiServer, listening: Listening, source: EndpointSlices
) -> None:
    """It refuses, it is gone, it comes back: the last list stays until there is a new one."""
    async with running(source.run):
        await is_watched(api)
        api.list_status = status
        api.end_watches()
        await until(lambda: listening.num_failures >= 2, "refused")
        port = api.port
        await api.stop()
        known = listening.num_failures
        await until(lambda: listening.num_failures >= known + 2, "unreachable")
        assert all(each == TWO for each in listening.lists)
        api.list_status = 200
        api.slices["a"] = slice_of("a", endpoint("10.0.0.7", "engine-7"))
        await api.start(port)
        await until(lambda: list(listening.lists[-1]) == ["engine-7"], "back")


async def test_nothing_is_left_of_a_source_that_was_cancelled(
    api: FakeApiServer, source: EndpointSlices
) -> None:
    """A watch in which nothing happens ends at once, and its thread with it."""
    async with asyncio.timeout(5):  # the watch would go on for a minute
        async with running(source.run):
            await is_watched(api)

    def has_thread() -> bool:
        return any(each.name.startswith("endpoint-slices") for each in threading.enumerate())

    await until(lambda: not has_thread(), "the thread has ended")
    await until(lambda: api.num_watches == 0, "the connection is closed")


async def test_a_gateway_follows_a_service(
    api: FakeApiServer, start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """Requests go to its ready pods; one that is not ready any more gets none."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    ports = [int(stub.url.rsplit(":", 1)[1]) for stub in stubs]
    pods = [endpoint("127.0.0.1", f"engine-{index}") for index in range(2)]
    await api.delete("a")
    for index in range(2):
        await api.put(slice_of(f"s{index}", pods[index], port=ports[index]))
    kubernetes = KubernetesSettings(
        service=SERVICE, namespace=NAMESPACE, kubeconfig=api.write_kubeconfig(tmp_path)
    )
    fleet = FleetSettings(probe_interval_s=0.05, kubernetes=kubernetes)
    gateway = await start_gateway(quick_gateway(fleet=fleet))

    async def serve(*names: str) -> None:
        async def is_so() -> bool:
            healthy: list[str] = (await gateway.get("/ready")).json["replicas"]["healthy"]
            return healthy == list(names)

        await until_true(is_so, f"{names} are healthy")

    await serve("engine-0", "engine-1")
    await api.put(slice_of("s0", endpoint("127.0.0.1", "engine-0", is_ready=False), port=ports[0]))
    await serve("engine-1")
    assert {(await gateway.ask()).headers["x-cartridge-replica"] for _ in range(3)} == {"engine-1"}
    assert await gateway.metric("cartridge_router_replicas", source="kubernetes") == 1


async def test_outside_of_a_cluster_the_failure_is_counted(start_gateway: StartGateway) -> None:
    """Without a kubeconfig a pod's own account is taken, and there is none here."""
    fleet = FleetSettings(kubernetes=KubernetesSettings(service=SERVICE, namespace=NAMESPACE))
    gateway = await start_gateway(quick_gateway(fleet=fleet))
    await gateway.has_metric("cartridge_router_discovery_failures_total", 1, source="kubernetes")


async def test_without_the_client_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway does not start, and says what to install."""
    monkeypatch.setitem(sys.modules, "cartridge_router.discovery.endpoint_slices", None)
    fleet = FleetSettings(kubernetes=KubernetesSettings(service=SERVICE, namespace=NAMESPACE))
    with pytest.raises(ConfigurationError, match=r"cartridge-router\[kubernetes\]"):
        async with running_gateway(Settings(port=0, fleet=fleet), None):
            raise AssertionError("it started")
