"""The default policy: the replica where the first token is predicted soonest."""

from cartridge_policies.ranking import decide_by
from cartridge_policies.types import Candidate, ClusterView, Decision, Demand, MapMode, Refusal
from cartridge_proto.residency import Tier


class CartridgeAware:
    """Lowest predicted time to first token.

    Purpose: a request goes where its Cartridges are, unless the queue there costs more than
    loading them elsewhere. Formula: queue + load + prefill + interference + copy, in seconds
    (`cost.py`). Inputs: loads, tiers and rates of the view.
    """

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """Rank by predicted seconds; ties take turns."""

        def reason(best: Candidate) -> str:
            if view.mode is MapMode.FALLBACK:
                return "fallback-load"
            if not demand.artifacts:
                return "load"
            return "cold" if Tier.REMOTE in best.tiers else "resident"

        return decide_by(lambda table, rows: table.total_s, demand, view, reason=reason)
