"""Spans of prefixes: linked to the client's trace, with the times of the prefix."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from cartridge_engine_ext.tracing import PrefixSpans
from cartridge_proto import names
from cartridge_proto.composition import decode_message
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import FailureReason, Tier
from tests.engine_ext.fake_request import message_of
from tests.engine_ext.test_activity import receipt
from tests.proto.sample_artifact import sample_artifact

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MESSAGE = decode_message(message_of([(sha256_digest(b"one"), sample_artifact()[0])]))


def test_a_span_of_the_clients_trace() -> None:
    """Its parent is the client's span, its times are those of the prefix."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = PrefixSpans(provider)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    spans.record(MESSAGE, receipt(Tier.DRAM, Tier.REMOTE), headers, 1000, 3000)
    spans.record(MESSAGE, receipt(reason=FailureReason.DEADLINE), None, 1, 2)
    served, refused = exporter.get_finished_spans()
    assert served.name == names.SPAN_PREFIX
    assert (served.start_time, served.end_time) == (1000, 3000)
    assert served.context is not None
    assert served.parent is not None
    assert f"{served.context.trace_id:032x}" == TRACE
    assert f"{served.parent.span_id:016x}" == PARENT
    assert served.attributes is not None
    assert served.attributes[names.ATTRIBUTE_TIER] == "dram,remote"
    assert served.attributes[names.ATTRIBUTE_COMPOSITION] == MESSAGE.composition
    assert refused.parent is None
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes is not None
    assert refused.attributes[names.ATTRIBUTE_REASON] == "deadline"
