"""From eligible replicas to an ordered decision: lowest cost first, fair among equals.

Owns the steps and the tie rule that all policies share. Refuses randomness: fairness comes from the
view's tick.
"""

from collections.abc import Callable

from cartridge_policies.cost import CostPriors, cost_terms, tier_of
from cartridge_policies.eligibility import eligible
from cartridge_policies.types import (
    Candidate,
    ClusterView,
    Decision,
    Demand,
    Refusal,
    ReplicaView,
)

RELATIVE_TIE = 1e-9

Key = Callable[[Candidate, ReplicaView], float]
"""What a policy sorts by; lower is better."""


def decide_by(
    key: Key,
    demand: Demand,
    view: ClusterView,
    *,
    priors: CostPriors,
    reason: Callable[[Candidate], str],
) -> Decision | Refusal:
    """Rank the eligible replicas by a key; `reason` says why the best one is.

    Those tied for the best take turns by tick. Independent of the order of the view's replicas.
    """
    replicas = eligible(view)
    if isinstance(replicas, Refusal):
        return replicas
    keyed = []
    for replica in replicas:
        candidate = Candidate(
            replica=replica.replica,
            terms=cost_terms(demand, replica, priors),
            tiers=tuple(tier_of(replica, artifact.digest) for artifact in demand.artifacts),
        )
        keyed.append((key(candidate, replica), replica.replica, candidate))
    keyed.sort(key=lambda entry: entry[:2])
    best = keyed[0][0]
    num_tied = sum(value - best <= abs(best) * RELATIVE_TIE for value, _, _ in keyed)
    turn = view.tick % num_tied
    ordered = [candidate for _, _, candidate in keyed]
    ranking = (*ordered[turn:num_tied], *ordered[:turn], *ordered[num_tied:])
    return Decision(ranking, reason(ranking[0]))
