"""The replicas: where they are, whether they answer, what they serve, what is in flight.

Owns health, capability and the in-flight counts, also of replicas that come and go. Refuses to rank
and to find replicas, and counts in-flight requests through a context manager only.
"""

import asyncio
import contextlib
import http
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

from cartridge_policies.loads import Booking, LoadTable, Row
from cartridge_policies.rates import PRIORS, ReplicaRates
from cartridge_policies.types import Demand
from cartridge_proto.digest import Digest
from cartridge_proto.names import FIELD_CARTRIDGES, FIELD_KV_TRANSFER_PARAMS
from cartridge_proto.residency import ReplicaId, Tier
from cartridge_router.outliers import Outliers
from cartridge_router.roster import Listed, OperatorChanges, Roster, Source
from cartridge_router.settings import FleetSettings
from cartridge_router.tls import EngineLogin

logger = logging.getLogger(__name__)

EXTENSION_TIMEOUT_S = 15.0
EXTENSION_PAUSE_S = 30.0
"""Time between two questions to a replica that did not answer the first; each is a generation."""
_SHOWN_BY: dict[int, bool] = {
    http.HTTPStatus.OK: False,
    http.HTTPStatus.BAD_REQUEST: True,
    http.HTTPStatus.INTERNAL_SERVER_ERROR: True,
}
"""Status of an empty message -> whether the extension is there; others say nothing."""


