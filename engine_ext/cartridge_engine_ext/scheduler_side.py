"""The scheduler half of the connector: gives requests their virtual prefix, or refuses them.

Owns the life of each request that carries Cartridges, from message to receipt. Refuses to prefill
a virtual position: what cannot be loaded fails its request, and only that.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cartridge_engine_ext.adapter_identity import AdapterIdentities, RequestAdapter
from cartridge_engine_ext.dram_tier import Artifact, DramTier
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.first_load_probe import ProbeVerdict
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.layout_probe import Captured
from cartridge_engine_ext.load_plan import (
    Capture,
    Load,
    LoadPlan,
    LoadReport,
    LoadResult,
    joined,
)
from cartridge_engine_ext.packed_layout import (
    CacheGeometry,
    PackedPrefix,
    StoredSegment,
    packed_prefix,
)
from cartridge_engine_ext.stored_segments import InPlacePrefix, Segment, TensorReference
from cartridge_engine_ext.virtual_prefix import context_overrun
from cartridge_proto.claims import FalseClaim, check_claims
from cartridge_proto.compatibility import EngineIdentity, adapter_mismatch
from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    InvalidComposition,
    OnMiss,
    cache_salt,
    claimed_request_id,
    claimed_scope,
    composition_digest,
    decode_message,
)
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.names import FIELD_CARTRIDGES, FIELD_KV_HINTS, FIELD_RECEIPT, FIELD_SELF_TEST
from cartridge_proto.residency import (
    Epoch,
    FailureReason,
    Receipt,
    ReceiptItem,
    ReceiptStatus,
    ReplicaId,
    Tier,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MAX_DETAIL = 2000
_MAX_LAYOUTS = 4096
"""Compositions whose layout in blocks is remembered; of others it is found out anew."""


@dataclass
class _VirtualRequest:
    """One live request with a virtual prefix."""

    message: CompositionMessage
    received_s: float
    tiers: dict[str, Tier]
    adapter: RequestAdapter | None = None
    """The LoRA adapter that its tokens are computed with."""
    trace_headers: Mapping[str, str] | None = None
    received_ns: int = field(default_factory=time.time_ns)
    ready_ns: int | None = None
    reloaded_s: float | None = None
    """When its artifacts were first asked for after it had run without: its blocks were lost."""
    refusal: Refusal | None = None
    is_proof: bool = False
    """A request of the engine to itself: a self-test or a probe."""
    was_in_hbm: bool = False
    """Its whole prefix was in HBM when it came."""
    is_checked: bool = False
    num_reused_slots: int | None = None
    num_loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    """Seconds that it waited for its prefix, in waits that are over."""
    waiting_since_s: float | None = None
    """When its wait for bytes, verdicts or another request's load began; `None` = it has none."""
    was_scheduled: bool = False
    """Its prefix was asked for, and nothing had to be waited for any longer."""
    is_acquired: bool = False
    is_counted: bool = False
    """Listed in the census of prefixes in HBM."""
    is_loading: bool = False
    """The workers have a load of this request that not all of them have ended."""
    result: LoadResult | None = None
    """Of that load, from the workers that have told so far."""
    has_error: bool | None = None
    """How the request ended while its load went on; `None` while it lives."""
    is_abandoned: bool = False
    """Its client has left before its prefix was whole."""
    packed: PackedPrefix | None = None
    """How its prefix lies in blocks, where it is packed; plain slots otherwise."""
    is_laid_out: bool = False
    """Which of the two is known."""
    is_in_place: bool = False
    """It is read where it lies, and takes no slot."""

    @property
    def num_slots(self) -> int:
        """Slots that its prefix takes."""
        if self.is_in_place:
            return 0
        return self.message.num_tokens if self.packed is None else self.packed.num_slots

    @property
    def deadline_s(self) -> float:
        begin_s = self.received_s if self.reloaded_s is None else self.reloaded_s
        return begin_s + self.message.deadline_ms / 1000

    def begin_wait(self) -> None:
        """It was asked for its prefix and has to wait: for the first one, from its arrival."""
        if self.waiting_since_s is None:
            self.waiting_since_s = time.monotonic() if self.was_scheduled else self.received_s

    def end_wait(self) -> None:
        """It need not wait any longer."""
        self.was_scheduled = True
        if self.waiting_since_s is not None:
            self.load_s += time.monotonic() - self.waiting_since_s
            self.waiting_since_s = None

    @property
    def digests(self) -> list[Digest]:
        """Each artifact that is read, once, in order."""
        return list(dict.fromkeys(Digest(item.digest) for item in self.message.visible_items))


