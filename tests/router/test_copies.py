"""Copies of hot Cartridges, over real control services: who is asked for what, and who never is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from cartridge_engine_ext.control_access import ControlAccess, ControlTls
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.names import CONTROL_OWNER, ENV_CONTROL_TOKEN, METRIC_COPIES
from cartridge_proto.residency import Registration, ReplicaId, ResidencyRecord, ResidencyState, Tier
from cartridge_proto.stores import LocalStore
from cartridge_router.app import running_gateway
from cartridge_router.catalog import Catalog
from cartridge_router.copies import (
    MAX_PAUSE_S,
    ControlLogin,
    Copies,
    Handover,
    _reachable,
    read_control_login,
)
from cartridge_router.errors import ConfigurationError
from cartridge_router.fleet import Fleet
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.settings import (
    AdminSettings,
    ReplicationSettings,
    ResidencySettings,
    Settings,
    load_settings,
)
from tests.proto.sample_artifact import engine_of
from tests.router.controlled_engines import (
    ControlledEngine,
    StartEngine,
    controlled_engines,
    receipt_for,
)
from tests.router.fleets import fleet_of
from tests.router.gateway_client import Gateway, StartGateway, quick_gateway, until_true
from tests.router.stored_cartridges import digest_of, put_cartridge
from tests.router.stub_engine import StartStub, answer_ok
from tests.trust import make_authority

KEY = b"k" * 32
TOKEN = "0123456789abcdef-control"
ASKED = f"{METRIC_COPIES}_total"
QUICK = ReplicationSettings(enabled=True, interval_s=0.05, rate_window_s=10.0)
MANY = 60
"""Requests in a moment that make an artifact hot."""


@pytest.fixture
def manifests(store: LocalStore) -> list[Manifest]:
    """Three Cartridges of one model."""
    return [put_cartridge(store, f"document-{n}", seed=n, num_tokens=5 + n) for n in range(3)]


@pytest.fixture
def digests(manifests: list[Manifest]) -> list[Digest]:
    """What they are known by."""
    return [digest_of(manifest) for manifest in manifests]


@pytest.fixture
async def start_engine(store: LocalStore, manifests: list[Manifest]) -> AsyncIterator[StartEngine]:
    """Start engines with a control service."""
    async with controlled_engines(store, engine_of(manifests[0])) as start:
        yield start


# --- a whole gateway -----------------------------------------------------------------------------
async def start_pair(
    start_engine: StartEngine,
    start_stub: StartStub,
    redis_url: str,
    *,
    key: bytes | None = KEY,
    access: ControlAccess | None = None,
) -> tuple[ControlledEngine, ControlledEngine, list[str]]:
    """Two engines that publish, and the gateway's list of them."""
    how = {"redis_url": redis_url, "key": key, "access": access or ControlAccess(TOKEN)}
    one = await asyncio.to_thread(start_engine, "r0", **how)
    two = await asyncio.to_thread(start_engine, "r1", **how)
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    return one, two, [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]


async def has_heard(gateway: Gateway, count: int) -> None:
    """Wait until so many receipts have come."""
    await gateway.has_metric("cartridge_router_receipts_total", count, status="served")


