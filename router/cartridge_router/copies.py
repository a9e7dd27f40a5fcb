"""Copies of hot Cartridges: asks the policy every few seconds, and has engines do what it says.

Owns the calls to engines' control services: their login, bounds and back-off. Refuses to be waited
for by a request, to call an address that no signed registration names, and to write Redis.

Several gateways act on the same numbers: arrivals are counted from the engines' receipts, which all
gateways read, and a copy is in the residency map of all once it is there. What two ask of one
engine it does once: a prefetch of what is there or on its way, a second eviction and a second pin
of one owner change nothing. At worst each makes a copy elsewhere before it sees the other's.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import grpc.aio
import msgspec

from cartridge_policies.replication import (
    Action,
    ActionKind,
    ArrivalRates,
    ArtifactState,
    Bounds,
    CopiesView,
    Copy,
    ReplicaState,
    Replication,
)
from cartridge_policies.types import MapMode
from cartridge_proto.compatibility import incompatibilities
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.names import CONTROL_OWNER, ENV_CONTROL_TOKEN, HEADER_AUTHORIZATION
from cartridge_proto.residency import Receipt, Registration, ReplicaId, Tier
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from cartridge_router.catalog import Catalog
from cartridge_router.errors import ConfigurationError
from cartridge_router.fleet import Fleet
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.settings import ReplicationSettings

logger = logging.getLogger(__name__)

MAX_ARTIFACTS: Final = 256
"""Those that are asked for most; the others are left to the engines."""
CALL_TIMEOUT_S: Final = 5.0
LOAD_DEADLINE_MS: Final = 60_000
"""How long an engine may try to bring a copy."""
ASKED_FOR_S: Final = 60.0
"""How long what was asked for counts as on its way, if no engine says that it came."""
MAX_ANSWER_BYTES: Final = 16 << 20
"""A replica describes some 100,000 artifacts in it."""
MAX_CALLS: Final = 16
"""At a time."""
MAX_PAUSE_S: Final = 300.0
SAVED_UP_S: Final = 60.0
"""For how long bytes that may be copied add up while nothing is."""
BATCH: Final = 32
"""Artifacts that are looked at before requests get their turn."""
_WILDCARDS: Final = {"0.0.0.0", "[::]"}
_DECLINED: Final = "declined"
_DESCRIBE: Final = "describe"
_OF_THE_SERVICE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)
"""Statuses that the next call would get as well."""
_TOKEN: Final = re.compile(r"[!-~]+")
_NEAR: Final = (Tier.HBM, Tier.DRAM)

Outcome = Callable[[str, str], None]


@dataclass(frozen=True)
class ControlLogin:
    """How the gateway shows itself to control services; without `credentials` in clear."""

    token: str | None
    credentials: grpc.ChannelCredentials | None


def read_control_login(
    settings: ReplicationSettings, environment: Mapping[str, str]
) -> ControlLogin | None:
    """What engines ask of callers, `None` where nobody is called. Blocks.

    The environment's token wins over the file's.

    Raises:
        ConfigurationError: a file cannot be read, or holds no token.
    """
    if not settings.enabled:
        return None
    name, token = ENV_CONTROL_TOKEN, environment.get(ENV_CONTROL_TOKEN) or None
    if token is None and settings.token_file is not None:
        name = f"replication.token_file: {settings.token_file}"
        token = _read("token_file", settings.token_file).decode("utf-8", "replace").strip()
    if token is not None and _TOKEN.fullmatch(token) is None:
        raise ConfigurationError([f"{name}: visible ASCII characters, at least one"])
    if settings.ca_file is None:
        return ControlLogin(token, None)
    key = certificate = None
    if settings.cert_file is not None and settings.key_file is not None:
        certificate = _read("cert_file", settings.cert_file)
        key = _read("key_file", settings.key_file)
    authority = _read("ca_file", settings.ca_file)
    return ControlLogin(token, grpc.ssl_channel_credentials(authority, key, certificate))


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigurationError([f"replication.{name}: {file}: {error.strerror}"]) from error


@dataclass(frozen=True)
class Handover:
    """How far a replica that leaves has handed over: hot artifacts, and those that others have."""

    num_hot: int
    num_elsewhere: int


class _Line:
    """One engine's control service: a channel, and since when it is left alone."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub: control_pb2_grpc.CartridgeControlAsyncStub = (
            control_pb2_grpc.CartridgeControlStub(channel)
        )
        self.num_failures = 0
        self.not_before_s = 0.0


