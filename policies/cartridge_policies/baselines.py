"""What the default policy must beat: round robin and least loaded."""

from cartridge_policies.cost import CostPriors
from cartridge_policies.eligibility import eligible
from cartridge_policies.ranking import candidates, rank
from cartridge_policies.types import Candidate, ClusterView, Decision, Demand, Refusal


class RoundRobin:
    """Each replica in turn, whatever it holds. Formula: none. Inputs: the view's tick."""

    def __init__(self, priors: CostPriors | None = None) -> None:
        self._priors = priors or CostPriors()

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The next replica in the order of names."""
        replicas = eligible(view)
        if isinstance(replicas, Refusal):
            return replicas
        found = candidates(demand, replicas, self._priors)
        return Decision(rank(found, lambda candidate: 0.0, view.tick), "round-robin")


class LeastLoaded:
    """Fewest requests in flight; ties take turns. Inputs: requests in flight."""

    def __init__(self, priors: CostPriors | None = None) -> None:
        self._priors = priors or CostPriors()

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The replica with the fewest requests in flight."""
        replicas = eligible(view)
        if isinstance(replicas, Refusal):
            return replicas
        load = {replica.replica: float(replica.num_in_flight) for replica in replicas}

        def in_flight(candidate: Candidate) -> float:
            return load[candidate.replica]

        found = candidates(demand, replicas, self._priors)
        return Decision(rank(found, in_flight, view.tick), "least-loaded")
