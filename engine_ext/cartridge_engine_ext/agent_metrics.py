"""What the node agent counts, and the address where Prometheus reads it.

Owns the instruments and their HTTP server. Refuses labels that are not closed sets: no digest, no
engine and no owner is a label.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto import names
from cartridge_proto.digest import Digest
from cartridge_proto.residency import FailureReason, Tier

LOADED = "loaded"
"""Result of a load that did not fail; others are a `FailureReason`."""
AGENT_TIERS = (Tier.DRAM, Tier.NVME)


class AgentMetrics:
    """Instruments of one agent; observes its ledger. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._artifacts = Gauge(
            names.METRIC_AGENT_RESIDENT_ARTIFACTS,
            "Artifacts held at a tier.",
            ["tier"],
            registry=self.registry,
        )
        self._bytes = Gauge(
            names.METRIC_AGENT_RESIDENT_BYTES,
            "Bytes held at a tier.",
            ["tier"],
            registry=self.registry,
        )
        self._evictions = Counter(
            names.METRIC_AGENT_EVICTIONS,
            "Artifacts that left a tier.",
            ["tier"],
            registry=self.registry,
        )
        self._loads = Counter(
            names.METRIC_AGENT_LOADS,
            "Loads to memory that have ended, by their result: loaded, or why not.",
            ["result"],
            registry=self.registry,
        )
        self._engines = Gauge(
            names.METRIC_AGENT_ENGINES, "Engines that are connected.", registry=self.registry
        )
        self._used = Gauge(
            names.METRIC_AGENT_DRAM_USED_BYTES,
            "Bytes of memory that are taken or reserved.",
            registry=self.registry,
        )
        self._capacity = Gauge(
            names.METRIC_AGENT_DRAM_CAPACITY_BYTES, "Bound of these.", registry=self.registry
        )
        # Series that are there from the start: a rate needs the 0 before the 1.
        for tier in AGENT_TIERS:
            for instrument in (self._artifacts, self._bytes, self._evictions):
                instrument.labels(tier.value)
        for result in (LOADED, *(reason.value for reason in FailureReason)):
            self._loads.labels(result)

    def watch(
        self, *, num_engines: Callable[[], int], used_bytes: Callable[[], int], capacity_bytes: int
    ) -> None:
        """Ask these at each reading."""
        self._engines.set_function(num_engines)
        self._used.set_function(used_bytes)
        self._capacity.set(capacity_bytes)

    def note_entered(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds an artifact."""
        self._artifacts.labels(tier.value).inc()
        self._bytes.labels(tier.value).inc(size_bytes)

    def note_left(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds it no more."""
        self._artifacts.labels(tier.value).dec()
        self._bytes.labels(tier.value).dec(size_bytes)
        self._evictions.labels(tier.value).inc()

    def note_loaded(self, failure: FailureReason | None) -> None:
        """A load to memory has ended; `None` when the artifact is there."""
        self._loads.labels(LOADED if failure is None else failure.value).inc()


class MetricsServer:
    """Serves a registry over HTTP until `stop`; `address` is where it really listens.

    Raises:
        ConfigurationError: the address cannot be had.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigurationError(
                f"metrics_port: {host}:{port}: {error.strerror or error}"
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Close the address."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
