"""Fleets: bare ones, and whole ones of simulated replicas with one store and one Redis.

Owns how replicas are named and joined. Refuses to judge answers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import aiohttp

from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import LocalStore
from cartridge_router.fleet import Fleet
from cartridge_router.roster import Source
from cartridge_router.settings import EngineSettings, FleetSettings
from cartridge_router.tls import EngineLogin
from tests.loadtest.replica_client import Client, StartReplica, quick_settings
from tests.router.gateway_client import Gateway, StartGateway, quick_gateway


def fleet_of(session: aiohttp.ClientSession, urls: Mapping[ReplicaId, str], **fields: Any) -> Fleet:
    """A fleet of these replicas, probed often, unhealthy after three failed probes.

    Nobody is ejected or suspected within a test.
    """
    settings: dict[str, Any] = {
        "settings": FleetSettings(
            probe_interval_s=0.02,
            probe_timeout_s=5.0,
            num_failures=3,
            num_request_failures=1000,
            suspect_after_s=60.0,
        ),
        "login": EngineLogin(EngineSettings()),
    }
    fleet = Fleet(session=session, **(settings | fields))
    fleet.set_all(Source.SETTINGS, urls)
    return fleet


async def start_replicas(
    start_replica: StartReplica,
    count: int,
    store: LocalStore | None,
    redis_url: str | None = None,
    **fields: Any,
) -> list[Client]:
    """Replicas `sim-0`, `sim-1`, …; `fields` replace engine settings."""
    return [
        await start_replica(
            dataclasses.replace(
                quick_settings(store, redis_url), replica=ReplicaId(f"sim-{index}"), **fields
            )
        )
        for index in range(count)
    ]


def named(clients: list[Client]) -> list[str]:
    """The replicas as the gateway's settings name them."""
    return [f"sim-{index}={client.url}" for index, client in enumerate(clients)]


async def start_fleet(
    start_gateway: StartGateway,
    clients: list[Client],
    store: LocalStore,
    redis_url: str,
    **fields: Any,
) -> Gateway:
    """A gateway that already knows the registration of every replica."""
    gateway = await start_gateway(
        quick_gateway(*named(clients), store=store, redis_url=redis_url, **fields)
    )
    await gateway.has_registered(*(f"sim-{index}" for index in range(len(clients))))
    return gateway
