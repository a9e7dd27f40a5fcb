"""A fleet in simulated time: replicas, gateways with the real policies, failures; from one seed.

Owns the course of each request, from its arrival to its one end, and what a run measures. Refuses
wall clocks, sockets and policies of its own (docs/simulator.md).
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cartridge_loadtest.copies_model import CopiesModel
from cartridge_loadtest.event_heap import EventHeap
from cartridge_loadtest.gateway_model import GatewayModel, StaleMap
from cartridge_loadtest.replica_model import EngineProfile, ReplicaModel, Visit
from cartridge_loadtest.shared_link import SharedLink
from cartridge_loadtest.workloads import FleetRequest, Workload, scaled
from cartridge_policies import POLICIES
from cartridge_policies.loads import Load
from cartridge_policies.never_worse import NeverWorse
from cartridge_policies.rates import ReplicaRates
from cartridge_policies.replication import Bounds
from cartridge_policies.types import Demand, PlacementPolicy, Refusal
from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier

if TYPE_CHECKING:
    from cartridge_policies.loads import Booking

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Failure:
    """A replica dies, and comes back cold."""

    at_s: float
    replica: int
    down_s: float


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """What is simulated, but for the requests."""

    num_replicas: int
    policy: str | Callable[[], PlacementPolicy] = "cartridge_aware"
    """A key of `POLICIES`, or what makes one."""
    profile: EngineProfile = field(default_factory=EngineProfile)
    num_gateways: int = 1
    share_s: float | None = None
    """How often gateways tell one another their bookings; `None` = never."""
    map_delay_s: float = 0.05
    """Age of what gateways know of residency."""
    detect_s: float = 1.0
    """Until gateways know that a replica is away, or back, without asking it."""
    store_bytes_per_s: float | None = None
    """Of the remote store for all; `None`: half of what all replicas could take."""
    rates_error: float = 0.1
    """Gateways predict each replica's rates wrong by up to this share, each replica in its way."""
    estimate_error: float = 0.1
    """The same for the number of live tokens of a request."""
    copy_s_per_byte: float = 0.0
    slot_s: float = 1.0
    with_fallback: bool = False
    """Gateways take texts where they predict them to be sooner (`never_worse.py`)."""
    max_in_flight: int | None = None
    max_tries: int = 3
    failures: tuple[Failure, ...] = ()
    replication: bool = False
    """Copies are made before holders queue, and let go, by `cartridge_policies.replication`."""
    replication_interval_s: float = 0.5
    replication_tau_s: float = 20.0
    replication_bounds: Bounds = field(default_factory=Bounds)
    seed: int = 0
    checks: bool = False
    """Check invariants at each end of a request (slow)."""


@dataclass(frozen=True)
class Outcome:
    """What a run measured; arrays have one entry for each request, in the workload's order."""

    settings: FleetSettings
    ttft_s: Floats
    """NaN where no first token came."""
    plain_s: Floats
    """The same, had the request gone to the same replica without Cartridges; NaN where it did, or
    has none."""
    fell_back: NDArray[np.bool_]
    """Went with the text in the place of its Cartridges."""
    end_s: Floats
    replica: NDArray[np.intp]
    """-1 where it was refused."""
    num_ends: NDArray[np.intp]
    num_failed: int
    num_refused: int
    tier_hits: dict[Tier, int]
    """Where artifacts were, when the requests that used them came."""
    moved_bytes: dict[Tier, int]
    """Over all links of a tier."""
    prefill_s: Floats
    """Seconds of prefill on each replica."""
    num_evicted: int
    num_events: int
    prefetched_bytes: int
    """Brought ahead of any request; part of `moved_bytes`."""

    @property
    def load_ratio(self) -> float:
        """Prefill of the busiest replica over the mean."""
        return float(self.prefill_s.max() / max(1e-12, self.prefill_s.mean()))

    @property
    def regret(self) -> Floats:
        """By which share first tokens came later than without Cartridges.

        0 where they did not, and for requests that had no Cartridges, or took the text instead.
        """
        later: Floats = np.maximum(0.0, self.ttft_s / self.plain_s - 1.0)
        return np.nan_to_num(later)


def simulate(workload: Workload, settings: FleetSettings) -> Outcome:
    """Let all requests of a workload run to their ends."""
    return _Run(workload, settings).outcome()


def prefill_span_s(
    workload: Workload, num_replicas: int, utilisation: float, profile: EngineProfile
) -> float:
    """Over how many seconds the requests must come to keep a fleet's prefill busy so far.

    With every Cartridge in place and nothing decoding: what is loaded and decoded adds to it.
    """
    work_s = sum(
        profile.prefill_s(request.num_live_tokens, request.num_virtual_tokens)
        for request in workload.requests
    )
    return work_s / (num_replicas * utilisation)


def at_utilisation(
    workload: Workload, num_replicas: int, utilisation: float, profile: EngineProfile
) -> Workload:
    """The workload in the time of `prefill_span_s`."""
    return scaled(workload, prefill_span_s(workload, num_replicas, utilisation, profile))


