"""Carries what happened to the process that serves vLLM's `/metrics`, and shows it there.

Owns vLLM's two classes for that and the instruments. Refuses to count anything itself.
"""

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cartridge_engine_ext.activity import LABELS
from cartridge_proto import names

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LOAD_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_RESIDENCY_SECONDS = (1, 10, 60, 300, 1800, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)

_COUNTERS = {
    names.METRIC_ENGINE_REQUESTS: "Requests served with Cartridges, by their slowest tier.",
    names.METRIC_ENGINE_TOKENS: "Virtual tokens served, by the slowest tier of their request.",
    names.METRIC_ENGINE_ABANDONED: "Requests whose clients left before their prefix was whole.",
    names.METRIC_ENGINE_REFUSALS: "Requests whose Cartridges could not be served.",
    names.METRIC_ENGINE_LOADED_BYTES: "Bytes of keys and values written to the KV cache.",
    names.METRIC_ENGINE_ENTERED: "Artifacts (hbm: compositions) that came to a tier.",
    names.METRIC_ENGINE_LEFT: "Artifacts (hbm: compositions) that left a tier.",
    names.METRIC_ENGINE_HINTS: "Actions of kv_hints, by what became of them.",
}
_GAUGES = {
    names.METRIC_ENGINE_RESIDENT_BYTES: "Bytes held at a tier.",
    names.METRIC_ENGINE_QUARANTINED: "Artifacts that answered their probe wrongly.",
}
_HISTOGRAMS = {
    names.METRIC_ENGINE_LOAD_SECONDS: (
        "Seconds that a request waited for its Cartridges, by their slowest tier.",
        _LOAD_SECONDS,
    ),
    names.METRIC_ENGINE_RESIDENCY_SECONDS: (
        "Seconds that a tier held what has left it.",
        _RESIDENCY_SECONDS,
    ),
}


class ConnectorStats(KVConnectorStats):
    """`Activity.take()` on its way; `data` is its dictionary, or empty."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Join with what came later."""
        if not self.data or not other.data:
            return self if self.data else other
        # Counts may name a series twice: they are added where they are shown.
        joined = {part: self.data[part] + other.data[part] for part in ("counts", "observed")}
        return ConnectorStats(data={**joined, "levels": other.data["levels"]})

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: sums over all labels."""
        sums: dict[str, int | float] = {}
        for name, _, amount in self.data.get("counts", []):
            sums[name] = sums.get(name, 0) + amount
        return sums

    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The instruments, with vLLM's own labels before ours."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._instruments: dict[str, Any] = {}
        for name, text in _COUNTERS.items():
            labels = [*labelnames, *LABELS[name]]
            self._instruments[name] = metric_types[Counter](name, text, labels)
        for name, text in _GAUGES.items():
            labels = [*labelnames, *LABELS[name]]
            self._instruments[name] = metric_types[Gauge](name, text, labels)
        for name, (text, buckets) in _HISTOGRAMS.items():
            labels = [*labelnames, *LABELS[name]]
            self._instruments[name] = metric_types[Histogram](name, text, labels, buckets=buckets)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show one taking."""
        before = self.per_engine_labelvalues[engine_idx]
        for part, verb in (("counts", "inc"), ("observed", "observe"), ("levels", "set")):
            for name, labels, number in transfer_stats_data.get(part, []):
                getattr(self._instruments[name].labels(*before, *labels), verb)(number)
