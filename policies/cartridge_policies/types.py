"""What a placement policy is given and what it answers.

Owns the frozen values between the gateway and the policies. Refuses clocks, I/O and live objects:
everything a decision depends on is in the demand and the view.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cartridge_proto.digest import Digest
from cartridge_proto.residency import ReplicaId, Tier


class MapMode(StrEnum):
    """How far the residency map can be believed."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Stale: the last known rows, their age shown."""
    FALLBACK = "fallback"
    """No map: placement by load only."""


@dataclass(frozen=True)
class ArtifactDemand:
    """One artifact that the request needs."""

    digest: Digest
    size_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class Demand:
    """One request: what it needs, how much it brings (`num_live_tokens`, an estimate)."""

    model: str
    artifacts: tuple[ArtifactDemand, ...]
    num_live_tokens: int


@dataclass(frozen=True)
class ReplicaView:
    """One replica as of now.

    `tiers` holds the fastest tier of each demanded artifact that is ready there. `refusal` says why
    the replica cannot take this request at all; `None` when it can. `max_in_flight` is `None`
    without a limit.
    """

    replica: ReplicaId
    num_in_flight: int
    max_in_flight: int | None
    tiers: Mapping[Digest, Tier]
    refusal: str | None


@dataclass(frozen=True)
class ClusterView:
    """The fleet as of now. `tick` grows with each decision, for fair rotation among equals."""

    replicas: tuple[ReplicaView, ...]
    mode: MapMode
    tick: int


@dataclass(frozen=True)
class CostTerm:
    """A named part of a cost, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """An eligible replica with its predicted time to first token; the terms add up to it."""

    replica: ReplicaId
    terms: tuple[CostTerm, ...]
    tiers: tuple[Tier, ...]
    """Tier of each demanded artifact there, in the order of the demand."""

    @property
    def total_s(self) -> float:
        """Predicted seconds to the first token."""
        return sum(term.seconds for term in self.terms)


@dataclass(frozen=True)
class Decision:
    """Candidates, best first, and one word on why the first one."""

    ranking: tuple[Candidate, ...]
    reason: str

    @property
    def best(self) -> Candidate:
        """The chosen replica."""
        return self.ranking[0]


class RefusalKind(StrEnum):
    """Why no replica was chosen; the two are different things."""

    NO_ELIGIBLE = "no_eligible_replica"
    SATURATED = "all_replicas_saturated"


@dataclass(frozen=True)
class Refusal:
    """No decision; a reason for each replica."""

    kind: RefusalKind
    reasons: Mapping[ReplicaId, str]


class PlacementPolicy(Protocol):
    """Chooses a replica. Stateless: state is in the view."""

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """Rank the eligible replicas, or say why there is none."""
        ...