class _ModelEntry(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    created: int = 0


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


@dataclass(frozen=True)
class ServedModel:
    """One model of a replica.

    `max_model_len`: context limit in tokens, if it says; an adapter has that of its base model.
    `parent`: the base model of a LoRA adapter; `None` for a base model. `created`: Unix time.
    """

    max_model_len: int | None
    parent: str | None = None
    created: int = 0

    def merged(self, other: "ServedModel") -> "ServedModel":
        """What can be said of it where two replicas serve it: the smaller limit, the older one."""
        limits = [each.max_model_len for each in (self, other) if each.max_model_len is not None]
        return ServedModel(
            min(limits, default=None),
            self.parent or other.parent,
            min(self.created, other.created),
        )


@dataclass(eq=False)
class Replica:
    """One replica as the fleet sees it, from when it joins to when it is gone.

    The same name at another URL is another one. `has_extension`: whether it attends over
    Cartridges; `None` = not known yet.
    """

    replica: ReplicaId
    url: str
    source: Source
    is_healthy: bool = False
    models: dict[str, ServedModel] = field(default_factory=dict)
    """By the name that requests use."""
    has_extension: bool | None = None
    num_failures: int = 0
    asked_s: float | None = None
    """When it was last asked for the extension, `time.monotonic()`."""
    row: Row = field(init=False)
    """What it is busy with; the fleet gives it one when it joins."""

    @property
    def num_in_flight(self) -> int:
        """Requests of this gateway that have not ended."""
        return self.row.num_in_flight

    def serves(self, model: str) -> bool:
        """Whether it may serve a model; "" stands for any, and one that names none for all."""
        return not model or not self.models or model in self.models


NOTHING: Final = Demand("", (), 0)
"""Of a request of which only its presence is known."""
NO_TIERS: Final[Mapping[Digest, Tier]] = {}


class Fleet:
    """All replicas, probed by one task each while `watch` runs. For use from one event loop.

    `must_probe_extension(replica)` says whether nothing else tells what the replica can do.
    `on_gone(replica)` is called when
    a replica has left and the last of its requests has ended.
    """

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        login: EngineLogin,
        settings: FleetSettings,
        max_in_flight: int | None = None,
        must_probe_extension: Callable[[ReplicaId], bool] = lambda replica: False,
        on_gone: Callable[[ReplicaId], None] = lambda replica: None,
    ) -> None:
        self.max_in_flight = max_in_flight
        """Limit of requests in flight for each replica; `None` = none."""
        self.outliers = Outliers(settings)
        self.loads = LoadTable()
        self.rates = PRIORS
        """Where predictions begin, before anything was measured."""
        self.edition = 0
        """Grows with each change of who is there, is well, and serves what."""
        self._roster = Roster()
        self._replicas: dict[ReplicaId, Replica] = {}
        self._leaving: list[Replica] = []
        self._has_changed = asyncio.Event()
        self._session = session
        self._login = login
        self._settings = settings
        self._must_probe_extension = must_probe_extension
        self._on_gone = on_gone
        self._on_freed: Callable[[], None] = lambda: None

    def set_rates(self, rates: ReplicaRates) -> None:
        """Predict all replicas by these rates from now on, whatever was learned."""
        self.rates = rates
        for replica in self._replicas.values():
            self.loads.set_rates(replica.row, None)
        self.loads.share_rates(rates)

    def configure(self, settings: FleetSettings, max_in_flight: int | None) -> None:
        """Probe and judge by other settings from now on."""
        self._settings = self.outliers.settings = settings
        self.max_in_flight = max_in_flight
        self._on_freed()

    # --- who is there ----------------------------------------------------------------------------
    @property
    def replicas(self) -> list[Replica]:
        """All that may get requests, in the order of the sources and their lists."""
        return list(self._replicas.values())

    @property
    def leaving(self) -> list[Replica]:
        """Those that were removed and still have requests running."""
        return list(self._leaving)

    @property
    def taken_out(self) -> dict[ReplicaId, Listed]:
        """Those that an operator removed and a source still lists."""
        return self._roster.taken_out

    def find(self, replica: ReplicaId) -> Replica | None:
        """The replica that has this name now."""
        return self._replicas.get(replica)

    def set_all(self, source: Source, urls: Mapping[ReplicaId, str]) -> None:
        """Replace what a source lists: name -> base URL without a trailing slash."""
        self._roster.replace(source, urls)
        self._follow_roster()

    def add(self, replica: ReplicaId, url: str) -> None:
        """Let a replica join that an operator names."""
        self._roster.add(replica, url)
        self._follow_roster()

    def remove(self, replica: ReplicaId) -> None:
        """Send no new request to a replica, whoever lists it; those that run go on.

        It stays out until it is added, or no source lists it any more.
        """
        self._roster.take_out(replica)
        self._follow_roster()

    @property
    def changes(self) -> OperatorChanges:
        """What operators have changed."""
        return self._roster.changes

    def follow(self, changes: OperatorChanges) -> None:
        """Change what operators have changed at another worker."""
        self._roster.follow(changes)
        self._follow_roster()

    def _follow_roster(self) -> None:
        """Let replicas join and leave, so that those of the roster are there."""
        wanted, before = self._roster.present, self._replicas
        kept = {
            name: replica
            for name, replica in before.items()
            if name in wanted and wanted[name].url == replica.url
        }
        left = [replica for name, replica in before.items() if name not in kept]
        for replica in left:
            self.loads.remove(replica.row)
            self.outliers.remove(replica.replica)
            logger.info("replica %s at %s leaves", replica.replica, replica.url)
        self._replicas = {}
        for name, listed in wanted.items():
            if name not in kept:
                self.outliers.add(name)
                logger.info("replica %s joins: %s, by %s", name, listed.url, listed.source)
            if name not in kept:
                kept[name] = Replica(name, listed.url, listed.source)
                kept[name].row = self.loads.add(name)
            kept[name].source = listed.source
            self._replicas[name] = kept[name]
        self._leaving += left
        for replica in left:
            self._end_if_idle(replica)
        self.edition += 1
        self._has_changed.set()

    def _end_if_idle(self, replica: Replica) -> None:
        """Forget a replica that has left, once nothing of it runs."""
        if replica.num_in_flight or replica not in self._leaving:
            return
        self._leaving.remove(replica)
        others = [*self._replicas.values(), *self._leaving]
        if all(other.replica != replica.replica for other in others):
            self._on_gone(replica.replica)

    # --- what requests tell ----------------------------------------------------------------------
    @contextlib.contextmanager
    def in_flight(
        self,
        replica: Replica,
        demand: Demand = NOTHING,
        tiers: Mapping[Digest, Tier] = NO_TIERS,
        *,
        is_streamed: bool = True,
    ) -> Iterator[Booking]:
        """Count one request, and what it demands, for as long as the block runs.

        `tiers`: where the replica is thought to read each artifact from. `is_streamed`: whether
        the first token will be seen.
        """
        booking = self.loads.book(
            replica.row, demand, tiers=tiers, now_s=time.monotonic(), is_streamed=is_streamed
        )
        try:
            yield booking
        finally:
            booking.end()
            self._end_if_idle(replica)
            self._on_freed()

    def call_when_freed(self, on_freed: Callable[[], None]) -> None:
        """Have this called whenever a request has ended."""
        self._on_freed = on_freed

    def has_room(self, replica: Replica) -> bool:
        """Whether a replica is below the limit."""
        return self.max_in_flight is None or replica.num_in_flight < self.max_in_flight

    def is_full(self, model: str) -> bool:
        """Whether healthy replicas serve a model, and all of them are at the limit."""
        rooms = [
            self.has_room(replica)
            for replica in self._replicas.values()
            if replica.is_healthy and replica.serves(model)
        ]
        return bool(rooms) and not any(rooms)

    def note_connect_failure(self, replica: Replica) -> None:
        """A request could not be delivered: no more traffic until a probe succeeds."""
        self._set_away(replica)

    def _set_away(self, replica: Replica) -> None:
        """What comes back under this name may be another engine."""
        self.edition += 1
        replica.is_healthy = False
        replica.has_extension = None
        replica.asked_s = None

    # --- probes ----------------------------------------------------------------------------------
    async def watch(self) -> None:
        """Probe all replicas until cancelled, from when they join to when they leave."""
        async with asyncio.TaskGroup() as group:
            probing: dict[Replica, asyncio.Task[None]] = {}
            while True:
                self._has_changed.clear()
                present = set(self._replicas.values())
                for replica in probing.keys() - present:
                    probing.pop(replica).cancel()
                for replica in present - probing.keys():
                    probing[replica] = group.create_task(
                        self._watch_one(replica), name=f"probe {replica.replica}"
                    )
                await self._has_changed.wait()

    async def _watch_one(self, replica: Replica) -> None:
        while True:
            await self.probe(replica)
            await asyncio.sleep(self._settings.probe_interval_s)

    async def probe(self, replica: Replica) -> None:
        """Ask one replica whether it is well and what it serves."""
        self.outliers.note_asked(replica.replica)
        try:
            models = await self._ask(replica)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            replica.num_failures += 1
            if replica.num_failures >= self._settings.num_failures and replica.is_healthy:
                logger.warning("replica %s is unhealthy: %r", replica.replica, error)
                self._set_away(replica)
            return
        self.outliers.note_answered(replica.replica)
        if not replica.is_healthy or models != replica.models:
            self.edition += 1
        replica.models, replica.num_failures = models, 0
        if not replica.is_healthy:
            logger.info("replica %s is healthy, serves %s", replica.replica, list(replica.models))
        replica.is_healthy = True
        now_s = time.monotonic()
        is_due = replica.asked_s is None or now_s - replica.asked_s >= EXTENSION_PAUSE_S
        if replica.has_extension is None and self._must_probe_extension(replica.replica) and is_due:
            replica.asked_s = now_s
            replica.has_extension = await self._find_extension(replica)
            self.edition += 1

    async def _ask(self, replica: Replica) -> dict[str, ServedModel]:
        async with self._get(replica, "/health") as answer:
            answer.raise_for_status()
        async with self._get(replica, "/v1/models") as answer:
            answer.raise_for_status()
            return _served(msgspec.json.decode(await answer.read(), type=_ModelList).data)

    def _get(
        self, replica: Replica, path: str
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(
            replica.url + path,
            timeout=aiohttp.ClientTimeout(total=self._settings.probe_timeout_s),
            headers=self._login.headers,
            ssl=self._login.context,
        )

    async def _find_extension(self, replica: Replica) -> bool | None:
        """Tell an engine with the extension from a stock one, which ignores Cartridges silently.

        The question carries an empty message: the extension fails it, a stock engine answers. The
        same question without the message must be answered, or the failure says nothing. `None` when
        nothing was learned: a replica that is slow to answer is well all the same.
        """
        model = next(iter(replica.models), None)
        if model is None:
            return None
        plain = {"model": model, "prompt": [0], "max_tokens": 1}
        asked = {**plain, FIELD_KV_TRANSFER_PARAMS: {FIELD_CARTRIDGES: {}}}
        try:
            if await self._status_of(replica, plain) != http.HTTPStatus.OK:
                return None
            has_extension = _SHOWN_BY.get(await self._status_of(replica, asked))
        except (aiohttp.ClientError, TimeoutError):
            return None
        logger.info("replica %s: has the Cartridge extension: %s", replica.replica, has_extension)
        return has_extension

    async def _status_of(self, replica: Replica, question: Mapping[str, Any]) -> int:
        timeout = aiohttp.ClientTimeout(total=EXTENSION_TIMEOUT_S)
        async with self._session.post(
            f"{replica.url}/v1/completions",
            json=question,
            timeout=timeout,
            headers=self._login.headers,
            ssl=self._login.context,
        ) as answer:
            await answer.read()
            return answer.status


def _served(entries: Sequence[_ModelEntry]) -> dict[str, ServedModel]:
    limits = {entry.id: entry.max_model_len for entry in entries}
    return {
        entry.id: ServedModel(
            limits.get(entry.parent)
            if entry.max_model_len is None and entry.parent
            else entry.max_model_len,
            entry.parent,
            entry.created,
        )
        for entry in entries
    }
