"""The residency map and its reader: what is believed, how long, and what heals it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import redis

from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_policies.types import MapMode
from cartridge_proto import codec
from cartridge_proto.codec import MAX_BYTES, seal
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.names import REDIS_CHANGES, REDIS_RECEIPTS, STREAM_FIELD, lease_key
from cartridge_proto.names import residency_key as rows_key
from cartridge_proto.residency import (
    Receipt,
    Registration,
    ReplicaId,
    ResidencyChange,
    ResidencyRecord,
    ResidencyState,
    Tier,
)
from cartridge_router.residency_map import RedisReader, ResidencyMap
from cartridge_router.settings import ResidencySettings
from cartridge_router.testing import FakeClock
from tests.loadtest.cartridge_requests import until
from tests.proto.sample_artifact import engine_of, sample_artifact
from tests.router.killable_redis import KillableRedis
from tests.router.sample_receipts import receipt_of

KEY = b"residency key of the tests"
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
A, B = sha256_digest(b"a"), sha256_digest(b"b")
ENGINE = engine_of(sample_artifact()[0])


@dataclass
class Mirror:
    """A map with its clock, what it did not believe, and receipts that came."""

    key: bytes | None = KEY
    clock: FakeClock = field(default_factory=FakeClock)
    rejected: list[str] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.map = ResidencyMap(
            key=self.key,
            settings=ResidencySettings(stale_after_s=3.0, fallback_after_s=30.0),
            on_rejected=self.rejected.append,
            clock=self.clock,
        )

    @contextlib.asynccontextmanager
    async def reading(self, url: str) -> AsyncIterator[None]:
        """Run the reader; at the end it must stop when it is cancelled."""
        reader = RedisReader(url=url, residency=self.map, on_receipt=self.receipts.append)
        task = asyncio.create_task(reader.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()

    def held(self, replica: ReplicaId) -> dict[Digest, Tier]:
        """Which of the tests' artifacts a replica holds."""
        return self.map.tiers(replica, [A, B])

    async def shows(self, replica: ReplicaId, expected: dict[Digest, Tier]) -> None:
        """Wait until a replica is registered and holds exactly this."""
        await until(
            lambda: self.map.registration(replica) is not None and self.held(replica) == expected,
            f"{replica} holds {expected}",
        )


def record(replica: str, epoch: str, digest: Digest, seq: int, **changes: Any) -> ResidencyRecord:
    """A ready row in dram."""
    row = ResidencyRecord(
        replica=replica,
        epoch=epoch,
        digest=digest,
        tier=Tier.DRAM,
        state=ResidencyState.READY,
        size_bytes=1,
        is_pinned=False,
        seq=seq,
    )
    return msgspec.structs.replace(row, **changes)


def change(row: ResidencyRecord, **changes: Any) -> ResidencyChange:
    """The change that brings a row."""
    made = ResidencyChange(
        replica=row.replica, epoch=row.epoch, digest=row.digest, seq=row.seq, record=row
    )
    return msgspec.structs.replace(made, **changes)


def registration(replica: str, epoch: str, seq: int) -> Registration:
    """What a replica says of itself."""
    return Registration(
        replica=replica,
        epoch=epoch,
        seq=seq,
        engine=ENGINE,
        engine_version="1",
        control_address=None,
    )


StartPublisher = Callable[..., ResidencyPublisher]


