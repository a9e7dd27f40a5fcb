"""OpenTelemetry spans of virtual prefixes, linked to the trace that the client began.

Owns the span of a request's prefix: from its arrival to the end of its last load. Refuses to trace
anything else; vLLM has spans of its own.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from cartridge_proto import names
from cartridge_proto.composition import CompositionMessage
from cartridge_proto.residency import Receipt, ReceiptStatus, ReplicaId

TRACER_NAME = "cartridge_engine_ext"


def otlp_provider(endpoint: str, replica: ReplicaId) -> TracerProvider:
    """A provider that exports to an OTLP endpoint by gRPC; `shutdown` sends what is left."""
    resource = Resource.create({"service.name": TRACER_NAME, "service.instance.id": replica})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class PrefixSpans:
    """Makes one span for each request with Cartridges; without a provider they go nowhere."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer(TRACER_NAME)

    def record(
        self,
        message: CompositionMessage,
        receipt: Receipt,
        trace_headers: Mapping[str, str] | None,
        start_ns: int,
        end_ns: int,
    ) -> None:
        """A request has ended, whose prefix took from `start_ns` to `end_ns` (Unix time)."""
        attributes: dict[str, str | int] = {
            names.ATTRIBUTE_COMPOSITION: message.composition,
            names.ATTRIBUTE_TIER: ",".join(item.tier for item in receipt.items),
            names.ATTRIBUTE_NUM_TOKENS: receipt.num_virtual_tokens,
            names.ATTRIBUTE_NUM_REUSED_TOKENS: receipt.num_reused_tokens,
            names.ATTRIBUTE_LOADED_BYTES: receipt.loaded_bytes,
            names.ATTRIBUTE_NUM_LOADS: receipt.num_loads,
        }
        if receipt.reason is not None:
            attributes[names.ATTRIBUTE_REASON] = receipt.reason
        span = self._tracer.start_span(
            names.SPAN_PREFIX,
            context=extract(dict(trace_headers or {})),
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            start_time=start_ns,
        )
        if receipt.status is ReceiptStatus.FAILED:
            span.set_status(Status(StatusCode.ERROR, receipt.detail))
        span.end(end_ns)
