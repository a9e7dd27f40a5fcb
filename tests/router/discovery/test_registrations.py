"""Replicas that name themselves: by a signed lease, and for as long as it lives."""

import dataclasses

import msgspec
import pytest

from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import LocalStore
from cartridge_router.app import running_gateway
from cartridge_router.demo.stack import free_port
from cartridge_router.discovery.registrations import STAY_S, Registrations
from cartridge_router.errors import ConfigurationError
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.settings import FleetSettings, ResidencySettings, Settings
from cartridge_router.testing import FakeClock
from tests.loadtest.cartridge_requests import until
from tests.loadtest.replica_client import StartReplica, quick_settings
from tests.router.discovery.listening import Listening, running
from tests.router.gateway_client import StartGateway, quick_gateway, until_true
from tests.router.killable_redis import KillableRedis
from tests.router.stored_cartridges import put_cartridge
from tests.router.test_residency_map import registration

KEY = b"residency key of the tests"
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
URL = "http://127.0.0.1:1"
FROM_REGISTRATIONS = FleetSettings(probe_interval_s=0.05, from_registrations=True)


class Live:
    """A map and the source over it, on one clock."""

    def __init__(self) -> None:
        self.clock, self.listening = FakeClock(), Listening()
        self.map = ResidencyMap(key=None, settings=ResidencySettings(), clock=self.clock)
        self.source = Registrations(self.map, self.listening.channel, poll_s=0.01, clock=self.clock)

    def register(self, **urls: str | None) -> None:
        """A look at Redis finds these leases and no others."""
        for name, url in urls.items():
            lease = msgspec.structs.replace(registration(name, "0" * 32, 0), url=url)
            self.map.put_rows(lease, {})
        self.map.keep_only({ReplicaId(name) for name in urls})
        self.map.mark_synced()


async def test_who_says_where_it_answers_is_listed() -> None:
    """Others are not; a list that stays the same is said once."""
    live = Live()
    async with running(live.source.run):
        live.register(r0=URL, r1=None)
        await until(lambda: live.listening.lists == [{R0: URL}], "listed")
        live.register(r0="http://127.0.0.1:2", r1=None)
        await until(lambda: live.listening.lists[1:] == [{R0: "http://127.0.0.1:2"}], "moved")


def test_a_replica_stays_for_a_while_without_a_lease() -> None:
    """A Redis that lost everything takes nobody away; who does not come back leaves."""
    live = Live()
    live.register(r0=URL, r1=URL)
    live.source.look()
    live.register(r0=URL)
    live.clock.advance(STAY_S / 2)
    live.register(r0=URL)
    live.source.look()
    assert live.listening.lists == [{R0: URL, R1: URL}]
    live.clock.advance(STAY_S)
    live.register(r0=URL)
    live.source.look()
    assert live.listening.lists == [{R0: URL, R1: URL}, {R0: URL}]


def test_a_map_that_is_not_known_to_be_true_says_nothing() -> None:
    """However old it gets: with Redis away, all replicas stay."""
    live = Live()
    live.source.look()
    live.register(r0=URL)
    live.source.look()
    live.clock.advance(10 * STAY_S)
    live.source.look()
    assert live.listening.lists == [{R0: URL}]


async def test_engines_join_a_gateway_by_themselves(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    killable_redis: KillableRedis,
) -> None:
    """A gateway without a list serves them, with Cartridges, and goes on when Redis is away."""
    put_cartridge(store)
    gateway = await start_gateway(
        quick_gateway(store=store, redis_url=killable_redis.url, fleet=FROM_REGISTRATIONS), KEY
    )
    assert (await gateway.ask()).status == 503
    port = free_port()
    settings = dataclasses.replace(
        quick_settings(store, killable_redis.url),
        residency_key=KEY,
        advertise_url=f"http://127.0.0.1:{port}",
    )
    await start_replica(settings, port=port)

    async def is_healthy() -> bool:
        return (await gateway.get("/ready")).status == 200

    await until_true(is_healthy, "the engine is in the fleet")
    await gateway.has_registered("sim-0")
    reply = await gateway.ask("harbour-rules@1")
    assert (reply.status, reply.headers["x-cartridge-replica"]) == (200, "sim-0")
    killable_redis.kill()
    await gateway.has_metric("cartridge_router_residency_mode", 1, mode="degraded")
    assert (await gateway.ask()).status == 200


@pytest.mark.parametrize("signed_with", [None, b"another"])
async def test_a_forged_lease_draws_no_request(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    signed_with: bytes | None,
) -> None:
    """Without the gateway's key nobody joins; it is counted."""
    put_cartridge(store)
    gateway = await start_gateway(
        quick_gateway(store=store, redis_url=redis_url, fleet=FROM_REGISTRATIONS), KEY
    )
    port = free_port()
    settings = dataclasses.replace(
        quick_settings(store, redis_url),
        residency_key=signed_with,
        advertise_url=f"http://127.0.0.1:{port}",
    )
    client = await start_replica(settings, port=port)

    async def is_refused() -> bool:
        return await gateway.metric("cartridge_router_rejected_records_total") > 2

    await until_true(is_refused, "the lease is refused")
    assert await gateway.metric("cartridge_router_replicas") == 0
    assert (await gateway.ask()).status == 503
    assert len(client.replica.requests) == 0


async def test_an_address_counts_only_where_it_is_asked_for(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """By default a registration says what a replica can, and not where it is."""
    put_cartridge(store)
    gateway = await start_gateway(quick_gateway(store=store, redis_url=redis_url), KEY)
    settings = dataclasses.replace(
        quick_settings(store, redis_url), residency_key=KEY, advertise_url=URL
    )
    await start_replica(settings)

    await gateway.has_metric("cartridge_router_residency_mode", 1, mode="exact")
    assert await gateway.metric("cartridge_router_replicas") == 0


async def test_without_a_key_the_setting_is_refused(redis_url: str) -> None:
    """The gateway does not start: whoever writes to Redis could draw all requests."""
    settings = Settings(port=0, redis_url=redis_url, fleet=FROM_REGISTRATIONS)
    with pytest.raises(ConfigurationError, match="CARTRIDGE_ROUTER_RESIDENCY_KEY"):
        async with running_gateway(settings, None):
            raise AssertionError("it started")