@pytest.fixture
def start_publisher() -> Iterator[StartPublisher]:
    """Start the publisher that engines use; all are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(url: str, replica: ReplicaId = R0, **fields: Any) -> ResidencyPublisher:
            arguments: dict[str, Any] = {"epoch": new_epoch(), "key": KEY, "engine": ENGINE}
            publisher = ResidencyPublisher(
                redis_url=url, replica=replica, engine_version="1", **(arguments | fields)
            )
            publisher.start()
            stack.callback(publisher.stop)
            return publisher

        yield start


# --- the map alone -------------------------------------------------------------------------------
def test_the_mode_follows_the_age() -> None:
    """Never read is `fallback`; then exact, degraded at 3 s and fallback at 30 s, with the age."""
    mirror = Mirror()
    assert (mirror.map.mode, mirror.map.age_s) == (MapMode.FALLBACK, None)
    mirror.map.mark_synced()
    seen = []
    for step_s in (0.0, 2.75, 0.25, 26.75, 0.25):
        mirror.clock.advance(step_s)
        seen.append((mirror.map.age_s, mirror.map.mode))
    assert seen == [
        (0.0, MapMode.EXACT),
        (2.75, MapMode.EXACT),
        (3.0, MapMode.DEGRADED),
        (29.75, MapMode.DEGRADED),
        (30.0, MapMode.FALLBACK),
    ]


def test_in_fallback_rows_count_no_more_but_the_registration_does() -> None:
    """What an engine is stays known; where artifacts are does not."""
    mirror = Mirror(key=None)
    epoch = new_epoch()
    row = record("r0", epoch, A, 1)
    mirror.map.put_rows(registration("r0", epoch, 1), {A.encode(): seal(row, None)})
    mirror.map.mark_synced()
    assert mirror.held(R0) == {A: Tier.DRAM}
    mirror.clock.advance(30.0)
    assert mirror.held(R0) == {}
    assert mirror.map.registration(R0) == registration("r0", epoch, 1)
    assert mirror.map.holders(A) == []


def test_only_ready_rows_count() -> None:
    """An artifact that is still loading is nowhere yet."""
    mirror = Mirror(key=None)
    epoch = new_epoch()
    rows = [
        record("r0", epoch, A, 1, state=ResidencyState.LOADING),
        record("r0", epoch, B, 2, tier=Tier.HBM),
    ]
    sealed = {row.digest.encode(): seal(row, None) for row in rows}
    mirror.map.put_rows(registration("r0", epoch, 2), sealed)
    mirror.map.mark_synced()
    assert mirror.held(R0) == {B: Tier.HBM}


def test_holders_come_fastest_first() -> None:
    """Of three replicas with an artifact the one with the fastest tier is first."""
    mirror = Mirror(key=None)
    mirror.map.mark_synced()
    for name, tier in (("r0", Tier.NVME), ("r1", Tier.HBM), ("r2", Tier.DRAM)):
        epoch = new_epoch()
        row = record(name, epoch, A, 1, tier=tier)
        mirror.map.put_rows(registration(name, epoch, 1), {A.encode(): seal(row, None)})
    assert mirror.map.holders(A) == [("r1", Tier.HBM), ("r2", Tier.DRAM), ("r0", Tier.NVME)]


def test_changes_apply_in_order_only() -> None:
    """A repeated change, one after a gap and one of another boot change nothing."""
    mirror = Mirror(key=None)
    epoch = new_epoch()
    mirror.map.put_rows(registration("r0", epoch, 3), {})
    mirror.map.mark_synced()
    for row in (
        record("r0", epoch, A, 3),
        record("r0", epoch, A, 5),
        record("r0", new_epoch(), A, 4),
        record("r1", epoch, A, 4),
    ):
        mirror.map.apply(seal(change(row), None))
    assert mirror.held(R0) == {}
    assert mirror.map.needs_rows(registration("r0", epoch, 4))
    mirror.map.apply(seal(change(record("r0", epoch, A, 4)), None))
    assert mirror.held(R0) == {A: Tier.DRAM}
    assert not mirror.map.needs_rows(registration("r0", epoch, 4))
    mirror.map.apply(seal(change(record("r0", epoch, A, 5), record=None), None))
    assert mirror.held(R0) == {}
    assert mirror.rejected == []


@pytest.mark.parametrize("field_name", ["replica", "epoch", "digest"])
def test_a_change_whose_row_is_another_s_is_not_believed(field_name: str) -> None:
    """Envelope and row must agree on replica, boot and digest."""
    mirror = Mirror(key=None)
    epoch = new_epoch()
    mirror.map.put_rows(registration("r0", epoch, 0), {})
    mirror.map.mark_synced()
    other = {"replica": "r1", "epoch": new_epoch(), "digest": B}[field_name]
    row = record("r0", epoch, A, 1)
    forged = change(row, record=msgspec.structs.replace(row, **{field_name: other}))
    mirror.map.apply(seal(forged, None))
    assert (mirror.held(R0), mirror.rejected) == ({}, ["foreign"])


def test_rows_of_another_replica_or_digest_are_not_believed() -> None:
    """A row counts only under its own replica's hash and its own digest, of the present boot."""
    mirror = Mirror()
    epoch = new_epoch()
    mirror.map.put_rows(
        registration("r0", epoch, 1),
        {
            A.encode(): seal(record("r1", epoch, A, 1), KEY),
            B.encode(): seal(record("r0", epoch, A, 1), KEY),
            b"old": seal(record("r0", new_epoch(), A, 1), KEY),
            b"not a digest": b"rubbish",
        },
    )
    mirror.map.mark_synced()
    assert mirror.held(R0) == {}
    assert sorted(mirror.rejected) == ["foreign", "foreign", "foreign", "rejected"]