async def test_a_hot_artifact_is_copied_and_a_cold_one_is_not(
    start_engine: StartEngine,
    start_stub: StartStub,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    digests: list[Digest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica without the hot one is asked to bring it, with a hint, and then has it."""
    monkeypatch.setenv(ENV_CONTROL_TOKEN, TOKEN)
    hot, cold, _ = digests
    one, two, listed = await start_pair(start_engine, start_stub, redis_url)
    await asyncio.to_thread(one.hold, hot, cold)
    gateway = await start_gateway(
        quick_gateway(*listed, store=store, redis_url=redis_url, replication=QUICK), KEY
    )
    await gateway.has_registered("r0", "r1")
    one.serve(cold, 1)
    one.serve(hot, MANY)
    await gateway.has_residents("document-0@1", {"r0": "dram", "r1": "dram"})
    assert two.prefetched == {hot}
    assert one.prefetched == set()
    call = two.calls.prefetches[0]
    assert call.no_wait
    assert 1 <= call.priority < 100
    assert call.HasField("expected_in_ms")
    assert await gateway.metric(ASKED, action="prefetch", outcome="ok") >= 1


async def test_a_replica_that_leaves_hands_its_hot_set_over(
    start_engine: StartEngine,
    start_stub: StartStub,
    store: LocalStore,
    redis_url: str,
    session: aiohttp.ClientSession,
    digests: list[Digest],
    unused_tcp_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is asked for and lies nowhere else goes to the other; operators see how far it is."""
    monkeypatch.setenv(ENV_CONTROL_TOKEN, TOKEN)
    one, two, listed = await start_pair(start_engine, start_stub, redis_url)
    await asyncio.to_thread(one.hold, *digests)
    settings = quick_gateway(
        *listed,
        store=store,
        redis_url=redis_url,
        replication=QUICK,
        admin=AdminSettings(port=unused_tcp_port),
    )
    async with running_gateway(settings, KEY) as url:
        gateway = Gateway(session, url)
        operators = Gateway(session, f"http://127.0.0.1:{unused_tcp_port}")
        await gateway.has_registered("r0", "r1")
        await gateway.has_residents("document-0@1", {"r0": "dram"})
        for digest in digests[:2]:
            one.serve(digest, 2)
        await has_heard(gateway, 4)
        # Each is asked for too seldom to need a second copy while the first one stays.
        assert two.prefetched == set()
        one.drain()

        async def is_over() -> bool:
            rows = (await operators.get("/admin/state")).json["replicas"]["data"]
            seen = {row["name"]: row["handover"] for row in rows}
            return seen == {"r0": {"num_hot": 2, "num_elsewhere": 2}, "r1": None}

        await until_true(is_over, "both are elsewhere")
    assert two.prefetched == set(digests[:2])


async def test_a_gateway_that_is_not_told_to_calls_nobody(
    start_engine: StartEngine,
    start_stub: StartStub,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    digests: list[Digest],
) -> None:
    """By default no control service hears of it, however hot an artifact is."""
    one, two, listed = await start_pair(start_engine, start_stub, redis_url)
    await asyncio.to_thread(one.hold, digests[0])
    gateway = await start_gateway(
        quick_gateway(
            *listed, store=store, redis_url=redis_url, replication=replace(QUICK, enabled=False)
        ),
        KEY,
    )
    await gateway.has_registered("r0", "r1")
    one.serve(digests[0], MANY)
    await has_heard(gateway, MANY)
    for engine in (one, two):
        assert engine.calls.num_others == 0
        assert engine.prefetched == set()


async def test_an_address_that_nobody_signed_is_not_called(
    start_engine: StartEngine,
    start_stub: StartStub,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    digests: list[Digest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token goes to no service whose registration has another signature."""
    monkeypatch.setenv(ENV_CONTROL_TOKEN, TOKEN)
    one, two, listed = await start_pair(start_engine, start_stub, redis_url, key=b"another" * 5)
    gateway = await start_gateway(
        quick_gateway(*listed, store=store, redis_url=redis_url, replication=QUICK), KEY
    )
    one.serve(digests[0], MANY)

    async def is_refused() -> bool:
        return await gateway.metric("cartridge_router_rejected_records_total") > 2

    await until_true(is_refused, "records are refused")
    assert (one.calls.num_others, two.calls.num_others) == (0, 0)
    assert await gateway.metric(ASKED) == 0


async def test_without_a_key_nobody_is_called(redis_url: str, store: LocalStore) -> None:
    """The gateway does not start: whoever writes to Redis could have the token sent to himself."""
    settings = quick_gateway(store=store, redis_url=redis_url, replication=QUICK)
    with pytest.raises(ConfigurationError, match=r"replication\.enabled: needs the residency key"):
        async with running_gateway(settings, None):
            pass


# --- one that is stepped by hand -----------------------------------------------------------------
class Clock:
    """Time as a test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


class Stepped:
    """`Copies` over a map that a test fills, and what its calls came to."""

    def __init__(
        self, fleet: Fleet, catalog: Catalog, manifest: Manifest, token: str | None
    ) -> None:
        self.clock = Clock()
        self.outcomes: list[tuple[str, str]] = []
        self.residency = ResidencyMap(key=None, settings=ResidencySettings(), clock=self.clock)
        self._manifest = manifest
        self.copies = self.of(fleet, catalog, ControlLogin(token, None))

    def of(self, fleet: Fleet, catalog: Catalog, login: ControlLogin) -> Copies:
        """Those that act here, by a login."""
        return Copies(
            ReplicationSettings(enabled=True, interval_s=10.0, rate_window_s=10.0),
            fleet=fleet,
            residency=self.residency,
            catalog=catalog,
            login=login,
            service_s=lambda: 0.25,
            on_outcome=lambda action, outcome: self.outcomes.append((action, outcome)),
            clock=self.clock,
        )

    def register(self, name: str, address: str | None, *held: Digest) -> None:
        """A replica says where its control is and what it has in dram."""
        registration = Registration(
            replica=name,
            epoch="0" * 32,
            seq=0,
            engine=engine_of(self._manifest),
            engine_version="0.32.0",
            control_address=address,
        )
        self.residency.put_rows(registration, {})
        rows = self.residency._replicas[ReplicaId(name)]
        for digest in held:
            record = ResidencyRecord(
                replica=name,
                epoch="0" * 32,
                digest=digest,
                tier=Tier.DRAM,
                state=ResidencyState.READY,
                size_bytes=1,
                is_pinned=False,
                seq=0,
            )
            rows.put(digest, record)
        self.residency.mark_synced()

    def serve(self, digest: Digest, count: int) -> None:
        """So many requests used an artifact."""
        for number in range(count):
            self.copies.note_receipt(receipt_for("r0", f"q{number}", [digest]))

    async def act(self) -> list[tuple[str, str]]:
        """One round, and what its calls came to."""
        self.outcomes.clear()
        self.residency.mark_synced()
        await self.copies.act()
        return sorted(self.outcomes)


@asynccontextmanager
async def stepped(
    session: aiohttp.ClientSession,
    start_stub: StartStub,
    store: LocalStore,
    manifest: Manifest,
    *names: str,
    token: str | None = TOKEN,
) -> AsyncIterator[Stepped]:
    """Over healthy replicas of these names."""
    urls = {ReplicaId(name): (await start_stub(answer_ok)).url for name in names}
    fleet = fleet_of(session, urls)
    for replica in fleet.replicas:
        await fleet.probe(replica)
    catalog = Catalog(store, 1.0)
    await catalog.read_first()
    by_hand = Stepped(fleet, catalog, manifest, token)
    running = asyncio.create_task(by_hand.copies.run())
    try:
        yield by_hand
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        catalog.close()


@pytest.mark.parametrize(
    ("token", "outcome"), [("another-token-of-16", "unauthenticated"), (None, "unauthenticated")]
)
async def test_a_wrong_token_is_counted_and_tried_again_later(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
    token: str | None,
    outcome: str,
) -> None:
    """Twice as long each time; nothing reaches the service, and the round goes on without it."""
    engine = await asyncio.to_thread(start_engine, "r0", access=ControlAccess(TOKEN))
    async with stepped(session, start_stub, store, manifests[0], "r0", token=token) as by_hand:
        by_hand.register("r0", engine.address)
        by_hand.serve(digests[0], MANY)
        for pause_s in (20.0, 40.0, 80.0):
            assert await by_hand.act() == [("describe", outcome)]
            by_hand.clock.now_s += pause_s * 0.99
            assert await by_hand.act() == []
            by_hand.clock.now_s += pause_s * 0.02
        assert engine.calls.num_others == 0


async def test_a_service_that_is_away_is_left_alone_but_not_for_ever(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
    unused_tcp_port: int,
) -> None:
    """The other replica is served meanwhile; the longest pause has an end."""
    other = await asyncio.to_thread(start_engine, "r1", access=ControlAccess(TOKEN))
    async with stepped(session, start_stub, store, manifests[0], "r0", "r1") as by_hand:
        by_hand.register("r0", f"127.0.0.1:{unused_tcp_port}")
        by_hand.register("r1", other.address)
        by_hand.serve(digests[0], MANY)
        assert await by_hand.act() == [("describe", "ok"), ("describe", "unavailable")]
        for _ in range(12):
            by_hand.clock.now_s += MAX_PAUSE_S
            by_hand.serve(digests[0], MANY)
            assert ("describe", "unavailable") in await by_hand.act()
        assert other.prefetched == {digests[0]}


async def test_a_service_of_another_replica_is_asked_for_nothing(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
) -> None:
    """As when an address has a new owner: counted, and looked at again later and later."""
    engine = await asyncio.to_thread(start_engine, "r7", access=ControlAccess(TOKEN))
    async with stepped(session, start_stub, store, manifests[0], "r0") as by_hand:
        by_hand.register("r0", engine.address)
        by_hand.serve(digests[0], MANY)
        for pause_s in (20.0, 40.0):
            assert await by_hand.act() == [("describe", "another_replica")]
            by_hand.clock.now_s += pause_s * 0.99
            assert await by_hand.act() == []
            by_hand.clock.now_s += pause_s * 0.02
        assert engine.prefetched == set()


async def test_what_was_asked_for_is_not_asked_for_again_at_once(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
) -> None:
    """It counts as on its way until the map says that it is there, or a minute has passed."""
    engine = await asyncio.to_thread(start_engine, "r1", access=ControlAccess(TOKEN))
    async with stepped(session, start_stub, store, manifests[0], "r0", "r1") as by_hand:
        by_hand.register("r0", None, digests[0])
        by_hand.register("r1", engine.address)
        by_hand.serve(digests[0], MANY)
        # At the beginning no bytes have been earned.
        assert await by_hand.act() == [("describe", "ok")]
        by_hand.clock.now_s += 1
        assert await by_hand.act() == [("describe", "ok"), ("prefetch", "ok")]
        by_hand.clock.now_s += 1
        assert await by_hand.act() == [("describe", "ok")]
        assert [call.digest for call in engine.calls.prefetches] == [digests[0]]


async def test_the_last_copy_of_what_is_hot_is_pinned_where_room_is_short(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
) -> None:
    """By the gateways' own name; it ends when the artifact is cold, and others' pins stay."""
    hot, cold, kept = digests
    sizes = [manifest.decoded_bytes for manifest in manifests]
    engine = await asyncio.to_thread(
        start_engine,
        "r0",
        access=ControlAccess(TOKEN),
        capacity_bytes=sum(sizes),
        pinned_bytes=sum(sizes),
    )
    await asyncio.to_thread(engine.hold, hot, cold, kept)
    await asyncio.to_thread(engine.pool.pin, kept, "somebody", 10.0)
    async with stepped(session, start_stub, store, manifests[0], "r0") as by_hand:
        by_hand.register("r0", engine.address, *digests)
        by_hand.residency._replicas[ReplicaId("r0")].records[kept] = replace(
            by_hand.residency._replicas[ReplicaId("r0")].records[kept], is_pinned=True
        )
        by_hand.serve(hot, MANY)
        assert ("pin", "ok") in await by_hand.act()
        holding = engine.pool.holding(hot)
        assert holding is not None
        assert holding.pinned_by == (CONTROL_OWNER,)
        by_hand.clock.now_s += 1000
        assert ("unpin", "ok") in await by_hand.act()
        holding, other = engine.pool.holding(hot), engine.pool.holding(kept)
        assert holding is not None
        assert other is not None
        assert (holding.pinned_by, other.pinned_by) == ((), ("somebody",))


async def test_a_replica_that_an_operator_took_out_hands_over(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
) -> None:
    """As one that says itself that it drains."""
    engine = await asyncio.to_thread(start_engine, "r1", access=ControlAccess(TOKEN))
    async with stepped(session, start_stub, store, manifests[0], "r0", "r1") as by_hand:
        by_hand.register("r0", None, digests[0])
        by_hand.register("r1", engine.address)
        by_hand.serve(digests[0], 2)
        await by_hand.act()
        by_hand.clock.now_s += 1
        assert await by_hand.act() == [("describe", "ok")]
        by_hand.copies._fleet.remove(ReplicaId("r0"))
        by_hand.clock.now_s += 1
        assert await by_hand.act() == [("describe", "ok"), ("prefetch", "ok")]
        assert by_hand.copies.handovers == {ReplicaId("r0"): Handover(1, 0)}


async def test_control_services_are_called_over_tls(
    start_engine: StartEngine,
    start_stub: StartStub,
    session: aiohttp.ClientSession,
    store: LocalStore,
    manifests: list[Manifest],
    digests: list[Digest],
    tmp_path: Path,
) -> None:
    """One that the authority vouches for is called; another gets no token."""
    right, wrong = make_authority("right"), make_authority("wrong")
    (tmp_path / "ca.pem").write_bytes(right.pem)
    (tmp_path / "token").write_text(TOKEN + "\n")
    settings = ReplicationSettings(
        enabled=True, token_file=str(tmp_path / "token"), ca_file=str(tmp_path / "ca.pem")
    )
    login = await asyncio.to_thread(read_control_login, settings, {})
    assert login is not None
    engines = []
    for name, authority in (("r0", right), ("r1", wrong)):
        key, certificate = authority.issue(name)
        access = ControlAccess(TOKEN, ControlTls(certificate, key, None))
        engines.append(await asyncio.to_thread(start_engine, name, access=access))
    async with stepped(session, start_stub, store, manifests[0], "r0", "r1") as by_hand:
        old = by_hand.copies
        by_hand.copies = by_hand.of(old._fleet, old._catalog, login)
        for engine in engines:
            by_hand.register(engine.name, engine.address)
        by_hand.serve(digests[0], 1)
        assert await by_hand.act() == [("describe", "ok"), ("describe", "unavailable")]
        for line in by_hand.copies._lines.values():
            await line.channel.close()
    assert [engine.calls.num_others for engine in engines] == [1, 0]


# --- settings ------------------------------------------------------------------------------------
def test_problems_name_the_setting(tmp_path: Path) -> None:
    """What is missing, and which file cannot be used."""
    environment = {
        "CARTRIDGE_ROUTER_REPLICATION__ENABLED": "true",
        "CARTRIDGE_ROUTER_REPLICATION__CERT_FILE": "c.pem",
    }
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None, environment, {})
    assert sorted(caught.value.problems) == [
        "replication.cert_file and replication.key_file: both or neither",
        "replication.cert_file: goes with replication.ca_file",
        "replication.enabled: needs redis_url",
        "replication.enabled: needs store",
    ]
    missing = replace(QUICK, token_file=str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"replication\.token_file: .*No such file"):
        read_control_login(missing, {})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigurationError, match=r"replication\.token_file: .*visible ASCII"):
        read_control_login(replace(QUICK, token_file=str(tmp_path / "empty")), {})


def test_a_gateway_that_calls_nobody_reads_no_token(tmp_path: Path) -> None:
    """A file that is not there is no problem while replication is off."""
    off = ReplicationSettings(token_file=str(tmp_path / "none"))
    assert read_control_login(off, {ENV_CONTROL_TOKEN: TOKEN}) is None
    assert Settings().replication.enabled is False


@pytest.mark.parametrize(
    ("address", "called"),
    [
        ("0.0.0.0:8002", "engine-0:8002"),
        ("[::]:8002", "engine-0:8002"),
        ("10.0.0.7:8002", "10.0.0.7:8002"),
        ("unix:/run/control", "unix:/run/control"),
    ],
)
def test_a_service_on_all_addresses_is_called_where_its_engine_answers(
    address: str, called: str
) -> None:
    """An engine that listens everywhere does not know its own name."""
    assert _reachable(address, "http://engine-0:8001") == called
