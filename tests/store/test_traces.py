"""Spans have the parent, the times and the errors that they were given."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from scorepool import wire
from scorepool.api.trace_context import traced_submission
from scorepool.store.otel import OtelTracer
from scorepool.store.traces import client_traceparent

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[OtelTracer]:
    tracer = OtelTracer("api", SimpleSpanProcessor(exporter))
    yield tracer
    tracer.close()


def test_a_span_is_a_child_of_the_traceparent_that_it_is_given(tracer: OtelTracer, exporter: InMemorySpanExporter):
    first = tracer.begin("run", "consumer", CLIENT, {"gen_ai.request.model": "demo"}, 10.0)
    tracer.begin("webhook", "client", first.traceparent, {}).end(error="503")
    first.end(12.5, attributes={"gen_ai.usage.input_tokens": 3})
    child, parent = exporter.get_finished_spans()
    assert f"{parent.context.trace_id:032x}" == CLIENT.split("-")[1] == f"{child.context.trace_id:032x}"
    assert parent.parent is not None
    assert f"{parent.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert child.parent is not None
    assert child.parent.span_id == parent.context.span_id
    assert (parent.start_time, parent.end_time, parent.kind) == (10 * 10**9, 12_500_000_000, SpanKind.CONSUMER)
    assert dict(parent.attributes or {}) == {"gen_ai.request.model": "demo", "gen_ai.usage.input_tokens": 3}
    assert (child.status.status_code, (child.attributes or {})["error.type"]) == (StatusCode.ERROR, "503")
    assert parent.resource.attributes["service.name"] == "scorepool-api"


@pytest.mark.parametrize("parent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_what_is_no_traceparent_begins_a_trace(tracer: OtelTracer, exporter: InMemorySpanExporter, parent: str):
    tracer.begin("run", "consumer", parent, {}).end()
    [span] = exporter.get_finished_spans()
    assert span.parent is None


def test_a_parent_that_is_not_sampled_has_no_spans(tracer: OtelTracer, exporter: InMemorySpanExporter):
    span = tracer.begin("submit", "producer", CLIENT[:-1] + "0", {})
    assert span.traceparent.endswith("-00")  # so that the worker makes none either
    span.end()
    assert exporter.get_finished_spans() == ()


def test_a_submission_that_is_refused_is_a_failed_span(tracer: OtelTracer, exporter: InMemorySpanExporter):
    token = client_traceparent.set(CLIENT)
    request = wire.Generate(model="demo", prompt="secret", max_tokens=5, temperature=0.5)
    with pytest.raises(ValueError, match="full"), traced_submission(tracer, [request], ["j1"]) as traceparent:
        raise ValueError("full")
    client_traceparent.reset(token)
    [span] = exporter.get_finished_spans()
    assert traceparent == f"{CLIENT[:36]}{span.context.span_id:016x}-01"
    about = dict(span.attributes or {})
    assert about["error.type"] == "ValueError"
    assert (about["gen_ai.request.max_tokens"], about["gen_ai.request.temperature"]) == (5, 0.5)
    assert "secret" not in str(about)
    with traced_submission(None, [request], ["j1"]) as traceparent:
        assert traceparent == ""
