"""The methods of AsyncClient for jobs, and their handles: submit, await, stream, cancel and delete jobs."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from itertools import islice
from typing import Self, TypeVar
from weakref import WeakSet

from scorepool import wire
from scorepool.sdk import calls
from scorepool.sdk.connection import AsyncConnection, Event, events_of
from scorepool.sdk.errors import JobTimeout, NotScorepool, ScorepoolError, TokensRestarted, Unreachable
from scorepool.sdk.splitting import result_of
from scorepool.sdk.window import Window, cancel_tasks

T = TypeVar("T")
logger = logging.getLogger("scorepool")
LONG_POLL_S = 60.0
MAX_IN_FLIGHT = 64  # jobs of one call that the API has at a time
CANCEL_S = 10.0  # without an answer, after which jobs that nobody awaits are no longer canceled
RECONNECT_S = 0.5  # between two connections of one stream
GRACE_S = 5.0  # beyond its deadline, for the reply to a wait that has reached it
ENDED = ("finished", "failed", "canceled")


class AsyncJobHandle:
    """A job that was submitted. Iterate over it to get its tokens as they are generated, if it has `stream`."""

    def __init__(self, client: "AsyncJobs", job_id: str) -> None:
        self.id = job_id
        self._client = client

    def __repr__(self) -> str:
        return f"<job {self.id} at {self._client.url}>"

    async def result(self, timeout_s: float | None = None) -> wire.Result:
        """Wait for the result, however often the API restarts meanwhile.

        Raises JobFailed; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return await self._client.result(self.id, timeout_s=timeout_s)

    async def status(self) -> wire.Job:
        """Return the job as it is, without waiting. Raises ScorepoolError, Unreachable."""
        return await self._client.job(self.id)

    async def cancel(self) -> wire.Job:
        """Cancel the job. Raises ScorepoolError, Unreachable."""
        return await self._client.cancel(self.id)

    async def delete(self) -> None:
        """Delete the job, which has ended, and its result. Raises ScorepoolError, Unreachable."""
        await self._client.delete(self.id)

    def detach(self) -> Self:
        """Let the job go on when the client is closed. Return it."""
        self._client.detach(self.id)
        return self

    def __aiter__(self) -> AsyncIterator[wire.TokenDelta]:
        return self._client.events(self.id)

    def progress(self, timeout_s: float | None = None) -> AsyncIterator[wire.Progress]:
        """Yield how many items of a score or classify job are done, about once a second until it ends.

        Raises JobFailed if the job fails; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._client.progress(self.id, timeout_s=timeout_s)


class AsyncJobs:
    """Submit jobs, and wait for them however often the API restarts meanwhile.

    Remember which were submitted here and not awaited: `close` cancels them.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._not_awaited: dict[str, None] = {}  # ids of jobs
        self._submitting: set[asyncio.Task[list[str]]] = set()
        self._windows = WeakSet[Window]()

    @property
    def url(self) -> str:
        return self._connection.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    async def submit(self, request: wire.Request, *, idempotency_key: str | None = None) -> AsyncJobHandle:
        """Submit a job. Raises ScorepoolError, Unreachable."""
        (job_id,) = await self._submit(calls.submit(request, idempotency_key), may_be_others=bool(idempotency_key))
        return AsyncJobHandle(self, job_id)

    async def submit_many(
        self, requests: Iterable[wire.Request], *, idempotency_key: str | None = None
    ) -> list[AsyncJobHandle]:
        """Submit jobs, all or none, in the order of `requests`. Raises ScorepoolError, Unreachable."""
        call = calls.submit_many(requests, idempotency_key)
        job_ids = await self._submit(call, may_be_others=bool(idempotency_key))
        return [AsyncJobHandle(self, job_id) for job_id in job_ids]

    async def _submit(
        self, call: calls.Call[list[wire.Accepted]], retry_s: float | None = None, *, may_be_others: bool = False
    ) -> list[str]:
        """Submit jobs and remember them. Canceling this does not cancel what was sent: `close` can cancel the jobs.

        Jobs that existed before are the business of who submitted them first, where these `may_be_others`: a key of
        our own making comes twice only when we repeat a call.
        """

        async def send() -> list[str]:
            accepted = await self._connection.send(call, retry_s)
            self._not_awaited |= {job.id: None for job in accepted if not (job.is_replay and may_be_others)}
            return [job.id for job in accepted]

        task = asyncio.create_task(send())
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._connection.may_have_sent:
                task.cancel()
            raise

    def attach(self, job: AsyncJobHandle | str) -> None:
        """Cancel a job when the client is closed, unless it was awaited until then."""
        self._not_awaited[_id_of(job)] = None

    def detach(self, job: AsyncJobHandle | str) -> None:
        """Let a job go on when the client is closed."""
        self._not_awaited.pop(_id_of(job), None)

    async def job(self, job: AsyncJobHandle | str, *, wait_s: float = 0.0) -> wire.Job:
        """Return the job when it ends, or as it is after `wait_s`. Raises ScorepoolError, Unreachable."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        found = await self._connection.send(calls.job(_id_of(job), min(wait_s, LONG_POLL_S)))
        while found.status not in ENDED and (left_s := deadline - clock()) > 0:  # the API waits for a limited time
            found = await self._connection.send(calls.job(_id_of(job), min(left_s, LONG_POLL_S)))
        if found.status in ENDED:
            self.detach(found.id)
        return found

    async def jobs(
        self,
        *,
        status: wire.Status | None = None,
        model: str | None = None,
        kind: wire.Kind | None = None,
        created_from: float | None = None,
        created_before: float | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.JobPage:
        """Return a page of jobs, newest first, without results. Times are unix times, in seconds.

        Raises ScorepoolError, Unreachable.
        """
        return await self._connection.send(
            calls.jobs(
                status=status,
                model=model,
                kind=kind,
                created_from=created_from,
                created_before=created_before,
                cursor=cursor,
                limit=limit,
            )
        )

    async def result(self, job: AsyncJobHandle | str, *, timeout_s: float | None = None) -> wire.Result:
        """Wait for the job's result, however often the API restarts meanwhile.

        Raises JobFailed, ScorepoolError; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        found = await self._until_ended(_id_of(job), self._deadline(timeout_s), timeout_s)
        return result_of(found, self.url)

    def _deadline(self, timeout_s: float | None) -> float:
        return math.inf if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    async def _until_ended(self, job_id: str, deadline: float, timeout_s: float | None) -> wire.Job:
        """Return the job when it has ended. Raises JobTimeout, ScorepoolError, Unreachable."""
        clock = asyncio.get_running_loop().time
        while True:
            found = await self._wait(partial(calls.job, job_id), deadline)
            if found.status in ENDED:
                self.detach(job_id)
                return found
            if clock() >= deadline:
                raise JobTimeout(job_id, found.status, timeout_s or 0.0, self.url)

    async def _first_ended(self, job_ids: list[str], deadline: float, timeout_s: float | None) -> list[wire.Job]:
        """Return the jobs at the start of the list that have ended, the first one when it has.

        Raises JobTimeout, ScorepoolError, Unreachable.
        """
        found = await self._wait(partial(calls.ended_jobs, job_ids), deadline)
        if found and found[-1].status == "finished" and found[-1].result is None:
            found.pop()  # its result is too large for a list
        for job in found:
            self.detach(job.id)
        return found or [await self._until_ended(job_ids[0], deadline, timeout_s)]

    async def _wait(self, call_of: Callable[[float], calls.Call[T]], deadline: float) -> T:
        """Send a call that lets the API wait, until the deadline at most. Raises ScorepoolError, Unreachable."""
        clock = asyncio.get_running_loop().time
        started_at = clock()
        left_s = max(0.0, deadline - started_at)
        call = call_of(min(left_s, LONG_POLL_S))
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline + GRACE_S):
                return await self._connection.send(call, left_s)
        except TimeoutError as error:  # connected, and silent
            raise Unreachable(self.url, clock() - started_at, error, call.name, call.job_id) from error

    async def cancel(self, job: AsyncJobHandle | str) -> wire.Job:
        """Cancel a queued or running job and return it. Raises ScorepoolError, Unreachable."""
        canceled = await self._connection.send(calls.cancel(_id_of(job)))
        self.detach(job)  # not before: what could not be canceled here is canceled by `close`
        return canceled

    async def delete(self, job: AsyncJobHandle | str) -> None:
        """Delete a job that has ended, with its result. Raises ScorepoolError, Unreachable."""
        await self._connection.send(calls.delete(_id_of(job)))

    async def as_completed(
        self, jobs: Iterable[AsyncJobHandle | str], *, timeout_s: float | None = None
    ) -> AsyncGenerator[wire.Job]:
        """Yield jobs as they end, each with its result or its failure.

        At most MAX_IN_FLIGHT are watched at a time, the first ones first. Raises ScorepoolError, Unreachable, and
        JobTimeout after `timeout_s`.
        """
        deadline = self._deadline(timeout_s)
        waiting = deque(map(_id_of, jobs))
        watched: set[asyncio.Task[wire.Job]] = set()
        ended: set[asyncio.Task[wire.Job]] = set()
        try:
            while waiting or watched:
                while waiting and len(watched) < MAX_IN_FLIGHT:
                    watched.add(asyncio.create_task(self._until_ended(waiting.popleft(), deadline, timeout_s)))
                ended, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                while ended:
                    yield ended.pop().result()
        finally:
            await cancel_tasks(watched | ended)

    async def in_order(
        self, jobs: Iterable[AsyncJobHandle | str], *, timeout_s: float | None = None
    ) -> AsyncGenerator[wire.Job]:
        """Yield jobs in the order given, each when it has ended, with its result or its failure.

        Several that have ended come with one request: this is the fastest way to read many small results. Raises
        ScorepoolError, Unreachable, and JobTimeout after `timeout_s`.
        """
        deadline = self._deadline(timeout_s)
        waiting = deque(map(_id_of, jobs))
        while waiting:
            for job in await self._first_ended([*islice(waiting, wire.MAX_ENDED_JOBS)], deadline, timeout_s):
                waiting.popleft()
                yield job

    async def gather(
        self, requests: Iterable[wire.Request], *, max_in_flight: int = MAX_IN_FLIGHT, timeout_s: float | None = None
    ) -> AsyncGenerator[wire.Job]:
        """Submit jobs and yield them in the order of `requests`, each with its result or its failure.

        At most `max_in_flight` are submitted and not yielded, so any number of requests fits into the memory of this
        process. The server keeps what was yielded, usually for a day: of very many, call `delete(job.id)`. Raises
        ScorepoolError, Unreachable, and JobTimeout after `timeout_s`; what was submitted is then canceled.
        """
        window = await self._open_window(max_in_flight, timeout_s)
        left = iter(requests)
        try:
            while True:
                while not window.is_full and (request := next(left, None)) is not None:
                    await window.start(request)
                if window.is_empty:
                    return
                yield await window.next()
        finally:
            await window.close()

    async def _open_window(self, max_in_flight: int, timeout_s: float | None) -> Window:
        deadline = self._deadline(timeout_s)
        window = Window(lambda request: self._run(request, deadline, timeout_s), max_in_flight)
        self._windows.add(window)
        return window

    async def _run(self, request: wire.Request, deadline: float = math.inf, timeout_s: float | None = None) -> wire.Job:
        """Submit a job and return it when it has ended. Cancel it if this is canceled, or at the deadline.

        An API that has answered before is awaited until the deadline. The URL of one that never did may be wrong.
        """
        left_s = deadline - asyncio.get_running_loop().time()
        retry_s = left_s if self._connection.has_answered else min(left_s, self._connection.retry_s)
        submitting = asyncio.create_task(self._submit(calls.submit(request), retry_s))
        try:
            (job_id,) = await asyncio.shield(submitting)
            return await self._until_ended(job_id, deadline, timeout_s)
        except (asyncio.CancelledError, JobTimeout) as error:
            if not self._connection.may_have_sent:
                submitting.cancel()
                raise
            is_canceled = False
            with suppress(ScorepoolError, Unreachable, NotScorepool, TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await self.cancel(*await submitting)
                    is_canceled = True
            if is_canceled and isinstance(error, JobTimeout):
                raise JobTimeout(error.job_id, error.status, timeout_s or 0.0, self.url, is_canceled=True) from None
            raise

    async def events(
        self, job: AsyncJobHandle | str, *, timeout_s: float | None = None
    ) -> AsyncGenerator[wire.TokenDelta]:
        """Yield new tokens of a job with `stream` as they are generated, however often the API restarts meanwhile.

        Raises JobFailed if the job fails; TokensRestarted if it began again with other tokens; ScorepoolError;
        JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        async with aclosing(self._events(_id_of(job), timeout_s)) as events:
            async for event in events:
                if event.name == "tokens":
                    yield wire.parse(event.data, wire.TokenDelta, "json")
                elif event.name == "restart":
                    raise TokensRestarted(_id_of(job), self.url)

    async def progress(
        self, job: AsyncJobHandle | str, *, timeout_s: float | None = None
    ) -> AsyncGenerator[wire.Progress]:
        """Yield how many items of a score or classify job are done, about once a second until it ends.

        A job that takes less than a second yields nothing. Raises JobFailed if the job fails; ScorepoolError;
        JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        async with aclosing(self._events(_id_of(job), timeout_s)) as events:
            async for event in events:
                if event.name == "progress":
                    yield wire.parse(event.data, wire.Progress, "json")

    async def _events(self, job_id: str, timeout_s: float | None) -> AsyncGenerator[Event]:
        """Yield the events of a job until it has ended, over as many connections as it takes. Raises its failure."""
        last_event_id, deadline = "", self._deadline(timeout_s)
        while True:
            call = calls.events(job_id, last_event_id)
            async with AsyncExitStack() as stack:
                left_s = max(0.0, deadline - asyncio.get_running_loop().time())
                opening = stack.enter_async_context(self._connection.stream(call, left_s))
                reply = await self._in_time(opening, job_id, deadline + GRACE_S, timeout_s)
                events = await stack.enter_async_context(aclosing(events_of(reply)))
                while event := await self._in_time(anext(events, None), job_id, deadline, timeout_s):
                    last_event_id = event.id or last_event_id
                    if event.name == "end":
                        self.detach(job_id)
                        result_of(wire.parse(event.data, wire.Job, "json"), self.url)
                        return
                    yield event
            await asyncio.sleep(RECONNECT_S)

    async def _in_time(self, work: Awaitable[T], job_id: str, deadline: float, timeout_s: float | None) -> T:
        """Await something about a job that goes on. Raises JobTimeout at the deadline, ScorepoolError, Unreachable."""
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline):
                return await work
        except TimeoutError:
            found = await self._until_ended(job_id, asyncio.get_running_loop().time(), timeout_s)
            raise JobTimeout(job_id, found.status, timeout_s or 0.0, self.url) from None

    async def close(self) -> None:
        """Cancel what was not awaited, and close the connections."""
        try:
            # A `gather` that was left early begins jobs until its generator is collected, which may be later.
            await asyncio.gather(*(window.close() for window in list(self._windows)))
            await self._cancel_not_awaited()
        finally:
            await self._connection.close()

    async def _cancel_not_awaited(self) -> None:
        """Cancel jobs, also those whose submission was interrupted, until the API is silent for CANCEL_S.

        A job that has ended meanwhile is left alone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S) as silence:
                while self._submitting and self._connection.may_have_sent:
                    await asyncio.wait(self._submitting, return_when=asyncio.FIRST_COMPLETED)
                    _extend(silence)
                job_ids = deque(self._not_awaited)
                await asyncio.gather(*(self._cancel_each(job_ids, silence) for _ in range(min(16, len(job_ids)))))
        for task in self._submitting:
            task.cancel()
        if self._not_awaited:
            shown = ", ".join(islice(self._not_awaited, 3)) + (", ..." if len(self._not_awaited) > 3 else "")
            logger.warning("jobs that go on, not canceled at %s: %d (%s)", self.url, len(self._not_awaited), shown)

    async def _cancel_each(self, job_ids: deque[str], silence: asyncio.Timeout) -> None:
        while job_ids:
            job_id = job_ids.popleft()
            with suppress(ScorepoolError, NotScorepool):  # it has ended
                try:
                    await self._connection.send(calls.cancel(job_id), CANCEL_S)
                except Unreachable:
                    return
            self.detach(job_id)
            _extend(silence)


def _extend(silence: asyncio.Timeout) -> None:
    """Begin a time of CANCEL_S anew, unless it is over."""
    if not silence.expired():
        silence.reschedule(asyncio.get_running_loop().time() + CANCEL_S)


def _id_of(job: AsyncJobHandle | str) -> str:
    return job if isinstance(job, str) else job.id
