"""Build the hash that RQ keeps of a new job, for the submit script. Its fields are listed in job_fields.py."""

from functools import lru_cache
from itertools import chain

from redis import Redis
from rq.job import Job, JobStatus, Retry
from rq.serializers import JSONSerializer

from scorepool import wire
from scorepool.store.job_fields import JobField
from scorepool.store.keys import INFER
from scorepool.store.rq_keys import RqKeys, queue_name

# rq.Job requires a connection. This one is never used: nothing here touches the network.
_UNUSED_CONNECTION = Redis()

RQ_RETRIES = 3  # of a job whose worker is gone, if one of RQ's own cleaners finds it before reclaim.lua does

Job.redis_job_namespace_prefix = RqKeys.job("")  # see rq_keys.py; unchanged with the default prefix


def new_job(
    owner: str,
    weight: int | None,
    request: wire.Request,
    ttl_s: int,
    batch: str | None = None,
    *,
    is_synchronous: bool = False,
    traceparent: str = "",
) -> list[str | bytes]:
    """Return the hash of the job that runs a request: name, value, name, value, ...

    The request itself has a key of its own, and the script adds the times. `weight` is None where one owner has all.
    """
    kind = wire.kind_of(request)
    field = JobField
    flat = [
        *_rq_fields(kind, request.model, queue_name(request.model, request.priority), request.timeout_s, ttl_s),
        *(field.OWNER, owner, field.MODEL, request.model, field.KIND, kind),
    ]
    if weight is not None:
        flat += (field.WEIGHT, str(weight))
    if request.expires_at is not None:
        flat += (field.EXPIRES_AT, repr(request.expires_at))
    if request.webhook is not None:
        flat += (field.WEBHOOK, request.webhook)
    if batch is not None:
        flat += (field.BATCH, batch)
    if is_synchronous:
        flat += (field.SYNCHRONOUS, "1")
    if traceparent:
        flat += (field.TRACEPARENT, traceparent)
    return flat


@lru_cache(maxsize=1024)
def _rq_fields(kind: str, model: str, queue: str, timeout_s: int, ttl_s: int) -> tuple[str | bytes, ...]:
    """Return what RQ itself would write, without times and empty fields, which RQ reads as absent."""
    job = Job.create(
        INFER,
        args=[],
        kwargs={},
        connection=_UNUSED_CONNECTION,
        serializer=JSONSerializer,
        origin=queue,
        status=JobStatus.QUEUED,
        description=f"{kind} {model}",  # never the prompt: it is printed in logs and dashboards
        timeout=timeout_s,
        retry=Retry(max=RQ_RETRIES),
        result_ttl=ttl_s,
        failure_ttl=ttl_s,
    )
    written = {name: _redis_value(value) for name, value in job.to_dict().items() if name != JobField.CREATED_AT}
    return tuple(chain.from_iterable((name, value) for name, value in written.items() if value))


def _redis_value(value: object) -> str | bytes:
    if isinstance(value, JobStatus):
        return str(value.value)
    return value if isinstance(value, bytes) else str(value)
