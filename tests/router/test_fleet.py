"""The fleet: health by probes, capability by question, and in-flight counts that come back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from aiohttp import web

from cartridge_loadtest.faults import Faults
from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import LocalStore
from cartridge_router.fleet import Fleet, Replica, ServedModel
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.roster import Source
from cartridge_router.settings import ResidencySettings
from cartridge_router.telemetry import Metrics
from tests.loadtest.cartridge_requests import until
from tests.loadtest.replica_client import MODEL, StartReplica, quick_settings
from tests.router.fleets import fleet_of
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import Handler, StartStub, answer_ok

R0, R1 = ReplicaId("r0"), ReplicaId("r1")
URL = "http://127.0.0.1:9"


def must_probe(_: ReplicaId) -> bool:
    """Nothing else tells what a replica can do."""
    return True


def only(fleet: Fleet) -> Replica:
    """The one replica."""
    (replica,) = fleet.replicas
    return replica


@contextlib.asynccontextmanager
async def watching(fleet: Fleet) -> AsyncIterator[None]:
    """Watch for as long as the block runs."""
    task = asyncio.create_task(fleet.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()


async def test_a_probe_learns_the_models(
    session: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    """A replica is unhealthy until asked; then its models and their limits are known."""
    client = await start_replica(quick_settings(None))
    fleet = fleet_of(session, {R0: client.url})
    assert not only(fleet).is_healthy
    await fleet.probe(only(fleet))
    assert only(fleet).is_healthy
    served = only(fleet).models[MODEL]
    assert (served.max_model_len, served.parent) == (8192, None)
    assert abs(served.created - time.time()) < 60


async def test_adapters_are_told_from_base_models(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """An entry with a parent is an adapter, and has the context limit of its base model."""
    stub = await start_stub(answer_ok)
    stub.adapters = ["legal"]
    fleet = fleet_of(session, {R0: stub.url})
    await fleet.probe(only(fleet))
    assert only(fleet).models == {
        "sample": ServedModel(4096),
        "legal": ServedModel(4096, parent="sample"),
    }


async def test_it_takes_several_failures_to_be_unhealthy(
    session: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    """Two bad probes are forgiven, the third is not, and one good one mends it."""
    client = await start_replica(quick_settings(None))
    fleet = fleet_of(session, {R0: client.url})
    await fleet.probe(only(fleet))
    seen = []
    for faults in [Faults(unhealthy=True)] * 3 + [Faults()]:
        client.replica.faults = faults
        await fleet.probe(only(fleet))
        seen.append(only(fleet).is_healthy)
    assert seen == [True, True, False, True]
    assert only(fleet).num_failures == 0


async def test_watching_goes_on_through_death_and_return(
    session: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    """A replica that ends is noticed, and so is the one that takes its port."""
    client = await start_replica(quick_settings(None))
    fleet = fleet_of(session, {R0: client.url})
    async with watching(fleet):
        await until(lambda: only(fleet).is_healthy, "healthy")
        await client.replica.stop()
        await until(lambda: not only(fleet).is_healthy, "unhealthy")
        await start_replica(quick_settings(None), port=int(client.url.rsplit(":", 1)[1]))
        await until(lambda: only(fleet).is_healthy, "healthy again")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"data":[{}]}', b'{"data":[{"id":"m","max_model_len":"x"}]}', b"\xff"]
)
async def test_a_model_list_that_cannot_be_read_is_a_failed_probe(
    session: aiohttp.ClientSession, body: bytes
) -> None:
    """A server that is no engine never becomes healthy, and watching it goes on."""
    asked = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fleet = fleet_of(session, {R0: f"http://127.0.0.1:{runner.addresses[0][1]}"})
        async with watching(fleet):
            await until(lambda: asked > 8, "several probes were made")
        assert not only(fleet).is_healthy
    finally:
        await runner.cleanup()


async def test_an_undelivered_request_takes_a_replica_out_until_a_probe_succeeds(
    session: aiohttp.ClientSession, start_replica: StartReplica
) -> None:
    """No traffic follows a failed connection; the next good probe lets it in again."""
    client = await start_replica(quick_settings(None))
    fleet = fleet_of(session, {R0: client.url})
    await fleet.probe(only(fleet))
    fleet.note_connect_failure(only(fleet))
    assert not only(fleet).is_healthy
    await fleet.probe(only(fleet))
    assert only(fleet).is_healthy


async def test_in_flight_counts_come_back_on_every_way_out(
    session: aiohttp.ClientSession,
) -> None:
    """Success, an error and a cancellation each give the place back."""
    fleet = fleet_of(session, {R0: URL})
    with fleet.in_flight(only(fleet)), fleet.in_flight(only(fleet)):
        assert only(fleet).num_in_flight == 2
    with pytest.raises(RuntimeError), fleet.in_flight(only(fleet)):
        raise RuntimeError

    async def wait() -> None:
        with fleet.in_flight(only(fleet)):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await until(lambda: only(fleet).num_in_flight == 1, "in flight")
    task.cancel()
    await asyncio.wait([task])
    assert only(fleet).num_in_flight == 0


# --- replicas that come and go -------------------------------------------------------------------
async def test_a_replica_that_joins_is_probed_at_once(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """While the fleet is watched; nothing is asked of one that was removed."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    fleet = fleet_of(session, {R0: stubs[0].url})
    async with watching(fleet):
        await until(lambda: only(fleet).is_healthy, "the first is healthy")
        fleet.add(R1, stubs[1].url)
        await until(lambda: all(r.is_healthy for r in fleet.replicas), "both are healthy")
        fleet.remove(R0)
        assert only(fleet).replica == R1
        assert tasks_named("probe r1")
        await until(lambda: not tasks_named("probe r0"), "the probes have ended")
        fleet.add(R0, stubs[0].url)
        assert [replica.is_healthy for replica in fleet.replicas] == [True, False]
        await until(lambda: all(r.is_healthy for r in fleet.replicas), "both are healthy again")


