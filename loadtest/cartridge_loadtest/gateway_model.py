"""One simulated gateway: the real policy over its own bookings, guesses and a stale map.

Owns what one gateway believes. Refuses to know what replicas really do: it sees first tokens, ends,
refused connections, and residency as old as the map is.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from cartridge_policies.history import RouteHistory
from cartridge_policies.loads import IDLE, Booking, Load, LoadTable, Rows
from cartridge_policies.never_worse import NeverWorse, fallback_demand
from cartridge_policies.rates import ReplicaRates
from cartridge_policies.types import (
    ClusterView,
    Decision,
    Demand,
    MapMode,
    PlacementPolicy,
    Refusal,
)
from cartridge_proto.digest import Digest
from cartridge_proto.residency import ReplicaId, Tier

NOWHERE: Final[Mapping[ReplicaId, Tier]] = {}


class StaleMap:
    """Residency as gateways see it: each change `delay_s` after it happened."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.num_rows = 0
        self._ready: dict[Digest, dict[ReplicaId, Tier]] = {}
        self._held: dict[ReplicaId, set[Digest]] = {}
        self._news: deque[tuple[float, ReplicaId, Digest | None, Tier | None]] = deque()

    def publish(
        self, now_s: float, replica: ReplicaId, digest: Digest | None, tier: Tier | None
    ) -> None:
        """A replica has an artifact ready, or no more; no digest: it has lost everything."""
        self._news.append((now_s + self.delay_s, replica, digest, tier))

    def catch_up(self, now_s: float) -> None:
        """Believe what has arrived by now."""
        news = self._news
        while news and news[0][0] <= now_s:
            _, replica, digest, tier = news.popleft()
            held = self._held.setdefault(replica, set())
            gone = list(held) if digest is None else [] if tier is not None else [digest]
            for lost in gone:
                holders = self._ready.get(lost)
                if holders is not None and holders.pop(replica, None) is not None:
                    held.discard(lost)
                    self.num_rows -= 1
                    if not holders:
                        del self._ready[lost]
            if digest is not None and tier is not None:
                holders = self._ready.setdefault(digest, {})
                self.num_rows += replica not in holders
                holders[replica] = tier
                held.add(digest)

    def ready_on(self, digest: Digest) -> Mapping[ReplicaId, Tier]:
        """As `Residency` says."""
        return self._ready.get(digest, NOWHERE)


class GatewayModel:
    """Places requests with a policy; its table of loads and history are its own."""

    def __init__(
        self,
        policy: PlacementPolicy,
        residency: StaleMap,
        rates: Mapping[ReplicaId, ReplicaRates],
        *,
        max_in_flight: int | None = None,
        first_tick: int = 0,
        never_worse: NeverWorse | None = None,
    ) -> None:
        """`never_worse`: chooses between Cartridges and texts; `None` = Cartridges always."""
        self.loads = LoadTable()
        self.never_worse = never_worse
        self._policy, self._map, self._rates = policy, residency, rates
        self._history = RouteHistory()
        self._max_in_flight = max_in_flight
        self._tick = first_tick
        for name in rates:
            self.loads.add(name, rates[name])
        self._rows = self._all_rows()

    def _all_rows(self, *, without: Sequence[ReplicaId] = ()) -> Rows:
        names = (name for name in self._rates if name not in without)
        return self.loads.rows(name for name in names if self.loads.find(name) is not None)

    def decide(
        self, demand: Demand, now_s: float, *, without: Sequence[ReplicaId] = ()
    ) -> Decision | Refusal:
        """What the policy says of this request now, leaving some replicas alone."""
        _, decision = self.choose(demand, now_s, without=without)
        return decision

    def choose(
        self, demand: Demand, now_s: float, *, without: Sequence[ReplicaId] = ()
    ) -> tuple[Demand, Decision | Refusal]:
        """The same, and of what: of the request, or of one with texts where that is sooner.

        A text has as many tokens as its Cartridge.
        """
        self._map.catch_up(now_s)
        view = ClusterView(
            loads=self.loads,
            rows=self._all_rows(without=without) if without else self._rows,
            residency=self._map,
            history=self._history,
            mode=MapMode.EXACT,
            tick=self._tick,
            now_s=now_s,
            max_in_flight=self._max_in_flight,
        )
        self._tick += 1
        decision = self._policy.decide(demand, view)
        if self.never_worse is None or not demand.artifacts or isinstance(decision, Refusal):
            return demand, decision
        other = fallback_demand(demand, demand.num_virtual_tokens)
        by_text = self._policy.decide(other, view)
        if isinstance(by_text, Decision):
            compared = self.never_worse.compare(decision, by_text)
            if not compared.is_attached:
                return other, by_text
        return demand, decision

    def book(
        self, demand: Demand, decision: Decision, now_s: float, *, is_streamed: bool
    ) -> Booking:
        """The request goes to the first of the ranking, and is counted there at once."""
        best = decision.best
        row = self.loads.find(best.replica)
        if row is None:
            raise KeyError(best.replica)
        self._history.record(best.replica, demand, now_s)
        digests = [artifact.digest for artifact in demand.artifacts]
        tiers = dict(zip(digests, best.tiers, strict=True))
        return self.loads.book(row, demand, tiers=tiers, now_s=now_s, is_streamed=is_streamed)

    def busy_s(self, now_s: float) -> dict[ReplicaId, tuple[float, float]]:
        """What waits on each replica, as far as this gateway knows: work, and loads from the store.

        Both in seconds.
        """
        found = ((name, self.loads.find(name)) for name in self._rates)
        return {
            name: (
                row.own_load(now_s).pending_s + row.others.pending_s,
                (row.pending_bytes[Tier.REMOTE] + row.others.pending_bytes.get(Tier.REMOTE, 0))
                / row.rates.tiers[Tier.REMOTE].bytes_per_s,
            )
            for name, row in found
            if row is not None
        }

    def own_loads(self, now_s: float) -> dict[ReplicaId, Load]:
        """What it has on each replica, where it has anything."""
        found = ((name, self.loads.find(name)) for name in self._rates)
        own = {name: row.own_load(now_s) for name, row in found if row is not None}
        return {name: load for name, load in own.items() if load is not IDLE}

    def note_others(self, loads: Mapping[ReplicaId, Load], now_s: float) -> None:
        """Other gateways have said what they have on each replica; nothing where not named."""
        for name in self._rates:
            row, load = self.loads.find(name), loads.get(name, IDLE)
            if row is not None and not (load is IDLE and row.others is IDLE):
                self.loads.note_others(row, load, now_s)

    def note_down(self, replica: ReplicaId) -> None:
        """A replica is known to be away."""
        row = self.loads.find(replica)
        if row is not None:
            self.loads.remove(row)
            self._history.forget(replica)
            self._rows = self._all_rows()

    def note_up(self, replica: ReplicaId) -> None:
        """A replica has joined again."""
        if self.loads.find(replica) is None:
            self.loads.add(replica, self._rates[replica])
            self._rows = self._all_rows()
