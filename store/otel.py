"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP. The standard OTEL_* variables say where, and which are kept."""

import os
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scorepool.store import traces

FLUSH_MS = 3000
PROPAGATOR = TraceContextTextMapPropagator()


def otlp_processor() -> SpanProcessor:
    """Return a processor that collects spans and sends them in batches."""
    return BatchSpanProcessor(OTLPSpanExporter())


class OtelSpan:
    def __init__(self, span: Span, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    def end(
        self, at_s: float | None = None, error: str | None = None, attributes: traces.Attributes | None = None
    ) -> None:
        if attributes:
            self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_nanoseconds(at_s))


class OtelTracer:
    """A tracer of its own provider, so that spans of libraries in the process are not sent."""

    def __init__(self, process: str, processor: SpanProcessor) -> None:
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: f"scorepool-{process}"}
        resource = Resource.create({**name, SERVICE_VERSION: version("scorepool")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._processor = processor
        self._tracer = self._provider.get_tracer("scorepool")

    def begin(
        self,
        name: str,
        kind: traces.SpanKind,
        parent: str,
        attributes: traces.Attributes,
        at_s: float | None = None,
    ) -> OtelSpan:
        context = PROPAGATOR.extract({"traceparent": parent})
        span = self._tracer.start_span(
            name, context, SpanKind[kind.upper()], dict(attributes), start_time=_nanoseconds(at_s)
        )
        at = span.get_span_context()
        return OtelSpan(span, f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}")

    def close(self) -> None:
        self._processor.force_flush(FLUSH_MS)
        self._provider.shutdown()


def _nanoseconds(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1e9)