class _Course:
    """One request on its way through gateway and replicas."""

    __slots__ = (
        *("booking", "came_s", "demand", "gateway", "has_first", "index"),
        *("is_text", "predicted_s", "tried", "visit"),
    )

    def __init__(self, index: int, demand: Demand, gateway: GatewayModel, came_s: float) -> None:
        self.index, self.demand, self.gateway, self.came_s = index, demand, gateway, came_s
        self.has_first = self.is_text = False
        self.predicted_s = 0.0
        self.tried: tuple[ReplicaId, ...] = ()
        self.booking: Booking | None = None
        self.visit: Visit | None = None


class _Run:
    def __init__(self, workload: Workload, settings: FleetSettings) -> None:
        self._workload, self._settings = workload, settings
        self._clock = EventHeap()
        chance = np.random.default_rng(settings.seed)
        names = [ReplicaId(f"replica-{index:04}") for index in range(settings.num_replicas)]
        link_bytes_per_s = settings.profile.tiers[Tier.REMOTE].bytes_per_s
        self._store_link = SharedLink(
            self._clock, settings.store_bytes_per_s or link_bytes_per_s * len(names) / 2
        )
        self._map = StaleMap(settings.map_delay_s)
        self._replicas = {
            name: ReplicaModel(
                name, settings.profile, self._clock, self._store_link, self._published
            )
            for name in names
        }
        self._places = {name: place for place, name in enumerate(names)}
        rates = {
            name: self._believed(1 + settings.rates_error * chance.uniform(-1, 1)) for name in names
        }
        make = POLICIES[settings.policy] if isinstance(settings.policy, str) else settings.policy
        self._gateways = [
            GatewayModel(
                make(),
                self._map,
                rates,
                max_in_flight=settings.max_in_flight,
                first_tick=index * 7919,
                never_worse=NeverWorse() if settings.with_fallback else None,
            )
            for index in range(settings.num_gateways)
        ]
        self._copies: CopiesModel | None = None
        if settings.replication:
            self._copies = CopiesModel(
                settings.replication_bounds,
                settings.replication_tau_s,
                self._gateways[0],
                self._map,
                self._replicas,
                rates,
            )
        count = len(workload.requests)
        self._errors = 1 + settings.estimate_error * chance.uniform(-1, 1, count)
        self._gateway_of = chance.integers(settings.num_gateways, size=count)
        self._ttft_s = np.full(count, np.nan)
        self._plain_s = np.full(count, np.nan)
        self._fell_back = np.zeros(count, dtype=bool)
        self._end_s = np.full(count, np.nan)
        self._replica = np.full(count, -1, dtype=np.intp)
        self._num_ends = np.zeros(count, dtype=np.intp)
        self._hits = Counter[Tier]()
        self._num_failed = self._num_refused = 0

    def _believed(self, factor: float) -> ReplicaRates:
        settings = self._settings
        rates = settings.profile.rates
        return replace(
            rates,
            prefill_base_s=rates.prefill_base_s * factor,
            prefill_s_per_token=rates.prefill_s_per_token * factor,
            prefill_s_per_token2=rates.prefill_s_per_token2 * factor,
            copy_s_per_byte=settings.copy_s_per_byte,
            slot_s=settings.slot_s,
        )

    def _published(self, replica: ReplicaId, digest: Digest, tier: Tier | None) -> None:
        self._map.publish(self._clock.now_s, replica, digest, tier)

    def outcome(self) -> Outcome:
        """Run, and say what was measured."""
        names = list(self._replicas)
        for failure in self._settings.failures:
            self._clock.at(failure.at_s, self._die, names[failure.replica], failure.down_s)
        if self._workload.requests:
            self._clock.at(self._workload.requests[0].arrival_s, self._arrive, 0)
        if self._settings.share_s is not None and len(self._gateways) > 1:
            self._clock.at(self._settings.share_s, self._share, self._settings.share_s)
        if self._copies is not None:
            self._clock.at(self._settings.replication_interval_s, self._replicate)
        self._clock.run()
        replicas = self._replicas.values()
        moved = {
            tier: sum(replica.links[tier].num_bytes for replica in replicas)
            for tier in (Tier.DRAM, Tier.NVME, Tier.REMOTE)
        }
        return Outcome(
            settings=self._settings,
            ttft_s=self._ttft_s,
            plain_s=self._plain_s,
            fell_back=self._fell_back,
            end_s=self._end_s,
            replica=self._replica,
            num_ends=self._num_ends,
            num_failed=self._num_failed,
            num_refused=self._num_refused,
            tier_hits={tier: self._hits[tier] for tier in TIERS_FASTEST_FIRST},
            moved_bytes=moved,
            prefill_s=np.array([replica.busy_s for replica in replicas]),
            num_evicted=sum(replica.num_evicted for replica in replicas),
            num_events=self._clock.num_events,
            prefetched_bytes=sum(replica.prefetched_bytes for replica in replicas),
        )

    def _share(self, every_s: float) -> None:
        """Each gateway learns what all others have on each replica."""
        now_s = self._clock.now_s
        told = [gateway.own_loads(now_s) for gateway in self._gateways]
        for gateway in self._gateways:
            others = defaultdict[ReplicaId, Load](Load)
            for teller, loads in zip(self._gateways, told, strict=True):
                if teller is not gateway:
                    for name, load in loads.items():
                        others[name] = others[name] + load
            gateway.note_others(others, now_s)
        if not self._num_ends.all():
            self._clock.after(every_s, self._share, every_s)

    def _replicate(self) -> None:
        """One gateway of the fleet asks the policy, and has engines do what it says."""
        if self._copies is not None and not self._num_ends.all():
            self._copies.act(self._clock.now_s)
            self._clock.after(self._settings.replication_interval_s, self._replicate)

    # --- requests --------------------------------------------------------------------------------
    def _arrive(self, index: int) -> None:
        requests = self._workload.requests
        if index + 1 < len(requests):
            self._clock.at(requests[index + 1].arrival_s, self._arrive, index + 1)
        request = requests[index]
        demand = Demand(
            "m",
            request.cartridges,
            max(1, round(request.num_live_tokens * float(self._errors[index]))),
            composition=request.prefix,
            session=request.session,
        )
        gateway = self._gateways[self._gateway_of[index]]
        self._place(_Course(index, demand, gateway, self._clock.now_s), request)

    def _place(self, course: _Course, request: FleetRequest) -> None:
        now_s = self._clock.now_s
        demand, decision = course.gateway.choose(course.demand, now_s, without=course.tried)
        if isinstance(decision, Refusal):
            self._num_refused += 1
            self._finish(course)
            return
        name = decision.best.replica
        course.booking = course.gateway.book(
            demand, decision, now_s, is_streamed=request.is_streamed
        )
        course.is_text, course.predicted_s = demand is not course.demand, decision.best.total_s
        if course.is_text:
            num_tokens = request.num_live_tokens + request.num_virtual_tokens
            request = replace(request, cartridges=(), num_live_tokens=num_tokens)
        course.visit = Visit(
            request,
            now_s,
            first_token=partial(self._first_token, course),
            ended=partial(self._ended, course),
            failed=partial(self._failed, course, name),
        )
        self._replica[course.index] = self._places[name]
        self._replicas[name].send(course.visit)

    def _first_token(self, course: _Course) -> None:
        course.has_first = True
        visit = course.visit
        if course.booking is None or visit is None:
            return
        if visit.request.is_streamed:
            course.booking.note_first_token(self._clock.now_s)
        self._ttft_s[course.index] = self._clock.now_s - course.came_s
        self._fell_back[course.index] = course.is_text
        self._learn(course, visit)
        if visit.request.cartridges:
            self._plain_s[course.index] = visit.came_s - course.came_s + visit.plain_s
        self._hits.update(visit.held.values())
        if self._copies is not None:
            self._copies.note(course.booking, course.demand, self._clock.now_s)

    def _learn(self, course: _Course, visit: Visit) -> None:
        """A gateway compares what it predicted with the first token that it sees."""
        never_worse = course.gateway.never_worse
        is_either = course.is_text or bool(visit.request.cartridges)
        if never_worse is not None and is_either and visit.request.is_streamed:
            kind = never_worse.fallback if course.is_text else never_worse.attached
            kind.note(course.predicted_s, self._clock.now_s - visit.came_s)

    def _ended(self, course: _Course) -> None:
        if course.booking is not None:
            course.booking.end()
        self._finish(course)

    def _finish(self, course: _Course) -> None:
        self._end_s[course.index] = self._clock.now_s
        self._num_ends[course.index] += 1
        if self._settings.checks:
            for replica in self._replicas.values():
                replica.check()

    def _failed(self, course: _Course, name: ReplicaId) -> None:
        """The connection broke: tried elsewhere, unless the answer had begun."""
        if course.booking is not None:
            course.booking.end()
        course.gateway.note_down(name)
        course.tried = (*course.tried, name)
        if course.has_first or len(course.tried) >= self._settings.max_tries:
            self._num_failed += 1
            self._finish(course)
            return
        self._place(course, self._workload.requests[course.index])

    # --- replicas --------------------------------------------------------------------------------
    def _die(self, name: ReplicaId, down_s: float) -> None:
        now_s, detect_s = self._clock.now_s, self._settings.detect_s
        self._map.publish(now_s, name, None, None)
        self._clock.after(detect_s, self._tell_down, name)
        self._clock.after(down_s, self._come_back, name)
        self._replicas[name].die()

    def _tell_down(self, name: ReplicaId) -> None:
        if not self._replicas[name].is_up:
            for gateway in self._gateways:
                gateway.note_down(name)

    def _come_back(self, name: ReplicaId) -> None:
        self._replicas[name].come_back()
        self._clock.after(self._settings.detect_s, self._tell_up, name)

    def _tell_up(self, name: ReplicaId) -> None:
        if self._replicas[name].is_up:
            for gateway in self._gateways:
                gateway.note_up(name)
