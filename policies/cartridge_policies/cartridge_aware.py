"""The default policy: the replica where the first token is predicted soonest."""

from typing import Final

import numpy as np

from cartridge_policies.cost import TERMS, CostTable
from cartridge_policies.loads import Floats, Rows
from cartridge_policies.ranking import decide_by
from cartridge_policies.types import Candidate, ClusterView, Decision, Demand, MapMode, Refusal
from cartridge_proto.residency import Tier

_LOAD: Final = TERMS.index("load")


class CartridgeAware:
    """Lowest predicted time to first token; the least busy of those that are nearly as fast.

    Purpose: a request goes where its Cartridges are, unless the queue there costs more than
    loading them elsewhere. Formula: queue + load + prefill + interference + copy, in seconds
    (`cost.py`). Inputs: loads, tiers and rates of the view. Parameters: `near`, the share of the
    best prediction within which another is not known to be worse.
    """

    def __init__(self, *, near: float = 0.1) -> None:
        self._near = near

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """Rank by seconds, near ones by requests in flight and then load; ties take turns."""

        def key(table: CostTable, rows: Rows) -> Floats:
            total_s = table.total_s
            is_near = total_s <= (1 + self._near) * np.minimum.reduce(total_s)
            # Of equally busy ones that which has to load least, by less than one request.
            load_s = table.terms[_LOAD]
            busy = view.loads.column("in_flight", rows) + 0.5 * load_s / (1 + load_s)
            # The near ones come before all others, which have seconds for keys.
            values: Floats = np.where(is_near, -1 / (1 + busy), total_s)
            return values

        def reason(best: Candidate) -> str:
            if view.mode is MapMode.FALLBACK:
                return "fallback-load"
            if not demand.artifacts:
                return "load"
            return "cold" if Tier.REMOTE in best.tiers else "resident"

        return decide_by(key, demand, view, reason=reason)
