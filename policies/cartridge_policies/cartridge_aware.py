"""The default policy: the replica where the first token is predicted soonest."""

from cartridge_policies.cost import CostPriors
from cartridge_policies.ranking import decide_by
from cartridge_policies.types import Candidate, ClusterView, Decision, Demand, MapMode, Refusal
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

        def reason(best: Candidate) -> str:
            if view.mode is MapMode.FALLBACK:
                return "fallback-load"
            if not demand.artifacts:
                return "load"
            return "cold" if Tier.REMOTE in best.tiers else "resident"

        return decide_by(
            lambda candidate, replica: candidate.total_s,
            demand,
            view,
            priors=self._priors,
            reason=reason,
        )
