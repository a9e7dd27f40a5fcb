"""Rates of one replica, learned from what its requests took.

Owns recursive least squares with forgetting and how sure it is. Refuses clocks and to decide what
is worth learning from: the caller leaves out what ran beside others.

Source: Haykin, "Adaptive Filter Theory", recursive least squares, in information form.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cartridge_policies.loads import Floats
from cartridge_policies.rates import ReplicaRates, TierRate
from cartridge_proto.residency import Tier

FORGETTING: Final = 0.97
"""Weight of an observation of the one before: the last thirty or so count."""
PRIOR_WEIGHT: Final = 1e-3
"""Of the prior: one observation that is off by half outweighs a prior that is off by ten."""
ERROR_WEIGHT: Final = 0.1
MAX_SURPRISE: Final = 4.0
"""What took this many times the prediction, or more, counts as this: one stall moves little."""
MIN_OBSERVATIONS: Final = 8
MIN_DIFFERENCE: Final = 0.25
"""Replicas that differ by less in a typical request are of one kind."""
_TOKENS: Final = 1024.0
_BYTES: Final = float(1 << 20)


_TYPICAL_PREFILL: Final = (1.0, 0.5, 0.25)
"""512 tokens."""
_TYPICAL_LOAD: Final = (1.0, 64.0)
"""64 MiB."""


class LeastSquares:
    """Non-negative weights of a linear model of seconds, one observation after the other.

    In information form, of relative errors: a tenth off counts the same for short and long ones.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._scale: Floats = np.maximum(prior, max(0.1 * max(prior), 1e-6))
        self._prior: Floats = np.array(prior, float)
        self._stretch = 1.0
        """How many times slower than the prior observations are, in the mean."""
        self._weights = self._prior
        self._information: Floats = np.zeros((len(prior), len(prior)))
        self._evidence: Floats = np.zeros(len(prior))
        self.relative_error: float | None = None
        """Mean of how far predictions were off, as a part, of late; `None` before the first."""
        self.count = 0

    @property
    def weights(self) -> list[float]:
        """As they are now."""
        found: list[float] = self._weights.tolist()
        return found

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """Learn from one that took more than no time."""
        x = np.array(terms, float)
        predicted = float(self._weights @ x)
        error = abs(seconds - predicted) / max(seconds, 1e-9)
        if self.count > 3:
            seconds = min(seconds, MAX_SURPRISE * predicted)
        seconds = max(seconds, 1e-6)
        ratio = max(1.0, seconds / max(float(self._prior @ x), 1e-9))
        self._stretch = max(self._stretch, (self._stretch * self.count + ratio) / (self.count + 1))
        self.relative_error = (
            error
            if self.relative_error is None
            else self.relative_error + ERROR_WEIGHT * (error - self.relative_error)
        )
        self.count += 1
        relative = x / seconds
        self._information = FORGETTING * self._information + np.outer(relative, relative)
        self._evidence = FORGETTING * self._evidence + relative
        self._weights = self._solved()

    def differs_from(self, other: "LeastSquares", terms: Sequence[float]) -> bool:
        """Whether both predict a typical case too differently for it to be chance."""
        ours, theirs = float(np.dot(self.weights, terms)), float(np.dot(other.weights, terms))
        least = max(MIN_DIFFERENCE, 2 * (self.relative_error or 0.0))
        return self.count >= MIN_OBSERVATIONS and abs(ours - theirs) > least * theirs

    def _solved(self) -> Floats:
        """The weights that fit best; those that would be negative are left out, one by one."""
        used = list(range(len(self._prior)))
        ridge = PRIOR_WEIGHT / (self._scale * self._stretch) ** 2
        weights = np.zeros(len(self._prior))
        while used:
            rows = np.ix_(used, used)
            matrix = self._information[rows] + np.diag(ridge[used])
            target = self._evidence[used] + ridge[used] * self._prior[used]
            found = np.linalg.solve(matrix, target)
            if found.min() >= 0:
                weights[used] = found
                break
            del used[int(found.argmin())]
        return weights


class RateEstimate:
    """One replica's rates: a prior, and what was learned since."""

    def __init__(self, prior: ReplicaRates) -> None:
        self.prior = prior
        self.prefill = LeastSquares(
            [
                prior.prefill_base_s,
                prior.prefill_s_per_token * _TOKENS,
                prior.prefill_s_per_token2 * _TOKENS**2,
            ]
        )
        self.loads = {
            tier: LeastSquares([rate.latency_s, _BYTES / rate.bytes_per_s])
            for tier, rate in prior.tiers.items()
            if tier is not Tier.HBM
        }

    def note_prefill(self, num_live_tokens: int, num_virtual_tokens: int, seconds: float) -> None:
        """A first token came after so long; nothing had to be loaded, nothing ran beside it."""
        total = num_live_tokens + num_virtual_tokens
        squares = total**2 - num_virtual_tokens**2
        self.prefill.observe([1.0, num_live_tokens / _TOKENS, squares / _TOKENS**2], seconds)

    def note_load(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """So many bytes came from a tier in so long."""
        if tier in self.loads and size_bytes > 0:
            self.loads[tier].observe([1.0, size_bytes / _BYTES], seconds)

    def differs_from(self, other: "RateEstimate") -> bool:
        """Whether enough was learned to say that this replica is another kind than the rest."""
        return self.prefill.differs_from(other.prefill, _TYPICAL_PREFILL) or any(
            own.differs_from(other.loads[tier], _TYPICAL_LOAD) for tier, own in self.loads.items()
        )

    @property
    def rates(self) -> ReplicaRates:
        """The prior, where nothing was learned, and what was learned elsewhere."""
        rates = self.prior
        if self.prefill.count:
            base, per_token, per_square = self.prefill.weights
            rates = replace(
                rates,
                prefill_base_s=base,
                prefill_s_per_token=per_token / _TOKENS,
                prefill_s_per_token2=per_square / _TOKENS**2,
            )
        tiers = dict(rates.tiers)
        for tier, learned in self.loads.items():
            if learned.count:
                latency_s, per_mib = learned.weights
                tiers[tier] = TierRate(latency_s, _BYTES / max(per_mib, 1e-9))
        return replace(rates, tiers=tiers)
