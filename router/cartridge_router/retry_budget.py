"""How many requests may be sent a second time, so that retries never become the load.

Owns the count. Refuses to know requests or replicas.
"""

import time
from collections.abc import Callable

BURST_S = 10.0
"""Seconds of the steady allowance that can be saved up."""


class RetryBudget:
    """A bucket that requests fill by a part each, and time by a steady rate.

    Args:
        ratio: retries for each request.
        per_s: retries each second, whatever the traffic.
        clock: seconds that never go back.
    """

    def __init__(
        self, *, ratio: float, per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.configure(ratio=ratio, per_s=per_s)
        self._tokens = self._limit
        self._seen_s = clock()

    def configure(self, *, ratio: float, per_s: float) -> None:
        """Fill by other rates from now on."""
        self._ratio = ratio
        self._per_s = per_s
        self._limit = max(1.0, per_s * BURST_S)

    def note_request(self) -> None:
        """A request came."""
        self._refill()
        self._tokens = min(self._limit, self._tokens + self._ratio)

    def take(self) -> bool:
        """Whether one more retry may be made; it then counts."""
        self._refill()
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _refill(self) -> None:
        now_s = self._clock()
        self._tokens = min(self._limit, self._tokens + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
