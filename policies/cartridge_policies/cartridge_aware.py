"""The default policy: the replica where the first token is predicted soonest."""

from cartridge_policies.cost import CostPriors
from cartridge_policies.eligibility import eligible
from cartridge_policies.ranking import candidates, rank
from cartridge_policies.types import ClusterView, Decision, Demand, MapMode, Refusal
from cartridge_proto.residency import Tier


class CartridgeAware:
    """Lowest predicted time to first token.

    Purpose: a request goes where its Cartridges are, unless the queue there costs more than
    loading them elsewhere. Formula: queue + load + prefill, in seconds (`cost.py`). Inputs: tiers
    and requests in flight of the view. Parameters: `priors`.
    """

    def __init__(self, priors: CostPriors | None = None) -> None:
        self._priors = priors or CostPriors()

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """Rank by predicted seconds; ties take turns."""
        replicas = eligible(view)
        if isinstance(replicas, Refusal):
            return replicas
        found = candidates(demand, replicas, self._priors)
        ranking = rank(found, lambda candidate: candidate.total_s, view.tick)
        return Decision(ranking, _reason(demand, ranking[0].tiers, view.mode))


def _reason(demand: Demand, tiers: tuple[Tier, ...], mode: MapMode) -> str:
    if mode is MapMode.FALLBACK:
        return "fallback-load"
    if not demand.artifacts:
        return "load"
    return "resident" if all(tier is not Tier.REMOTE for tier in tiers) else "cold"
