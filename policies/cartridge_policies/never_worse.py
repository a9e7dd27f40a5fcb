"""Whether a request takes its Cartridges or the texts they were made of: the one that is sooner.

Owns the comparison of two decisions on one request, and the margin that is learned from how far
predictions were off. Refuses clocks and texts: the caller says how many tokens they are.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from cartridge_policies.types import Decision, Demand

WEIGHT: Final = 0.02
"""Of the newest residual: the last hundred or so count."""
PRIOR_COUNT: Final = 10.0
"""Residuals that the prior counts as."""
MIN_SEEN: Final = 20
"""First tokens before a prediction is believed to be a bound."""
MAX_RESIDUAL: Final = math.log(4.0)
"""What was off by more counts as this: one stall moves little."""
DEFAULT_SPREAD: Final = 0.1
"""How far predictions are thought to be off before any was compared."""
NUM_DEVIATIONS: Final = 0.5
"""Of the difference of both errors that the margin is wide.

Both predictions are of one fleet at one moment, so most of their errors is common to both and
cancels; and most requests are far from the border. Chosen by runs of the simulator
(docs/simulator.md, "Falling back to the text").
"""
DEFAULT_QUEUE_SHARE: Final = 0.1
"""A text is taken as sooner while the queue before it is at most this share of what it adds.

Without that bound texts collapse a fleet: each is sooner for its own request and many times the
work for all behind it, and where all are late nothing is sooner by being loaded.
"""
MAX_MARGIN: Final = 0.5
"""A fallback that takes twice as long is never taken, whatever was learned."""


class Residuals:
    """log(actual / predicted) of first tokens of one kind: their running mean and deviation."""

    def __init__(self, spread: float = DEFAULT_SPREAD) -> None:
        """Begin with a prior: right in the mean, off by `spread` (1 = by a factor of e)."""
        self.mean = 0.0
        self._variance = spread**2
        self._count = PRIOR_COUNT

    def note(self, predicted_s: float, actual_s: float) -> None:
        """A first token came; what was predicted to take no time says nothing."""
        if predicted_s <= 0.0 or actual_s <= 0.0:
            return
        residual = math.log(actual_s / predicted_s)
        residual = min(MAX_RESIDUAL, max(-MAX_RESIDUAL, residual))
        self._count += 1.0
        weight = max(WEIGHT, 1.0 / self._count)
        off = residual - self.mean
        self.mean += weight * off
        self._variance = (1.0 - weight) * (self._variance + weight * off * off)

    @property
    def deviation(self) -> float:
        """Of one residual."""
        return math.sqrt(self._variance)

    def at_least_s(self, predicted_s: float) -> float:
        """What hardly any first token of such a prediction comes before; 0 while little is known.

        Two deviations below the mean.
        """
        if self._count < PRIOR_COUNT + MIN_SEEN:
            return 0.0
        return predicted_s * math.exp(self.mean - 2.0 * self.deviation)


@dataclass(frozen=True)
class Comparison:
    """Predicted seconds to the first token both ways, and the share that attaching must save."""

    attached_s: float
    fallback_s: float
    margin: float
    shared_s: float = 0.0
    """Of both, waiting for others: a margin of it would speak for neither."""
    is_busy: bool = False
    """Others wait where the text would be prefilled, and would wait longer."""

    @property
    def is_attached(self) -> bool:
        """Whether the Cartridges are taken."""
        own_s = self.fallback_s - self.shared_s
        return self.is_busy or self.attached_s - self.shared_s <= own_s * (1.0 - self.margin)


class NeverWorse:
    """Compares for one fleet, and learns from what came of it."""

    def __init__(
        self,
        spread: float = DEFAULT_SPREAD,
        *,
        num_deviations: float = NUM_DEVIATIONS,
        queue_share: float = DEFAULT_QUEUE_SHARE,
    ) -> None:
        self.queue_share = queue_share
        self.attached = Residuals(spread)
        self.fallback = Residuals(spread)
        self._num_deviations = num_deviations

    @property
    def margin(self) -> float:
        """From 0 to `MAX_MARGIN`.

        By how much attaching was underestimated more than falling back, and some deviations of
        the difference. Falling back wrongly costs a prefill, attaching wrongly a late answer:
        doubt speaks for the fallback, never for the Cartridges.
        """
        bias = self.attached.mean - self.fallback.mean
        spread = math.hypot(self.attached.deviation, self.fallback.deviation)
        gap = max(0.0, bias + self._num_deviations * spread)
        return min(MAX_MARGIN, -math.expm1(-gap))

    def compare(self, attached: Decision, fallback: Decision) -> Comparison:
        """Both decisions were made on one view, of demands that `fallback_demand` relates."""
        waits_s = [decision.best.seconds("queue") for decision in (attached, fallback)]
        added_s = fallback.best.seconds("prefill") - attached.best.seconds("prefill")
        return Comparison(
            attached.best.total_s,
            fallback.best.total_s,
            self.margin,
            shared_s=min(waits_s),
            is_busy=waits_s[1] > self.queue_share * max(0.0, added_s),
        )


def fallback_demand(demand: Demand, num_text_tokens: int) -> Demand:
    """The same question with so many tokens of text in the place of its Cartridges."""
    return replace(
        demand,
        artifacts=(),
        composition=None,
        num_live_tokens=demand.num_live_tokens + num_text_tokens,
    )
