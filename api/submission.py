"""Submit jobs to the queue and, for synchronous requests, wait for their results."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from redis.exceptions import RedisError
from starlette.requests import Request

from scorepool import store, wire
from scorepool.api.admission import Admission, with_default_mode
from scorepool.api.http import tasks
from scorepool.api.http.bodies import while_connected
from scorepool.api.http.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Failed,
    NotReplicated,
    PromptTooLong,
    TooLarge,
    Unavailable,
    map_field_names,
    server_stopping,
)
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.images.fetched_images import FetchedImages, has_urls
from scorepool.api.metrics.prometheus import Metrics
from scorepool.api.repositories.jobs import ENDED, Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.queue import Queue, Submitted, fingerprint
from scorepool.api.repositories.waiting import Waiting
from scorepool.api.trace_context import traced_submission
from scorepool.store.traces import Tracer

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # after an error of Redis
MAX_ENDED_BYTES = 4 * 2**20  # of results, as they are stored, after which a list of jobs ends
ANSWER_TTL_S = 60  # how long results of synchronous requests are kept: they are read at once, unless they have a name


class Submission:
    """Submit, wait for and cancel jobs on behalf of an owner."""

    def __init__(
        self,
        settings: store.Settings,
        admission: Admission,
        models: Models,
        queue: Queue,
        jobs: Jobs,
        waiting: Waiting,
        metrics: Metrics,
        images: FetchedImages,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._images = images
        self._admission = admission
        self._models = models
        self._queue = queue
        self._jobs = jobs
        self._waiting = waiting
        self._metrics = metrics
        self._tracer = tracer

    @property
    def time_limit_s(self) -> int:
        """Return the seconds that a job of a synchronous request may run: no longer than its client waits."""
        return min(math.ceil(self._settings.max_wait_s), 86_400)

    def check_count(self, count: int, field: str, noun: str) -> None:
        """Check how many jobs one request asks for: they are queued all or none. Raises TooLarge."""
        for most, setting in (
            (self._settings.max_bulk_jobs, "SCOREPOOL_MAX_BULK_JOBS"),
            (self._settings.max_queue_depth, "SCOREPOOL_MAX_QUEUE_DEPTH"),
        ):
            if count > most:
                expected = f"expected at most {most} {noun} in one request ({setting})"
                raise TooLarge(f"{field}: {expected}, found {count}", field)

    async def build(self, requests: Iterable[wire.Request], field: str) -> list[wire.Request]:
        """Build the jobs of one request one by one, until together they are larger than a body may be.

        `field` is the list with an entry for each job, if there is one. Raises TooLarge, and what building one raises.
        """
        most, num_bytes = self._settings.max_body_bytes, 0
        built: list[wire.Request] = []
        async for request in tasks.in_turns(requests):
            num_bytes += len(wire.encode(request))
            if num_bytes > most:
                raise TooLarge(
                    f"{field}: expected jobs of at most {most} bytes together (SCOREPOOL_MAX_BODY_BYTES), each with "
                    f"what they share; found more after {len(built)}".removeprefix(": "),
                    field or None,
                )
            built.append(request)
        return built

    async def job_ids(self, owner: str, idempotency_key: str | None, count: int, model: str) -> list[str]:
        """Return an id for each job of a submission for a model: the same ones whenever it comes under the same key."""
        return await self._queue.job_ids(owner, idempotency_key, count if count > 1 else None, model)

    async def submit(
        self,
        owner: str,
        requests: Sequence[wire.Request],
        idempotency_key: str | None = None,
        job_ids: Sequence[str] | None = None,
        *,
        is_bulk: bool,
        is_synchronous: bool = False,
        kept_body: bytes = b"",
    ) -> list[Submitted]:
        """Check the requests and put them on the queue, all or none. Fields of a bulk begin with `[index].` in errors.

        `kept_body` is kept with each job, whose result is then kept as long as that of any job.

        A submission that was accepted before under the same key is answered again even if it would be refused now: its
        model may have left since. Images by URL are fetched here, once: under the same key, what the client sent is
        compared, not what is at the URLs by then. Raises ApiError.
        """
        count = len(requests) if is_bulk else None
        job_ids = job_ids or await self._queue.job_ids(owner, idempotency_key, count, requests[0].model)
        is_known = idempotency_key is not None and has_urls(requests)
        is_known = is_known and await self._queue.was_submitted(requests, job_ids)  # its images are not fetched again
        if not is_known:
            try:
                self._admission.check_priorities(owner, requests, is_bulk)
                await self._admission.check(requests, is_bulk=is_bulk)
            except ApiError:
                if idempotency_key is None or not await self._queue.was_submitted(requests, job_ids):
                    raise
        async with self._images.fetched(owner, () if is_known else requests, is_bulk=is_bulk) as with_files:
            try:
                submitted = await self.enqueue(
                    owner,
                    with_files or requests,
                    job_ids,
                    fingerprint(requests),
                    is_synchronous=is_synchronous,
                    ttl_s=ANSWER_TTL_S if is_synchronous and idempotency_key is None and not kept_body else None,
                    kept_body=kept_body,
                )
            except NotReplicated as error:
                raise await self._too_few_replicas(owner, error, idempotency_key) from None
        if len(submitted) == 1:
            store.logs.set_about(job=submitted[0].id, model=requests[0].model)
        return submitted

    async def _too_few_replicas(self, owner: str, error: NotReplicated, idempotency_key: str | None) -> Unavailable:
        """Build the error of a submission. Without a key its jobs are canceled, because no client knows their ids."""
        if idempotency_key is not None:
            return Unavailable(f"{error.message}; send it again with the same Idempotency-Key")
        is_canceled = await asyncio.shield(self.cancel_all(owner, error.job_ids))
        return Unavailable(f"{error.message}, so {_fate(is_kept=not is_canceled)}; send it again")

    async def enqueue(
        self,
        owner: str,
        requests: Sequence[wire.Request],
        job_ids: Sequence[str],
        submission_fingerprint: str,
        batch_id: str | None = None,
        *,
        is_synchronous: bool = False,
        ttl_s: int | None = None,
        kept_body: bytes = b"",
    ) -> list[Submitted]:
        """Put checked requests on their models' queues, all or none.

        The client of a synchronous request waits, so no event goes to registered webhook endpoints. Results are kept
        for `ttl_s`, by default as long as the settings say. Raises Conflict, QueueFull, TooLarge, NotReplicated,
        Unavailable.
        """
        asked, asked_ids = requests, set(job_ids)
        requests, job_ids = wire.with_bases(requests, job_ids)
        with_modes = [with_default_mode(request, self._settings) for request in requests]
        named = self._models.resolve_names(with_modes)
        with traced_submission(self._tracer, named, job_ids) as traceparent:
            submitted = await self._queue.submit(
                owner,
                named,
                job_ids,
                submission_fingerprint,
                ttl_s,
                batch_id,
                context_lengths=self._models.context_lengths(),
                is_synchronous=is_synchronous,
                traceparent=traceparent,
                kept_body=kept_body,
            )
        submitted = [job for job in submitted if job.id in asked_ids]
        for job, request in zip(submitted, asked, strict=True):
            if job.is_replay:
                self._metrics.replayed.inc()
            else:
                self._metrics.submitted.labels(wire.kind_of(request)).inc()
        return submitted

    async def wait_for_job(
        self, request: Request, owner: str, job_id: str, held: HeldResults, wait_s: float
    ) -> wire.Job:
        """Return the job as soon as it has ended, or as it is after `wait_s`.

        Raises NotFound, TooManyResults, ClientDisconnect.
        """
        if wait_s == 0:
            return await self._jobs.read(owner, job_id, held)
        started_at = time.monotonic()
        with self._metrics.waiting.track_inprogress():
            job = await while_connected(request, self.until_ended(owner, job_id, held, wait_s))
        has_ended = job.status in ENDED
        self._metrics.waits.labels(str(has_ended).lower()).observe(time.monotonic() - started_at)
        return job

    async def read_ended(
        self, request: Request, owner: str, job_ids: Sequence[str], held: HeldResults, wait_s: float
    ) -> list[wire.Job]:
        """Return the jobs that have ended, up to the first that has not; wait for the first of all.

        What would hold too many bytes, and what cannot be read, is left for a request in which it is the first. Raises
        NotFound, TooManyResults, ClientDisconnect.
        """
        first, *others = job_ids
        job = await self.wait_for_job(request, owner, first, held, wait_s)
        found: list[wire.Job] = []
        left = iter(others)
        while job.status in ENDED:
            found.append(job)
            following = next(left, None)
            if following is None or held.stored is not None or held.num_bytes >= MAX_ENDED_BYTES:
                break
            try:
                job = await self._jobs.read(owner, following, held)
            except (ApiError, RedisError, OSError):
                break
        return found

    async def submit_and_wait(
        self,
        request: Request,
        owner: str,
        requests: Sequence[wire.Request],
        held: HeldResults,
        map_field: Callable[[str], str] = str,
        idempotency_key: str | None = None,
        job_ids: Sequence[str] | None = None,
        kept_body: bytes = b"",
    ) -> list[wire.Result]:
        """Return the results of all requests, in order, as soon as the last is there. They count in `held`.

        If one fails, if time runs out or if the client disconnects, the other jobs are canceled, because no client
        knows their ids. Under an `idempotency_key` they go on: the client can ask again. Raises ClientDisconnect and
        ApiError, with fields as `map_field` names them.
        """
        with map_field_names(map_field):
            submitted = await self.submit(
                owner,
                requests,
                idempotency_key,
                job_ids,
                is_bulk=len(requests) > 1,
                is_synchronous=True,
                kept_body=kept_body,
            )
            job_ids = [job.id for job in submitted]
            try:
                with self._metrics.waiting.track_inprogress():
                    is_kept = idempotency_key is not None
                    return await while_connected(request, self._results(owner, requests, job_ids, held, is_kept))
            except BaseException:
                if idempotency_key is None:
                    await asyncio.shield(self.cancel_all(owner, job_ids))
                raise

    async def _results(
        self, owner: str, requests: Sequence[wire.Request], job_ids: Sequence[str], held: HeldResults, is_kept: bool
    ) -> list[wire.Result]:
        waits = [asyncio.create_task(self.until_ended(owner, job_id, held)) for job_id in job_ids]
        try:
            for ended in asyncio.as_completed(waits):
                job = await ended
                if job.result is None:
                    raise await self.error_of_request(job, requests, job_ids, is_kept=is_kept)
            return [result for wait in waits if (result := wait.result().result) is not None]
        finally:
            await tasks.cancel_and_wait(waits)

    async def until_ended(self, owner: str, job_id: str, held: HeldResults, wait_s: float | None = None) -> wire.Job:
        """Return the job as soon as it has ended, or as it is after `wait_s`; the server's limit if None."""
        wait_s = self._settings.max_wait_s if wait_s is None else wait_s
        return await self._waiting.until_ended(job_id, lambda: self._jobs.read_with_expiry(owner, job_id, held), wait_s)

    async def until_streamed_job_ended(self, owner: str, job_id: str, held: HeldResults) -> wire.Job:
        """Return the job as soon as it has ended, or as it is at the server's limit.

        A Redis that does not answer is waited out until then, because the client of a stream cannot ask again for the
        rest.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._settings.max_wait_s
        while True:
            try:
                return await self.until_ended(owner, job_id, held, max(0.0, deadline - clock()))
            except (RedisError, OSError) as error:
                if self._waiting.is_closing or clock() >= deadline:
                    raise
                logger.info("a stream waits for Redis: %r", error)
                await asyncio.sleep(RETRY_S)

    async def cancel_all(self, owner: str, job_ids: Sequence[str]) -> bool:
        """Cancel jobs that have not ended. If Redis fails, they end by themselves and expire, and False is returned."""
        for job_id in job_ids:
            try:
                await self._queue.cancel(owner, job_id)
            except ApiError:  # it has ended
                continue
            except RedisError as error:
                logger.warning("jobs whose ids no client knows cannot be canceled: %r", error)
                return False
        return True

    async def error_of_request(
        self, job: wire.Job, requests: Sequence[wire.Request], job_ids: Sequence[str], *, is_kept: bool = False
    ) -> ApiError:
        """Build the error for a synchronous request whose job has no result. `is_kept`: it has not been canceled."""
        if job.failure is None and self._waiting.is_closing:
            return server_stopping()
        if job.failure is None and not await self._models.is_live(job.model):
            return Unavailable(
                f"model: no live worker serves {job.model!r}. One did a short time ago, but none came back within "
                f"{self._settings.max_wait_s:g} s, so {_fate(is_kept)}; send it again"
            )
        return name_field(
            error_of_job(job, self._settings.max_wait_s, is_kept=is_kept), requests, list(job_ids).index(job.id)
        )


def _fate(is_kept: bool) -> str:
    return "this request ended, and its job goes on" if is_kept else "the request was canceled"


def error_of_job(job: wire.Job, waited_s: float, *, is_kept: bool = False) -> ApiError:
    """Map a job without a result to the error of its request. `is_kept`: it has not been canceled."""
    failure = job.failure
    if failure is None:
        state = "was still running" if job.status == "started" else "still waited in its queue"
        return Unavailable(
            f"no answer within {waited_s:g} s (SCOREPOOL_MAX_WAIT_S): the job {state}, so {_fate(is_kept)}; "
            "send it again, or submit it with POST /v1/jobs and fetch the result later"
        )
    match failure.code:
        case "invalid":
            return BadRequest(failure.message, failure.field)
        case "too_long":
            return PromptTooLong(failure.message, failure.field)
        case "weights_gone":
            gone = BadRequest(failure.message, failure.field)  # final: OpenAI's clients send what gets 409 again
            gone.code = failure.code
            return gone
        case "canceled":
            return Conflict(failure.message)
        case "timeout":
            return Unavailable(failure.message)
        case _:
            message = f"{failure.code}: {failure.message}" if failure.field is None else failure.message
            return Failed(message, failure.field)


def name_field(error: ApiError, requests: Sequence[wire.Request], index: int) -> ApiError:
    """Name the field of a job's error as admission does: it begins with `[index].` if there are several requests.

    A worker that finds an input too long names no field, so the input's field is added.
    """
    if isinstance(error, PromptTooLong) and error.field is None:
        request = requests[index]
        if isinstance(request, wire.Score | wire.Classify | wire.Embed):
            error.field = "items"
        else:
            error.field = "prompt" if request.messages is None else "messages"
        error.message = f"{error.field}: {error.message}"
    if error.field is not None and len(requests) > 1:
        field = f"[{index}].{error.field}"
        error.rename_field(lambda _: field)
    return error