def test_a_lease_of_another_replica_is_not_believed() -> None:
    """A registration that is copied under another name is not that replica's."""
    mirror = Mirror()
    sealed = seal(registration("r0", new_epoch(), 1), KEY)
    assert mirror.map.read_registration(R1, sealed) is None
    assert mirror.map.read_registration(R0, sealed) is not None
    assert mirror.rejected == ["foreign"]


def _oversized(true: Any) -> bytes:
    """A record above its cap that is signed as it should be."""
    payload = msgspec.json.encode(true) + b" " * MAX_BYTES[type(true)]
    return codec._signature(type(true), payload, KEY) + b"." + payload


def _of_another_kind(true: Any) -> bytes:
    if isinstance(true, Receipt):
        return seal(registration("r0", EPOCH, 1), KEY)
    return seal(receipt_of("other"), KEY)


EPOCH = "0" * 32
DAMAGES: dict[str, Callable[[Any], bytes]] = {
    "unsigned": lambda true: seal(true, None),
    "foreign": lambda true: seal(true, b"another key"),
    "kind": _of_another_kind,
    "altered": lambda true: seal(true, KEY)[:-1] + b" }",
    "oversized": _oversized,
    "short": lambda true: seal(true, KEY)[:80],
    "empty": lambda true: b"",
    "rubbish": lambda true: b"\xff" * 100,
}
"""What may stand in Redis where a true record should."""
damaged = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@damaged
def test_a_bad_change_moves_nothing_but_a_counter(damage: Callable[[Any], bytes]) -> None:
    """What is unsigned, forged, altered, too large or no record leaves the map as it was."""
    mirror = Mirror()
    mirror.map.put_rows(registration("r0", EPOCH, 0), {})
    mirror.map.mark_synced()
    true = change(record("r0", EPOCH, A, 1))
    mirror.map.apply(damage(true))
    assert (mirror.held(R0), mirror.rejected) == ({}, ["rejected"])
    mirror.map.apply(seal(true, KEY))
    assert mirror.held(R0) == {A: Tier.DRAM}


@damaged
def test_a_bad_row_moves_nothing_but_a_counter(damage: Callable[[Any], bytes]) -> None:
    """What was known of its artifact stays for that boot; the rows beside it are read."""
    mirror = Mirror()
    mirror.map.mark_synced()
    first, second = record("r0", EPOCH, A, 1), record("r0", EPOCH, B, 2)
    mirror.map.put_rows(registration("r0", EPOCH, 1), {A.encode(): seal(first, KEY)})
    rows = {A.encode(): damage(first), B.encode(): seal(second, KEY)}
    mirror.map.put_rows(registration("r0", EPOCH, 2), rows)
    assert (mirror.held(R0), mirror.rejected) == ({A: Tier.DRAM, B: Tier.DRAM}, ["rejected"])
    mirror.map.put_rows(registration("r0", "1" * 32, 2), {A.encode(): damage(first)})
    assert mirror.held(R0) == {}


