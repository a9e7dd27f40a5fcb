"""A local mirror of the residency map: what each live replica holds, and how old that is.

Owns the rows, the modes and the task that reads Redis. Refuses to write Redis, to be asked for
anything that waits, and to believe a record whose signature, schema or epoch is off.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from cartridge_policies.types import MapMode
from cartridge_proto.codec import RejectedRecord, unseal
from cartridge_proto.digest import Digest
from cartridge_proto.names import (
    REDIS_CHANGES,
    REDIS_RECEIPTS,
    REDIS_REPLICAS,
    STREAM_FIELD,
    lease_key,
    residency_key,
)
from cartridge_proto.residency import (
    TIERS_FASTEST_FIRST,
    Receipt,
    Registration,
    ReplicaId,
    ResidencyChange,
    ResidencyRecord,
    ResidencyState,
    Tier,
)
from cartridge_router.redis_reading import RECONNECT_S, connection, raise_if_cancelled
from cartridge_router.settings import ResidencySettings

T = TypeVar("T", ResidencyRecord, ResidencyChange, Registration, Receipt)

logger = logging.getLogger(__name__)

READ_GAP_S = 0.005
"""Between two reads of the streams: a busy fleet writes thousands of entries a second."""
BLOCK_MS = 500
MAX_REPLICAS = 4096
MAX_ROWS = 100_000
MAX_STREAM_BATCH = 512


@dataclass
class _Rows:
    """One live replica."""

    registration: Registration
    believed_s: float
    """When its lease was last read and believed, by the map's clock."""
    seq: int
    ready: dict[Digest, dict[ReplicaId, Tier]]
    """Of all replicas; each keeps its own entries."""
    records: dict[Digest, ResidencyRecord] = field(default_factory=dict)
    used_bytes: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    """Of what is ready, by its fastest tier."""

    def put(self, digest: Digest, record: ResidencyRecord) -> None:
        """Take in what is known of one artifact."""
        self.drop(digest)
        self.records[digest] = record
        if record.state is ResidencyState.READY:
            self.used_bytes[record.tier] += record.size_bytes
            self.ready.setdefault(digest, {})[self.replica] = record.tier

    def drop(self, digest: Digest) -> None:
        """Forget one artifact, if it is known."""
        record = self.records.pop(digest, None)
        if record is not None and record.state is ResidencyState.READY:
            self.used_bytes[record.tier] -= record.size_bytes
            self._withdraw(digest)

    def withdraw_all(self) -> None:
        """Nothing of this replica can be read any more."""
        for digest, record in self.records.items():
            if record.state is ResidencyState.READY:
                self._withdraw(digest)

    def _withdraw(self, digest: Digest) -> None:
        holders = self.ready[digest]
        del holders[self.replica]
        if not holders:
            del self.ready[digest]

    @property
    def replica(self) -> ReplicaId:
        """Whose rows they are."""
        return ReplicaId(self.registration.replica)


