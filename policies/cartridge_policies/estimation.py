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
_TOKENS: Final = 1024.0
_BYTES: Final = float(1 << 20)


class LeastSquares:
    """Non-negative weights of a linear model of seconds, one observation after the other.

    In information form, of relative errors: a tenth off counts the same for short and long ones.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        scale = np.maximum(prior, 0.1 * max(prior))
        self._ridge: Floats = PRIOR_WEIGHT / scale**2
        self._prior: Floats = np.array(prior, float)
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

    def _solved(self) -> Floats:
        """The weights that fit best; those that would be negative are left out, one by one."""
        used = list(range(len(self._prior)))
        weights = np.zeros(len(self._prior))
        while used:
            rows = np.ix_(used, used)
            matrix = self._information[rows] + np.diag(self._ridge[used])
            target = self._evidence[used] + self._ridge[used] * self._prior[used]
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
        self._prefill = LeastSquares(
            [
                prior.prefill_base_s,
                prior.prefill_s_per_token * _TOKENS,
                prior.prefill_s_per_token2 * _TOKENS**2,
            ]
        )
        self._loads = {
            tier: LeastSquares([rate.latency_s, _BYTES / rate.bytes_per_s])
            for tier, rate in prior.tiers.items()
            if tier is not Tier.HBM
        }

    def note_prefill(self, num_live_tokens: int, num_virtual_tokens: int, seconds: float) -> None:
        """A first token came after so long; nothing had to be loaded, nothing ran beside it."""
        total = num_live_tokens + num_virtual_tokens
        squares = total**2 - num_virtual_tokens**2
        self._prefill.observe([1.0, num_live_tokens / _TOKENS, squares / _TOKENS**2], seconds)

    def note_load(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """So many bytes came from a tier in so long."""
        if tier in self._loads and size_bytes > 0:
            self._loads[tier].observe([1.0, size_bytes / _BYTES], seconds)

    @property
    def num_prefills(self) -> int:
        """Observations that the prefill rates are made of."""
        return self._prefill.count

    @property
    def prefill_error(self) -> float | None:
        """How far predictions of prefills were off lately, as a part, in the mean."""
        return self._prefill.relative_error

    @property
    def rates(self) -> ReplicaRates:
        """The prior, where nothing was learned, and what was learned elsewhere."""
        rates = self.prior
        if self._prefill.count:
            base, per_token, per_square = self._prefill.weights
            rates = replace(
                rates,
                prefill_base_s=base,
                prefill_s_per_token=per_token / _TOKENS,
                prefill_s_per_token2=per_square / _TOKENS**2,
            )
        tiers = dict(rates.tiers)
        for tier, learned in self._loads.items():
            if learned.count:
                latency_s, per_mib = learned.weights
                tiers[tier] = TierRate(latency_s, _BYTES / max(per_mib, 1e-9))
        return replace(rates, tiers=tiers)
