"""The gateway as a whole: what it starts it also ends."""

import asyncio

import aiohttp
import pytest
import redis
from msgspec.structs import replace

from cartridge_proto.stores import LocalStore, open_store
from cartridge_proto.stores.copying import copy_artifact
from cartridge_router import app
from cartridge_router.app import kept_running, running_gateway
from cartridge_router.selection import Selector
from cartridge_router.settings import Settings
from tests.loadtest.cartridge_requests import until
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import named, start_replicas
from tests.router.gateway_client import CHAT, Gateway, quick_gateway
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StartStub, never_answer

KEY = b"residency key of the tests"


async def test_a_gateway_that_stops_leaves_nothing(
    session: aiohttp.ClientSession, start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """No task, no Redis connection and no listener is left; a second one starts at once."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store)
    settings = quick_gateway(*named(clients), store=store, redis_url=redis_url)
    with redis.Redis.from_url(redis_url) as server:
        num_clients, tasks = len(server.client_list()), asyncio.all_tasks()
        for _ in range(2):
            async with running_gateway(settings, None) as url:
                gateway = Gateway(session, url)
                assert (await gateway.ask()).status == 200
                await gateway.has_registered()
                assert len(server.client_list()) > num_clients
            with pytest.raises(aiohttp.ClientConnectorError):
                await gateway.get("/health")
            await until(lambda: len(server.client_list()) == num_clients, "Redis is left alone")
            started = {task.get_name(): task for task in asyncio.all_tasks() - tasks}
            ours = [task for task in started.values() if "cartridge_router" in repr(task)]
            assert ours == []


async def test_a_store_may_be_a_url(
    session: aiohttp.ClientSession,
    start_replica: StartReplica,
    store: LocalStore,
    redis_url: str,
    redis_tcp_url: str,
) -> None:
    """The gateway knows what is in it, while the engine reads another store of the same bytes."""
    put_cartridge(store)
    remote = f"{redis_tcp_url}/library"
    await asyncio.to_thread(copy_artifact, store, open_store(remote), "harbour-rules@1")
    clients = await start_replicas(start_replica, 1, store, redis_url)
    settings = quick_gateway(*named(clients), redis_url=redis_url)
    async with running_gateway(replace(settings, store=remote), None) as url:
        gateway = Gateway(session, url)
        await gateway.has_registered("sim-0")
        (row,) = (await gateway.get("/v1/cartridges")).json["data"]
        assert row["id"] == "harbour-rules@1"
        assert (await gateway.ask("harbour-rules@1")).status == 200


async def test_a_store_that_is_away_costs_cartridges_only(
    session: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    """The gateway starts, and answers plain requests."""
    clients = await start_replicas(start_replica, 1, None)
    settings = replace(quick_gateway(*named(clients)), store="redis://127.0.0.1:1/0/library")
    async with running_gateway(settings, None) as url:
        gateway = Gateway(session, url)
        assert (await gateway.ask()).status == 200
        assert (await gateway.ask("harbour-rules@1")).status == 404


async def test_a_taken_port_is_an_error_and_leaves_nothing(session: aiohttp.ClientSession) -> None:
    """The second gateway on one port does not start, and the first goes on."""
    async with running_gateway(quick_gateway(), None) as url:
        port = int(url.rsplit(":", 1)[1])
        tasks = asyncio.all_tasks()
        with pytest.raises(OSError, match="in use"):
            async with running_gateway(Settings(port=port), None):
                raise AssertionError("it started")
        assert asyncio.all_tasks() <= tasks
        assert (await Gateway(session, url).get("/health")).status == 200


@pytest.mark.parametrize("keys", [(KEY, KEY), (KEY, b"another"), (None, KEY)])
async def test_records_count_only_with_the_gateway_s_key(
    session: aiohttp.ClientSession,
    start_replica: StartReplica,
    store: LocalStore,
    redis_url: str,
    keys: tuple[bytes | None, bytes],
) -> None:
    """A replica that signs with another key, or not at all, is not registered, but counted."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store, redis_url, residency_key=keys[0])
    settings = quick_gateway(*named(clients), store=store, redis_url=redis_url)
    async with running_gateway(settings, keys[1]) as url:
        gateway = Gateway(session, url)
        if keys[0] == keys[1]:
            await gateway.has_registered("sim-0")
            assert (await gateway.ask("harbour-rules@1")).status == 200
            assert await gateway.metric("cartridge_router_rejected_records_total") == 0
            return
        await gateway.has_registered()
        assert await gateway.metric("cartridge_router_rejected_records_total") > 0
        reply = await gateway.post(CHAT, {"model": "sample", "cartridge_ids": ["harbour-rules@1"]})
        assert reply.status == 503


async def test_a_busy_engine_does_not_keep_the_gateway_from_listening(
    session: aiohttp.ClientSession,
    start_stub: StartStub,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that is well and does not answer the extension's question in time is served."""
    monkeypatch.setattr(app, "FIRST_LOOK_S", 0.2)
    stub = await start_stub(never_answer)
    async with asyncio.timeout(10):
        async with running_gateway(quick_gateway(stub.url, store=store), None) as url:
            assert (await Gateway(session, url).get("/ready")).status == 200


async def test_an_unforeseen_error_is_counted_as_the_gateway_s(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the gateway is a 500, not a client that went away."""

    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(Selector, "select", fail)
    async with running_gateway(quick_gateway(), None) as url:
        gateway = Gateway(session, url)
        assert (await gateway.ask()).status == 500
        assert await gateway.metric("cartridge_router_requests_total", status="500") == 1
        assert await gateway.metric("cartridge_router_requests_total") == 1


async def test_a_job_that_fails_is_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    """An unforeseen error in the background is logged, and the job goes on."""
    runs: list[int] = []
    is_back = asyncio.Event()

    async def job() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise RuntimeError("unforeseen")
        is_back.set()

    task = asyncio.create_task(kept_running(job, pause_s=0.0))
    async with asyncio.timeout(10):
        await is_back.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "unforeseen" in caplog.text