class ResidencyMap:
    """Rows of all live replicas. For use from one event loop.

    `on_rejected(reason)` is called for each record that is not believed.
    """

    def __init__(
        self,
        *,
        key: bytes | None,
        settings: ResidencySettings,
        on_rejected: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self.settings = settings
        self._on_rejected = on_rejected
        self._clock = clock
        self._replicas: dict[ReplicaId, _Rows] = {}
        self._ready: dict[Digest, dict[ReplicaId, Tier]] = {}
        self.edition = 0
        """Grows when a replica comes, goes, or says something else of itself."""
        self._synced_s: float | None = None

    # --- reading -------------------------------------------------------------------------------
    @property
    def age_s(self) -> float | None:
        """Seconds since the map was last known to be true; `None` = never."""
        return None if self._synced_s is None else self._clock() - self._synced_s

    @property
    def mode(self) -> MapMode:
        """How far the map can be believed now."""
        age_s = self.age_s
        if age_s is None or age_s >= self.settings.fallback_after_s:
            return MapMode.FALLBACK
        return MapMode.DEGRADED if age_s >= self.settings.stale_after_s else MapMode.EXACT

    @property
    def has_replicas(self) -> bool:
        """Whether any replica is known."""
        return bool(self._replicas)

    def tiers(self, replica: ReplicaId, digests: Iterable[Digest]) -> dict[Digest, Tier]:
        """Tier of those of some artifacts that are ready on a replica; empty without a map.

        Costs a look-up for each digest, whatever the replica holds.
        """
        rows = self._replicas.get(replica)
        if rows is None or self.mode is MapMode.FALLBACK:
            return {}
        found = ((digest, rows.records.get(digest)) for digest in digests)
        return {
            digest: record.tier
            for digest, record in found
            if record is not None and record.state is ResidencyState.READY
        }

    def record(self, replica: ReplicaId, digest: Digest) -> ResidencyRecord | None:
        """What a replica says of one artifact, also of one on its way; `None` = nothing."""
        rows = self._replicas.get(replica)
        return rows.records.get(digest) if rows is not None else None

    def registration(self, replica: ReplicaId) -> Registration | None:
        """What a replica says of itself; kept through `degraded` and `fallback`."""
        rows = self._replicas.get(replica)
        return rows.registration if rows is not None else None

    def used_bytes(self, replica: ReplicaId) -> dict[Tier, int] | None:
        """Bytes that are ready on a replica, by their fastest tier; `None` if it is not known."""
        rows = self._replicas.get(replica)
        return dict(rows.used_bytes) if rows is not None else None

    @property
    def urls(self) -> dict[ReplicaId, str]:
        """Where live replicas answer that say so."""
        return {
            replica: rows.registration.url
            for replica, rows in self._replicas.items()
            if rows.registration.url is not None
        }

    def ready_on(self, digest: Digest) -> Mapping[ReplicaId, Tier]:
        """Tier of an artifact on each replica that has it ready; empty without a map."""
        return {} if self.mode is MapMode.FALLBACK else self._ready.get(digest, {})

    def holders(self, digest: Digest) -> list[tuple[ReplicaId, Tier]]:
        """Replicas on which an artifact is ready, fastest tier first."""
        return sorted(
            self.ready_on(digest).items(),
            key=lambda pair: (TIERS_FASTEST_FIRST.index(pair[1]), pair[0]),
        )

    # --- writing: the reader task, and tests -----------------------------------------------------
    def mark_synced(self) -> None:
        """The map is true as of now."""
        self._synced_s = self._clock()

    def keep_only(
        self, live: Collection[ReplicaId], doubted: Collection[ReplicaId] = frozenset()
    ) -> None:
        """Forget replicas whose lease has ended.

        Where something lies in a lease's place that is not believed, the replica stays as it is:
        its next heartbeat mends that. After `fallback_after_s` it is forgotten all the same.
        """
        oldest_s = self._clock() - self.settings.fallback_after_s
        for replica, rows in list(self._replicas.items()):
            is_doubted = replica in doubted and rows.believed_s > oldest_s
            if replica not in live and not is_doubted:
                rows.withdraw_all()
                del self._replicas[replica]
                self.edition += 1

    def read_registration(self, replica: ReplicaId, data: bytes) -> Registration | None:
        """Decode a lease's value; `None` when it is not believed."""
        registration = self._unseal(data, Registration)
        if registration is not None and registration.replica != replica:
            self._on_rejected("foreign")
            return None
        return registration

    def needs_rows(self, registration: Registration) -> bool:
        """Whether this registration tells of changes that the mirror has not seen."""
        rows = self._replicas.get(ReplicaId(registration.replica))
        return (
            rows is None
            or rows.registration.epoch != registration.epoch
            or rows.seq < registration.seq
        )

    def put_rows(self, registration: Registration, rows: dict[bytes, bytes]) -> None:
        """Replace everything known of one replica, but for rows that are not believed."""
        replica = ReplicaId(registration.replica)
        before = self._replicas.get(replica)
        is_same_boot = before is not None and before.registration.epoch == registration.epoch
        known = before.records if before is not None and is_same_boot else {}
        if before is not None:
            before.withdraw_all()
        fresh = _Rows(registration, self._clock(), registration.seq, self._ready)
        for name, data in list(rows.items())[:MAX_ROWS]:
            record = self._read_row(replica, name, data)
            if record is None:
                record = known.get(Digest(name.decode("utf-8", "replace")))
            if record is not None and record.epoch == registration.epoch:
                fresh.put(Digest(record.digest), record)
        self._replicas[replica] = fresh
        self.edition += 1

    def _read_row(self, replica: ReplicaId, name: bytes, data: bytes) -> ResidencyRecord | None:
        """Decode a row; `None` when it is not believed."""
        record = self._unseal(data, ResidencyRecord)
        if record is not None and (record.replica, record.digest.encode()) != (replica, name):
            self._on_rejected("foreign")
            return None
        return record

    def renew(self, registration: Registration) -> None:
        """Take in a registration that brings no new rows."""
        rows = self._replicas.get(ReplicaId(registration.replica))
        if rows is not None:
            self.edition += _says_else(rows.registration, registration)
            rows.registration, rows.believed_s = registration, self._clock()

    def apply(self, data: bytes) -> None:
        """Take in one change of the stream."""
        change = self._unseal(data, ResidencyChange)
        if change is None:
            return
        rows = self._replicas.get(ReplicaId(change.replica))
        record = change.record
        if record is not None and (record.replica, record.epoch, record.digest) != (
            change.replica,
            change.epoch,
            change.digest,
        ):
            self._on_rejected("foreign")
            return
        # A new epoch or a gap is mended by the next look at the lease, which then reads all rows.
        if rows is None or change.epoch != rows.registration.epoch or change.seq != rows.seq + 1:
            return
        rows.seq = change.seq
        if record is None:
            rows.drop(Digest(change.digest))
        else:
            rows.put(Digest(change.digest), record)

    def read_receipt(self, data: bytes) -> Receipt | None:
        """Decode a receipt; `None` when it is not believed."""
        return self._unseal(data, Receipt)

    def _unseal(self, data: bytes, kind: type[T]) -> T | None:
        try:
            return unseal(data, kind, self._key)
        except RejectedRecord as error:
            logger.warning("record not believed: %s", error)
            self._on_rejected("rejected")
            return None


def _says_else(old: Registration, new: Registration) -> bool:
    """Whether a heartbeat tells something new of what the replica can take."""
    return (old.engine, old.is_draining) != (new.engine, new.is_draining)


class RedisReader:
    """Keeps a `ResidencyMap` true, and hands receipts on. Run it as one task."""

    def __init__(
        self,
        *,
        url: str,
        residency: ResidencyMap,
        on_receipt: Callable[[Receipt], None],
    ) -> None:
        self._url = url
        self._map = residency
        self._on_receipt = on_receipt

    async def run(self) -> None:
        """Read until cancelled; reconnects for ever."""
        while True:
            raise_if_cancelled()
            client = connection(self._url)
            try:
                await self._follow(client)
            except (RedisError, OSError) as error:
                logger.warning("Redis cannot be read: %s", error)
            finally:
                await client.aclose()
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self, client: redis.asyncio.Redis) -> None:
        positions: dict[Any, Any] = {
            stream: await _last_id(client, stream) for stream in (REDIS_CHANGES, REDIS_RECEIPTS)
        }
        next_look_s, is_whole = 0.0, False
        while True:
            raise_if_cancelled()
            if time.monotonic() >= next_look_s:
                is_whole = await self._read_leases(client)
                next_look_s = time.monotonic() + BLOCK_MS / 1000
            # redis-py types answers for every protocol and decoding; these are bytes.
            batches: Any = await client.xread({**positions}, count=MAX_STREAM_BATCH, block=BLOCK_MS)
            for stream, entries in batches:
                name = stream.decode()
                for entry_id, values in entries:
                    positions[name] = entry_id.decode()
                    self._take(name, values.get(STREAM_FIELD.encode(), b""))
            if is_whole:
                self._map.mark_synced()
            # What comes in the meantime comes in one answer.
            await asyncio.sleep(READ_GAP_S)

    def _take(self, stream: str, data: bytes) -> None:
        if stream == REDIS_CHANGES:
            self._map.apply(data)
            return
        receipt = self._map.read_receipt(data)
        if receipt is not None:
            self._on_receipt(receipt)

    async def _read_leases(self, client: redis.asyncio.Redis) -> bool:
        """Look at all leases; False when there is nothing to believe.

        A Redis that came back empty says nothing of replicas that were there: what is known of
        them stays, and grows old, until they have registered again.
        """
        members: Any = await client.smembers(REDIS_REPLICAS)
        if not members and self._map.has_replicas:
            return False
        names: list[bytes] = sorted(members)[:MAX_REPLICAS]
        replicas = [ReplicaId(name.decode("utf-8", "replace")) for name in names]
        leases: Any = await client.mget([lease_key(r) for r in replicas]) if replicas else []
        live, doubted = set(), set()
        for replica, data in zip(replicas, leases, strict=True):
            if data is None:
                continue
            registration = self._map.read_registration(replica, data)
            if registration is None:
                doubted.add(replica)
                continue
            live.add(replica)
            if self._map.needs_rows(registration):
                rows: Any = await client.hgetall(residency_key(replica))
                self._map.put_rows(registration, rows)
            else:
                self._map.renew(registration)
        self._map.keep_only(live, doubted)
        self._map.mark_synced()
        return True


async def _last_id(client: redis.asyncio.Redis, stream: str) -> str:
    entries: Any = await client.xrevrange(stream, count=1)
    return str(entries[0][0].decode()) if entries else "0-0"
