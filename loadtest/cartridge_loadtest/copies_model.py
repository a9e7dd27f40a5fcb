"""Replication in simulated time: the real policy, and actions that take effect as in engines.

Owns what the policy is told: arrival rates from ends of loads, the stale map, free room. Refuses to
place requests; pins are left out, as simulated tiers keep what is used.
"""

from collections.abc import Mapping
from typing import Final

from cartridge_loadtest.gateway_model import GatewayModel, StaleMap
from cartridge_loadtest.replica_model import ReplicaModel
from cartridge_policies.loads import Booking
from cartridge_policies.rates import ReplicaRates
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
from cartridge_policies.types import ArtifactDemand, Demand
from cartridge_proto.digest import Digest
from cartridge_proto.residency import ReplicaId, Tier

ASKED_FOR_S: Final = 10.0
"""How long what was asked for counts as on its way, if nobody says that it came."""
_WEIGHT: Final = 0.02
"""Of the last request in the mean service time."""


class CopiesModel:
    """What one gateway of a simulated fleet does about copies."""

    def __init__(
        self,
        bounds: Bounds,
        tau_s: float,
        gateway: GatewayModel,
        residency: StaleMap,
        replicas: Mapping[ReplicaId, ReplicaModel],
        rates: Mapping[ReplicaId, ReplicaRates],
    ) -> None:
        self._policy = Replication(bounds)
        self._arrivals = ArrivalRates(tau_s=tau_s)
        self._gateway, self._map = gateway, residency
        self._replicas, self._rates = replicas, rates
        self._artifacts = dict[Digest, ArtifactDemand]()
        self._service_s: float | None = None
        self._asked = dict[tuple[ReplicaId, Digest], float]()

    def note(self, booking: Booking | None, demand: Demand, now_s: float) -> None:
        """A request has what it needs: its engine would send the receipt."""
        self._arrivals.note((artifact.digest for artifact in demand.artifacts), now_s)
        self._artifacts.update((artifact.digest, artifact) for artifact in demand.artifacts)
        if booking is not None:
            before_s = self._service_s if self._service_s is not None else booking.work_s
            self._service_s = before_s + _WEIGHT * (booking.work_s - before_s)

    def act(self, now_s: float) -> None:
        """Ask the policy once, and have replicas do what it says."""
        if self._service_s is None:
            return
        self._map.catch_up(now_s)
        self._asked = {
            key: asked_s for key, asked_s in self._asked.items() if now_s - asked_s < ASKED_FOR_S
        }
        for action in self._policy.plan(self._view(self._service_s, now_s)):
            self._take_effect(action, now_s)

    def _take_effect(self, action: Action, now_s: float) -> None:
        replica = self._replicas[action.replica]
        if action.kind is ActionKind.PREFETCH:
            replica.prefetch(self._artifacts[action.digest])
            self._asked[action.replica, action.digest] = now_s
        elif action.kind is ActionKind.EVICT:
            replica.evict(action.digest)

    def _view(self, service_s: float, now_s: float) -> CopiesView:
        asked = dict[Digest, list[ReplicaId]]()
        for name, digest in self._asked:
            asked.setdefault(digest, []).append(name)
        artifacts = dict[Digest, ArtifactState]()
        for digest, rate_per_s in self._arrivals.rates(now_s).items():
            copies = {name: Copy(Tier.REMOTE, is_ready=False) for name in asked.get(digest, ())}
            copies |= {name: Copy(tier) for name, tier in self._map.ready_on(digest).items()}
            artifacts[digest] = ArtifactState(
                self._artifacts[digest].size_bytes, rate_per_s, copies
            )
        return CopiesView(
            artifacts,
            {
                name: self._state(name, *busy_s)
                for name, busy_s in self._gateway.busy_s(now_s).items()
            },
            service_s,
            self._arrivals.requests_per_s(now_s),
        )

    def _state(self, name: ReplicaId, queue_s: float, link_s: float) -> ReplicaState:
        capacity, used = self._replicas[name].dram_bytes
        return ReplicaState(
            rates=self._rates[name],
            queue_s=queue_s,
            link_s=link_s,
            capacity_bytes=capacity,
            spare_bytes=max(0, capacity - used),
        )