@dataclass
class _Doomed:
    """A request refused before it got a prefix: fails as soon as it is scheduled."""

    request_id: str
    scope: str | None
    refusal: Refusal
    trace_headers: Mapping[str, str] | None
    is_proof: bool
    received_ns: int = field(default_factory=time.time_ns)


@dataclass
class _CaptureRequest:
    """A self-test request whose first `num_tokens` positions are read back."""

    num_tokens: int
    is_captured: bool = False


_Tracked = _VirtualRequest | _Doomed | _CaptureRequest


@dataclass
class SelfTestGate:
    """What lets the self-test in before the engine is ready, and everybody else after.

    The token never leaves this process except in the self-test's own requests.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(16))
    is_open: bool = False
    immovable: str | None = "the boot self-test has not moved keys yet"
    """Why keys cannot be moved along the sequence on this engine; `None` when they can."""


@dataclass(frozen=True)
class EndedPrefix:
    """A request that had, or asked for, a virtual prefix, and is over. Unix times.

    `message` is `None` when there was none that could be read.
    """

    receipt: Receipt
    message: CompositionMessage | None
    trace_headers: Mapping[str, str] | None
    start_ns: int
    ready_ns: int


class SchedulerSide:
    """One per engine; called by vLLM's scheduler on its thread only."""

    def __init__(
        self,
        *,
        pool: DramTier,
        engine: EngineIdentity,
        replica: ReplicaId,
        epoch: Epoch,
        placeholder_token_id: int,
        gate: SelfTestGate,
        census: HbmCensus,
        adapters: AdapterIdentities,
        verdict_of: Callable[[Digest, Manifest, str | None], ProbeVerdict | None],
        packed_cache: CacheGeometry | None,
        is_in_place: bool,
        hints: Callable[[object], None],
        on_ended: Callable[[EndedPrefix], None],
        on_captured: Callable[[dict[int, Captured]], None],
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._replica = replica
        self._epoch = epoch
        self._placeholder = placeholder_token_id
        self._gate = gate
        self._census = census
        self._adapters = adapters
        self._verdict_of = verdict_of
        self._take_hints = hints
        self._on_ended = on_ended
        self._packed_cache = packed_cache
        self._is_in_place = is_in_place
        self._layouts: dict[str, PackedPrefix | None] = {}
        """By block salt of plain slots; `None` = plain slots."""
        self._is_draining = False
        self._on_captured = on_captured
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, str] = {}
        self._plan = LoadPlan()

    # --- hooks of the connector, in the order vLLM calls them ----------------------------------
    def on_new_request(self, request: "Request") -> None:
        """Put the virtual prefix in front of a request, or mark it as refused."""
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return
        if FIELD_SELF_TEST in params:
            self._track_capture(request, params[FIELD_SELF_TEST])
        if FIELD_KV_HINTS in params:
            self._take_hints(params[FIELD_KV_HINTS])
        if FIELD_CARTRIDGES not in params:
            return
        try:
            self._attach(request, params)
        except Refusal as refusal:
            self._doom(request, refusal, params)
        except Exception as error:
            logger.exception("request %s: no virtual prefix", request.request_id)
            internal = Refusal(FailureReason.INTERNAL, f"{type(error).__name__}: {error}")
            self._doom(request, internal, params)

    def num_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Virtual tokens to load beyond those computed, and whether a load will bring them.

        `None` = ask again, the bytes are coming. Nothing that a second call would repeat.
        """
        tracked = self._tracked.get(request.request_id)
        if isinstance(tracked, _Doomed):
            return 1, True
        if not isinstance(tracked, _VirtualRequest):
            return 0, False
        if tracked.is_in_place:
            return self._matched_in_place(request, tracked)
        missing = max(0, tracked.num_slots - num_computed_tokens)
        if not missing:
            # Refused before, but vLLM had no blocks yet to fail it by, and another has loaded them.
            tracked.refusal = None
        elif tracked.refusal is None:
            try:
                # A new layout changes what vLLM looked up in its prefix cache: it must ask again.
                must_ask_again = (
                    not self._is_loaded(tracked)
                    or self._is_laid_out_anew(request, tracked)
                    or self._is_coming(request, missing)
                )
                if must_ask_again:
                    tracked.begin_wait()
                    return None, False
            except Refusal as refusal:
                tracked.refusal = refusal
        tracked.end_wait()
        return missing, missing > 0

    def _matched_in_place(
        self, request: "Request", tracked: _VirtualRequest
    ) -> tuple[int | None, bool]:
        """Nothing to load once all is in dram; one token of a refused request, to fail it by."""
        if tracked.refusal is None:
            try:
                if not self._is_loaded(tracked):
                    tracked.begin_wait()
                    return None, False
            except Refusal as refusal:
                logger.warning("request %s refused: %s", request.request_id, refusal)
                tracked.refusal = refusal
                _empty(request)
                # What vLLM found in its prefix cache was for the prompt that it had.
                return None, False
        tracked.end_wait()
        return (0, False) if tracked.refusal is None else (1, True)

    def after_allocation(
        self,
        request: "Request",
        block_ids: Sequence[int],
        num_external_tokens: int,
        num_skipped_blocks: int = 0,
    ) -> None:
        """Plan the load of a request that has its blocks; called again after the load.

        `num_skipped_blocks` of them, the first, stand for positions that no window reads any more.
        """
        tracked = self._tracked.get(request.request_id)
        if isinstance(tracked, _CaptureRequest) and not tracked.is_captured:
            tracked.is_captured = True
            self._plan.captures.append(
                Capture(request.request_id, tracked.num_tokens, tuple(block_ids))
            )
        elif isinstance(tracked, _Doomed):
            self._plan.failures.append(request.request_id)
        elif isinstance(tracked, _VirtualRequest):
            first = num_skipped_blocks * self._engine.block_size
            self._plan_load(request, tracked, tuple(block_ids), first, num_external_tokens)

    def take_plan(self) -> LoadPlan:
        """The loads of this step; scheduling it is done."""
        self._census.update()
        plan, self._plan = self._plan, LoadPlan()
        return plan

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its bytes, or for their way into blocks."""
        return any(
            isinstance(tracked, _VirtualRequest)
            and (tracked.is_loading or tracked.num_reused_slots is None)
            for tracked in self._tracked.values()
        )

    def take_output(self, report: LoadReport | None, ended: Iterable[str]) -> None:
        """Note what workers did in a step, and the loads that all of them have ended."""
        if report is not None:
            for request_id, result in report.results.items():
                tracked = self._tracked.get(request_id)
                if isinstance(tracked, _VirtualRequest):
                    before = tracked.result
                    tracked.result = result if before is None else joined(before, result)
            for by_rank in report.captured.values():
                self._on_captured(by_rank)
        for request_id in ended:
            tracked = self._tracked.get(request_id)
            if isinstance(tracked, _VirtualRequest):
                self._end_load(request_id, tracked)

    def finish(self, request: "Request") -> dict[str, Any] | None:
        """Give back what a request used; returns what goes into a non-streamed answer."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None
        receipt: Receipt | None = None
        if isinstance(tracked, _VirtualRequest):
            ended_by = str(request.get_finished_reason())
            tracked.has_error = ended_by == "error"
            # After that vLLM calls so what its API server ended, for a stop string for example.
            tracked.is_abandoned = ended_by == "abort" and tracked.ready_ns is None
            if tracked.is_loading:
                # Workers still read its artifacts: the rest when they have ended.
                return None
            receipt = self._end(tracked, has_error=tracked.has_error)
        elif isinstance(tracked, _Doomed):
            receipt = self._refused_receipt(tracked)
            if not tracked.is_proof:
                now_ns = time.time_ns()
                self._on_ended(
                    EndedPrefix(receipt, None, tracked.trace_headers, tracked.received_ns, now_ns)
                )
        del self._tracked[request.request_id]
        return None if receipt is None else {FIELD_RECEIPT: msgspec.to_builtins(receipt)}

    # --- draining, from any thread -------------------------------------------------------------
    def drain(self) -> None:
        """Take no more requests with Cartridges."""
        self._is_draining = True

    def resume(self) -> None:
        """Take them again."""
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """Whether none is taken."""
        return self._is_draining

    def is_drained(self) -> bool:
        """Whether none is taken and none is left."""
        return self._is_draining and not self._tracked

    def _end(self, tracked: _VirtualRequest, *, has_error: bool) -> Receipt:
        """A request and its last load are over."""
        tracked.end_wait()
        self._release(tracked)
        receipt = self._receipt(tracked, has_error=has_error)
        if not tracked.is_proof:
            ready_ns = tracked.ready_ns or time.time_ns()
            self._on_ended(
                EndedPrefix(
                    receipt, tracked.message, tracked.trace_headers, tracked.received_ns, ready_ns
                )
            )
        return receipt

    def _acquire(self, tracked: _VirtualRequest) -> None:
        if tracked.is_acquired:
            return
        tracked.is_acquired = True
        if tracked.num_reused_slots is not None:
            tracked.reloaded_s = time.monotonic()
        for digest in tracked.digests:
            is_ready = self._pool.acquire(digest, tracked.deadline_s)
            tracked.tiers[digest] = Tier.DRAM if is_ready else Tier.REMOTE

    def _release(self, tracked: _VirtualRequest) -> None:
        if tracked.is_acquired:
            tracked.is_acquired = False
            for digest in tracked.digests:
                self._pool.release(digest)
        if tracked.is_counted:
            tracked.is_counted = False
            self._census.leave(Digest(tracked.message.composition))

    # --- a new request ---------------------------------------------------------------------------
    def _track_capture(self, request: "Request", value: object) -> None:
        match value:
            case {"token": str(token), "num_tokens": int(num_tokens)} if self._is_token(token):
                if num_tokens > 0:
                    self._tracked[request.request_id] = _CaptureRequest(num_tokens)
            case _:
                logger.warning("request %s: self-test field without its token", request.request_id)

    def _attach(self, request: "Request", params: dict[str, Any]) -> None:
        try:
            message = decode_message(params[FIELD_CARTRIDGES])
        except InvalidComposition as error:
            raise Refusal(FailureReason.INVALID_MESSAGE, str(error)) from error
        self._check_request(request, params, message)
        lora = request.lora_request
        tracked = _VirtualRequest(
            message,
            time.monotonic(),
            {},
            adapter=None if lora is None else self._adapters.look(lora),
            trace_headers=(
                request.trace_headers
                if message.traceparent is None
                else {"traceparent": message.traceparent}
            ),
            is_proof=self._is_self_test(params),
            is_in_place=self._is_in_place,
        )
        self._tracked[request.request_id] = tracked
        known = _block_salt(message, tracked.adapter)
        if known in self._layouts:
            tracked.packed, tracked.is_laid_out = self._layouts[known], True
        self._put_prefix(request, tracked)
        is_aligned = tracked.num_slots % self._engine.block_size == 0
        if not (is_aligned and tracked.was_in_hbm):
            # At once: the bytes may come while the request waits for its turn.
            self._acquire(tracked)

    def _put_prefix(
        self, request: "Request", tracked: _VirtualRequest, num_before: int = 0
    ) -> None:
        """Put as many placeholders as the prefix has slots in the place of those `num_before`."""
        num_virtual, num_slots = tracked.message.num_tokens, tracked.num_slots
        num_live = request.num_prompt_tokens - num_before
        limit = self._engine.max_model_len
        overrun = context_overrun(max(num_virtual, num_slots), num_live, limit)
        if overrun is not None:
            raise Refusal(FailureReason.CONTEXT_LENGTH, overrun)
        # vLLM counts slots, of which there may be fewer than positions.
        request.max_tokens = min(request.max_tokens, limit - num_virtual - num_live)
        placeholders = [self._placeholder] * num_slots
        request.prompt_token_ids = placeholders + list(request.prompt_token_ids or [])[num_before:]
        request.num_prompt_tokens = num_slots + num_live
        request._all_token_ids[:num_before] = placeholders  # noqa: SLF001 - DESIGN section 6
        salt = _block_salt(tracked.message, tracked.adapter)
        if tracked.packed is not None or tracked.is_in_place:
            salt += _PACKED
        # Blocks that a proof wrote are for nobody else: who comes later is judged by its verdict.
        _rehash(request, secrets.token_hex(16) if tracked.is_proof else salt)
        # Under these hashes: a prefix that is laid out anew stands in other blocks.
        num_full = num_slots // self._engine.block_size
        tracked.was_in_hbm = self._census.is_whole(
            Digest(tracked.message.composition), request.block_hashes[:num_full]
        )

    def _is_laid_out_anew(self, request: "Request", tracked: _VirtualRequest) -> bool:
        """Choose the layout of a prefix whose artifacts are there; whether it is another now."""
        if tracked.is_laid_out or self._packed_cache is None:
            return False
        num_before = tracked.num_slots
        tracked.packed = packed_prefix(
            [self._stored_segment(item) for item in tracked.message.visible_items],
            self._packed_cache,
        )
        tracked.is_laid_out = True
        self._layouts[_block_salt(tracked.message, tracked.adapter)] = tracked.packed
        if len(self._layouts) > _MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        if tracked.packed is None:
            return False
        self._put_prefix(request, tracked, num_before)
        return True

    def _stored_segment(self, item: CompositionItem) -> StoredSegment:
        artifact = self._pool.poll(Digest(item.digest))
        assert artifact is not None  # noqa: S101 - asked only after every artifact was ready
        stored = artifact.manifest.representation
        return StoredSegment(
            item.num_tokens, item.offset, stored.k_dtype, stored.v_dtype, stored.v_scale is not None
        )

    def _check_request(
        self, request: "Request", params: dict[str, Any], message: CompositionMessage
    ) -> None:
        if not (self._gate.is_open or self._is_self_test(params)):
            raise Refusal(FailureReason.NOT_READY, "the boot self-test has not passed")
        if self._is_draining and not self._is_self_test(params):
            raise Refusal(FailureReason.NOT_READY, "this replica is being drained")
        if request.cache_salt != cache_salt(Digest(message.composition)):
            raise Refusal(
                FailureReason.INVALID_MESSAGE, "cache_salt is not the composition identity"
            )
        _refuse_unsupported(request, message)
        is_moved = any(item.offset for item in message.visible_items)
        if is_moved and self._gate.immovable is not None:
            raise Refusal(FailureReason.UNSUPPORTED, f"items at an offset: {self._gate.immovable}")

    def _is_self_test(self, params: dict[str, Any]) -> bool:
        value = params.get(FIELD_SELF_TEST)
        token = value.get("token") if isinstance(value, dict) else None
        return isinstance(token, str) and self._is_token(token)

    def _is_token(self, text: str) -> bool:
        # As bytes: `compare_digest` raises on text beyond ASCII, and a client chose this text.
        return hmac.compare_digest(
            text.encode("utf-8", "surrogatepass"), self._gate.token.encode("ascii")
        )

    def _doom(self, request: "Request", refusal: Refusal, params: dict[str, Any]) -> None:
        """Let a request fail without its prompt being run."""
        logger.warning("request %s refused: %s", request.request_id, refusal)
        before = self._tracked.get(request.request_id)
        if isinstance(before, _VirtualRequest):
            self._release(before)
        self._tracked[request.request_id] = _Doomed(
            claimed_request_id(params[FIELD_CARTRIDGES]),
            claimed_scope(params[FIELD_CARTRIDGES]),
            refusal,
            request.trace_headers,
            is_proof=self._is_self_test(params),
        )
        _empty(request)

    # --- scheduling ----------------------------------------------------------------------------
    def _is_coming(self, request: "Request", num_missing_tokens: int) -> bool:
        """Whether another request is loading the same full blocks, which vLLM will share."""
        loader = self._loading.get(request.cache_salt or "")
        return (
            loader is not None
            and loader != request.request_id
            and num_missing_tokens >= self._engine.block_size
            and bool(request.block_hashes)
        )

    def _is_loaded(self, tracked: _VirtualRequest) -> bool:
        self._acquire(tracked)
        artifacts = [self._pool.poll(digest) for digest in tracked.digests]
        ready = [artifact for artifact in artifacts if artifact is not None]
        for artifact in ready:
            if tracked.tiers[artifact.digest] is not Tier.DRAM:
                tracked.tiers[artifact.digest] = artifact.loaded_from
        if len(ready) < len(artifacts):
            self._check_deadline(tracked, "not loaded")
            return False
        if not tracked.is_checked:
            manifests = {str(artifact.digest): artifact.manifest for artifact in ready}
            try:
                check_claims(tracked.message, manifests)
            except FalseClaim as claim:
                raise Refusal(claim.reason, claim.detail) from claim
            if not self._have_its_adapter(tracked, ready):
                return False
            if not (tracked.is_proof or self._are_probed(tracked, ready)):
                return False
            tracked.is_checked = True
        return True

    def _have_its_adapter(self, tracked: _VirtualRequest, artifacts: Sequence[Artifact]) -> bool:
        """Whether all artifacts are of the request's adapter; False while its files are read."""
        digest = None
        if tracked.adapter is not None:
            digest = self._adapters.digest(tracked.adapter)
            if digest is None:
                self._check_deadline(tracked, "adapter not read")
                return False
        for artifact in artifacts:
            mismatch = adapter_mismatch(artifact.manifest, digest)
            if mismatch is not None:
                raise Refusal(FailureReason.INCOMPATIBLE, str(mismatch))
        return True

    def _are_probed(self, tracked: _VirtualRequest, artifacts: Sequence[Artifact]) -> bool:
        """Whether all artifacts have answered their probes; starts those that have not."""
        name = None if tracked.adapter is None else tracked.adapter.name
        verdicts = [self._verdict_of(a.digest, a.manifest, name) for a in artifacts]
        for artifact, verdict in zip(artifacts, verdicts, strict=True):
            if verdict is not None and verdict.problem is not None:
                raise Refusal(FailureReason.QUARANTINED, f"{artifact.digest}: {verdict.problem}")
        if None not in verdicts:
            return True
        self._check_deadline(tracked, "not probed")
        return False

    def _check_deadline(self, tracked: _VirtualRequest, what: str) -> None:
        if time.monotonic() > tracked.deadline_s:
            raise Refusal(
                FailureReason.DEADLINE,
                f"{what} within deadline_ms ({tracked.message.deadline_ms})",
            )

    def _plan_load(
        self,
        request: "Request",
        tracked: _VirtualRequest,
        block_ids: tuple[int, ...],
        first: int,
        num_external_tokens: int,
    ) -> None:
        """Plan what of the prefix is not there, from position `first` on."""
        stop = tracked.num_slots
        # A token by which a refused request fails is none of its prefix.
        start = max(0, stop - num_external_tokens)
        if tracked.packed is not None:
            self._plan.prefixes[request.request_id] = tracked.packed
        elif tracked.is_in_place and tracked.refusal is None:
            self._plan.prefixes[request.request_id] = InPlacePrefix(self._segments(tracked))
        if tracked.num_reused_slots is None:
            tracked.num_reused_slots = start
        self._count(request, tracked)
        if num_external_tokens == 0:
            tracked.ready_ns = tracked.ready_ns or time.time_ns()
            return
        if tracked.refusal is not None:
            self._plan.failures.append(request.request_id)
            return
        tracked.num_loads += 1
        tracked.is_loading = True
        self._loading[request.cache_salt or ""] = request.request_id
        self._plan.loads.append(
            Load(
                request.request_id,
                self._segments(tracked),
                max(start, first),
                stop,
                block_ids,
                tracked.packed,
            )
        )

    def _segments(self, tracked: _VirtualRequest) -> tuple[Segment, ...]:
        return tuple(
            _segment(self._pool.poll(Digest(item.digest)), item.offset)
            for item in tracked.message.visible_items
        )

    def _count(self, request: "Request", tracked: _VirtualRequest) -> None:
        """List the prefix of a request that has its blocks in the census."""
        if tracked.is_counted or tracked.is_proof or tracked.refusal is not None:
            return
        tracked.is_counted = True
        message = tracked.message
        num_full = tracked.num_slots // self._engine.block_size
        covered = num_full * self._engine.block_size
        tail_digests, stop = [], 0
        for item in message.visible_items:
            stop += item.num_tokens
            if stop > covered and tracked.packed is None:
                tail_digests.append(Digest(item.digest))
        self._census.enter(
            Digest(message.composition), request.block_hashes[:num_full], tail_digests
        )

    def _end_load(self, request_id: str, tracked: _VirtualRequest) -> None:
        """All workers have ended the load of a request."""
        tracked.is_loading = False
        tracked.ready_ns = time.time_ns()
        for salt in [salt for salt, loader in self._loading.items() if loader == request_id]:
            del self._loading[salt]
        result, tracked.result = tracked.result, None
        if result is not None:
            tracked.loaded_bytes += result.size_bytes
            tracked.load_s += result.write_s
            if result.error is not None:
                tracked.refusal = Refusal(FailureReason.INTERNAL, result.error)
        if tracked.has_error is not None:
            self._end(tracked, has_error=tracked.has_error)
            del self._tracked[request_id]

    # --- receipts --------------------------------------------------------------------------------
    def _receipt(self, tracked: _VirtualRequest, *, has_error: bool) -> Receipt:
        refusal = tracked.refusal
        if refusal is None and has_error:
            refusal = Refusal(FailureReason.INTERNAL, "the engine failed the request")
        status = ReceiptStatus.FAILED
        if refusal is None:
            status = ReceiptStatus.ABANDONED if tracked.is_abandoned else ReceiptStatus.SERVED
        num_slots, num_reused = tracked.num_slots, tracked.num_reused_slots or 0
        num_full = num_slots // self._engine.block_size * self._engine.block_size
        is_in_hbm = tracked.was_in_hbm and num_reused >= num_full
        return Receipt(
            replica=self._replica,
            epoch=self._epoch,
            request_id=tracked.message.request_id,
            scope=tracked.message.scope,
            status=status,
            reason=None if refusal is None else refusal.reason,
            detail="" if refusal is None else refusal.detail[:_MAX_DETAIL],
            items=[
                ReceiptItem(
                    digest=item.digest,
                    tier=Tier.HBM if is_in_hbm else tracked.tiers.get(item.digest, Tier.REMOTE),
                )
                for item in tracked.message.visible_items
            ],
            num_virtual_tokens=tracked.message.num_tokens,
            num_reused_tokens=num_reused * tracked.message.num_tokens // max(num_slots, 1),
            num_loads=tracked.num_loads,
            loaded_bytes=tracked.loaded_bytes,
            load_s=tracked.load_s,
        )

    def _refused_receipt(self, doomed: _Doomed) -> Receipt:
        return Receipt(
            replica=self._replica,
            epoch=self._epoch,
            request_id=doomed.request_id,
            scope=doomed.scope,
            status=ReceiptStatus.FAILED,
            reason=doomed.refusal.reason,
            detail=doomed.refusal.detail[:_MAX_DETAIL],
            items=[],
            num_virtual_tokens=0,
            num_reused_tokens=0,
            num_loads=0,
            loaded_bytes=0,
            load_s=0.0,
        )


