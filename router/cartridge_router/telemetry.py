"""What the gateway measures: Prometheus metrics and the OpenTelemetry tracer.

Owns the instruments. Refuses client-derived label values: labels come from settings and enums.
"""

import contextlib
import operator
import uuid
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, Tracer, get_current_span
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cartridge_policies.types import MapMode
from cartridge_proto import names
from cartridge_proto.residency import ReplicaId
from cartridge_router.fleet import Fleet
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.roster import Source

SERVICE = "cartridge_router"
OTHER = "other"
"""Label of what only clients have named."""

_NO_TRACER: Final = NoOpTracer()
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_REGRET_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_SEARCH_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


def otlp_provider(endpoint: str) -> TracerProvider:
    """A provider that exports to an OTLP endpoint by gRPC; `shutdown` sends what is left."""
    resource = Resource.create({"service.name": SERVICE, "service.instance.id": uuid.uuid4().hex})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def span_of(
    tracer: Tracer | None, operation: str, headers: Mapping[str, str]
) -> contextlib.AbstractContextManager[Span]:
    """The span of a request, current in the block; below that of the client if it sent one.

    Without a tracer and without a trace of the client's nothing is to be done.
    """
    if tracer is None and "traceparent" not in headers:
        return contextlib.nullcontext(INVALID_SPAN)
    return (tracer or _NO_TRACER).start_as_current_span(
        operation, context=extract(headers), kind=SpanKind.SERVER
    )


def current_traceparent() -> str | None:
    """The trace that this request belongs to, as W3C Trace Context; `None` without one."""
    if not get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get("traceparent")


_EACH_WORKER_SEES_ALL = frozenset(
    {names.METRIC_RECEIPTS, names.METRIC_REJECTED_RECORDS}
    | {names.METRIC_DISCOVERY_FAILURES, names.METRIC_RELOAD_FAILURES}
)
"""Counters of what comes to every worker alike: the sum would count it again and again."""
_PARTS_OF_A_WHOLE = frozenset(
    {names.METRIC_IN_FLIGHT, names.METRIC_QUEUED, names.METRIC_CONNECTIONS}
)
"""Gauges that add up over workers."""


def merged(texts: Sequence[bytes]) -> bytes:
    """Prometheus text of all workers of one gateway, from that of each.

    What counts requests adds up. Of what each worker says of the same thing the largest value is
    taken, but for health and the map: a replica is well, and the map exact, if all say so.
    """
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                join = _joined_by(family, sample.labels)
                key = (sample.name, tuple(sample.labels.items()))
                found[key] = join(found[key], sample.value) if key in found else sample.value
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return generate_latest(_Collected(list(families.values())))


def _joined_by(family: Metric, labels: Mapping[str, str]) -> Callable[[float, float], float]:
    is_exact_map = family.name == names.METRIC_MAP_MODE and labels["mode"] == MapMode.EXACT
    if family.name == names.METRIC_REPLICA_HEALTHY or is_exact_map:
        return min
    if family.name == names.METRIC_MAP_AGE:
        return _older
    if family.name in _PARTS_OF_A_WHOLE:
        return operator.add
    is_count = family.type in {"counter", "histogram"}
    return operator.add if is_count and family.name not in _EACH_WORKER_SEES_ALL else max


def _older(one: float, other: float) -> float:
    """The greater age; one that was never read (-1) is older than any."""
    return -1.0 if min(one, other) < 0 else max(one, other)


