"""What requests tell of the rates of each replica, and how well placement predicted them.

Owns an estimate for the fleet and one for each replica that is there. Refuses what ran beside other
requests, or was tried twice: it says nothing of the rates.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from cartridge_policies.estimation import RateEstimate
from cartridge_policies.loads import Booking, Row
from cartridge_policies.never_worse import Comparison, NeverWorse, Residuals
from cartridge_policies.types import Candidate, Demand
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Receipt, ReceiptStatus, ReplicaId, Tier
from cartridge_router.fleet import Fleet

PredictionSeen = Callable[[float], None]

MAX_REGRET: Final = 0.05
"""By which share of the fallback's predicted time Cartridges may come later without a word."""
KNOWN_S: Final = 30.0
"""Without a first token for so long, how predictions came out before says nothing of now: those
refused for it teach nothing, and a slow minute would never end."""
logger = logging.getLogger(__name__)
_NEWEST = 0.02
"""Weight of the last stream in the average."""


class Observations:
    """Learns for one fleet. For use from one event loop.

    `on_prediction(observed / predicted)` is called for each first token whose time was predicted;
    `on_compared(observed / predicted of the texts)` for each with Cartridges that texts could have
    stood in for.
    """

    def __init__(
        self,
        fleet: Fleet,
        on_prediction: PredictionSeen = lambda ratio: None,
        *,
        never_worse: NeverWorse | None = None,
        on_compared: PredictionSeen = lambda ratio: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_learning = True
        self.service_s: float | None = None
        """What a stream's prefill is predicted to take, on average; `None` before the first."""
        self._never_worse = never_worse or NeverWorse()
        self._residuals = Residuals()
        """Of all first tokens."""
        self._clock = clock
        self._seen_s = clock()
        """When the last of them came."""
        self._on_compared = on_compared
        self._fleet = fleet
        self._on_prediction = on_prediction
        self._shared: RateEstimate | None = None
        self._own: dict[ReplicaId, tuple[Row, RateEstimate]] = {}

    def note_first_token(
        self,
        candidate: Candidate,
        demand: Demand,
        booking: Booking,
        elapsed_s: float,
        *,
        comparison: Comparison | None = None,
        is_text: bool = False,
    ) -> None:
        """A stream's first token came so long after its request was sent.

        `comparison`: with what texts were predicted to take. `is_text`: they stood in.
        """
        before_s = booking.work_s if self.service_s is None else self.service_s
        self.service_s = before_s + _NEWEST * (booking.work_s - before_s)
        predicted_s = candidate.total_s
        if predicted_s > 0:
            self._on_prediction(elapsed_s / predicted_s)
            self._forget_old()
            self._residuals.note(predicted_s, elapsed_s)
            self._seen_s = self._clock()
        if is_text:
            self._never_worse.fallback.note(predicted_s, elapsed_s)
            # The engine may have had a part of the text in its own prefix cache: of the rates it
            # says nothing.
            return
        if demand.artifacts:
            self._never_worse.attached.note(predicted_s, elapsed_s)
            if comparison is not None and comparison.fallback_s > 0:
                self._compare(comparison, elapsed_s)
        has_loaded = candidate.slowest_tier not in (None, Tier.HBM)
        # Alone from the beginning until now, on a replica that is there.
        is_alone = booking.was_alone and booking.row.has_one and booking.row.index >= 0
        if not self.is_learning or has_loaded or not is_alone:
            return
        for estimate in self._of(booking.row):
            estimate.note_prefill(demand.num_live_tokens, demand.num_virtual_tokens, elapsed_s)
        self._apply(booking.row)

    def _compare(self, comparison: Comparison, elapsed_s: float) -> None:
        ratio = elapsed_s / comparison.fallback_s
        self._on_compared(ratio)
        if ratio > 1.0 + MAX_REGRET:
            logger.info(
                "regret: %.3f s to the first token with Cartridges, predicted %.3f s; with their "
                "texts %.3f s",
                *(elapsed_s, comparison.attached_s, comparison.fallback_s),
            )

    def at_least_s(self, candidate: Candidate) -> float:
        """What a first token from there will take in all likelihood, by how predictions came out.

        0 while too few came to say so, of late.
        """
        self._forget_old()
        return self._residuals.at_least_s(candidate.total_s)

    def _forget_old(self) -> None:
        if self._clock() - self._seen_s > KNOWN_S:
            self._residuals = Residuals()

    def note_receipt(self, receipt: Receipt) -> None:
        """An engine says how long a prefix took to load, and from where."""
        replica = self._fleet.find(ReplicaId(receipt.replica))
        # Loads of several requests of one prefix are one, and of a lost one two.
        is_one_load = receipt.status is ReceiptStatus.SERVED and receipt.num_loads == 1
        tier = max(
            (item.tier for item in receipt.items), key=TIERS_FASTEST_FIRST.index, default=None
        )
        if not self.is_learning or replica is None or tier is None or not is_one_load:
            return
        for estimate in self._of(replica.row):
            estimate.note_load(tier, receipt.loaded_bytes, receipt.load_s)
        self._apply(replica.row)

    def forget(self, replica: ReplicaId) -> None:
        """A replica is gone."""
        self._own.pop(replica, None)

    def _of(self, row: Row) -> tuple[RateEstimate, RateEstimate]:
        """That of the fleet and a replica's own; anew after other priors, or when it is back."""
        if self._shared is None or self._shared.prior is not self._fleet.rates:
            self._shared = RateEstimate(self._fleet.rates)
            self._own.clear()
        known = self._own.get(row.replica)
        if known is None or known[0] is not row:
            known = self._own[row.replica] = row, RateEstimate(self._fleet.rates)
        return self._shared, known[1]

    def _apply(self, row: Row) -> None:
        """Equal replicas are predicted alike and take turns; who differs is predicted by itself."""
        shared, own = self._of(row)
        self._fleet.loads.share_rates(shared.rates)
        is_different = own.differs_from(shared)
        self._fleet.loads.set_rates(row, own.rates if is_different else None)
