"""The gRPC control service of one engine or node agent, and standard health.

Owns the translation between protobuf and what it controls: the dram tier, pins, draining, the
ledger. Refuses to touch tensors or scheduling, and callers without the token.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cartridge_engine_ext.control_access import OPEN_ACCESS, ControlAccess
from cartridge_engine_ext.dram_tier import MAX_PREFETCH_PRIORITY, Artifact, DramTier
from cartridge_engine_ext.errors import ConfigurationError, Refusal
from cartridge_engine_ext.residency_ledger import ResidencyLedger, ResidencyRow
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.residency import Epoch, FailureReason, ReplicaId, Tier
from cartridge_proto.v1 import control_pb2, control_pb2_grpc

if TYPE_CHECKING:
    import queue

MAX_MESSAGE_BYTES = 1 << 20
MAX_DIGESTS = 1024
DEFAULT_DEADLINE_MS = 30_000
MAX_DEADLINE_MS = 600_000
MAX_EXPECTED_IN_MS = 86_400_000
NUM_THREADS = 32
"""Each waiting call and each watcher takes one; health and Describe need some left."""
MAX_WAITING = 12
MAX_WATCHERS = 12
_DRAIN_POLL_S = 0.02

T = TypeVar("T")

_OWNER = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_STATUS = {
    FailureReason.UNKNOWN_ARTIFACT: grpc.StatusCode.NOT_FOUND,
    FailureReason.CORRUPT_ARTIFACT: grpc.StatusCode.DATA_LOSS,
    FailureReason.INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
    FailureReason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    FailureReason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    FailureReason.CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FailureReason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
}

_WIRE_TIER = {
    Tier.HBM: control_pb2.TIER_HBM,
    Tier.DRAM: control_pb2.TIER_DRAM,
    Tier.NVME: control_pb2.TIER_NVME,
    Tier.REMOTE: control_pb2.TIER_REMOTE,
}


class HbmPins(Protocol):
    """Keeps compositions in HBM. A future holds why not, or `None` when it is done."""

    def pin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """Keep the blocks of a composition that is whole in HBM."""
        ...

    def unpin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """End an owner's pin; with the last one the blocks may go."""
        ...

    def pinned_by(self, composition: Digest) -> tuple[str, ...]:
        """Who holds pins on a composition."""
        ...


class Drainable(Protocol):
    """What can stop taking requests with Cartridges."""

    def drain(self) -> None:
        """Take no more. Idempotent."""
        ...

    def is_drained(self) -> bool:
        """Whether none is taken and none is left."""
        ...

    def resume(self) -> None:
        """Take them again. Idempotent."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether none is taken."""
        ...