@damaged
def test_a_bad_registration_moves_nothing_but_a_counter(damage: Callable[[Any], bytes]) -> None:
    """Who was registered stays; who was not is not; the counter says that something came."""
    mirror = Mirror()
    true = registration("r0", EPOCH, 1)
    assert mirror.map.read_registration(R0, damage(true)) is None
    assert (mirror.map.registration(R0), mirror.rejected) == (None, ["rejected"])
    mirror.map.put_rows(true, {})
    assert mirror.map.read_registration(R0, damage(true)) is None
    mirror.map.keep_only({R1}, {R0})
    assert mirror.map.registration(R0) == true


@damaged
def test_a_bad_receipt_moves_nothing_but_a_counter(damage: Callable[[Any], bytes]) -> None:
    """It is no receipt of any request."""
    mirror = Mirror()
    assert mirror.map.read_receipt(damage(receipt_of("one"))) is None
    assert mirror.rejected == ["rejected"]


def test_a_replica_in_doubt_is_forgotten_in_the_end() -> None:
    """A lease that is not believed keeps it no longer than the map itself is believed."""
    mirror = Mirror()
    mirror.map.put_rows(registration("r0", EPOCH, 1), {})
    mirror.clock.advance(20.0)
    mirror.map.renew(registration("r0", EPOCH, 1))
    mirror.clock.advance(29.75)
    mirror.map.keep_only(set(), {R0})
    assert mirror.map.registration(R0) is not None
    mirror.clock.advance(0.25)
    mirror.map.keep_only(set(), {R0})
    assert mirror.map.registration(R0) is None


