"""Tells the fleet what this replica holds: residency rows, a lease, and receipts, in Redis.

Owns the records of one boot, their sequence numbers and the one thread that writes them. Never
raises into serving: while Redis is away changes collapse into one full publication on its return.
"""

import logging
import secrets
import threading
import time
from collections import deque
from typing import Any, TypeVar

import redis

from cartridge_proto.codec import seal
from cartridge_proto.compatibility import EngineIdentity
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
    Epoch,
    Receipt,
    Registration,
    ReplicaId,
    ResidencyChange,
    ResidencyRecord,
    ResidencyState,
    Tier,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_STREAM_ENTRIES = 10_000
MAX_PENDING_CHANGES = 1_000
"""Changes kept for Redis; a reader sees the gap that older ones leave, and reads everything."""
MAX_PENDING_RECEIPTS = 1_000
REDIS_TIMEOUT_S = 1.0


def new_epoch() -> Epoch:
    """A random name for this boot: 32 hex characters."""
    return Epoch(secrets.token_hex(16))


class ResidencyPublisher:
    """Publishes one replica's residency until `stop`.

    Methods only note the change and return; a thread of its own writes. `flush` waits for it.
    The lease lives `lease_s` seconds and is renewed at a third of that; it carries `url`, where
    gateways reach the replica's API server, if that is to be known.
    """

    def __init__(
        self,
        *,
        redis_url: str,
        replica: ReplicaId,
        epoch: Epoch,
        key: bytes | None,
        engine: EngineIdentity,
        engine_version: str,
        url: str | None = None,
        lease_s: float = 6.0,
    ) -> None:
        self.replica = replica
        self.epoch = epoch
        self._key = key
        self._engine = engine
        self._engine_version = engine_version
        self._url = url
        self._control_address: str | None = None
        self._lease_s = lease_s
        self._client = redis.Redis.from_url(
            redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
        self._condition = threading.Condition()
        self._records: dict[Digest, ResidencyRecord] = {}
        self._changes: deque[ResidencyChange] = deque(maxlen=MAX_PENDING_CHANGES)
        self._receipts: deque[Receipt] = deque(maxlen=MAX_PENDING_RECEIPTS)
        self._seq = 0
        self._noted = 0
        self._written = 0
        self._must_publish_all = True
        self._is_draining = False
        self._is_away = False
        self._must_renew = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="residency-publisher", daemon=True)

    def start(self, control_address: str | None = None) -> None:
        """Register the replica, with the address of its control service, and begin to publish."""
        self._control_address = control_address
        self._thread.start()

    def put(
        self,
        digest: Digest,
        tier: Tier,
        size_bytes: int,
        *,
        state: ResidencyState = ResidencyState.READY,
        is_pinned: bool = False,
    ) -> None:
        """Note that an artifact is at a tier; call it when the bytes are usable there."""
        with self._condition:
            self._seq += 1
            record = ResidencyRecord(
                replica=self.replica,
                epoch=self.epoch,
                digest=digest,
                tier=tier,
                state=state,
                size_bytes=size_bytes,
                is_pinned=is_pinned,
                seq=self._seq,
            )
            self._records[digest] = record
            self._note_change(digest, record)

    def withdraw(self, digest: Digest) -> None:
        """Note that an artifact is gone; `flush` before its bytes are overwritten."""
        with self._condition:
            if self._records.pop(digest, None) is None:
                return
            self._seq += 1
            self._note_change(digest, None)

    def publish_receipt(self, receipt: Receipt) -> None:
        """Send a receipt; the oldest are dropped while Redis is away."""
        with self._condition:
            self._receipts.append(receipt)
            self._noted += 1
            self._condition.notify_all()

    def set_draining(self, *, is_draining: bool) -> None:
        """Say in the lease, soon, whether the replica takes new requests with Cartridges."""
        with self._condition:
            self._is_draining = is_draining
            self._must_renew = True
            self._condition.notify_all()

    @property
    def is_writing(self) -> bool:
        """Whether a `flush` makes sense: started, and Redis was there the last time."""
        return self._thread.is_alive() and not self._is_away

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything noted so far is written; False when time ran out."""
        with self._condition:
            goal = self._noted
            return self._condition.wait_for(lambda: self._written >= goal, timeout_s)

    def stop(self) -> None:
        """Withdraw everything, give up the lease, and end the thread. Idempotent."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=3 * REDIS_TIMEOUT_S)

    # --- under the condition's lock --------------------------------------------------------------
    def _note_change(self, digest: Digest, record: ResidencyRecord | None) -> None:
        self._changes.append(
            ResidencyChange(
                replica=self.replica,
                epoch=self.epoch,
                digest=digest,
                seq=self._seq,
                record=record,
            )
        )
        self._noted += 1
        self._condition.notify_all()

    # --- the writing thread -----------------------------------------------------------------------
    def _run(self) -> None:
        next_heartbeat_s = 0.0
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: (
                        self._is_stopping or self._changes or self._receipts or self._must_renew
                    ),
                    max(0.0, next_heartbeat_s - time.monotonic()),
                )
                if self._is_stopping:
                    break
            try:
                self._write_pending()
                self._is_away = False
                if time.monotonic() >= next_heartbeat_s:
                    self._heartbeat()
                    next_heartbeat_s = time.monotonic() + self._lease_s / 3
            except Exception as error:
                # Whatever it is, the next round starts from the records, and serving goes on.
                logger.warning("residency not published: %r", error)
                self._must_publish_all = True
                self._is_away = True
                next_heartbeat_s = time.monotonic() + min(REDIS_TIMEOUT_S, self._lease_s / 3)
                with self._condition:
                    self._condition.wait_for(lambda: self._is_stopping, REDIS_TIMEOUT_S / 2)
        self._leave()

    def _write_pending(self) -> None:
        with self._condition:
            noted = self._noted
            changes, receipts = list(self._changes), list(self._receipts)
            records, seq = dict(self._records), self._seq
            self._must_renew = False
        pipeline = self._client.pipeline(transaction=True)
        if self._must_publish_all:
            # Rows of an earlier boot go in the same transaction that brings the new ones.
            pipeline.delete(residency_key(self.replica))
            pipeline.sadd(REDIS_REPLICAS, self.replica)
            for digest, record in records.items():
                pipeline.hset(residency_key(self.replica), digest, seal(record, self._key))
        else:
            for change in changes:
                if change.record is None:
                    pipeline.hdel(residency_key(self.replica), change.digest)
                else:
                    pipeline.hset(
                        residency_key(self.replica), change.digest, seal(change.record, self._key)
                    )
        for change in changes:
            pipeline.xadd(
                REDIS_CHANGES, {STREAM_FIELD: seal(change, self._key)}, maxlen=MAX_STREAM_ENTRIES
            )
        for receipt in receipts:
            pipeline.xadd(
                REDIS_RECEIPTS, {STREAM_FIELD: seal(receipt, self._key)}, maxlen=MAX_STREAM_ENTRIES
            )
        self._renew_lease(pipeline, seq)
        pipeline.execute()
        self._must_publish_all = False
        with self._condition:
            _drop_written(self._changes, changes)
            _drop_written(self._receipts, receipts)
            self._written = noted
            self._condition.notify_all()

    def _heartbeat(self) -> None:
        """Renew the lease; publish everything again when Redis lost it (flushed, restored)."""
        num_rows = int(self._client.hlen(residency_key(self.replica)))
        with self._condition:
            is_complete = num_rows == len(self._records)
            seq = self._seq
        if not is_complete:
            self._must_publish_all = True
            self._write_pending()
            return
        pipeline = self._client.pipeline(transaction=True)
        pipeline.sadd(REDIS_REPLICAS, self.replica)
        self._renew_lease(pipeline, seq)
        pipeline.execute()

    def _renew_lease(self, pipeline: "redis.client.Pipeline", seq: int) -> None:
        registration = Registration(
            replica=self.replica,
            epoch=self.epoch,
            seq=seq,
            engine=self._engine,
            engine_version=self._engine_version,
            control_address=self._control_address,
            is_draining=self._is_draining,
            url=self._url,
        )
        pipeline.set(
            lease_key(self.replica), seal(registration, self._key), px=int(self._lease_s * 1000)
        )

    def _leave(self) -> None:
        try:
            if not self._holds_lease():
                return
            with self._condition:
                has_receipts = bool(self._receipts)
            if has_receipts:
                self._write_pending()
            self._client.delete(lease_key(self.replica), residency_key(self.replica))
            self._client.srem(REDIS_REPLICAS, self.replica)
        except redis.RedisError as error:
            logger.warning("lease not given up, it will expire; Redis says: %s", error)
        finally:
            self._client.close()

    def _holds_lease(self) -> bool:
        """Whether the replica's lease is of this boot; a newer one must keep its rows."""
        data: Any = self._client.get(lease_key(self.replica))
        return data is not None and self.epoch.encode() in data


def _drop_written(pending: deque[T], written: list[T]) -> None:
    """Take what was written off the front; a full queue may have dropped some of it already."""
    for entry in written:
        if pending and pending[0] is entry:
            pending.popleft()
