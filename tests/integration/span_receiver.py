"""A real OTLP receiver on loopback, for what the engine extension exports."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class SpanReceiver(TraceServiceServicer):
    """Keeps all spans that it is sent. `endpoint` is where it listens."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """Take spans in."""
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
        return ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Span]:
        """Spans of a trace, by 32 hex digits."""
        with self._lock:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]


@contextmanager
def receiving_spans() -> Iterator[SpanReceiver]:
    """A receiver that listens until the end of the block."""
    receiver = SpanReceiver()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=None).wait()
