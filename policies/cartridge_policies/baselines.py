"""What the default policy must beat: round robin and least loaded."""

from cartridge_policies.cost import CostPriors
from cartridge_policies.ranking import decide_by
from cartridge_policies.types import ClusterView, Decision, Demand, Refusal


class RoundRobin:
    """Each replica in turn, whatever it holds. Formula: none. Inputs: the view's tick."""

    def __init__(self, priors: CostPriors | None = None) -> None:
        self._priors = priors or CostPriors()

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The next replica in the order of names."""
        return decide_by(
            lambda candidate, replica: 0.0,
            demand,
            view,
            priors=self._priors,
            reason=lambda best: "round-robin",
        )


class LeastLoaded:
    """Fewest requests in flight; ties take turns. Inputs: requests in flight."""

    def __init__(self, priors: CostPriors | None = None) -> None:
        self._priors = priors or CostPriors()

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The replica with the fewest requests in flight."""
        return decide_by(
            lambda candidate, replica: float(replica.num_in_flight),
            demand,
            view,
            priors=self._priors,
            reason=lambda best: "least-loaded",
        )
