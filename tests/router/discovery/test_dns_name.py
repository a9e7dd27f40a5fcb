"""Replicas from DNS: every address is one, and no answer is no news."""

import socket

import pytest

from cartridge_router.discovery.dns_name import DnsName, resolve_by_system
from cartridge_router.settings import FleetSettings
from tests.loadtest.cartridge_requests import until
from tests.router.discovery.listening import Listening, running
from tests.router.gateway_client import StartGateway, quick_gateway, until_true
from tests.router.stub_engine import StartStub, answer_ok


class FakeResolver:
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.error: OSError | None = None

    async def __call__(self, host: str, port: int) -> list[str]:
        """Of `engines`, port 8001."""
        assert (host, port) == ("engines", 8001)
        if self.error is not None:
            raise self.error
        return self.addresses


async def test_every_address_is_a_replica() -> None:
    """IPv4 and IPv6, each once, whatever the order; addresses of one machine only are none."""
    resolver, listening = FakeResolver(), Listening()
    resolver.addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1", "fe80::1%eth0"]
    source = DnsName("https://engines:8001", listening.channel, refresh_s=0.01, resolve=resolver)
    async with running(source.run):
        await until(lambda: len(listening.lists) > 2, "asked again")
        assert listening.lists[-1] == {
            "10.0.0.1:8001": "https://10.0.0.1:8001",
            "10.0.0.2:8001": "https://10.0.0.2:8001",
            "fd00::1:8001": "https://[fd00::1]:8001",
        }
        resolver.addresses = ["10.0.0.3"]
        changed = {"10.0.0.3:8001": "https://10.0.0.3:8001"}
        await until(lambda: listening.lists[-1] == changed, "followed")


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_AGAIN, "SERVFAIL"),
        socket.gaierror(socket.EAI_NONAME, "NXDOMAIN"),
        TimeoutError(),
    ],
)
async def test_without_an_answer_the_replicas_stay(error: OSError) -> None:
    """Whatever the reason; it is counted, and the next answer is followed."""
    resolver, listening = FakeResolver(), Listening()
    resolver.addresses = ["10.0.0.1"]
    source = DnsName("http://engines:8001", listening.channel, refresh_s=0.01, resolve=resolver)
    async with running(source.run):
        await until(lambda: bool(listening.lists), "resolved")
        resolver.error = error
        await until(lambda: listening.num_failures > 2, "asked again and again")
        known = len(listening.lists)
        resolver.error, resolver.addresses = None, []
        await until(lambda: len(listening.lists) > known, "answered again")
    assert listening.lists[0] == {"10.0.0.1:8001": "http://10.0.0.1:8001"}
    assert listening.lists[-1] == {}


async def test_the_system_resolves() -> None:
    """Names, and addresses as they are."""
    assert "127.0.0.1" in await resolve_by_system("localhost", 80)
    assert await resolve_by_system("127.0.0.9", 80) == ["127.0.0.9"]
    with pytest.raises(socket.gaierror):
        await resolve_by_system("no-such-name.invalid", 80)


async def test_a_gateway_follows_a_name(start_stub: StartStub, start_gateway: StartGateway) -> None:
    """The replica is named by its address and port."""
    stub = await start_stub(answer_ok)
    port = stub.url.rsplit(":", 1)[1]
    fleet = FleetSettings(probe_interval_s=0.05, dns=f"http://localhost:{port}")
    gateway = await start_gateway(quick_gateway(fleet=fleet))

    async def is_ready() -> bool:
        return (await gateway.get("/ready")).status == 200

    await until_true(is_ready, "a replica is healthy")
    reply = await gateway.ask()
    assert (reply.status, reply.headers["x-cartridge-replica"]) == (200, f"127.0.0.1:{port}")
