"""What RQ keeps of a job: the hashes that RQ itself would write, ready for the submit script."""

from collections.abc import Mapping

from redis import Redis
from rq.job import Job, JobStatus, Retry
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

import wire

# rq.Job wants a connection at birth. This one is never used: nothing here touches the network.
_NOWHERE = Redis()

RUN_RETRIES = 3


def run_hash(
    id: str,  # noqa: A002
    owner: str,
    weight: int,
    request: wire.Request,
    ttl_s: int,
    batch: str | None = None,
) -> list[str | bytes]:
    """The hash of the job that runs a request. The request itself lies in a key of its own."""
    kind = wire.kind_of(request)
    job = Job.create(
        wire.INFER,
        args=[],
        kwargs={},
        id=id,
        connection=_NOWHERE,
        serializer=JSONSerializer,
        origin=wire.queue_name(request.model, request.priority),
        status=JobStatus.QUEUED,
        description=f"{kind} {request.model}",  # never the prompt: it is printed in logs and dashboards
        timeout=request.timeout_s,
        retry=Retry(max=RUN_RETRIES),
        result_ttl=ttl_s,
        failure_ttl=ttl_s,
    )
    job.enqueued_at = now()
    ours = {"owner": owner, "model": request.model, "kind": kind}
    if weight != 1:
        ours["weight"] = str(weight)
    if request.expires_at is not None:
        ours["expires_at"] = repr(request.expires_at)
    if request.webhook is not None:
        ours["webhook"] = request.webhook
    if batch is not None:
        ours["batch"] = batch
    return _flat(job, ours)


def _flat(job: Job, ours: Mapping[str, str]) -> list[str | bytes]:
    """name, value, name, value, ..."""
    flat: list[str | bytes] = []
    for name, value in {**job.to_dict(), **ours}.items():
        flat += (name, _redis_value(value))
    return flat


def _redis_value(value: object) -> str | bytes:
    if isinstance(value, JobStatus):
        return str(value.value)
    return value if isinstance(value, bytes) else str(value)


def iso_now() -> str:
    """As RQ writes times."""
    return str(utcformat(now()))