_PACKED = ":packed"
"""Behind the salt of packed blocks, which hold something else than plain ones of that salt."""


def _empty(request: "Request") -> None:
    """Leave nothing of a prompt to be run: two tokens, so that the first one can be 'external'."""
    request.prompt_token_ids = [0, 0]
    request.num_prompt_tokens = 2
    request._all_token_ids[:] = [0, 0]  # noqa: SLF001 - DESIGN section 6
    request.mm_features.clear()
    request.prompt_embeds = None
    # Otherwise vLLM would not ask for external tokens, and the request would not fail.
    request.skip_reading_prefix_cache = False
    _rehash(request, secrets.token_hex(16))


def _rehash(request: "Request", salt: str) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _block_salt(message: CompositionMessage, adapter: RequestAdapter | None) -> str:
    """The salt under which vLLM shares the blocks of this prefix.

    It binds the composition identity to everything the message says beside it. A prefix that is
    whole in HBM is served without another look at its manifests, so only a message that says what
    the checked one said may find it: not one with that identity and a scope or items of its own,
    and not one with another adapter, or with other files of it than those that were checked.
    """
    composition = Digest(message.composition)
    return cache_salt(
        composition_digest(
            scope=message.scope,
            layout=message.layout,
            items=message.items,
            visibility=message.visibility,
            fingerprint=composition if adapter is None else adapter.bind(composition),
        )
    )


