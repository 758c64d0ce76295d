"""The client for asyncio, and the handles of its jobs."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self, Unpack

from scorepool import wire
from scorepool.options import GenerateOptions, ScoreOptions
from scorepool.sdk import calls
from scorepool.sdk.async_batches import AsyncBatches
from scorepool.sdk.connection import RETRY_S, AsyncConnection
from scorepool.sdk.errors import JobFailed, JobTimeout, ScorepoolError, TokensRestarted, Unreachable
from scorepool.sdk.splitting import chunks, join

logger = logging.getLogger("scorepool")
Pair = tuple[str, str] | tuple[list[int], list[int]]  # a prompt and a completion, both text or both token ids
DEFAULT_URL = "http://127.0.0.1:8000"
LONG_POLL_S = 60.0
MAX_IN_FLIGHT = 64  # jobs of one call that the API has at a time
CANCEL_S = 10.0  # in which jobs that nobody awaits are canceled
RECONNECT_S = 0.5  # between two connections of one stream
GRACE_S = 5.0  # beyond its deadline, for the reply to a wait that has reached it
_ENDED = ("finished", "failed", "canceled")


class AsyncJob:
    """A job that was submitted. Iterate over it to get its tokens as they are generated, if it has `stream`."""

    def __init__(self, client: "AsyncClient", job_id: str) -> None:
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


class AsyncClient(AsyncBatches):
    """A connection to one API, for one event loop. Safe to share between its tasks.

    Calls are repeated for `retry_s` while the API is away or busy. Leaving `async with` cancels the jobs that were
    submitted here and not awaited, unless they were detached.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, *, retry_s: float = RETRY_S) -> None:
        """Use the API at a URL, or at a unix socket: `unix:///PATH`."""
        self._connection = AsyncConnection(url, api_key, retry_s)
        self._not_awaited: dict[str, None] = {}  # ids of jobs
        self._submitting: set[asyncio.Task[list[str]]] = set()

    @property
    def url(self) -> str:
        return self._connection.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what was not awaited, and close the connections."""
        try:
            await self._cancel_not_awaited()
        finally:
            await self._connection.close()

    async def _cancel_not_awaited(self) -> None:
        """Cancel jobs as well as it goes in CANCEL_S, also those whose submission was interrupted.

        A job that has ended meanwhile is left alone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                if self._submitting:
                    await asyncio.wait(self._submitting)
                job_ids = deque(self._not_awaited)
                await asyncio.gather(*(self._cancel_each(job_ids) for _ in range(min(16, len(job_ids)))))
        for task in self._submitting:
            task.cancel()
        if self._not_awaited:
            logger.warning("%d jobs at %s could not be canceled and go on", len(self._not_awaited), self.url)

    async def _cancel_each(self, job_ids: deque[str]) -> None:
        while job_ids:
            job_id = job_ids.popleft()
            with suppress(ScorepoolError):  # it has ended
                try:
                    await self._connection.send(calls.cancel(job_id), CANCEL_S)
                except Unreachable:
                    return
            self.detach(job_id)

    # Jobs.

    async def submit(self, request: wire.Request, *, idempotency_key: str | None = None) -> AsyncJob:
        """Submit a job. Raises ScorepoolError, Unreachable."""
        (job_id,) = await self._submit(calls.submit(request, idempotency_key))
        return AsyncJob(self, job_id)

    async def submit_many(
        self, requests: Iterable[wire.Request], *, idempotency_key: str | None = None
    ) -> list[AsyncJob]:
        """Submit jobs, all or none, in the order of `requests`. Raises ScorepoolError, Unreachable."""
        job_ids = await self._submit(calls.submit_many(requests, idempotency_key))
        return [AsyncJob(self, job_id) for job_id in job_ids]

    async def _submit(self, call: calls.Call[list[str]]) -> list[str]:
        """Submit jobs and remember them. Canceling this does not cancel that, so that `close` can cancel the jobs."""

        async def send() -> list[str]:
            job_ids = await self._connection.send(call)
            self._not_awaited.update(dict.fromkeys(job_ids))
            return job_ids

        task = asyncio.create_task(send())
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)
        return await asyncio.shield(task)

    def detach(self, job: AsyncJob | str) -> None:
        """Let a job go on when the client is closed."""
        self._not_awaited.pop(_id_of(job), None)

    async def job(self, job: AsyncJob | str, *, wait_s: float = 0.0) -> wire.Job:
        """Return the job when it ends, or as it is after `wait_s`. Raises ScorepoolError, Unreachable."""
        found = await self._connection.send(calls.job(_id_of(job), wait_s))
        if found.status in _ENDED:
            self.detach(found.id)
        return found

    async def jobs(
        self,
        *,
        status: wire.Status | None = None,
        model: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.JobPage:
        """Return a page of jobs, newest first, without results. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.jobs(status, model, cursor, limit))

    async def result(self, job: AsyncJob | str, *, timeout_s: float | None = None) -> wire.Result:
        """Wait for the job's result, however often the API restarts meanwhile.

        Raises JobFailed, ScorepoolError; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        found = await self._until_ended(_id_of(job), self._deadline(timeout_s), timeout_s)
        return self._result_of(found)

    def _deadline(self, timeout_s: float | None) -> float:
        return math.inf if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    async def _until_ended(self, job_id: str, deadline: float, timeout_s: float | None) -> wire.Job:
        """Return the job when it has ended. Raises JobTimeout, ScorepoolError, Unreachable."""
        clock = asyncio.get_running_loop().time
        while True:
            left_s = max(0.0, deadline - clock())
            try:
                async with asyncio.timeout_at(None if deadline == math.inf else deadline + GRACE_S):
                    found = await self._connection.send(calls.job(job_id, min(left_s, LONG_POLL_S)), left_s)
            except TimeoutError as error:  # connected, and silent
                raise Unreachable(self.url, left_s, error, job_id) from error
            if found.status in _ENDED:
                self.detach(job_id)
                return found
            if clock() >= deadline:
                raise JobTimeout(job_id, found.status, timeout_s or 0.0, self.url)

    async def cancel(self, job: AsyncJob | str) -> wire.Job:
        """Cancel a queued or running job and return it. Raises ScorepoolError, Unreachable."""
        self.detach(job)
        return await self._connection.send(calls.cancel(_id_of(job)))

    async def delete(self, job: AsyncJob | str) -> None:
        """Delete a job that has ended, with its result. Raises ScorepoolError, Unreachable."""
        await self._connection.send(calls.delete(_id_of(job)))

    async def as_completed(
        self, jobs: Iterable[AsyncJob | str], *, timeout_s: float | None = None
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
            await _cancel_tasks(watched | ended)

    async def gather(
        self, requests: Iterable[wire.Request], *, max_in_flight: int = MAX_IN_FLIGHT
    ) -> AsyncGenerator[wire.Job]:
        """Submit jobs and yield them in the order of `requests`, each with its result or its failure.

        At most `max_in_flight` are submitted and not yielded, so any number of requests fits into memory, here and on
        the server. Raises ScorepoolError, Unreachable; what was submitted is then canceled.
        """
        if max_in_flight < 1:
            raise ValueError(f"`max_in_flight` is {max_in_flight}: expected 1 or more")
        running: deque[asyncio.Task[wire.Job]] = deque()
        left = iter(requests)
        try:
            while True:
                while len(running) < max_in_flight and (request := next(left, None)) is not None:
                    running.append(asyncio.create_task(self._run(request)))
                if not running:
                    return
                yield await running[0]
                running.popleft()
        finally:
            await _cancel_tasks(running)

    async def _run(self, request: wire.Request) -> wire.Job:
        """Submit a job and return it when it has ended. Cancel it if this is canceled."""
        submitting = asyncio.create_task(self.submit(request))
        try:
            job = await asyncio.shield(submitting)
            return await self._until_ended(job.id, math.inf, None)
        except asyncio.CancelledError:
            with suppress(ScorepoolError, Unreachable, TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await self.cancel(await submitting)
            raise

    async def score(
        self, model: str, items: Iterable[Pair | str | list[int]], **options: Unpack[ScoreOptions]
    ) -> wire.Result:
        """Score (prompt, completion) pairs, or completions of one `prompt`, and wait for the result.

        Any number of items is divided into jobs, and their results are joined. Options are the fields of `Score`.
        Raises JobFailed, ScorepoolError, Unreachable, MixedResults.
        """
        jobs = (wire.Score(model=model, items=chunk, **options) for chunk in chunks(map(_to_item, items)))
        results = [self._result_of(job) async for job in self.gather(jobs)]
        if not results:
            raise ValueError("`items` is empty: expected (prompt, completion) pairs, or completions of `prompt`")
        return join(results)

    async def generate(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> wire.Result:
        """Continue a prompt, or answer `messages`, and wait for the result. Options are the fields of `Generate`."""
        return self._result_of(await self._run(wire.Generate(model=model, prompt=prompt, **options)))

    def _result_of(self, job: wire.Job) -> wire.Result:
        if job.result is None:
            failure = job.failure or wire.Failure(code="internal", message="it ended without a result")
            raise JobFailed(job.id, failure, self.url)
        return job.result

    async def events(self, job: AsyncJob | str) -> AsyncGenerator[wire.TokenDelta]:
        """Yield new tokens of a job with `stream` as they are generated, however often the API restarts meanwhile.

        Raises JobFailed if the job fails; TokensRestarted if it began again with other tokens; ScorepoolError.
        """
        job_id, last_event_id = _id_of(job), ""
        while True:
            async with aclosing(self._connection.stream(calls.events(job_id, last_event_id))) as events:
                async for event in events:
                    last_event_id = event.id or last_event_id
                    if event.name == "tokens":
                        yield wire.parse(event.data, wire.TokenDelta, "json")
                    elif event.name == "restart":
                        raise TokensRestarted(job_id, self.url)
                    elif event.name == "end":
                        self.detach(job_id)
                        self._result_of(wire.parse(event.data, wire.Job, "json"))
                        return
            await asyncio.sleep(RECONNECT_S)

    # Models.

    async def models(self) -> list[wire.ServedModel]:
        """Return the models that live workers serve, one entry per worker. Raises ScorepoolError, Unreachable."""
        return (await self._connection.send(calls.models())).models

    async def metrics(self) -> str:
        """Return the API's metrics in Prometheus's text format. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.metrics())

    # Webhooks.

    async def register_endpoint(
        self, url: str, events: Sequence[wire.EventType] = wire.ALL_EVENTS, description: str = ""
    ) -> wire.WebhookSecret:
        """Register a webhook endpoint; return it with its secret, which no other call shows. Raises ScorepoolError."""
        registration = wire.EndpointRegistration(url=url, events=list(events), description=description)
        return await self._connection.send(calls.register_endpoint(registration))

    async def endpoints(self) -> list[wire.WebhookEndpoint]:
        """Return your webhook endpoints, oldest first. Raises ScorepoolError, Unreachable."""
        return (await self._connection.send(calls.endpoints())).endpoints

    async def change_endpoint(self, endpoint_id: str, change: wire.EndpointChange) -> wire.WebhookEndpoint:
        """Change the given fields of a webhook endpoint. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.change_endpoint(endpoint_id, change))

    async def delete_endpoint(self, endpoint_id: str) -> None:
        """Delete a webhook endpoint. Raises ScorepoolError, Unreachable."""
        await self._connection.send(calls.delete_endpoint(endpoint_id))

    async def rotate_endpoint_secret(self, endpoint_id: str) -> wire.WebhookSecret:
        """Give an endpoint a new secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.rotate_endpoint_secret(endpoint_id))

    async def webhook_secret(self) -> wire.JobWebhookSecret:
        """Return the secret that signs what your jobs send to their `webhook`. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.webhook_secret())

    async def rotate_webhook_secret(self) -> wire.JobWebhookSecret:
        """Change that secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.rotate_webhook_secret())

    async def send_test_event(self, endpoint_id: str) -> wire.Delivery:
        """Send the event `webhook.test` to an endpoint. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.send_test_event(endpoint_id))

    async def deliveries(
        self,
        *,
        state: wire.DeliveryState | None = None,
        endpoint_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.DeliveryPage:
        """Return a page of deliveries, newest first. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.deliveries(state, endpoint_id, cursor, limit))

    async def delivery(self, delivery_id: str) -> wire.Delivery:
        """Return a delivery with its attempts. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.delivery(delivery_id))

    async def replay_delivery(self, delivery_id: str) -> wire.Delivery:
        """Send an event again. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.replay_delivery(delivery_id))

    async def replay_deliveries(self, since: float, *, endpoint_id: str | None = None) -> int:
        """Send all failed events since a time (unix, s) again; return how many. Raises ScorepoolError, Unreachable."""
        return (await self._connection.send(calls.replay_deliveries(since, endpoint_id))).replayed


def _id_of(job: AsyncJob | str) -> str:
    return job if isinstance(job, str) else job.id


async def _cancel_tasks(tasks: Iterable[asyncio.Task[wire.Job]]) -> None:
    """Cancel tasks, wait for them, and drop their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _to_item(item: Pair | str | list[int]) -> wire.ScoreItem:
    if isinstance(item, tuple):
        return wire.ScoreItem(prompt=item[0], completion=item[1])
    return wire.ScoreItem(completion=item)
