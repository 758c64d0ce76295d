"""Read jobs and pages of jobs from RQ's hash and our outcome as `wire.Job`."""

import asyncio
import logging
import math
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import NotFound
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.repositories import decode
from scorepool.api.repositories.pages import check_cursor, merge_pages
from scorepool.api.repositories.stored_results import Damaged, StoredResults, read_frames
from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.wire.stored_result import RecordedOutcome, StoredResult

logger = logging.getLogger(__name__)
KINDS: dict[str, wire.Kind] = {kind: kind for kind in get_args(wire.Kind)}
FIELDS = (
    *(JobField.OWNER, JobField.KIND, JobField.MODEL, JobField.STATUS),
    *(JobField.CREATED, JobField.STARTED_AT, JobField.ENDED_AT, JobField.EXPIRES_AT),
)

STATUSES: dict[str, wire.Status] = {  # by RQ's status
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

# For jobs that something other than a scorepool worker ended: `rq` on the command line, a dashboard, RQ's own cleanup.
ENDED_WITHOUT_OUTCOME = wire.Failure(
    code="crashed", message="the queue holds no result of this job: its worker died, or another tool ended it"
)
CANCELED_ELSEWHERE = wire.Failure(code="canceled", message="the job was canceled with the queue's own tools")
# For jobs that have expired (store/lua/expiry.lua). A worker that takes one later fails it in the same way.
EXPIRED = wire.Failure(
    code="expired", message="the job had not ended at its expires_at, and no worker holds it", field="expires_at"
)
# For records that scorepool did not write.
BROKEN_RECORD = wire.Failure(code="internal", message="the queue's record of this job cannot be read; submit it again")
BROKEN_OUTCOME = wire.Failure(
    code="internal", message="the job has ended, but the queue's record of its end cannot be read; submit it again"
)
LOST_RESULT = wire.Failure(
    code="internal", message="the result of this job is missing from the result store, or damaged; submit it again"
)

SLICE_SIZE = 1000  # jobs that one call of the script looks at, in some 3 ms of Redis
MAX_SLICES = 100  # of a page
SMALL_OUTCOME_BYTES = 64 * 1024  # read together with the job, in one round trip

_ID = re.compile(r"[0-9a-f]{32}")


def without_outcome(job_id: str, fields: Sequence[bytes | None], *, has_outcome: bool, has_expired: bool) -> wire.Job:
    """Build a job without result or failure. `fields` are the values of FIELDS."""
    _, kind, model, rq_status, created, started_at, ended_at, expires_at = fields
    status = status_of(rq_status)
    if status == "finished" and not has_outcome:
        status = "failed"
    ended = decode.parse_iso(ended_at) if status in ENDED else None
    return wire.Job(
        id=job_id,
        kind=KINDS.get(decode.text(kind)),
        model=decode.text(model),
        status="failed" if has_expired else status,
        created_at=decode.unix_s(created),
        started_at=decode.parse_iso(started_at),
        ended_at=decode.unix_s(expires_at) if has_expired else ended,
    )


def status_of(rq_status: bytes | None) -> wire.Status:
    """Map RQ's status to one of the API; an unknown one to failed."""
    return STATUSES.get(decode.text(rq_status), "failed")


def _with_outcome(job: wire.Job, record: "JobRecord") -> tuple[wire.Job, StoredResult | None]:
    """Return the job with its result or its failure, or without its result and where that is stored."""
    if job.status not in ENDED:
        return job, None  # the outcome of a job that is on its queue again is an old one
    if record.has_expired:
        return replace(job, failure=EXPIRED), None
    if (outcome := record.outcome) is not None:
        ending: RecordedOutcome = decode.message(outcome, RecordedOutcome) or BROKEN_OUTCOME  # type: ignore[arg-type]
    elif job.status == "canceled":
        ending = CANCELED_ELSEWHERE
    else:
        ending = ENDED_WITHOUT_OUTCOME if decode.text(record.rq_status) in STATUSES else BROKEN_RECORD
    if isinstance(ending, StoredResult):
        return replace(job, status="finished"), ending
    if isinstance(ending, wire.Result):
        return replace(job, status="finished", result=ending), None
    return _with_failure(job, ending), None


def _with_failure(job: wire.Job, failure: wire.Failure) -> wire.Job:
    return replace(job, status="failed" if job.status == "finished" else job.status, failure=failure)


def created_at(job: wire.Job) -> float:
    """Return the time by which a job is listed, unix, s."""
    return job.created_at or 0.0


def job_not_found(job_id: str) -> NotFound:
    """Build the same error for a job that never existed, one that expired and one of another owner."""
    return NotFound(f"no job {wire.quote(job_id)}; results are kept for a limited time after the end", "id")


def check_id(job_id: str) -> None:
    """Check the form of an id before it becomes a key in Redis. Raises NotFound."""
    if not _ID.fullmatch(job_id):
        raise job_not_found(job_id)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Say which jobs a list holds: those that have all that is not None. Times are unix times in seconds."""

    status: wire.Status | None = None
    model: str | None = None
    kind: wire.Kind | None = None
    created_from: float | None = None  # inclusive
    created_before: float | None = None

    def matches(self, job: wire.Job) -> bool:
        """Say whether a job has the status, the model and the kind. The times are Redis's to compare."""
        wanted = ((self.status, job.status), (self.model, job.model), (self.kind, job.kind))
        return all(one in (None, found) for one, found in wanted)


class JobRecord(NamedTuple):
    """What Redis holds of a job at one moment."""

    fields: list[bytes | None]  # the values of FIELDS
    expires_in_s: float  # as things stand, see store/lua/expiry.lua; inf: it does not
    outcome_bytes: int
    outcome: bytes | None  # None if there is none, or one with more bytes than were asked for
    now_s: float  # unix

    @property
    def rq_status(self) -> bytes | None:
        return self.fields[FIELDS.index(JobField.STATUS)]

    @property
    def has_expired(self) -> bool:
        return self.expires_in_s <= 0


class Jobs:
    """Read jobs; `queue.Queue` changes them."""

    def __init__(self, redis: Redis, stored_results: StoredResults) -> None:
        self._redis = redis
        self._stored_results = stored_results
        self._read_job = redis.register_script(load("read_job.lua"))
        self._find_jobs = redis.register_script(load("find_jobs.lua"))
        self._long_searches = asyncio.Lock()  # a list that finds it taken is short instead

    async def read_state(self, owner: str, job_id: str) -> wire.Job:
        """Read a job without its result or failure. Raises NotFound."""
        record = await self._read(owner, job_id, max_outcome_bytes=0)
        return without_outcome(job_id, record.fields, has_outcome=True, has_expired=record.has_expired)

    async def owner(self, job_id: str) -> str | None:
        """Return whose job this is, for those who may see every owner's; None if there is none."""
        check_id(job_id)
        found: Any = await self._redis.hget(store.RqKeys.job(job_id), JobField.OWNER)
        return None if found is None else decode.text(found)

    async def read(self, owner: str, job_id: str, held: HeldResults) -> wire.Job:
        """Read a job with its result or failure. Raises NotFound, TooManyResults."""
        job, _ = await self.read_with_expiry(owner, job_id, held)
        return job

    async def read_with_expiry(self, owner: str, job_id: str, held: HeldResults) -> tuple[wire.Job, float]:
        """Read a job, and the seconds until it expires as things stand: inf if it does not.

        A large outcome counts in `held` before it is read. Raises NotFound, TooManyResults, Unavailable.
        """
        job, expires_in_s, stored = await self._read_recorded(owner, job_id, held)
        if stored is None:
            return job, expires_in_s
        if held.leaves_stored:
            held.stored = stored
            return job, expires_in_s
        held.add(stored.num_bytes)
        try:
            frames = await self._stored_results.read(job_id, stored)
            result = await held.run(lambda: read_frames(frames))
        except Damaged as error:
            if (again := await self._read(owner, job_id, SMALL_OUTCOME_BYTES)).outcome is None:
                return _with_failure(job, ENDED_WITHOUT_OUTCOME), expires_in_s  # it expired in between
            logger.error("a result in the result store is lost: %s", error, extra={"job": job_id, "now": again.now_s})
            return _with_failure(job, LOST_RESULT), expires_in_s
        return replace(job, result=result), expires_in_s

    async def _read_recorded(
        self, owner: str, job_id: str, held: HeldResults
    ) -> tuple[wire.Job, float, StoredResult | None]:
        """Read a job as Redis has it, the seconds until it expires, and where its result is, if not in Redis."""
        record = await self._read(owner, job_id, SMALL_OUTCOME_BYTES)
        held.add(record.outcome_bytes)
        if record.outcome_bytes > SMALL_OUTCOME_BYTES:
            record = await self._read(owner, job_id, sys.maxsize)
        has_outcome = record.outcome is not None
        job = without_outcome(job_id, record.fields, has_outcome=has_outcome, has_expired=record.has_expired)
        job, stored = await held.run(lambda: _with_outcome(job, record))
        return job, record.expires_in_s, stored

    async def _read(self, owner: str, job_id: str, max_outcome_bytes: int) -> JobRecord:
        """Read a job, and its outcome if it has no more than these bytes. Raises NotFound."""
        check_id(job_id)
        read_at, *row = await self._read_job(args=[job_id, owner, max_outcome_bytes, *FIELDS])
        if not row:
            raise job_not_found(job_id)
        fields, expires_in_s, outcome_bytes, outcome = row
        return JobRecord(fields, float(expires_in_s), outcome_bytes, outcome, decode.time_s(read_at))

    async def read_request(self, owner: str, job_id: str) -> wire.Request | None:
        """Read what was submitted; None if it is not kept any more. Raises NotFound."""
        await self._read(owner, job_id, max_outcome_bytes=0)
        found: Any = await self._redis.get(store.Keys.request(job_id))
        if found is None:
            return None
        try:
            return wire.decode_request(found)
        except wire.Invalid:
            logger.warning("the request of a job in Redis cannot be decoded")
            return None

    async def read_kept_body(self, job_id: str, held: HeldResults) -> bytes | None:
        """Return the body that is kept with a job, whose owner was checked; None if there is none.

        It counts in `held` before it is read. Raises TooManyResults.
        """
        key = store.Keys.response(job_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.strlen(key)
            [num_bytes] = await decode.execute(pipeline)
            if not num_bytes:  # none, or a key of another type
                return None
            held.add(num_bytes)
            pipeline.get(key)
            [found] = await decode.execute(pipeline)
        return found if isinstance(found, bytes) else None

    async def page(self, owner: str, cursor: str | None, limit: int, wanted: JobFilter | None = None) -> wire.JobPage:
        """Read a page of jobs, newest first. It may be short, even empty, if `next_cursor` is set.

        Raises BadRequest.
        """
        check_cursor(cursor)
        wanted = wanted or JobFilter()
        found: list[wire.Job] = []
        async with AsyncExitStack() as searches:
            for number in range(MAX_SLICES):
                if number == 1:
                    if self._long_searches.locked():
                        break
                    await searches.enter_async_context(self._long_searches)
                begun = time.monotonic()
                jobs, cursor = await self._find(owner, wanted, cursor, limit - len(found))
                found += jobs
                if cursor is None or len(found) == limit:
                    break
                await asyncio.sleep(time.monotonic() - begun)  # in which Redis answers others
        return wire.JobPage(jobs=found, next_cursor=cursor)

    async def page_of_all(
        self, owners: Sequence[str], cursor: str | None, limit: int, wanted: JobFilter
    ) -> tuple[list[tuple[str, wire.Job]], str | None]:
        """Read a page of the jobs of several owners, with their owners, newest first; and the cursor behind it, if any.

        Raises BadRequest.
        """
        pages = [(owner, await self.page(owner, cursor, limit, wanted)) for owner in owners]
        rows = [([(owner, job) for job in page.jobs], page.next_cursor) for owner, page in pages]
        return merge_pages(rows, limit, lambda row: created_at(row[1]))

    async def _find(
        self, owner: str, wanted: JobFilter, cursor: str | None, limit: int
    ) -> tuple[list[wire.Job], str | None]:
        """Return up to `limit` jobs of the next SLICE_SIZE of the owner, and the cursor behind them, if any."""
        newest = min((float(at) for at in (cursor, wanted.created_before) if at is not None), default=math.inf)
        excluded = [name for name, status in STATUSES.items() if wanted.status not in (None, status)]
        last, *rows = await self._find_jobs(
            [store.Keys.jobs_of(owner)],
            [
                f"({newest:.6f}",
                "-inf" if wanted.created_from is None else f"{wanted.created_from:.6f}",
                SLICE_SIZE,
                limit,
                wanted.model or "",
                wanted.kind or "",
                f",{','.join(excluded)},",
                int(wanted.status == "failed"),
                *FIELDS,
            ],
        )
        jobs = [
            without_outcome(decode.text(job_id), fields, has_outcome=bool(has_outcome), has_expired=bool(has_expired))
            for job_id, _, has_outcome, has_expired, fields in rows
            if fields[0]
        ]
        return [job for job in jobs if wanted.matches(job)], None if last is None else f"{float(last):.6f}"