def tasks_named(name: str) -> list[asyncio.Task[object]]:
    """Those that run."""
    return [task for task in asyncio.all_tasks() if task.get_name() == name]


async def test_a_removed_replica_is_there_until_its_last_request_ends(
    session: aiohttp.ClientSession,
) -> None:
    """It is none of those that may be asked; then it is gone, and said to be."""
    gone: list[ReplicaId] = []
    fleet = fleet_of(session, {R0: URL}, on_gone=gone.append)
    replica = only(fleet)
    with fleet.in_flight(replica):
        with fleet.in_flight(replica):
            fleet.remove(R0)
            assert (fleet.replicas, fleet.leaving, fleet.find(R0)) == ([], [replica], None)
        assert (fleet.leaving, gone) == ([replica], [])
    assert (fleet.leaving, gone) == ([], [R0])


async def test_the_same_name_at_another_address_is_another_replica(
    session: aiohttp.ClientSession,
) -> None:
    """Nothing that was known is believed of it; the name's rows stay, since it is still there."""
    gone: list[ReplicaId] = []
    fleet = fleet_of(session, {R0: URL}, on_gone=gone.append)
    before = only(fleet)
    before.is_healthy = True
    for _ in range(1000):
        fleet.outliers.note_failure(R0)
    with fleet.in_flight(before):
        fleet.set_all(Source.SETTINGS, {R0: "http://127.0.0.1:10"})
        assert (only(fleet).is_healthy, only(fleet).num_in_flight) == (False, 0)
        assert fleet.leaving == [before]
        fleet.note_connect_failure(before)
        fleet.outliers.note_failure(R0)
    assert (fleet.leaving, gone) == ([], [])


async def test_a_list_that_stays_the_same_changes_nothing(session: aiohttp.ClientSession) -> None:
    """What is known of replicas is kept; another source may take them over."""
    fleet = fleet_of(session, {R0: URL})
    replica = only(fleet)
    fleet.set_all(Source.SETTINGS, {R0: URL})
    fleet.set_all(Source.DNS, {R0: URL})
    fleet.set_all(Source.SETTINGS, {})
    assert only(fleet) is replica
    assert replica.source is Source.DNS


