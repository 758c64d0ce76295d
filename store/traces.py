"""Traces of a job's hops: submit, queue, run, commit, webhook. Off unless SCOREPOOL_TRACES says where they go.

The span of the submission is the parent of the others. Its W3C traceparent is kept in the job's hash, and from there in
that of its deliveries, so any process can add a span. No span holds a prompt, a completion, an owner or a URL's path.

This module loads no OpenTelemetry. otel.py does, and is imported if traces are on.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Literal, Protocol

from scorepool.store.settings import Settings, SettingsError

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
SpanKind = Literal["internal", "producer", "consumer", "client"]
Attributes = Mapping[str, str | int | float | bool]

client_traceparent: ContextVar[str] = ContextVar("client_traceparent", default="")  # of the request in this task


class Span(Protocol):
    """A span that has begun."""

    traceparent: str  # by which others become its children

    def end(self, at_s: float | None = None, error: str | None = None, attributes: Attributes | None = None) -> None:
        """End it, now or at a unix time; `error` is a constant that programs can compare."""


class Tracer(Protocol):
    """Sends spans from a thread of its own. Any thread may use it."""

    def begin(
        self,
        name: str,
        kind: SpanKind,
        parent: str,
        attributes: Attributes,
        at_s: float | None = None,
    ) -> Span:
        """Begin a span, now or at a unix time. `parent` is a traceparent; any other text begins a trace."""

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""


def open_tracer(settings: Settings, process: str) -> Tracer | None:
    """Return what sends the spans of this process; None if traces are off. Raises SettingsError."""
    if settings.traces == "off":
        return None
    try:
        otel = import_module("scorepool.store.otel")
    except ImportError as error:
        raise SettingsError(
            f"SCOREPOOL_TRACES={settings.traces!r} needs a package that is not installed ({error.name}): run `pip "
            "install 'scorepool[otel]'`"
        ) from None
    tracer: Tracer = otel.OtelTracer(process, otel.otlp_processor())
    return tracer


def operation_name(kind: str) -> str:
    """Return `gen_ai.operation.name` of a kind of job; scoring has no name among OpenTelemetry's."""
    return {"generate": "text_completion"}.get(kind, kind)
