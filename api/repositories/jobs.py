"""What is known of a job, read from RQ's hash and our outcome: `wire.Job` and its pages."""

import re
from collections.abc import Sequence
from typing import Any, get_args

from msgspec.structs import replace
from redis.asyncio import Redis
from rq.job import Job as RqJob

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, NotFound
from scorepool.api.repositories import decode as stored

KINDS: dict[str, wire.Kind] = {kind: kind for kind in get_args(wire.Kind)}
FIELDS = ("owner", "kind", "model", "status", "created", "started_at", "ended_at")

STATUSES: dict[str, wire.Status] = {  # RQ's word: ours
    "created": "queued",
    "queued": "queued",
    "deferred": "queued",
    "scheduled": "queued",
    "started": "started",
    "finished": "finished",
    "failed": "failed",
    "canceled": "canceled",
    "stopped": "canceled",
}
ENDED: tuple[wire.Status, ...] = ("finished", "failed", "canceled")

# Where something else than our worker ended the job (`rq` on the command line, a dashboard, RQ's own cleanup).
GIVEN_UP = wire.Failure(
    code="crashed", message="the queue holds no result of this job: its worker died, or another tool ended it"
)
CANCELED_ELSEWHERE = wire.Failure(code="canceled", message="the job was canceled with the queue's own tools")
# Where nobody of ours wrote what lies there.
BROKEN_RECORD = wire.Failure(code="internal", message="the queue's record of this job cannot be read; submit it again")
BROKEN_OUTCOME = wire.Failure(
    code="internal", message="the job has ended, but what the queue holds of its end cannot be read; submit it again"
)

_ID = re.compile(r"[0-9a-f]{32}")
CURSOR = r"^[0-9]{1,12}\.[0-9]{6}$"
SCAN = 200  # jobs looked at per round trip while a page is filled
MAX_SCANNED = 2000  # per page: a filter that matches little gives short pages, not slow ones


def summary(id: str, fields: Sequence[bytes | None], has_outcome: bool) -> wire.Job:  # noqa: A002
    """`fields` are the values of FIELDS. Without result or failure."""
    _, kind, model, rq_status, created, started_at, ended_at = fields
    status = status_of(rq_status)
    if status == "finished" and not has_outcome:
        status = "failed"
    return wire.Job(
        id=id,
        kind=KINDS.get(stored.text(kind)),
        model=stored.text(model),
        status=status,
        created_at=stored.unix_s(created),
        started_at=stored.moment_s(started_at),
        ended_at=stored.moment_s(ended_at) if status in ENDED else None,
    )


def status_of(rq_status: bytes | None) -> wire.Status:
    """Failed, where it is none of RQ's: nobody can say more of such a job."""
    return STATUSES.get(stored.text(rq_status), "failed")


def _whole(job: wire.Job, rq_status: bytes | None, outcome: bytes | None) -> wire.Job:
    """With its result or its failure."""
    if job.status not in ENDED:
        return job  # an outcome beside a job that was put back on its queue is an old one
    if outcome is not None:
        ending: wire.Outcome = stored.message(outcome, wire.Outcome, "msgpack") or BROKEN_OUTCOME  # type: ignore[arg-type]
    elif job.status == "canceled":
        ending = CANCELED_ELSEWHERE
    else:
        ending = GIVEN_UP if stored.text(rq_status) in STATUSES else BROKEN_RECORD
    if isinstance(ending, wire.Result):
        return replace(job, status="finished", result=ending)
    return replace(job, status="failed" if job.status == "finished" else job.status, failure=ending)


def absent(id: str) -> NotFound:  # noqa: A002
    """The same for a job that never was, one that expired and one of another owner."""
    return NotFound(f"no job {id[:64]!r}; results are kept for a limited time after the end", "id")


def check_id(id: str) -> None:  # noqa: A002
    if not _ID.fullmatch(id):
        raise absent(id)


class Records:
    """Reads jobs. Nothing here changes one."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def read(self, owner: str, id: str) -> wire.Job:  # noqa: A002
        """Raises NotFound."""
        check_id(id)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(RqJob.key_for(id), FIELDS)
            pipeline.get(store.Keys.outcome(id))
            fields, outcome = await stored.replies(pipeline)
        if fields is None or fields[0] != owner.encode():
            raise absent(id)
        return _whole(summary(id, fields, outcome is not None), fields[FIELDS.index("status")], outcome)

    async def page(
        self, owner: str, status: wire.Status | None, model: str | None, cursor: str | None, limit: int
    ) -> wire.JobPage:
        """Raises BadRequest. A page may be shorter than `limit`, even empty, while `next_cursor` is set."""
        if cursor is not None and not re.fullmatch(CURSOR, cursor):
            raise BadRequest(f"cursor: expected a `next_cursor` of an earlier page, found {cursor[:40]!r}", "cursor")
        jobs: list[wire.Job] = []
        position = cursor
        for _ in range(MAX_SCANNED // SCAN):
            entries = await self._scan(owner, position)
            for created, job in entries:
                position = created
                if job and status in (None, job.status) and model in (None, job.model):
                    jobs.append(job)
                if len(jobs) == limit:
                    return wire.JobPage(jobs=jobs, next_cursor=position)
            if len(entries) < SCAN:
                return wire.JobPage(jobs=jobs)
        return wire.JobPage(jobs=jobs, next_cursor=position)

    async def _scan(self, owner: str, before: str | None) -> list[tuple[str, wire.Job | None]]:
        """The next jobs of the owner, newest first, each with its place in the list; None for one that expired."""
        newest = f"({before}" if before else "+inf"
        entries: Any = await self._redis.zrevrangebyscore(
            store.Keys.owned(owner), newest, "-inf", start=0, num=SCAN, withscores=True
        )
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id_, _ in entries:
                pipeline.hmget(RqJob.key_for(stored.text(id_)), FIELDS)
                pipeline.exists(store.Keys.outcome(stored.text(id_)))
            rows = await stored.replies(pipeline)
        return [
            (f"{created:.6f}", summary(stored.text(id_), fields, bool(exists)) if fields and fields[0] else None)
            for (id_, created), fields, exists in zip(entries, rows[::2], rows[1::2], strict=True)
        ]
