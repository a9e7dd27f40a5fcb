"""What a placement policy is given and what it answers.

Owns the values between the gateway and the policies. Refuses clocks and I/O: everything a decision
depends on is in the demand and the view.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier

if TYPE_CHECKING:
    from cartridge_policies.history import RouteHistory
    from cartridge_policies.loads import LoadTable, Rows


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
    composition: Digest | None = None
    """Identity of the whole prefix: where it is in HBM, nothing is read at all."""
    session: str | None = None
    """What requests of one conversation share."""

    @cached_property
    def num_virtual_tokens(self) -> int:
        """Positions of all artifacts."""
        return sum(artifact.num_tokens for artifact in self.artifacts)

    @property
    def num_context_tokens(self) -> int:
        """Positions that each step of the answer reads."""
        return self.num_virtual_tokens + self.num_live_tokens


class Residency(Protocol):
    """Where artifacts are; a look-up, not a scan."""

    def ready_on(self, digest: Digest) -> Mapping[ReplicaId, Tier]:
        """Fastest tier of an artifact, or of a composition, on each replica that has it ready."""
        ...


@dataclass(frozen=True)
class ClusterView:
    """The fleet as of now. `tick` grows with each decision, for fair rotation among equals.

    `rows` are the replicas that are able, in the order of their names; `refusals` says of the
    others why not. `max_in_flight` is the limit of each replica; `None` without one.
    """

    loads: "LoadTable"
    rows: "Rows"
    residency: Residency
    history: "RouteHistory"
    mode: MapMode
    tick: int
    now_s: float = 0.0
    refusals: Mapping[ReplicaId, str] | None = None
    max_in_flight: int | None = None


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
    def slowest_tier(self) -> Tier | None:
        """Where the last of the artifacts comes from; `None` without any."""
        return max(self.tiers, key=TIERS_FASTEST_FIRST.index, default=None)

    def seconds(self, name: str) -> float:
        """One term; 0 where there is none of that name."""
        return sum(term.seconds for term in self.terms if term.name == name)

    @property
    def total_s(self) -> float:
        """Predicted seconds to the first token."""
        return sum(term.seconds for term in self.terms)


@dataclass(frozen=True)
class Decision:
    """Candidates, best first, and one word on why the first one."""

    ranking: Sequence[Candidate]
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
