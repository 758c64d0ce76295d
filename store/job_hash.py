"""What RQ keeps of a job: the hashes that RQ itself would write, ready for the submit script."""

from functools import lru_cache
from itertools import chain

from redis import Redis
from rq.job import Job, JobStatus, Retry
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from scorepool import store, wire

# rq.Job wants a connection at birth. This one is never used: nothing here touches the network.
_NOWHERE = Redis()

RUN_RETRIES = 3


def run_hash(
    owner: str,
    weight: int,
    request: wire.Request,
    ttl_s: int,
    batch: str | None = None,
    *,
    is_synchronous: bool = False,
) -> list[str | bytes]:
    """The hash of the job that runs a request: name, value, name, value, ... The request itself lies in a key of its
    own."""
    kind = wire.kind_of(request)
    moment = iso_now()
    flat = [
        *_plain_hash(kind, request.model, store.queue_name(request.model, request.priority), request.timeout_s, ttl_s),
        *("created_at", moment, "enqueued_at", moment, "owner", owner, "model", request.model, "kind", kind),
    ]
    if weight != 1:
        flat += ("weight", str(weight))
    if request.expires_at is not None:
        flat += ("expires_at", repr(request.expires_at))
    if request.webhook is not None:
        flat += ("webhook", request.webhook)
    if batch is not None:
        flat += ("batch", batch)
    if is_synchronous:
        flat += ("synchronous", "1")
    return flat


@lru_cache(maxsize=1024)
def _plain_hash(kind: str, model: str, queue: str, timeout_s: int, ttl_s: int) -> tuple[str | bytes, ...]:
    """What RQ writes of such a job, but for the times and for what is empty, which RQ reads like what is not there."""
    job = Job.create(
        store.INFER,
        args=[],
        kwargs={},
        connection=_NOWHERE,
        serializer=JSONSerializer,
        origin=queue,
        status=JobStatus.QUEUED,
        description=f"{kind} {model}",  # never the prompt: it is printed in logs and dashboards
        timeout=timeout_s,
        retry=Retry(max=RUN_RETRIES),
        result_ttl=ttl_s,
        failure_ttl=ttl_s,
    )
    written = {name: _redis_value(value) for name, value in job.to_dict().items() if name != "created_at"}
    return tuple(chain.from_iterable((name, value) for name, value in written.items() if value))


def _redis_value(value: object) -> str | bytes:
    if isinstance(value, JobStatus):
        return str(value.value)
    return value if isinstance(value, bytes) else str(value)


def iso_now() -> str:
    """As RQ writes times."""
    return str(utcformat(now()))
