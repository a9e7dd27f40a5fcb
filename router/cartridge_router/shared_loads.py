"""What other gateways have booked on each replica, and what they are told of this one's bookings.

Owns the channel in Redis and how long a word on it counts. Refuses to be waited for: a decision
reads the table of loads, and where nobody is heard of, it knows this gateway's bookings alone.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from cartridge_policies.loads import IDLE, Load, Row
from cartridge_proto.codec import RejectedRecord, seal, unseal
from cartridge_proto.digest import Digest
from cartridge_proto.loads import MAX_LOADING_TOLD, MAX_REPLICAS_TOLD, GatewayLoads, ReplicaLoad
from cartridge_proto.names import REDIS_LOADS
from cartridge_proto.residency import ReplicaId
from cartridge_router.fleet import Fleet
from cartridge_router.redis_reading import RECONNECT_S, connection, raise_if_cancelled

logger = logging.getLogger(__name__)

TELL_S: Final = 0.05
"""Between two messages, while there is something to tell and somebody who listens."""
TELL_AGAIN_S: Final = 1.0
"""Between two words on a replica that has not changed: messages can be lost, gateways come late."""
FORGET_S: Final = 3.0
"""How long a word counts."""
LISTEN_S: Final = 1.0
NO_PERMISSION_PAUSE_S: Final = 60.0
MAX_GATEWAYS: Final = 256
"""That are listened to."""


class SharedLoads:
    """Tells and listens. For use from one event loop; `run` is one task.

    Replicas must have the same names in all gateways. `on_rejected(reason)` is called for each
    message that is not believed.
    """

    def __init__(
        self,
        *,
        url: str,
        key: bytes | None,
        fleet: Fleet,
        is_on: bool,
        on_rejected: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = is_on
        """Whether it is told and listened to."""
        self._url = url
        self._key = key
        self._fleet = fleet
        self._on_rejected = on_rejected
        self._clock = clock
        self._gateway = secrets.token_hex(16)
        self._seq = 0
        self._told_all_s = -TELL_AGAIN_S
        self._others: dict[str, tuple[int, float]] = {}
        """Gateway -> number of its last message, and when that came."""
        self._words: dict[ReplicaId, dict[str, tuple[Load, float]]] = defaultdict(dict)
        """Replica -> gateway -> its load there, and as of when."""

    async def run(self) -> None:
        """Tell and listen until cancelled; reconnects for ever."""
        while True:
            raise_if_cancelled()
            client, pause_s = connection(self._url), RECONNECT_S
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._listen(client))
                    group.create_task(self._tell(client))
            except* NoPermissionError as errors:
                # Users that were made by an earlier version: only an operator can change that.
                logger.warning("other gateways may not be spoken to: %s", errors.exceptions[0])
                pause_s = NO_PERMISSION_PAUSE_S
            except* (RedisError, OSError) as errors:
                logger.warning("other gateways cannot be reached: %s", errors.exceptions[0])
            finally:
                await client.aclose()
            await asyncio.sleep(pause_s)

    # --- telling ---------------------------------------------------------------------------------
    async def _tell(self, client: redis.asyncio.Redis) -> None:
        while True:
            raise_if_cancelled()
            for message in self.messages():
                await client.publish(REDIS_LOADS, message)
            await asyncio.sleep(TELL_S)

    def messages(self) -> list[bytes]:
        """What is to be told now, and as of now: what has changed, and now and then all."""
        now_s = self._clock()
        is_all = now_s - self._told_all_s >= TELL_AGAIN_S
        if is_all:
            self.forget_silent()
            self._told_all_s = now_s
        if not self.is_on or not (self._others or is_all):
            # Alone, as far as is known: a sign of life will do.
            return []
        changed = set(self._fleet.loads.take_changed())
        if is_all:
            rows = (replica.row for replica in self._fleet.replicas)
            changed.update(row for row in rows if row.num_in_flight)
        told = [_told(row, row.own_load(now_s)) for row in changed]
        starts = range(0, max(1 if is_all else 0, len(told)), MAX_REPLICAS_TOLD)
        return [self._message(told[start : start + MAX_REPLICAS_TOLD]) for start in starts]

    def _message(self, loads: list[ReplicaLoad]) -> bytes:
        self._seq += 1
        return seal(GatewayLoads(gateway=self._gateway, seq=self._seq, loads=loads), self._key)

    # --- listening -------------------------------------------------------------------------------
    async def _listen(self, client: redis.asyncio.Redis) -> None:
        async with client.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(REDIS_LOADS)
            while True:
                raise_if_cancelled()
                message = await channel.get_message(timeout=LISTEN_S)
                if message is not None:
                    self.take(message["data"])

    def take(self, data: bytes) -> None:
        """Believe one message, if it can be."""
        try:
            message = unseal(data, GatewayLoads, self._key)
        except RejectedRecord as error:
            logger.warning("loads not believed: %s", error)
            self._on_rejected("rejected")
            return
        seq, _ = self._others.get(message.gateway, (-1, 0.0))
        is_new = seq < 0
        if message.gateway == self._gateway or message.seq <= seq or not self.is_on:
            return
        if is_new and len(self._others) >= MAX_GATEWAYS:
            self._on_rejected("too_many_gateways")
            return
        now_s = self._clock()
        self._others[message.gateway] = message.seq, now_s
        if is_new:
            # It knows nothing of this one's bookings.
            self._told_all_s = -TELL_AGAIN_S
        for told in message.loads:
            self._words[ReplicaId(told.replica)][message.gateway] = _load(told), now_s
            self._add_up(ReplicaId(told.replica))

    def forget_silent(self) -> None:
        """Count no longer what was said long ago: its gateway may be gone."""
        oldest_s = self._clock() - (FORGET_S if self.is_on else 0.0)
        for gateway, (_, heard_s) in list(self._others.items()):
            if heard_s <= oldest_s:
                del self._others[gateway]
        for replica, words in list(self._words.items()):
            old = [gateway for gateway, (_, since_s) in words.items() if since_s <= oldest_s]
            for gateway in old:
                del words[gateway]
            if old:
                self._add_up(replica)

    def _add_up(self, replica: ReplicaId) -> None:
        now_s, found = self._clock(), self._fleet.find(replica)
        words = self._words[replica]
        if found is not None:
            total = sum((_as_of(load, now_s - since_s) for load, since_s in words.values()), IDLE)
            self._fleet.loads.note_others(found.row, total, now_s)
        if found is None or not words:
            del self._words[replica]


def _told(row: Row, load: Load) -> ReplicaLoad:
    latest = sorted(load.due_s.items(), key=lambda item: -item[1])[:MAX_LOADING_TOLD]
    return ReplicaLoad(
        replica=row.replica,
        num_in_flight=load.num_in_flight,
        num_pending=load.num_pending,
        pending_s=load.pending_s,
        pending_tokens=load.pending_tokens,
        context_tokens=load.context_tokens,
        pending_bytes=dict(load.pending_bytes),
        due_s={str(digest): due_s for digest, due_s in latest},
    )


def _load(told: ReplicaLoad) -> Load:
    return Load(
        told.num_in_flight,
        told.num_pending,
        told.pending_s,
        told.pending_tokens,
        told.context_tokens,
        told.pending_bytes,
        {Digest(digest): due_s for digest, due_s in told.due_s.items()},
    )


def _as_of(load: Load, passed_s: float) -> Load:
    """A load some time after it was told: work has been done since."""
    return replace(
        load,
        pending_s=max(0.0, load.pending_s - passed_s),
        due_s={digest: max(0.0, due_s - passed_s) for digest, due_s in load.due_s.items()},
    )
