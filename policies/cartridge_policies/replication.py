"""Where copies of artifacts should be: what to bring before it is asked for, keep, and let go.

Owns arrival rates and the decision, in seconds saved for each second spent. Refuses clocks and I/O,
to touch pins that are not its own, and to know how its actions are carried out.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cartridge_policies.rates import PRIORS, ReplicaRates
from cartridge_proto.digest import Digest
from cartridge_proto.residency import ReplicaId, Tier

MAX_PRIORITY: Final = 99
"""Of a prefetch; requests go before all, and 0 takes no room from what is worth more."""
MAX_UTILISATION: Final = 0.95
"""A queue's mean has no bound at 1; what is busier than this is taken for this busy."""


_FORGOTTEN: Final = 0.001
"""A decayed count of requests that says nothing any more."""


class ActionKind(StrEnum):
    """What a replica is asked to do with an artifact."""

    PREFETCH = "prefetch"
    PIN = "pin"
    UNPIN = "unpin"
    EVICT = "evict"


@dataclass(frozen=True)
class Action:
    """One thing to do, and why: seconds saved by it and spent on it, within the horizon."""

    kind: ActionKind
    replica: ReplicaId
    digest: Digest
    size_bytes: int
    saved_s: float
    spent_s: float
    expected_in_s: float | None = None
    """Until the next request for it comes to that replica, by the rate; `None` = not to be seen."""
    priority: int = 0
    """Of a prefetch, 0 to `MAX_PRIORITY`."""
    is_handover: bool = False
    """It takes over from a replica that is being drained."""

    @property
    def ratio(self) -> float:
        """Seconds saved for each second spent."""
        return self.saved_s / max(self.spent_s, 1e-9)


@dataclass(frozen=True)
class Copy:
    """One artifact on one replica."""

    tier: Tier
    is_ready: bool = True
    """If not, it is on its way."""
    is_pinned: bool = False
    """By anybody."""
    has_own_pin: bool = False
    """By those who act for this policy."""


@dataclass(frozen=True)
class ArtifactState:
    """What is known of one artifact."""

    size_bytes: int
    rate_per_s: float
    """Of requests that use it, all replicas together."""
    copies: Mapping[ReplicaId, Copy] = field(default_factory=dict)
    able: frozenset[ReplicaId] | None = None
    """Replicas that could use it; `None` = all."""


@dataclass(frozen=True)
class ReplicaState:
    """What is known of one replica. `None` = not known."""

    rates: ReplicaRates = PRIORS
    queue_s: float = 0.0
    """Predicted work of those that wait there."""
    link_s: float = 0.0
    """What requests are loading from the store, in seconds of its link."""
    capacity_bytes: int | None = None
    spare_bytes: int | None = None
    """Free in dram."""
    pin_bytes: int | None = None
    """What pins may still take."""
    is_draining: bool = False


@dataclass(frozen=True)
class CopiesView:
    """The fleet as of now. `service_s`: what one request keeps an engine busy, on average."""

    artifacts: Mapping[Digest, ArtifactState]
    replicas: Mapping[ReplicaId, ReplicaState]
    service_s: float
    requests_per_s: float
    """Of all requests, also of those without artifacts as far as they are known."""


@dataclass(frozen=True)
class Bounds:
    """What one round may do."""

    max_actions: int = 16
    max_copy_bytes: int = 8 << 30
    horizon_s: float = 30.0
    """For how long a copy is taken to stay, and seconds are counted."""
    min_ratio: float = 1.0
    """A copy must save more than so many seconds for each that it costs."""
    link_price: float = 0.5
    """What a second of transfer costs, in seconds of requests, where no request loads: copies go
    behind their loads."""
    crowd_price: float = 2.0
    """What it costs more where all replicas load: all read from one store."""
    room_share: float = 0.05
    """Of dram; with less free than this, cold artifacts are let go."""
    hysteresis: float = 2.0
    """A copy is surplus if it still were with a rate so much higher."""