async def test_rows_of_a_replica_that_is_gone_go(session: aiohttp.ClientSession) -> None:
    """In flight they are still counted; afterwards no metric has the name."""
    metrics = Metrics()
    fleet = fleet_of(session, {R0: URL, R1: "http://127.0.0.1:10"}, on_gone=metrics.forget)
    residency = ResidencyMap(
        key=None, settings=ResidencySettings(stale_after_s=1.0, fallback_after_s=1.0)
    )
    metrics.ejections.labels(R0).inc()
    replica = fleet.replicas[0]
    with fleet.in_flight(replica):
        fleet.remove(R0)
        metrics.broken_answers.labels(R0).inc()
        text = metrics.render(fleet, residency, {}).decode()
        assert 'cartridge_router_in_flight{replica="r0"} 1.0' in text
        assert 'cartridge_router_replica_healthy{replica="r0"}' not in text
        assert 'cartridge_router_replicas{source="settings"} 1.0' in text
    text = metrics.render(fleet, residency, {}).decode()
    assert 'replica="r0"' not in text
    assert 'cartridge_router_in_flight{replica="r1"} 0.0' in text


# --- does it have the extension ------------------------------------------------------------------
@pytest.mark.parametrize("has_store", [True, False])
async def test_the_question_tells_engines_with_the_extension_from_stock_ones(
    session: aiohttp.ClientSession, start_replica: StartReplica, store: LocalStore, has_store: bool
) -> None:
    """An engine that ignores Cartridges in silence is found out, and never asked for nothing."""
    put_cartridge(store)
    client = await start_replica(quick_settings(store if has_store else None))
    silent = fleet_of(session, {R0: client.url})
    await silent.probe(only(silent))
    assert only(silent).has_extension is None
    fleet = fleet_of(session, {R0: client.url}, must_probe_extension=must_probe)
    await fleet.probe(only(fleet))
    assert only(fleet).has_extension is has_store
    num_asked = len(client.replica.requests)
    await fleet.probe(only(fleet))
    assert len(client.replica.requests) == num_asked


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_an_engine_that_refuses_everything_has_not_shown_the_extension(
    session: aiohttp.ClientSession, start_stub: StartStub, status: int
) -> None:
    """A stock engine that is busy or wants a key must not pass for one with the extension."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    stub = await start_stub(refuse)
    fleet = fleet_of(session, {R0: stub.url}, must_probe_extension=must_probe)
    await fleet.probe(only(fleet))
    assert only(fleet).is_healthy
    assert only(fleet).has_extension is None


async def test_an_engine_that_breaks_off_the_question_is_well_all_the_same(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Health is what `/health` says; a question without an answer teaches nothing."""

    async def break_off(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    stub = await start_stub(break_off)
    fleet = fleet_of(session, {R0: stub.url}, must_probe_extension=must_probe)
    for _ in range(4):
        await fleet.probe(only(fleet))
        assert (only(fleet).is_healthy, only(fleet).num_failures) == (True, 0)
    assert only(fleet).has_extension is None


async def test_capability_is_asked_again_after_a_restart(
    session: aiohttp.ClientSession, start_replica: StartReplica, store: LocalStore
) -> None:
    """A stock engine that takes the place of one with the extension is noticed."""
    put_cartridge(store)
    client = await start_replica(quick_settings(store))
    fleet = fleet_of(session, {R0: client.url}, must_probe_extension=must_probe)
    async with watching(fleet):
        await until(lambda: only(fleet).has_extension is True, "has the extension")
        await client.replica.stop()
        await until(lambda: not only(fleet).is_healthy, "unhealthy")
        assert only(fleet).has_extension is None
        await start_replica(quick_settings(None), port=int(client.url.rsplit(":", 1)[1]))
        await until(lambda: only(fleet).has_extension is False, "has none")


async def test_the_question_asks_for_one_token_without_a_text(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """What an engine is asked costs it one token of prefill and one of decoding."""
    handler: Handler = answer_ok
    stub = await start_stub(handler)
    fleet = fleet_of(session, {R0: stub.url}, must_probe_extension=must_probe)
    await fleet.probe(only(fleet))
    for body in stub.bodies:
        asked = msgspec.json.decode(body)
        assert (asked["prompt"], asked["max_tokens"]) == ([0], 1)
    assert stub.bodies
    assert only(fleet).has_extension is False