class ControlService(control_pb2_grpc.CartridgeControlServicer):
    """Answers for one dram tier. `not_ready_reason()` is `None` once the self-test has passed.

    What is not given is answered UNIMPLEMENTED: `ledger` (Watch, and tiers beside dram),
    `hbm_pins` (Pin and Unpin in hbm), `drainable` (Drain, Resume). A node agent has no `engine`.
    """

    def __init__(
        self,
        *,
        pool: DramTier,
        engine: EngineIdentity | None,
        engine_version: str,
        replica: ReplicaId,
        epoch: Epoch,
        not_ready_reason: Callable[[], str | None],
        ledger: ResidencyLedger | None = None,
        hbm_pins: HbmPins | None = None,
        drainable: Drainable | None = None,
        quarantined: Callable[[], Mapping[Digest, str]] = dict,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._engine_version = engine_version
        self._replica = replica
        self._epoch = epoch
        self._not_ready_reason = not_ready_reason
        self._ledger = ledger
        self._hbm_pins = hbm_pins
        self._drainable = drainable
        self._quarantined = quarantined
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._watching = threading.BoundedSemaphore(MAX_WATCHERS)

    # --- looking ---------------------------------------------------------------------------------
    def Describe(  # noqa: N802
        self,
        request: control_pb2.DescribeRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.DescribeResponse:
        """What the replica serves and holds."""
        reason = self._not_ready_reason()
        drainable = self._drainable
        return control_pb2.DescribeResponse(
            replica=self._replica,
            epoch=self._epoch,
            engine_version=self._engine_version,
            ready=reason is None,
            reason=reason or "",
            engine_json=b"" if self._engine is None else msgspec.json.encode(self._engine),
            residents=self._residents(artifact.digest for artifact, _ in self._pool.residents()),
            dram_capacity_bytes=self._pool.capacity_bytes,
            dram_used_bytes=self._pool.used_bytes,
            dram_pinned_limit_bytes=self._pool.pinned_bytes,
            draining=drainable is not None and drainable.is_draining,
            drained=drainable is not None and drainable.is_drained(),
            quarantined=[
                control_pb2.Quarantine(digest=digest, reason=reason)
                for digest, reason in sorted(self._quarantined().items())
            ],
        )

    def Lookup(  # noqa: N802
        self,
        request: control_pb2.LookupRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.LookupResponse:
        """What is known of some digests."""
        if len(request.digests) > MAX_DIGESTS:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"digests: {len(request.digests)}; the limit is {MAX_DIGESTS}",
            )
        digests = [
            _digest(text, context, f"digests[{index}]")
            for index, text in enumerate(request.digests)
        ]
        return control_pb2.LookupResponse(residents=self._residents(digests))

    def Watch(  # noqa: N802
        self,
        request: control_pb2.WatchRequest,
        context: grpc.ServicerContext,
    ) -> Iterator[control_pb2.WatchEvent]:
        """All rows, then each change."""
        if self._ledger is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch: no residency is kept here")
        if not self._watching.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} callers are watching already"
            )
        try:
            with self._ledger.watching() as changes:
                yield from self._events(changes, context)
        finally:
            self._watching.release()

    def _events(
        self, changes: "queue.Queue[ResidencyRow | None]", context: grpc.ServicerContext
    ) -> Iterator[control_pb2.WatchEvent]:
        num_first = changes.qsize()
        if not context.add_callback(lambda: changes.put(None)):
            return
        for _ in range(num_first):
            row = changes.get()
            if row is not None:
                yield control_pb2.WatchEvent(epoch=self._epoch, resident=_from_row(row))
        yield control_pb2.WatchEvent(epoch=self._epoch, synced=True)
        while True:
            row = changes.get()
            if row is None:
                break
            yield control_pb2.WatchEvent(epoch=self._epoch, resident=_from_row(row))
        if context.is_active():
            context.abort(grpc.StatusCode.ABORTED, "changes were read too slowly; watch anew")

    # --- moving ----------------------------------------------------------------------------------
    def Prefetch(  # noqa: N802
        self,
        request: control_pb2.PrefetchRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.PrefetchResponse:
        """Bring an artifact to the dram tier and wait for it, unless told not to."""
        digest = _digest(request.digest, context)
        timeout_s = _timeout_s(request.deadline_ms, context)
        priority = _priority(request.priority, context)
        if request.HasField("expected_in_ms"):
            if request.expected_in_ms > MAX_EXPECTED_IN_MS:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"expected_in_ms: {request.expected_in_ms}; the limit is {MAX_EXPECTED_IN_MS}",
                )
            self._pool.expect(digest, time.monotonic() + request.expected_in_ms / 1000)
        if request.no_wait:
            try:
                self._pool.prefetch(digest, time.monotonic() + timeout_s, priority)
            except Refusal as refusal:
                _abort(context, refusal)
            return control_pb2.PrefetchResponse(resident=self._resident(digest))
        _, load_s = self._loaded(digest, timeout_s, priority, context)
        return control_pb2.PrefetchResponse(resident=self._resident(digest), load_s=load_s)

    def Move(  # noqa: N802
        self,
        request: control_pb2.MoveRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.MoveResponse:
        """Bring an artifact to a tier."""
        digest = _digest(request.digest, context)
        timeout_s = _timeout_s(request.deadline_ms, context)
        priority = _priority(request.priority, context)
        if request.to == control_pb2.TIER_DRAM:
            self._loaded(digest, timeout_s, priority, context)
        elif request.to in (control_pb2.TIER_NVME, control_pb2.TIER_REMOTE):
            reason = self._pool.evict(digest)
            if reason not in (None, "not resident"):
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"digest: {reason}")
        elif request.to == control_pb2.TIER_HBM:
            context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "to: what is in hbm is the engine's choice"
            )
        else:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"to: {request.to}; one of TIER_DRAM, TIER_NVME, TIER_REMOTE",
            )
        return control_pb2.MoveResponse(resident=self._resident(digest))

    def Evict(  # noqa: N802
        self,
        request: control_pb2.EvictRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.EvictResponse:
        """Drop an artifact from the dram tier."""
        reason = self._pool.evict(_digest(request.digest, context))
        return control_pb2.EvictResponse(evicted=reason is None, reason=reason or "")

    def _loaded(
        self, digest: Digest, timeout_s: float, priority: int, context: grpc.ServicerContext
    ) -> tuple[Artifact, float]:
        def load() -> tuple[Artifact, float]:
            self._pool.acquire(digest, time.monotonic() + timeout_s, priority)
            try:
                return self._pool.wait(digest, timeout_s)
            finally:
                self._pool.release(digest)

        return self._wait_for(load, context)

    # --- pins ------------------------------------------------------------------------------------
    def Pin(  # noqa: N802
        self,
        request: control_pb2.PinRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.PinResponse:
        """Keep an artifact in dram, or a composition in hbm."""
        digest = _digest(request.digest, context)
        timeout_s = _timeout_s(request.deadline_ms, context)
        if request.tier == control_pb2.TIER_HBM:
            pins = self._pins(context)
            owner = _owner(request.owner, context)
            reason = self._done(lambda: pins.pin(digest, owner), timeout_s, context)
            if reason is not None:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"digest: {reason}")
        else:
            _check_pin_tier(request.tier, context)
            owner = _owner(request.owner, context)
            self._wait_for(lambda: self._pool.pin(digest, owner, timeout_s), context)
        return control_pb2.PinResponse(resident=self._resident(digest))

    def Unpin(  # noqa: N802
        self,
        request: control_pb2.UnpinRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.UnpinResponse:
        """End a pin."""
        digest = _digest(request.digest, context)
        if request.tier == control_pb2.TIER_HBM:
            pins = self._pins(context)
            owner = _owner(request.owner, context)
            timeout_s = DEFAULT_DEADLINE_MS / 1000
            reason = self._done(lambda: pins.unpin(digest, owner), timeout_s, context)
            return control_pb2.UnpinResponse(unpinned=reason is None, reason=reason or "")
        _check_pin_tier(request.tier, context)
        owner = _owner(request.owner, context)
        is_ended = self._pool.unpin(digest, owner)
        reason = "" if is_ended else f"not pinned by {owner}"
        return control_pb2.UnpinResponse(unpinned=is_ended, reason=reason)

    def _pins(self, context: grpc.ServicerContext) -> HbmPins:
        if self._hbm_pins is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "tier: nothing is pinned in hbm here")
        return self._hbm_pins

    def _done(
        self,
        ask: Callable[[], "Future[str | None]"],
        timeout_s: float,
        context: grpc.ServicerContext,
    ) -> str | None:
        def wait() -> str | None:
            future = ask()
            try:
                return future.result(timeout_s)
            except (TimeoutError, CancelledError):
                future.cancel()
                detail = f"deadline_ms: the engine took no step in {timeout_s:.3f} s"
                raise Refusal(FailureReason.DEADLINE, detail) from None

        return self._wait_for(wait, context)

    # --- draining --------------------------------------------------------------------------------
    def Drain(  # noqa: N802
        self,
        request: control_pb2.DrainRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.DrainResponse:
        """Stop taking requests with Cartridges, and wait for the last one."""
        drainable = self._require_drainable(context)
        _check_deadline(request.deadline_ms, context)
        drainable.drain()
        end_s = time.monotonic() + request.deadline_ms / 1000

        def wait() -> bool:
            ended = threading.Event()
            context.add_callback(ended.set)
            while not drainable.is_drained():
                left_s = end_s - time.monotonic()
                if left_s <= 0 or ended.wait(min(left_s, _DRAIN_POLL_S)):
                    return False
            return True

        if request.deadline_ms == 0:
            return control_pb2.DrainResponse(drained=drainable.is_drained())
        return control_pb2.DrainResponse(drained=self._wait_for(wait, context))

    def Resume(  # noqa: N802
        self,
        request: control_pb2.ResumeRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.ResumeResponse:
        """Take requests with Cartridges again."""
        self._require_drainable(context).resume()
        return control_pb2.ResumeResponse()

    def _require_drainable(self, context: grpc.ServicerContext) -> Drainable:
        if self._drainable is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Drain: no requests are taken here")
        return self._drainable

    # --- waiting and answering -------------------------------------------------------------------
    def _wait_for(self, action: Callable[[], T], context: grpc.ServicerContext) -> T:
        """Run what may take long, unless too many do; a refusal becomes a status."""
        if not self._waiting.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WAITING} calls are waiting already"
            )
        try:
            return action()
        except Refusal as refusal:
            _abort(context, refusal)
        finally:
            self._waiting.release()

    def _resident(self, digest: Digest) -> control_pb2.Resident:
        return self._residents([digest])[0]

    def _residents(self, digests: Iterable[Digest]) -> list[control_pb2.Resident]:
        rows = [] if self._ledger is None else self._ledger.rows()
        by_digest = {row.digest: row for row in rows}
        return [self._described(digest, by_digest.get(digest)) for digest in digests]

    def _described(self, digest: Digest, row: ResidencyRow | None) -> control_pb2.Resident:
        holding = self._pool.holding(digest)
        tiers = set(self._ledger.tiers(digest)) if self._ledger is not None else set()
        answer = control_pb2.Resident(digest=digest)
        if row is not None:
            answer.size_bytes, answer.pinned = row.size_bytes, row.is_pinned
        if holding is not None:
            answer.size_bytes = holding.size_bytes or 0
            answer.pinned = answer.pinned or bool(holding.pinned_by)
            answer.num_users = holding.num_users
            answer.loading = not holding.is_ready
            answer.pinned_by.extend(holding.pinned_by)
            if holding.is_ready:
                tiers.add(Tier.DRAM)
        if self._hbm_pins is not None:
            answer.pinned_by.extend(self._hbm_pins.pinned_by(digest))
        answer.tiers.extend(_WIRE_TIER[tier] for tier in Tier if tier in tiers)
        if answer.tiers:
            answer.tier = answer.tiers[0]
        return answer


class ControlServer:
    """The listening gRPC server; `address` is where it really listens.

    Raises:
        ConfigurationError: the address cannot be had, or is open to others without a token or
            client certificates.
    """

    def __init__(
        self, service: ControlService, address: str, access: ControlAccess = OPEN_ACCESS
    ) -> None:
        access.check_address(address)
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="control"),
            interceptors=access.interceptors(),
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        control_pb2_grpc.add_CartridgeControlServicer_to_server(service, self._server)
        self.set_serving(is_serving=False)
        try:
            port = access.add_port(self._server, address)
        except RuntimeError as error:
            raise ConfigurationError(f"control_address {address}: {error}") from error
        is_path = address.startswith("unix:")
        self.address = address if is_path else f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def set_serving(self, *, is_serving: bool) -> None:
        """What health checks are told."""
        status = health_pb2.HealthCheckResponse
        self._health.set("", status.SERVING if is_serving else status.NOT_SERVING)

    def stop(self) -> None:
        """End the server; running calls get a second."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=1.0).wait()


# --- reading requests ----------------------------------------------------------------------------
def _digest(text: str, context: grpc.ServicerContext, field: str = "digest") -> Digest:
    try:
        return parse_digest(text)
    except ValueError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {error}")


def _check_deadline(deadline_ms: int, context: grpc.ServicerContext) -> None:
    if deadline_ms > MAX_DEADLINE_MS:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"deadline_ms: {deadline_ms}; the limit is {MAX_DEADLINE_MS}",
        )


def _timeout_s(deadline_ms: int, context: grpc.ServicerContext) -> float:
    _check_deadline(deadline_ms, context)
    return (deadline_ms or DEFAULT_DEADLINE_MS) / 1000


def _priority(priority: int, context: grpc.ServicerContext) -> int:
    if priority > MAX_PREFETCH_PRIORITY:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"priority: {priority}; the limit is {MAX_PREFETCH_PRIORITY}",
        )
    return priority


def _owner(owner: str, context: grpc.ServicerContext) -> str:
    if _OWNER.fullmatch(owner) is None:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"owner: {owner[:80]!r}; 1 to 128 signs of A-Za-z0-9._:-",
        )
    return owner


def _check_pin_tier(tier: int, context: grpc.ServicerContext) -> None:
    if tier != control_pb2.TIER_DRAM:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"tier: {tier}; one of TIER_DRAM, TIER_HBM")


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
    context.abort(_STATUS.get(refusal.reason, grpc.StatusCode.INTERNAL), refusal.detail)


def _from_row(row: ResidencyRow) -> control_pb2.Resident:
    tier = control_pb2.TIER_UNSPECIFIED if row.tier is None else _WIRE_TIER[row.tier]
    return control_pb2.Resident(
        digest=row.digest,
        tier=tier,
        size_bytes=row.size_bytes,
        pinned=row.is_pinned,
        tiers=[] if row.tier is None else [tier],
    )
