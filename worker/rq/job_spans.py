"""The spans of a job that ended here: how long it waited, ran, and took to record. See store/traces.py.

They are made when the end is recorded, from the times of Redis's clock.
"""

from datetime import datetime

from rq.utils import as_text

from scorepool import wire
from scorepool.store import JobField
from scorepool.store.traces import Tracer, operation_name
from scorepool.worker.rq.clock import REDIS_CLOCK
from scorepool.worker.rq.errors import JobError
from scorepool.worker.rq.in_flight import InFlightJob


def trace_job(tracer: Tracer, inflight: InFlightJob) -> None:
    """Make the spans of a job, if its submission was traced."""
    job = inflight.job
    parent = as_text(job.fields.get(JobField.TRACEPARENT, b""))
    if not parent or not job.has_outcome:
        return
    model, kind = (as_text(job.fields.get(name, b"")) for name in (JobField.MODEL, JobField.KIND))
    about: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation_name(kind),
        "gen_ai.provider.name": "scorepool",
        "gen_ai.request.model": model,
        "scorepool.job.id": job.id,
        "scorepool.job.kind": kind,
    }
    started_at, ended_at = job.leased_at, _unix_s(job.ended_at) or REDIS_CLOCK.now_s()
    queued_at = _unix_s(job.enqueued_at) or started_at
    queue = {"messaging.destination.name": inflight.queue.name, "scorepool.job.id": job.id}
    tracer.begin("queue", "internal", parent, queue, min(queued_at, started_at)).end(started_at)
    run = tracer.begin(f"{operation_name(kind)} {model}", "consumer", parent, about, started_at)
    error = None
    if inflight.error is not None:
        error = inflight.error.failure.code if isinstance(inflight.error, JobError) else type(inflight.error).__name__
    used: dict[str, str | int | float | bool] = {"scorepool.worker": job.worker_name or ""}
    if isinstance(inflight.value, wire.Result):
        used["gen_ai.usage.input_tokens"] = inflight.value.usage.prompt_tokens
        used["gen_ai.usage.output_tokens"] = inflight.value.usage.completion_tokens
        used["gen_ai.response.model"] = inflight.value.stamp.model
        used["scorepool.fingerprint"] = inflight.value.stamp.fingerprint
    run.end(ended_at, error, used)
    commit = tracer.begin("commit", "internal", parent, {"scorepool.job.id": job.id}, ended_at)
    commit.end(max(ended_at, REDIS_CLOCK.now_s()))


def _unix_s(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
