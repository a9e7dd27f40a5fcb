"""Whole fleets for functional tests: simulated replicas with one store and one Redis.

Owns how replicas are named and joined. Refuses to judge answers.
"""

import dataclasses
from typing import Any

from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import LocalStore
from cartridge_router.outliers import Outliers
from tests.loadtest.replica_client import Client, StartReplica, quick_settings
from tests.router.gateway_client import Gateway, StartGateway, quick_gateway


def no_outliers() -> Outliers:
    """Nobody is ejected or suspected within a test."""
    return Outliers(num_failures=1000, ejection_s=1.0, suspect_after_s=60.0)


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