class Copies:
    """Acts for one gateway. For use from one event loop; `run` it as one task.

    `service_s()`: what one request keeps an engine busy, on average. `on_outcome(action, outcome)`
    is called for each call to an engine.
    """

    def __init__(
        self,
        settings: ReplicationSettings,
        *,
        fleet: Fleet,
        residency: ResidencyMap,
        catalog: Catalog,
        login: ControlLogin,
        service_s: Callable[[], float],
        on_outcome: Outcome,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.handovers: Mapping[ReplicaId, Handover] = {}
        """Of replicas that leave."""
        self._fleet, self._map, self._catalog = fleet, residency, catalog
        self._credentials = login.credentials
        self._metadata = (
            () if login.token is None else ((HEADER_AUTHORIZATION, f"Bearer {login.token}"),)
        )
        self._service_s, self._on_outcome, self._clock = service_s, on_outcome, clock
        self._arrivals = ArrivalRates(tau_s=settings.rate_window_s, max_artifacts=MAX_ARTIFACTS)
        self._lines = dict[ReplicaId, _Line]()
        self._asked = dict[tuple[ReplicaId, Digest], float]()
        self._left_bytes = 0.0
        self._counted_s = clock()
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._has_pins = True
        """Maybe, from before this process began."""

    def note_receipt(self, receipt: Receipt) -> None:
        """An engine has served a request."""
        self._arrivals.note((Digest(item.digest) for item in receipt.items), self._clock())

    async def run(self) -> None:
        """Act until cancelled. Rounds of several gateways drift apart."""
        # One use of gRPC's poller that never ends: with the last channel it would be joined here,
        # on the event loop.
        grpc.aio.init_grpc_aio()
        try:
            while True:
                await asyncio.sleep(self.settings.interval_s * random.uniform(0.8, 1.2))  # noqa: S311
                await self.act()
        finally:
            lines, self._lines = self._lines, {}
            await asyncio.gather(*(line.channel.close() for line in lines.values()))

    async def act(self) -> None:
        """One round: look, decide, ask."""
        now_s = self._clock()
        rates = self._arrivals.rates(now_s)
        if self._map.mode is not MapMode.EXACT or not (rates or self._has_pins):
            # A stale map would have copies made that are there.
            return
        self._asked = {
            key: asked_s for key, asked_s in self._asked.items() if now_s - asked_s < ASKED_FOR_S
        }
        await self._keep_lines()
        described = await self._describe_all()
        view = await self._view(rates, described, now_s)
        self._note_handovers(view)
        bounds = self._bounds(now_s)
        actions = await asyncio.to_thread(Replication(bounds).plan, view)
        for action in actions:
            logger.info(
                "%s %s on %s: saves %.3f s for %.3f s",
                *(action.kind.value, action.digest, action.replica),
                *(action.saved_s, action.spent_s),
            )
        await asyncio.gather(*(self._do(action) for action in actions))

    def _bounds(self, now_s: float) -> Bounds:
        per_s = self.settings.max_copy_bytes_per_s
        earned = (now_s - self._counted_s) * per_s
        self._left_bytes = min(self._left_bytes + earned, SAVED_UP_S * per_s)
        self._counted_s = now_s
        return Bounds(
            max_actions=self.settings.max_actions, max_copy_bytes=max(0, int(self._left_bytes))
        )

    # --- what is known ---------------------------------------------------------------------------
    def _leaving(self) -> set[ReplicaId]:
        """Replicas whose hot set should be elsewhere: told so by an engine or by an operator."""
        present = {replica.replica for replica in self._fleet.replicas}
        removed = {replica.replica for replica in self._fleet.leaving} | set(self._fleet.taken_out)
        told = {name for name in present if self._is_draining(name)}
        return (removed - present) | told

    def _is_draining(self, name: ReplicaId) -> bool:
        registration = self._map.registration(name)
        return registration is not None and registration.is_draining

    async def _view(
        self,
        rates: Mapping[Digest, float],
        described: Mapping[ReplicaId, control_pb2.DescribeResponse],
        now_s: float,
    ) -> CopiesView:
        leaving = self._leaving()
        replicas = dict[ReplicaId, ReplicaState]()
        for replica in self._fleet.replicas:
            if replica.is_healthy and replica.replica not in leaving:
                row, said = replica.row, described.get(replica.replica)
                load = row.own_load(now_s) + row.others
                num_bytes = load.pending_bytes.get(Tier.REMOTE, 0)
                state = ReplicaState(
                    rates=row.rates,
                    queue_s=load.pending_s,
                    link_s=num_bytes / row.rates.tiers[Tier.REMOTE].bytes_per_s,
                )
                replicas[replica.replica] = state if said is None else _described(state, said)
        replicas |= {name: ReplicaState(is_draining=True) for name in leaving}
        own_pins = {
            (name, Digest(resident.digest))
            for name, said in described.items()
            for resident in said.residents
            if CONTROL_OWNER in resident.pinned_by
        }
        self._has_pins = bool(own_pins)
        asked = dict[Digest, set[ReplicaId]]()
        for name, digest in self._asked:
            asked.setdefault(digest, set()).add(name)
        kinds = self._kinds([name for name in described if name in replicas])
        artifacts = dict[Digest, ArtifactState]()
        wanted = sorted(rates.keys() | {digest for _, digest in own_pins})
        for number, digest in enumerate(wanted):
            if number % BATCH == 0:
                await asyncio.sleep(0)
            manifest = self._catalog.manifest(digest)
            if manifest is None:
                continue
            copies = {
                name: self._copy(name, digest, own_pins)
                for name in self._map.ready_on(digest)
                if name in replicas
            }
            copies |= {
                name: Copy(copies[name].tier if name in copies else Tier.REMOTE, is_ready=False)
                for name in asked.get(digest, ())
                if name in replicas and not _is_near(copies.get(name))
            }
            artifacts[digest] = ArtifactState(
                manifest.decoded_bytes,
                rates.get(digest, 0.0),
                copies,
                _able(manifest, kinds),
            )
        return CopiesView(
            artifacts, replicas, self._service_s(), self._arrivals.requests_per_s(now_s)
        )

    def _copy(
        self, name: ReplicaId, digest: Digest, own_pins: set[tuple[ReplicaId, Digest]]
    ) -> Copy:
        record = self._map.record(name, digest)
        assert record is not None  # noqa: S101 - it is listed as ready
        is_own = (name, digest) in own_pins
        return Copy(record.tier, is_pinned=record.is_pinned and not is_own, has_own_pin=is_own)

    def _kinds(self, names: list[ReplicaId]) -> dict[bytes, tuple[Registration, list[ReplicaId]]]:
        """Replicas that can be asked, by what their engines are: mostly one kind."""
        kinds = dict[bytes, tuple[Registration, list[ReplicaId]]]()
        for name in names:
            registration = self._map.registration(name)
            if registration is not None:
                key = msgspec.json.encode(registration.engine)
                kinds.setdefault(key, (registration, []))[1].append(name)
        return kinds

    def _note_handovers(self, view: CopiesView) -> None:
        found = dict[ReplicaId, Handover]()
        horizon_s = Bounds().horizon_s
        staying = {name for name, state in view.replicas.items() if not state.is_draining}
        for name in view.replicas.keys() - staying:
            hot = [
                state
                for state in view.artifacts.values()
                if name in state.copies and state.rate_per_s * horizon_s >= 1
            ]
            elsewhere = sum(
                any(copy.is_ready for other, copy in state.copies.items() if other in staying)
                for state in hot
            )
            found[name] = Handover(len(hot), elsewhere)
        self.handovers = found

    # --- calls -----------------------------------------------------------------------------------
    async def _keep_lines(self) -> None:
        """A channel to each replica that says where its control service is, and to no other."""
        wanted = dict[ReplicaId, str]()
        for replica in self._fleet.replicas:
            registration = self._map.registration(replica.replica)
            if registration is not None and registration.control_address is not None:
                wanted[replica.replica] = _reachable(registration.control_address, replica.url)
        for name, line in list(self._lines.items()):
            if wanted.get(name) != line.address:
                del self._lines[name]
                await line.channel.close()
        for name, address in wanted.items():
            if name not in self._lines:
                self._lines[name] = _Line(address, self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        # Each address has one channel here, and a failed one is tried anew when it is asked again.
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
        )
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self._credentials, options)

    async def _describe_all(self) -> dict[ReplicaId, control_pb2.DescribeResponse]:
        """What each replica that answers has room for, and what is pinned there."""
        names = sorted(self._lines)
        answers = await asyncio.gather(*(self._describe(name) for name in names))
        return {
            name: answer for name, answer in zip(names, answers, strict=True) if answer is not None
        }

    async def _describe(self, name: ReplicaId) -> control_pb2.DescribeResponse | None:
        async with self._calling(name, _DESCRIBE) as line:
            if line is None:
                return None
            answer: control_pb2.DescribeResponse = await line.stub.Describe(
                control_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
            if answer.replica != name:
                self._fail(line, _DESCRIBE, "another_replica")
                return None
            self._on_outcome(_DESCRIBE, "ok")
            return answer
        return None

    async def _do(self, action: Action) -> None:
        """Have one engine do one thing; what it refuses is not asked again before its time."""
        record = self._map.record(action.replica, action.digest)
        if action.kind is ActionKind.PREFETCH:
            if record is not None and _is_near(Copy(record.tier)):
                # Another gateway was first.
                self._on_outcome(action.kind.value, _DECLINED)
                return
            self._asked[action.replica, action.digest] = self._clock()
            self._left_bytes -= action.size_bytes
        async with self._calling(action.replica, action.kind.value) as line:
            if line is not None:
                is_done = await self._ask(line, action)
                self._on_outcome(action.kind.value, "ok" if is_done else _DECLINED)

    async def _ask(self, line: _Line, action: Action) -> bool:
        how: dict[str, Any] = {"timeout": CALL_TIMEOUT_S, "metadata": self._metadata}
        if action.kind is ActionKind.PREFETCH:
            expected_s = action.expected_in_s
            request = control_pb2.PrefetchRequest(
                digest=action.digest,
                deadline_ms=LOAD_DEADLINE_MS,
                priority=action.priority,
                no_wait=True,
                expected_in_ms=None
                if expected_s is None
                else min(86_400_000, int(expected_s * 1e3)),
            )
            await line.stub.Prefetch(request, **how)
            return True
        if action.kind is ActionKind.EVICT:
            answer = await line.stub.Evict(control_pb2.EvictRequest(digest=action.digest), **how)
            return bool(answer.evicted)
        pin: dict[str, Any] = {
            "digest": action.digest,
            "owner": CONTROL_OWNER,
            "tier": control_pb2.TIER_DRAM,
        }
        if action.kind is ActionKind.PIN:
            self._has_pins = True
            await line.stub.Pin(control_pb2.PinRequest(**pin), **how)
            return True
        ended = await line.stub.Unpin(control_pb2.UnpinRequest(**pin), **how)
        return bool(ended.unpinned)

    @contextlib.asynccontextmanager
    async def _calling(self, name: ReplicaId, action: str) -> AsyncIterator[_Line | None]:
        """The line to a replica, `None` while it is left alone; failures are counted, and end."""
        line = self._lines.get(name)
        if line is None or self._clock() < line.not_before_s:
            yield None
            return
        async with self._calls:
            try:
                yield line
            except grpc.aio.AioRpcError as error:
                code = error.code()
                logger.warning("%s on %s failed: %s %s", action, name, code.name, error.details())
                if code in _OF_THE_SERVICE:
                    self._fail(line, action, code.name.lower())
                else:
                    # About this artifact only: it does not fit, or the store has lost it.
                    self._on_outcome(action, code.name.lower())
            else:
                if self._clock() >= line.not_before_s:
                    line.num_failures = 0

    def _fail(self, line: _Line, action: str, outcome: str) -> None:
        """Leave a service alone for longer each time."""
        line.num_failures += 1
        pause_s = self.settings.interval_s * 2 ** min(line.num_failures, 16)
        line.not_before_s = self._clock() + min(MAX_PAUSE_S, pause_s)
        self._on_outcome(action, outcome)


def _is_near(copy: Copy | None) -> bool:
    return copy is not None and copy.tier in _NEAR


def _described(state: ReplicaState, said: control_pb2.DescribeResponse) -> ReplicaState:
    """With what a replica says of its memory."""
    pinned = sum(resident.size_bytes for resident in said.residents if resident.pinned)
    return replace(
        state,
        capacity_bytes=said.dram_capacity_bytes,
        spare_bytes=max(0, said.dram_capacity_bytes - said.dram_used_bytes),
        pin_bytes=max(0, said.dram_pinned_limit_bytes - pinned),
    )


def _able(
    manifest: Manifest, kinds: Mapping[bytes, tuple[Registration, list[ReplicaId]]]
) -> frozenset[ReplicaId]:
    """Replicas that can be asked to bring an artifact, and could use it."""
    return frozenset(
        name
        for registration, names in kinds.values()
        if not incompatibilities(manifest, registration.engine)
        for name in names
    )


def _reachable(address: str, url: str) -> str:
    """Where a control service is that listens on all addresses: where its API server is."""
    host, colon, port = address.rpartition(":")
    if host not in _WILDCARDS:
        return address
    name = urlsplit(url).hostname or host
    return f"{f'[{name}]' if ':' in name else name}{colon}{port}"
