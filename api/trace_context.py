"""Make jobs part of their client's trace, and begin the span of a submission. Installed if traces are on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from scorepool import wire
from scorepool.store.traces import TRACEPARENT, Tracer, client_traceparent, operation_name


class TraceContext:
    """Keep the `traceparent` of a request, in the W3C's form, for the span of what it submits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("traceparent", "")
            client_traceparent.set(given if TRACEPARENT.fullmatch(given) else "")
        await self._app(scope, receive, send)


@contextmanager
def traced_submission(tracer: Tracer | None, requests: Sequence[wire.Request], job_ids: Sequence[str]) -> Iterator[str]:
    """Yield the traceparent of the jobs' spans, that of the submission's; "" if traces are off."""
    if tracer is None or not requests:
        yield ""
        return
    first = requests[0]
    operation = operation_name(wire.kind_of(first))
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "scorepool",
        "gen_ai.request.model": first.model,
        "messaging.batch.message_count": len(requests),
    }
    if len(job_ids) == 1:
        attributes["scorepool.job.id"] = job_ids[0]
    if isinstance(first, wire.Generate):
        sampling = {"max_tokens": first.max_tokens, "temperature": first.temperature, "top_p": first.top_p}
        sampling |= {"top_k": first.top_k or None, "choice.count": first.n, "seed": first.seed}
        attributes |= {f"gen_ai.request.{name}": value for name, value in sampling.items() if value is not None}
    span = tracer.begin(f"submit {first.model}", "producer", client_traceparent.get(), attributes)
    try:
        yield span.traceparent
    except BaseException as error:
        span.end(error=type(error).__name__)
        raise
    span.end()
