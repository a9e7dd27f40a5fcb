"""What happened on this replica, counted: the numbers behind metrics.

Owns counters, observations and levels between two takings, and the bound on tenants' names. Refuses
Prometheus and vLLM: `stats` carries these to the process that serves `/metrics`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from cartridge_proto import names
from cartridge_proto.digest import Digest
from cartridge_proto.residency import Receipt, ReceiptStatus, Tier

MAX_TENANTS = 50
"""Tenants with a label of their own: the first ones seen. All others share `OTHER_TENANT`."""
OTHER_TENANT = "other"
MAX_OBSERVATIONS = 4096
"""Kept between two takings; vLLM takes them with each step that it runs."""

LABELS = {
    names.METRIC_ENGINE_REQUESTS: ("tier", "tenant"),
    names.METRIC_ENGINE_TOKENS: ("tier", "tenant"),
    names.METRIC_ENGINE_ABANDONED: ("tenant",),
    names.METRIC_ENGINE_REFUSALS: ("reason",),
    names.METRIC_ENGINE_LOADED_BYTES: ("tenant",),
    names.METRIC_ENGINE_LOAD_SECONDS: ("tier",),
    names.METRIC_ENGINE_ENTERED: ("tier",),
    names.METRIC_ENGINE_LEFT: ("tier",),
    names.METRIC_ENGINE_RESIDENCY_SECONDS: ("tier",),
    names.METRIC_ENGINE_RESIDENT_BYTES: ("tier",),
    names.METRIC_ENGINE_QUARANTINED: (),
    names.METRIC_ENGINE_HINTS: ("action", "outcome"),
}
"""Names of the labels of each metric."""

_Key = tuple[str, tuple[str, ...]]


class Activity:
    """Counts of one replica. All methods may be called from any thread and return at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[_Key] = Counter()
        self._observed: list[tuple[str, tuple[str, ...], float]] = []
        self._levels: dict[_Key, float] = {}
        self._has_news = False
        self._since_s: dict[tuple[Digest, Tier], float] = {}
        self._tenants: set[str] = set()

    # --- what happened ---------------------------------------------------------------------------
    def note_receipt(self, receipt: Receipt, tenant: str) -> None:
        """A request has ended; a served one counts for the slowest tier it read from."""
        with self._lock:
            if receipt.status is ReceiptStatus.FAILED:
                self._count(names.METRIC_ENGINE_REFUSALS, str(receipt.reason), amount=1)
                return
            label = self._tenant(tenant)
            self._count(names.METRIC_ENGINE_LOADED_BYTES, label, amount=receipt.loaded_bytes)
            if receipt.status is ReceiptStatus.ABANDONED:
                self._count(names.METRIC_ENGINE_ABANDONED, label, amount=1)
                return
            tier = max((item.tier for item in receipt.items), key=list(Tier).index)
            self._count(names.METRIC_ENGINE_REQUESTS, tier, label, amount=1)
            self._count(names.METRIC_ENGINE_TOKENS, tier, label, amount=receipt.num_virtual_tokens)
            self._observe(names.METRIC_ENGINE_LOAD_SECONDS, tier, value=receipt.load_s)

    def note_entered(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds a digest."""
        with self._lock:
            self._since_s[digest, tier] = self._clock()
            self._count(names.METRIC_ENGINE_ENTERED, tier, amount=1)
            self._level(names.METRIC_ENGINE_RESIDENT_BYTES, tier, change=size_bytes)

    def note_left(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds it no more."""
        with self._lock:
            since_s = self._since_s.pop((digest, tier), None)
            if since_s is not None:
                held_s = self._clock() - since_s
                self._observe(names.METRIC_ENGINE_RESIDENCY_SECONDS, tier, value=held_s)
            self._count(names.METRIC_ENGINE_LEFT, tier, amount=1)
            self._level(names.METRIC_ENGINE_RESIDENT_BYTES, tier, change=-size_bytes)

    def note_quarantined(self) -> None:
        """One more artifact may not serve."""
        with self._lock:
            self._level(names.METRIC_ENGINE_QUARANTINED, change=1)

    def note_hint(self, action: str, outcome: str) -> None:
        """What became of an action of `kv_hints`."""
        with self._lock:
            self._count(names.METRIC_ENGINE_HINTS, action, outcome, amount=1)

    # --- taking ----------------------------------------------------------------------------------
    def take(self) -> dict[str, Any] | None:
        """What is new since the last call, as builtins; `None` when nothing is.

        `counts` and `levels`: [[name, labels, number]], `observed`: the same with one value each.
        Levels are as of now.
        """
        with self._lock:
            if not self._has_news:
                return None
            self._has_news = False
            counts, self._counts = self._counts, Counter()
            observed, self._observed = self._observed, []
            return {
                "counts": [[name, list(labels), n] for (name, labels), n in counts.items()],
                "observed": [[name, list(labels), value] for name, labels, value in observed],
                "levels": [[name, list(labels), n] for (name, labels), n in self._levels.items()],
            }

    # --- with the lock held ----------------------------------------------------------------------
    def _count(self, name: str, *labels: str, amount: float) -> None:
        self._counts[name, tuple(map(str, labels))] += amount  # type: ignore[assignment]
        self._has_news = True

    def _observe(self, name: str, *labels: str, value: float) -> None:
        if len(self._observed) < MAX_OBSERVATIONS:
            self._observed.append((name, tuple(map(str, labels)), value))
        self._has_news = True

    def _level(self, name: str, *labels: str, change: float) -> None:
        key = (name, tuple(map(str, labels)))
        self._levels[key] = self._levels.get(key, 0) + change
        self._has_news = True

    def _tenant(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else OTHER_TENANT