class _Collected(CollectorRegistry):
    """What was collected elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """As it came."""
        return self._families


class Metrics:
    """All instruments of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._known_requests: dict[tuple[str, int, str], Counter] = {}
        self._known: dict[tuple[Histogram, str], Histogram] = {}
        registry = self.registry
        self.requests = Counter(
            names.METRIC_REQUESTS,
            "Requests by route, status and how Cartridges were selected.",
            ["route", "status", "selection"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            names.METRIC_REQUEST_SECONDS,
            "Request accepted to last byte sent.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            names.METRIC_TTFB_SECONDS,
            "Request accepted to first byte from a replica, by predicted tier.",
            ["tier"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.overhead_seconds = Histogram(
            names.METRIC_OVERHEAD_SECONDS,
            "Request read to request forwarded.",
            buckets=_OVERHEAD_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            names.METRIC_QUEUE_SECONDS,
            "Time that requests which had to wait for room have waited until they got it.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.searches = Counter(
            names.METRIC_SEARCHES,
            "Searches for Cartridges by how they ended.",
            ["outcome"],
            registry=registry,
        )
        self.search_seconds = Histogram(
            names.METRIC_SEARCH_SECONDS,
            "How long a search for Cartridges took, its waiting included.",
            buckets=_SEARCH_SECONDS,
            registry=registry,
        )
        self.retries = Counter(
            names.METRIC_UPSTREAM_RETRIES,
            "Requests that went on to another replica.",
            registry=registry,
        )
        self.refused_connections = Counter(
            names.METRIC_REFUSED_CONNECTIONS,
            "Connections of clients that were closed: too many, or a head that took too long.",
            ["reason"],
            registry=registry,
        )
        self.connections = Gauge(
            names.METRIC_CONNECTIONS, "Connections of clients that are open.", registry=registry
        )
        self.reload_failures = Counter(
            names.METRIC_RELOAD_FAILURES,
            "Changed files that were not taken; what they replace goes on.",
            ["what"],
            registry=registry,
        )
        self.ejections = Counter(
            names.METRIC_EJECTIONS,
            "Times that a replica was left alone for a while after failures in a row.",
            ["replica"],
            registry=registry,
        )
        self.cut_answers = Counter(
            names.METRIC_CUT_ANSWERS,
            "Requests that ran when the gateway could wait no longer for its own end.",
            registry=registry,
        )
        self.copies = Counter(
            names.METRIC_COPIES,
            "Calls to engines' control services about copies of artifacts, by how they ended.",
            ["action", "outcome"],
            registry=registry,
        )
        self.broken_answers = Counter(
            names.METRIC_BROKEN_ANSWERS,
            "Answers that a replica broke off after the first byte.",
            ["replica"],
            registry=registry,
        )
        self.rejected_records = Counter(
            names.METRIC_REJECTED_RECORDS,
            "Residency records that were not believed.",
            ["reason"],
            registry=registry,
        )
        self.receipts = Counter(
            names.METRIC_RECEIPTS,
            "Receipts of engines by status.",
            ["status"],
            registry=registry,
        )
        self.prediction_ratio = Histogram(
            names.METRIC_PREDICTION_RATIO,
            "Time to the first token of streams, as a multiple of what placement predicted.",
            buckets=_RATIOS,
            registry=registry,
        )
        self.fallbacks = Counter(
            names.METRIC_FALLBACKS,
            "Requests that went without their Cartridges, with the texts or with nothing, by why.",
            ["kind", "why"],
            registry=registry,
        )
        self.regret_ratio = Histogram(
            names.METRIC_REGRET_RATIO,
            "Time to the first token of streams with Cartridges, as a multiple of what their texts "
            "were predicted to take; above 1.05 is regret.",
            buckets=_REGRET_RATIOS,
            registry=registry,
        )
        self.mispredictions = Counter(
            names.METRIC_MISPREDICTIONS,
            "Receipts whose tier was not the predicted one.",
            ["predicted", "served"],
            registry=registry,
        )
        self.discovery_failures = Counter(
            names.METRIC_DISCOVERY_FAILURES,
            "Times that a source of replicas could not be read; its last list stayed.",
            ["source"],
            registry=registry,
        )
        self._replicas = Gauge(
            names.METRIC_REPLICAS,
            "Replicas that may get requests, by who lists them.",
            ["source"],
            registry=registry,
        )
        self._in_flight = Gauge(
            names.METRIC_IN_FLIGHT, "Requests in flight.", ["replica"], registry=registry
        )
        self._queued = Gauge(
            names.METRIC_QUEUED, "Requests that wait for room.", ["model"], registry=registry
        )
        self._healthy = Gauge(
            names.METRIC_REPLICA_HEALTHY, "1 = healthy.", ["replica"], registry=registry
        )
        self._mode = Gauge(
            names.METRIC_MAP_MODE, "1 = the mode of the map.", ["mode"], registry=registry
        )
        self._age = Gauge(
            names.METRIC_MAP_AGE, "Age of the residency map; -1 = never read.", registry=registry
        )

    def note_request(self, route: str, status: int, selection: str, elapsed_s: float) -> None:
        """A request is over."""
        key = (route, status, selection)
        counter = self._known_requests.get(key)
        if counter is None:
            counter = self.requests.labels(route, str(status), selection)
            self._known_requests[key] = counter
        counter.inc()
        self._of(self.request_seconds, route).observe(elapsed_s)

    def note_first_byte(self, tier: str, elapsed_s: float) -> None:
        """The first byte came from a replica, where the Cartridges were expected in a tier."""
        self._of(self.first_byte_seconds, tier).observe(elapsed_s)

    def _of(self, histogram: Histogram, label: str) -> Histogram:
        """The child of a histogram; looking it up by name costs as much as to observe."""
        key = (histogram, label)
        child = self._known.get(key)
        if child is None:
            child = self._known[key] = histogram.labels(label)
        return child

    def forget(self, replica: ReplicaId) -> None:
        """Drop the rows of a replica that is gone."""
        for counter in (self.ejections, self.broken_answers):
            counter.remove(replica)

    def render(self, fleet: Fleet, residency: ResidencyMap, num_queued: Mapping[str, int]) -> bytes:
        """Prometheus text, with the present state of fleet, map and queues (by model)."""
        # Rows of replicas that are gone go with them.
        self._in_flight.clear()
        self._healthy.clear()
        num_listed = Counts(replica.source for replica in fleet.replicas)
        for source in Source:
            self._replicas.labels(source.value).set(num_listed[source])
        self._queued.clear()
        served = {model for replica in fleet.replicas for model in replica.models}
        for model, count in num_queued.items():
            self._queued.labels(model if model in served else OTHER).inc(count)
        for replica in fleet.replicas:
            self._healthy.labels(replica.replica).set(int(replica.is_healthy))
        for replica in fleet.replicas + fleet.leaving:
            self._in_flight.labels(replica.replica).inc(replica.num_in_flight)
        for mode in MapMode:
            self._mode.labels(mode.value).set(int(residency.mode is mode))
        age_s = residency.age_s
        self._age.set(-1 if age_s is None else age_s)
        return generate_latest(self.registry)