class ArrivalRates:
    """Requests per second of the artifacts that are asked for most, decaying exponentially.

    `tau_s`: what is older than that counts little. Rates of at most `max_artifacts` are told. They
    may be too low by the rate of all requests over four times as many, and are never too high.

    Source: Misra and Gries, "Finding repeated elements" (1982).
    """

    def __init__(self, *, tau_s: float = 60.0, max_artifacts: int = 1024) -> None:
        self.tau_s, self.max_artifacts = tau_s, max_artifacts
        self._counts: dict[Digest, tuple[float, float]] = {}
        """Decayed count, and as of when."""
        self._all = (0.0, 0.0)
        self._begun_s: float | None = None

    def note(self, digests: Iterable[Digest], now_s: float) -> None:
        """One request came for these."""
        if self._begun_s is None:
            self._begun_s = now_s
        self._all = (1 + self._decayed(self._all, now_s), now_s)
        for digest in digests:
            known = self._counts.get(digest, (0.0, now_s))
            self._counts[digest] = (1 + self._decayed(known, now_s), now_s)
        if len(self._counts) > 8 * self.max_artifacts:
            self._prune(now_s)

    def rates(self, now_s: float) -> dict[Digest, float]:
        """Requests per second of each of the most wanted, at most `max_artifacts`."""
        span_s = self._span_s(now_s)
        return {
            digest: count / span_s for digest, count in self._largest(self.max_artifacts, now_s)
        }

    def requests_per_s(self, now_s: float) -> float:
        """Of all requests."""
        return self._decayed(self._all, now_s) / self._span_s(now_s)

    def _span_s(self, now_s: float) -> float:
        """Over which the counts were made: less than `tau_s` at the beginning, though not 0."""
        age_s = max(self.tau_s / 4, now_s - (self._begun_s if self._begun_s is not None else now_s))
        return self.tau_s * (1 - math.exp(-age_s / self.tau_s))

    def _decayed(self, known: tuple[float, float], now_s: float) -> float:
        count, since_s = known
        return count * math.exp(-max(0.0, now_s - since_s) / self.tau_s)

    def _largest(self, number: int, now_s: float) -> list[tuple[Digest, float]]:
        counts = ((digest, self._decayed(known, now_s)) for digest, known in self._counts.items())
        heard = (item for item in counts if item[1] > _FORGOTTEN)
        return heapq.nlargest(number, heard, key=lambda item: (item[1], item[0]))

    def _prune(self, now_s: float) -> None:
        """Forget half, and take from the others what those that go may have had."""
        num_kept = 4 * self.max_artifacts
        kept = self._largest(num_kept + 1, now_s)
        spread = kept.pop()[1] if len(kept) > num_kept else 0.0
        self._counts = {digest: (count - spread, now_s) for digest, count in kept if count > spread}


def wait_s(num_holders: int, utilisation: float, service_s: float) -> float:
    """Mean wait for the first of some equal holders that is free, each busy so far.

    Source: Sakasegawa, "An approximation formula for the mean queue length of M/M/c" (1977).
    """
    busy = min(max(0.0, utilisation), MAX_UTILISATION)
    exponent = math.sqrt(2 * (num_holders + 1)) - 1
    waiting_s: float = service_s * busy**exponent / (num_holders * (1 - busy))
    return waiting_s


def copies_for(work: float, num_able: int) -> int:
    """Holders with which what one artifact's requests wait for one another is below one service.

    `work`: seconds of service that its requests bring each second. A holder that is busy with them
    half of the time has a queue of one service time (M/M/1).
    """
    if work <= 0:
        return 0
    return min(num_able, max(1, math.ceil(2 * work)))