def _refuse_unsupported(request: "Request", message: CompositionMessage) -> None:
    """Refuse what would read or skip virtual positions in a way that is not exact."""
    sampling = request.sampling_params
    has_other_inputs = bool(request.mm_features) or request.prompt_embeds is not None
    found = [
        what
        for what, is_present in (
            ("pooling requests", sampling is None),
            ("prompt_logprobs", sampling is not None and sampling.prompt_logprobs is not None),
            ("skip_reading_prefix_cache", request.skip_reading_prefix_cache),
            ("multimodal inputs and prompt embeddings", has_other_inputs),
            ("resumable (streaming input) requests", request.resumable),
            ("prompts without a token of their own", not request.prompt_token_ids),
            (f"on_miss {message.on_miss}", message.on_miss is not OnMiss.FAIL),
        )
        if is_present
    ]
    if found:
        raise Refusal(
            FailureReason.UNSUPPORTED, f"not supported with Cartridges: {', '.join(found)}"
        )


def _segment(artifact: Artifact | None, offset: int) -> Segment:
    assert artifact is not None  # noqa: S101 - planned only after every artifact was ready
    manifest = artifact.manifest

    def references(part: str) -> tuple[TensorReference, ...]:
        tensors = [
            manifest.tensors[f"layers.{layer}.{part}"]
            for layer in range(manifest.geometry.num_layers)
        ]
        return tuple(
            TensorReference(
                memory=artifact.memories[tensor.blob].reference,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                begin=tensor.byte_range[0],
                end=tensor.byte_range[1],
            )
            for tensor in tensors
        )

    return Segment(
        digest=artifact.digest,
        num_tokens=manifest.num_tokens,
        num_positions=offset - manifest.rope.first_position,
        keys=references("k"),
        values=() if manifest.geometry.has_latents else references("v"),
        value_scales=references("v_scale") if manifest.representation.v_scale else (),
    )
