"""Order of candidates: lowest cost first, fair among equals.

Owns the tie rule that all policies share. Refuses randomness: fairness comes from the view's tick.
"""

from collections.abc import Callable, Sequence

from cartridge_policies.cost import CostPriors, cost_terms, tier_of
from cartridge_policies.types import Candidate, Demand, ReplicaView

RELATIVE_TIE = 1e-9


def candidates(
    demand: Demand, replicas: Sequence[ReplicaView], priors: CostPriors
) -> list[Candidate]:
    """Every replica with its cost terms and the tier of each artifact."""
    return [
        Candidate(
            replica=replica.replica,
            terms=cost_terms(demand, replica, priors),
            tiers=tuple(tier_of(replica, artifact.digest) for artifact in demand.artifacts),
        )
        for replica in replicas
    ]


def rank(
    found: Sequence[Candidate], key: Callable[[Candidate], float], tick: int
) -> tuple[Candidate, ...]:
    """Sort by key; those tied for the best take turns by tick. Independent of the input order."""
    ordered = sorted(found, key=lambda candidate: (key(candidate), candidate.replica))
    best = key(ordered[0])
    num_tied = sum(key(candidate) - best <= abs(best) * RELATIVE_TIE for candidate in ordered)
    turn = tick % num_tied
    return (*ordered[turn:num_tied], *ordered[:turn], *ordered[num_tied:])
