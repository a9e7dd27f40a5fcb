"""Actions that come with a request: vLLM's `kv_hints` envelopes with the actions of Cartridges.

Owns the reading of envelopes and what their actions do. Refuses to change an answer or to make a
request wait: a hint is advice, and one that is wrong, late or too much is counted and forgotten.

Source: `vllm.v1.kv_hints` for the envelope; vLLM 0.32 has no HTTP field for it, so that it travels
in `kv_transfer_params` there.
"""

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from threading import BoundedSemaphore
from typing import Annotated, Any

import msgspec

from cartridge_engine_ext.dram_tier import MAX_PREFETCH_PRIORITY, DramTier
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.ordered_work import OrderedWork
from cartridge_proto.digest import Digest, DigestText
from cartridge_proto.residency import Tier

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = "0.1"
ACTION_VERSION = "1.0"
MAX_ACTIONS = 64
MAX_PENDING = 256
"""Actions that wait for a thread; more are dropped."""
HINT_OWNER = "kv-hints"
"""Who holds the pins that hints made."""

DeadlineMs = Annotated[int, msgspec.Meta(ge=1, le=600_000)]


class HintOutcome(StrEnum):
    """What became of an action."""

    DONE = "done"
    REFUSED = "refused"
    INVALID = "invalid"
    UNKNOWN = "unknown"
    """Not one of ours: another connector's, or of a later version."""
    DROPPED = "dropped"


class _Action(msgspec.Struct):
    action_id: str
    action_type: str
    action_version: str
    payload: msgspec.Raw


class _Envelope(msgspec.Struct):
    protocol_version: str
    message_id: str
    actions: Annotated[list[_Action], msgspec.Meta(max_length=MAX_ACTIONS)]


class _Prefetch(msgspec.Struct, forbid_unknown_fields=True):
    """Bring an artifact to dram. `expected_in_ms`: when a request for it will come."""

    digest: DigestText
    deadline_ms: DeadlineMs = 30_000
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PREFETCH_PRIORITY)] = 0
    expected_in_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] | None = None


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    """Keep an artifact in dram, or a composition in hbm as soon as it is whole there."""

    digest: DigestText
    tier: Tier = Tier.DRAM
    deadline_ms: DeadlineMs = 30_000


class _Unpin(msgspec.Struct, forbid_unknown_fields=True):
    digest: DigestText
    tier: Tier = Tier.DRAM


class _Evict(msgspec.Struct, forbid_unknown_fields=True):
    """Drop an artifact from dram."""

    digest: DigestText


class KvHints:
    """Runs the actions of envelopes on threads of its own. `take` returns at once.

    Actions on one digest take effect in the order they came; a pin that waits for its load holds
    back those behind it, until its deadline at the latest.

    `on_outcome(action_type, outcome)` is called for each action, on any thread; the type of what is
    not one of ours is `other`.
    """

    def __init__(
        self,
        *,
        dram: DramTier,
        census: HbmCensus,
        on_outcome: Callable[[str, HintOutcome], None],
    ) -> None:
        self._dram = dram
        self._census = census
        self._on_outcome = on_outcome
        self._work = OrderedWork(2, "kv-hints")
        self._pending = BoundedSemaphore(MAX_PENDING)
        self._actions: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
            "cartridge.prefetch": (_Prefetch, self._prefetch),
            "cartridge.pin": (_Pin, self._pin),
            "cartridge.unpin": (_Unpin, self._unpin),
            "cartridge.evict": (_Evict, self._evict),
        }

    def take(self, value: object) -> None:
        """Read an envelope (builtins) and start its actions."""
        try:
            # By way of bytes: payloads stay unread until their action is known.
            envelope = msgspec.json.decode(msgspec.json.encode(value), type=_Envelope)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            logger.warning("kv_hints: %s", error)
            self._on_outcome("other", HintOutcome.INVALID)
            return
        for action in envelope.actions:
            self._start(action)

    def stop(self) -> None:
        """Start nothing more."""
        self._work.stop()

    def _start(self, action: _Action) -> None:
        known = self._actions.get(action.action_type)
        if known is None or action.action_version != ACTION_VERSION:
            self._on_outcome("other", HintOutcome.UNKNOWN)
            return
        payload_type, run = known
        try:
            payload = msgspec.json.decode(action.payload, type=payload_type)
        except msgspec.MsgspecError as error:
            logger.warning("kv_hints: %s: %s", action.action_type, error)
            self._on_outcome(action.action_type, HintOutcome.INVALID)
            return
        if not self._pending.acquire(blocking=False):
            self._on_outcome(action.action_type, HintOutcome.DROPPED)
            return
        work = partial(self._run, action.action_type, run, payload)
        if not self._work.submit(payload.digest, work):
            self._pending.release()
            self._on_outcome(action.action_type, HintOutcome.DROPPED)

    # --- on the threads --------------------------------------------------------------------------
    def _run(self, action_type: str, run: Callable[[Any], None], payload: object) -> None:
        outcome = HintOutcome.DONE
        try:
            run(payload)
        except Refusal as refusal:
            logger.info("kv_hints: %s refused: %s", action_type, refusal)
            outcome = HintOutcome.REFUSED
        except Exception:
            logger.exception("kv_hints: %s", action_type)
            outcome = HintOutcome.REFUSED
        finally:
            self._pending.release()
        self._on_outcome(action_type, outcome)

    def _prefetch(self, hint: _Prefetch) -> None:
        now_s = time.monotonic()
        if hint.expected_in_ms is not None:
            self._dram.expect(Digest(hint.digest), now_s + hint.expected_in_ms / 1000)
        self._dram.prefetch(Digest(hint.digest), now_s + hint.deadline_ms / 1000, hint.priority)

    def _pin(self, hint: _Pin) -> None:
        if hint.tier is Tier.HBM:
            self._census.keep(Digest(hint.digest), HINT_OWNER)
        else:
            self._dram.pin(Digest(hint.digest), HINT_OWNER, hint.deadline_ms / 1000)

    def _unpin(self, hint: _Unpin) -> None:
        if hint.tier is Tier.HBM:
            self._census.unpin(Digest(hint.digest), HINT_OWNER)
        else:
            self._dram.unpin(Digest(hint.digest), HINT_OWNER)

    def _evict(self, hint: _Evict) -> None:
        self._dram.evict(Digest(hint.digest))