# --- the reader, on a real server and with the engines' own publisher ----------------------------
async def test_what_is_published_appears_and_what_is_withdrawn_goes(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """Rows from before the reader and changes after it are both seen, without a restart."""
    mirror = Mirror()
    publisher = start_publisher(redis_url)
    publisher.put(A, Tier.DRAM, 10)
    assert await asyncio.to_thread(publisher.flush, 10)
    async with mirror.reading(redis_url):
        await mirror.shows(R0, {A: Tier.DRAM})
        publisher.put(B, Tier.HBM, 10)
        await mirror.shows(R0, {A: Tier.DRAM, B: Tier.HBM})
        publisher.withdraw(A)
        await mirror.shows(R0, {B: Tier.HBM})
        assert mirror.map.mode is MapMode.EXACT
        found = mirror.map.registration(R0)
        assert found is not None
        assert (found.epoch, found.engine) == (publisher.epoch, ENGINE)
    assert mirror.rejected == []


async def test_only_the_artifacts_asked_for_are_looked_up(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """A request costs its own artifacts, not everything that a replica holds."""
    mirror = Mirror()
    publisher = start_publisher(redis_url)
    publisher.put(A, Tier.DRAM, 10)
    publisher.put(B, Tier.DRAM, 10)
    async with mirror.reading(redis_url):
        await mirror.shows(R0, {A: Tier.DRAM, B: Tier.DRAM})
    assert mirror.map.tiers(R0, [B]) == {B: Tier.DRAM}
    assert mirror.map.tiers(R0, []) == {}
    assert mirror.map.tiers(R1, [B]) == {}
    assert mirror.map.holders(A) == [(R0, Tier.DRAM)]


async def test_a_new_boot_voids_the_rows_of_the_old(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """A replica that comes back under its name holds only what it says now."""
    mirror = Mirror()
    old = start_publisher(redis_url)
    old.put(A, Tier.DRAM, 10)
    async with mirror.reading(redis_url):
        await mirror.shows(R0, {A: Tier.DRAM})
        new = start_publisher(redis_url)
        new.put(B, Tier.DRAM, 10)
        await until(
            lambda: (
                (found := mirror.map.registration(R0)) is not None
                and found.epoch == new.epoch
                and mirror.held(R0) == {B: Tier.DRAM}
            ),
            "the new boot alone is known",
        )


async def test_a_stopped_replica_leaves_at_once(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """A lease that is given up removes the replica; the other stays."""
    mirror = Mirror()
    publishers = [start_publisher(redis_url, replica) for replica in (R0, R1)]
    for publisher in publishers:
        publisher.put(A, Tier.DRAM, 10)
    async with mirror.reading(redis_url):
        await until(lambda: len(mirror.map.holders(A)) == 2, "both are known")
        await asyncio.to_thread(publishers[0].stop)
        await until(lambda: mirror.map.registration(R0) is None, "the first is gone")
        assert mirror.map.holders(A) == [(R1, Tier.DRAM)]


async def test_a_lease_that_runs_out_removes_the_replica(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """A replica that dies without a word is gone when its lease ends, rows or no rows."""
    mirror = Mirror()
    epoch = new_epoch()
    row = record("r1", epoch, A, 1)
    publisher = start_publisher(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.sadd("cartridge:replicas", "r1")
        client.hset(rows_key("r1"), A, seal(row, KEY))
        client.set(lease_key("r1"), seal(registration("r1", epoch, 1), KEY), px=1500)
    async with mirror.reading(redis_url):
        await mirror.shows(R1, {A: Tier.DRAM})
        await until(lambda: mirror.map.registration(R1) is None, "the lease ran out")
        assert mirror.map.registration(R0) is not None
        assert publisher.epoch != epoch


async def test_a_gap_in_the_stream_is_mended_by_a_full_read(redis_url: str) -> None:
    """A row whose change was trimmed from the stream is found through the lease."""
    mirror, epoch = Mirror(), new_epoch()
    with redis.Redis.from_url(redis_url) as client:
        client.sadd("cartridge:replicas", "r0")
        client.set(lease_key("r0"), seal(registration("r0", epoch, 0), KEY))
        async with mirror.reading(redis_url):
            await mirror.shows(R0, {})
            rows = [record("r0", epoch, A, 1), record("r0", epoch, B, 2)]
            for row in rows:
                client.hset(rows_key("r0"), row.digest, seal(row, KEY))
            client.xadd(REDIS_CHANGES, {STREAM_FIELD: seal(change(rows[1]), KEY)})
            client.set(lease_key("r0"), seal(registration("r0", epoch, 2), KEY))
            await mirror.shows(R0, {A: Tier.DRAM, B: Tier.DRAM})


async def test_a_flushed_server_is_filled_again(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """After FLUSHALL the replica and its rows come back by themselves, and changes go on."""
    mirror = Mirror()
    publisher = start_publisher(redis_url, lease_s=1.5)
    publisher.put(A, Tier.DRAM, 10)
    async with mirror.reading(redis_url):
        await mirror.shows(R0, {A: Tier.DRAM})
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
            await until(lambda: bool(client.exists(rows_key("r0"))), "published again")
        await mirror.shows(R0, {A: Tier.DRAM})
        publisher.put(B, Tier.DRAM, 10)
        await mirror.shows(R0, {A: Tier.DRAM, B: Tier.DRAM})


async def test_rubbish_in_redis_does_not_end_the_reader(
    redis_url: str, start_publisher: StartPublisher
) -> None:
    """Forged rows, leases, changes and receipts are counted, and true ones are still read."""
    mirror = Mirror()
    epoch = new_epoch()
    with redis.Redis.from_url(redis_url) as client:
        client.sadd("cartridge:replicas", "r1", b"\xff\xfe", "no lease")
        client.set(lease_key("r1"), seal(registration("r1", epoch, 1), b"another key"))
    publisher = start_publisher(redis_url)
    async with mirror.reading(redis_url):
        await mirror.shows(R0, {})
        with redis.Redis.from_url(redis_url) as client:
            forged = change(record("r0", publisher.epoch, A, 1))
            client.xadd(REDIS_CHANGES, {STREAM_FIELD: seal(forged, b"another key")})
            client.xadd(REDIS_CHANGES, {"other": "field"})
            client.xadd(REDIS_RECEIPTS, {STREAM_FIELD: seal(receipt_of("forged"), None)})
            client.xadd(REDIS_RECEIPTS, {STREAM_FIELD: seal(receipt_of("true"), KEY)})
        await until(lambda: bool(mirror.receipts), "the true receipt came")
        publisher.put(B, Tier.DRAM, 10)
        await mirror.shows(R0, {B: Tier.DRAM})
    assert [receipt.request_id for receipt in mirror.receipts] == ["true"]
    assert mirror.map.registration(R1) is None
    assert set(mirror.rejected) == {"rejected"}
    assert len(mirror.rejected) >= 4


async def test_a_forged_lease_takes_nobody_away(redis_url: str) -> None:
    """The replica and its rows stay while the lease's key holds what nobody believes."""
    mirror = Mirror()
    true = registration("r0", EPOCH, 1)
    with redis.Redis.from_url(redis_url) as client:
        client.sadd("cartridge:replicas", "r0")
        client.hset(rows_key("r0"), A, seal(record("r0", EPOCH, A, 1), KEY))
        client.set(lease_key("r0"), seal(true, KEY))
        async with mirror.reading(redis_url):
            await mirror.shows(R0, {A: Tier.DRAM})
            client.set(lease_key("r0"), seal(true, b"another key"))
            await until(lambda: len(mirror.rejected) >= 2, "the forged lease was looked at twice")
            assert mirror.held(R0) == {A: Tier.DRAM}
            client.delete(lease_key("r0"))
            await until(lambda: mirror.map.registration(R0) is None, "without a lease it is gone")
    assert set(mirror.rejected) == {"rejected"}


async def test_a_key_of_the_wrong_type_is_survived(
    redis_url: str, start_publisher: StartPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's value under our key stops the reading only as long as it is there."""
    mirror = Mirror()
    with redis.Redis.from_url(redis_url) as client:
        client.set(REDIS_RECEIPTS, "a string")
        async with mirror.reading(redis_url):
            publisher = start_publisher(redis_url)
            await until(lambda: "WRONGTYPE" in caplog.text, "the reader came upon it")
            client.delete(REDIS_RECEIPTS)
            publisher.put(A, Tier.DRAM, 10)
            await mirror.shows(R0, {A: Tier.DRAM})
            publisher.publish_receipt(receipt_of("afterwards"))
            await until(lambda: bool(mirror.receipts), "receipts are read again")
    assert [receipt.request_id for receipt in mirror.receipts] == ["afterwards"]


async def test_without_redis_the_map_grows_old_and_comes_back(
    killable_redis: KillableRedis, start_publisher: StartPublisher
) -> None:
    """Killed: degraded, then fallback by age; started again, empty: exact, and filled."""
    mirror = Mirror()
    publisher = start_publisher(killable_redis.url)
    publisher.put(A, Tier.DRAM, 10)
    async with mirror.reading(killable_redis.url):
        await mirror.shows(R0, {A: Tier.DRAM})
        await asyncio.to_thread(killable_redis.kill)
        mirror.clock.advance(4.0)
        await until(lambda: mirror.map.mode is MapMode.DEGRADED, "the map is stale")
        assert mirror.held(R0) == {A: Tier.DRAM}
        mirror.clock.advance(40.0)
        assert mirror.map.mode is MapMode.FALLBACK
        assert mirror.map.registration(R0) is not None
        await asyncio.to_thread(killable_redis.start)
        await until(lambda: mirror.map.mode is MapMode.EXACT, "the map is read again")
        await mirror.shows(R0, {A: Tier.DRAM})


async def test_an_emptied_server_takes_nobody_away(redis_url: str) -> None:
    """Until replicas have registered again, the last known ones stay, and grow old."""
    mirror, epoch = Mirror(), new_epoch()
    sealed = seal(registration("r0", epoch, 1), KEY)
    with redis.Redis.from_url(redis_url) as client:
        client.sadd("cartridge:replicas", "r0")
        client.hset(rows_key("r0"), A, seal(record("r0", epoch, A, 1), KEY))
        client.set(lease_key("r0"), sealed)
        async with mirror.reading(redis_url):
            await mirror.shows(R0, {A: Tier.DRAM})
            client.flushall()
            # Two more looks at the leases: the clock stands still, so only they could renew.
            looks = client.info("commandstats")["cmdstat_smembers"]["calls"]
            await until(
                lambda: client.info("commandstats")["cmdstat_smembers"]["calls"] >= looks + 2,
                "the leases were looked at",
            )
            mirror.clock.advance(4.0)
            assert mirror.map.mode is MapMode.DEGRADED
            assert mirror.held(R0) == {A: Tier.DRAM}
            client.sadd("cartridge:replicas", "r0")
            client.set(lease_key("r0"), sealed)
            await until(lambda: mirror.map.mode is MapMode.EXACT, "the lease is there again")


async def test_a_reader_stops_whenever_it_is_cancelled(redis_url: str) -> None:
    """At each step of connecting and reading, a cancellation ends it and its connection."""
    with redis.Redis.from_url(redis_url) as client:
        num_before = len(client.client_list())
        for num_steps in range(1, 40):
            reader = RedisReader(url=redis_url, residency=Mirror().map, on_receipt=print)
            task = asyncio.create_task(reader.run())
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled(), f"still running when cancelled after {num_steps} steps"
        await until(lambda: len(client.client_list()) == num_before, "all connections closed")


async def test_a_reader_stops_when_its_server_dies_at_once(killable_redis: KillableRedis) -> None:
    """A cancellation together with a broken connection ends it too."""
    for num_steps in range(1, 24):
        reader = RedisReader(url=killable_redis.url, residency=Mirror().map, on_receipt=print)
        task = asyncio.create_task(reader.run())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        killable_redis.kill()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled(), f"still running when cancelled after {num_steps} steps"
        killable_redis.start()


def test_used_bytes_follow_the_rows() -> None:
    """Of what is ready, by tier, through rows, moves, loads and withdrawals; then of a new boot."""
    mirror, epoch = Mirror(key=None), new_epoch()
    assert mirror.map.used_bytes(R0) is None
    rows = [record(R0, epoch, A, 1, size_bytes=10), record(R0, epoch, B, 2, size_bytes=5)]
    sealed = {row.digest.encode(): seal(row, None) for row in rows}
    mirror.map.put_rows(registration(R0, epoch, 2), sealed)

    def used() -> dict[Tier, int]:
        counts = mirror.map.used_bytes(R0)
        assert counts is not None
        return {tier: count for tier, count in counts.items() if count}

    assert used() == {Tier.DRAM: 15}
    moved = record(R0, epoch, A, 3, size_bytes=10, tier=Tier.HBM)
    mirror.map.apply(seal(change(moved), None))
    assert used() == {Tier.HBM: 10, Tier.DRAM: 5}
    loading = record(R0, epoch, B, 4, size_bytes=5, state=ResidencyState.LOADING)
    mirror.map.apply(seal(change(loading), None))
    assert used() == {Tier.HBM: 10}
    for seq, row in ((5, moved), (6, loading)):
        gone = change(msgspec.structs.replace(row, seq=seq), record=None)
        mirror.map.apply(seal(gone, None))
    assert used() == {}
    fresh = record(R0, epoch, A, 7, size_bytes=7)
    mirror.map.put_rows(registration(R0, epoch, 7), {A.encode(): seal(fresh, None)})
    mirror.map.put_rows(registration(R0, epoch, 7), {A.encode(): seal(fresh, None)})
    assert used() == {Tier.DRAM: 7}