class Replication:
    """Decides; keeps nothing from one round to the next."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()

    def plan(self, view: CopiesView) -> list[Action]:
        """What to do now, most worthwhile first, handovers before all else.

        The same for the same view, whatever the order of its entries. At most
        `bounds.max_actions`, whose copies are at most `bounds.max_copy_bytes`.
        """
        return _Round(view, self.bounds).actions()


class _Round:
    """One plan in the making."""

    def __init__(self, view: CopiesView, bounds: Bounds) -> None:
        self._view, self._bounds = view, bounds
        self._staying = sorted(
            name for name, replica in view.replicas.items() if not replica.is_draining
        )
        # In seconds of queue: what was planned here counts as if it ran already.
        self._planned_s = {name: view.replicas[name].queue_s for name in self._staying}
        self._spare = {name: view.replicas[name].spare_bytes for name in self._staying}
        self._held = {digest: self._holders(state) for digest, state in view.artifacts.items()}
        self._on = self._by_replica()
        num_loading = sum(view.replicas[name].link_s > 0 for name in self._staying)
        crowd = num_loading / max(1, len(self._staying))
        self._link_price = bounds.link_price + bounds.crowd_price * crowd
        self._gone = set[tuple[Digest, ReplicaId]]()

    def _holders(self, state: ArtifactState) -> set[ReplicaId]:
        """Who has it near, or soon will, and stays."""
        return {
            name
            for name, copy in state.copies.items()
            if name in self._planned_s and (not copy.is_ready or copy.tier in (Tier.HBM, Tier.DRAM))
        }

    def _by_replica(self) -> dict[ReplicaId, list[Digest]]:
        """What lies ready in the dram of each, the coldest first."""
        held: dict[ReplicaId, list[Digest]] = {name: [] for name in self._staying}
        coldest = sorted(self._view.artifacts, key=lambda d: (self._rate_on(d), d))
        for digest in coldest:
            for name, copy in self._view.artifacts[digest].copies.items():
                if name in held and copy.is_ready and copy.tier is Tier.DRAM:
                    held[name].append(digest)
        return held

    def _rate_on(self, digest: Digest) -> float:
        """Of one holder; all share alike."""
        return self._view.artifacts[digest].rate_per_s / max(1, len(self._held[digest]))

    def _is_hot(self, state: ArtifactState) -> bool:
        """The next request is expected within the horizon."""
        return state.rate_per_s * self._bounds.horizon_s >= 1

    def actions(self) -> list[Action]:
        """Everything that is worth it, within bounds."""
        if not self._view.requests_per_s and not any(
            state.rate_per_s for state in self._view.artifacts.values()
        ):
            # Silence says nothing: after a pause the same ones may be wanted again.
            return self._own_pins_ended()[: self._bounds.max_actions]
        chosen = self._own_pins_ended()[: self._bounds.max_actions]
        left_bytes = self._bounds.max_copy_bytes
        for copy in sorted(self._worthwhile(), key=_first_first):
            if len(chosen) >= self._bounds.max_actions:
                break
            found = self._find_place(copy, left_bytes)
            if found is None:
                continue
            room, action = found
            if len(chosen) + len(room) + 1 > self._bounds.max_actions:
                break
            chosen += [*room, action]
            left_bytes -= action.size_bytes
        for more in (self._let_go(), self._pins()):
            chosen += more[: self._bounds.max_actions - len(chosen)]
        return chosen

    # --- copies ----------------------------------------------------------------------------------
    def _worthwhile(self) -> list["_Wanted"]:
        """Further copies, each with what it would save; nothing is said yet of where."""
        wanted = list[_Wanted]()
        for digest in sorted(self._view.artifacts):
            state = self._view.artifacts[digest]
            able = self._able(state)
            if not able or state.rate_per_s <= 0:
                continue
            num_held = len(self._held[digest])
            # Who has it counts also where nobody can be asked for anything.
            num_able = len(self._held[digest].union(able))
            is_handover = num_held == 0 and any(
                name in self._view.replicas and self._view.replicas[name].is_draining
                for name in state.copies
            )
            aim = copies_for(state.rate_per_s * self._view.service_s, num_able)
            queues = [self._planned_s[name] for name in self._held[digest]]
            if queues and min(queues) > self._view.service_s:
                # Whatever keeps them busy, its requests wait there now.
                aim = max(aim, num_held + 1)
            for number in range(num_held, min(aim, num_able)):
                saved_s = self._saved_s(state, number, num_able)
                if saved_s > 0:
                    wanted.append(_Wanted(digest, state, number, saved_s, is_handover))
        return wanted

    def _able(self, state: ArtifactState) -> list[ReplicaId]:
        return [name for name in self._staying if state.able is None or name in state.able]

    def _saved_s(self, state: ArtifactState, num_held: int, num_able: int) -> float:
        """Seconds that all its requests together wait less for one copy more, in the horizon."""
        load_s = PRIORS.load_s(Tier.REMOTE, state.size_bytes)
        rates = [self._view.replicas[name].rates for name in self._able(state)[:1]]
        if rates:
            load_s = rates[0].load_s(Tier.REMOTE, state.size_bytes)
        num_requests = state.rate_per_s * self._bounds.horizon_s
        # Without the copy a request brings it, once, and those who come meanwhile wait with it.
        at_most_s = load_s * (1 + state.rate_per_s * load_s)
        if num_held == 0:
            return min(1.0, num_requests) * at_most_s
        work = state.rate_per_s * self._view.service_s
        others = max(0.0, self._view.requests_per_s * self._view.service_s - work) / num_able
        now_s, then_s = (
            wait_s(count, others + work / count, self._view.service_s)
            for count in (num_held, num_held + 1)
        )
        return min(num_requests * (now_s - then_s), at_most_s)

    def _find_place(self, wanted: "_Wanted", left_bytes: int) -> tuple[list[Action], Action] | None:
        """The cheapest replica for a copy, with what has to go for it; `None` = not worth it."""
        state, digest = wanted.state, wanted.digest
        if state.size_bytes > left_bytes:
            return None
        best: tuple[tuple[float, float, str], ReplicaId, float, list[Digest]] | None = None
        held = self._held[digest]
        for name in self._able(state):
            # What goes in this round does not come back in it: both would be asked for at once.
            if name in held or (digest, name) in self._gone:
                continue
            if not self._has_capacity(name, state.size_bytes):
                continue
            victims = self._victims(name, state.size_bytes, digest)
            if victims is None:
                continue
            spent_s = self._spent_s(name, state, victims)
            key = (spent_s + self._planned_s[name], spent_s, name)
            if best is None or key < best[0]:
                best = (key, name, spent_s, victims)
        if best is None:
            return None
        _, name, spent_s, victims = best
        if wanted.saved_s <= self._bounds.min_ratio * spent_s:
            return None
        num_after = len(held) + 1
        ratio = wanted.saved_s / max(spent_s, 1e-9)
        action = Action(
            ActionKind.PREFETCH,
            name,
            digest,
            state.size_bytes,
            wanted.saved_s,
            spent_s,
            expected_in_s=num_after / state.rate_per_s,
            priority=max(1, min(MAX_PRIORITY, round(MAX_PRIORITY * (1 - 1 / max(1.0, ratio))))),
            is_handover=wanted.is_handover,
        )
        room = [self._evict(name, victim, wanted.saved_s) for victim in victims]
        self._take(name, state.size_bytes)
        held.add(name)
        self._planned_s[name] += state.rate_per_s / num_after * self._view.service_s
        return room, action

    def _has_capacity(self, name: ReplicaId, size_bytes: int) -> bool:
        capacity = self._view.replicas[name].capacity_bytes
        return capacity is None or size_bytes <= capacity

    def _victims(self, name: ReplicaId, size_bytes: int, wanted: Digest) -> list[Digest] | None:
        """What would have to go for so many bytes, the coldest; `None` = no room can be made."""
        spare = self._spare[name]
        if spare is None or spare >= size_bytes:
            return []
        victims = list[Digest]()
        for digest in self._on[name]:
            if digest != wanted and self._may_go(digest, name):
                victims.append(digest)
                spare += self._view.artifacts[digest].size_bytes
                if spare >= size_bytes:
                    return victims
        # What is not tracked here goes by the engine's own choice; nobody has asked for it lately.
        unseen = self._view.replicas[name].capacity_bytes
        if unseen is not None:
            seen = sum(self._view.artifacts[digest].size_bytes for digest in self._on[name])
            if spare + max(0, unseen - (self._spare[name] or 0) - seen) >= size_bytes:
                return victims
        return None

    def _spent_s(self, name: ReplicaId, state: ArtifactState, victims: list[Digest]) -> float:
        """Seconds of the link that a copy takes, and what it costs those that go for it."""
        rates = self._view.replicas[name].rates
        copy = state.copies.get(name)
        tier = Tier.REMOTE if copy is None else copy.tier
        seconds = rates.load_s(tier, state.size_bytes) * self._link_price
        for digest in victims:
            lost = self._view.artifacts[digest]
            share = min(1.0, self._rate_on(digest) * self._bounds.horizon_s)
            seconds += share * rates.load_s(Tier.REMOTE, lost.size_bytes)
        return seconds + state.size_bytes * rates.copy_s_per_byte

    def _take(self, name: ReplicaId, size_bytes: int) -> None:
        spare = self._spare[name]
        if spare is not None:
            self._spare[name] = max(0, spare - size_bytes)

    # --- letting go ------------------------------------------------------------------------------
    def _may_go(self, digest: Digest, name: ReplicaId) -> bool:
        """Nobody has pinned it, and it is not the last copy of something hot."""
        state = self._view.artifacts[digest]
        copy = state.copies[name]
        if copy.is_pinned or copy.has_own_pin or (digest, name) in self._gone:
            return False
        if not self._is_hot(state):
            return True
        others = [
            other
            for other in self._held[digest] - {name}
            if (there := state.copies.get(other)) is not None and there.is_ready
        ]
        return bool(others)

    def _evict(self, name: ReplicaId, digest: Digest, saved_s: float) -> Action:
        """Plan that one artifact goes."""
        state = self._view.artifacts[digest]
        rates = self._view.replicas[name].rates
        rate = self._rate_on(digest)
        self._gone.add((digest, name))
        self._held[digest].discard(name)
        spare = self._spare[name]
        if spare is not None:
            self._spare[name] = spare + state.size_bytes
        share = min(1.0, rate * self._bounds.horizon_s)
        return Action(
            ActionKind.EVICT,
            name,
            digest,
            state.size_bytes,
            saved_s,
            share * rates.load_s(Tier.REMOTE, state.size_bytes),
            expected_in_s=1 / rate if rate > 0 else None,
        )

    def _let_go(self) -> list[Action]:
        """Where room is short: what is cold, and what has more copies than it would need."""
        going = list[Action]()
        for name in self._staying:
            replica = self._view.replicas[name]
            if replica.capacity_bytes is None or self._spare[name] is None:
                continue
            room = self._bounds.room_share * replica.capacity_bytes
            for digest in self._on[name]:
                if (self._spare[name] or 0) >= room:
                    break
                state = self._view.artifacts[digest]
                if name not in self._held[digest] or not self._may_go(digest, name):
                    continue
                if not self._is_hot(state) or self._is_surplus(state, len(self._held[digest])):
                    saved_s = replica.rates.load_s(Tier.REMOTE, state.size_bytes)
                    going.append(self._evict(name, digest, saved_s))
        return going

    def _is_surplus(self, state: ArtifactState, num_held: int) -> bool:
        """One would do less, even if more came."""
        work = state.rate_per_s * self._view.service_s * self._bounds.hysteresis
        return num_held > copies_for(work, num_held)

    # --- pins ------------------------------------------------------------------------------------
    def _pins(self) -> list[Action]:
        """Where room is short, the last copy of what is hot is kept from the engine's eviction."""
        pins = list[Action]()
        for name in self._staying:
            replica = self._view.replicas[name]
            left = replica.pin_bytes
            if replica.capacity_bytes is None or left is None or replica.spare_bytes is None:
                continue
            if replica.spare_bytes >= self._bounds.room_share * replica.capacity_bytes:
                continue
            for digest in reversed(self._on[name]):
                state = self._view.artifacts[digest]
                copy = state.copies[name]
                is_last = self._held[digest] == {name}
                if copy.is_pinned or copy.has_own_pin or not is_last:
                    continue
                if not self._is_hot(state) or state.size_bytes > left:
                    continue
                left -= state.size_bytes
                load_s = replica.rates.load_s(Tier.REMOTE, state.size_bytes)
                pins.append(
                    Action(
                        ActionKind.PIN,
                        name,
                        digest,
                        state.size_bytes,
                        load_s,
                        0.0,
                        expected_in_s=1 / state.rate_per_s,
                    )
                )
        return sorted(pins, key=lambda pin: (-pin.saved_s, pin.replica, pin.digest))

    def _own_pins_ended(self) -> list[Action]:
        """Own pins of what is no longer hot, has other copies, or is on a replica that leaves."""
        ended = list[Action]()
        for digest in sorted(self._view.artifacts):
            state = self._view.artifacts[digest]
            # Well below the rate at which it was pinned.
            is_cold = state.rate_per_s * self._bounds.horizon_s < 1 / self._bounds.hysteresis
            for name in sorted(state.copies):
                if not state.copies[name].has_own_pin or name not in self._view.replicas:
                    continue
                has_others = len(self._held[digest] - {name}) > 0
                if is_cold or has_others or name not in self._planned_s:
                    ended.append(Action(ActionKind.UNPIN, name, digest, state.size_bytes, 0.0, 0.0))
        return ended


@dataclass(frozen=True)
class _Wanted:
    """One more copy."""

    digest: Digest
    state: ArtifactState
    num_held: int
    saved_s: float
    is_handover: bool


def _first_first(wanted: _Wanted) -> tuple[bool, float, str, int]:
    """Handovers, then by seconds saved for each byte."""
    return (
        not wanted.is_handover,
        -wanted.saved_s / max(1, wanted.state.size_bytes),
        wanted.digest,
        wanted.num_held,
    )
