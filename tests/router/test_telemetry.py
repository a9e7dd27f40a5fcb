"""What is measured: counters move with requests, and labels never come from a client."""

from prometheus_client.parser import text_string_to_metric_families

from cartridge_proto.stores import LocalStore
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import named, start_fleet, start_replicas
from tests.router.gateway_client import CHAT, TEXT, StartGateway, quick_gateway
from tests.router.stored_cartridges import flip_a_bit, put_cartridge


async def test_requests_are_counted_by_route_status_and_selection(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Served, unknown and malformed requests each have their own count."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    await gateway.ask("harbour-rules@1")
    await gateway.ask()
    await gateway.ask("absent@1")
    await gateway.post_bytes(TEXT, b"{")
    await gateway.ask(path="/v1/embeddings", model="absent")
    name = "cartridge_router_requests_total"
    for labels in (
        {"route": CHAT, "status": "200", "selection": "explicit"},
        {"route": CHAT, "status": "200", "selection": "none"},
        {"route": CHAT, "status": "404", "selection": "unknown"},
        {"route": TEXT, "status": "400", "selection": "unknown"},
        {"route": "other", "status": "404", "selection": "none"},
    ):
        assert await gateway.metric(name, **labels) == 1, labels
    assert await gateway.metric(name) == 5
    assert await gateway.metric("cartridge_router_request_seconds_count", route=CHAT) == 3
    assert await gateway.metric("cartridge_router_overhead_seconds_count") == 2
    first_byte = "cartridge_router_time_to_first_byte_seconds_count"
    assert await gateway.metric(first_byte, tier="remote") == 1
    assert await gateway.metric(first_byte, tier="none") == 1


async def test_receipts_and_mispredictions_are_counted(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """A request whose artifact was faster to have than predicted is a misprediction."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    await gateway.ask("harbour-rules@1")
    await gateway.has_metric("cartridge_router_receipts_total", 1, status="served")
    name = "cartridge_router_tier_mispredictions_total"
    assert await gateway.metric(name) == 0
    # The row is withdrawn behind the engine's back: predicted remote, served from dram.
    clients[0].replica.engine._publisher.withdraw(store.resolve("harbour-rules@1"))  # type: ignore[union-attr]
    await gateway.has_residents("harbour-rules@1", {})
    await gateway.ask("harbour-rules@1")
    await gateway.has_metric(name, 1, predicted="remote", served="dram")


async def test_failed_receipts_are_counted_apart(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """A corrupt artifact shows as a failed receipt and a 503."""
    flip_a_bit(store, put_cartridge(store))
    clients = await start_replicas(start_replica, 1, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    before = await gateway.metric("cartridge_router_receipts_total", status="failed")
    assert (await gateway.ask("harbour-rules@1")).status == 503
    after = await gateway.metric("cartridge_router_receipts_total", status="failed")
    assert after - before == 1
    assert await gateway.metric("cartridge_router_requests_total", status="503") == 1


async def test_the_state_of_fleet_and_map_is_exported(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """Health, in-flight counts, the map's mode and its age (-1 = never read)."""
    clients = await start_replicas(start_replica, 1, None)
    gateway = await start_gateway(quick_gateway(*named(clients), "gone=http://127.0.0.1:9"))
    assert await gateway.metric("cartridge_router_replica_healthy", replica="sim-0") == 1
    assert await gateway.metric("cartridge_router_replica_healthy", replica="gone") == 0
    modes = [
        await gateway.metric("cartridge_router_residency_mode", mode=mode)
        for mode in ("exact", "degraded", "fallback")
    ]
    assert modes == [0, 0, 1]
    assert await gateway.metric("cartridge_router_residency_age_seconds") == -1


async def test_no_label_comes_from_a_client(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """Odd models, paths and ids do not grow the number of series."""
    clients = await start_replicas(start_replica, 1, None)
    gateway = await start_gateway(quick_gateway(*named(clients)))
    for index in range(3):
        await gateway.ask(model=f"made-up-{index}")
        await gateway.ask(path=f"/v1/made-up-{index}")
        await gateway.ask(f"made-up-{index}@1")
    text = (await gateway.get("/metrics")).body.decode()
    assert "made-up" not in text
    assert len(list(text_string_to_metric_families(text))) >= 8
