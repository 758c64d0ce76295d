"""The blocking client: the methods of AsyncClient, run by an event loop in a thread of its own."""

from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from scorepool import wire
from scorepool.options import GenerateOptions, ScoreOptions
from scorepool.sdk.async_client import DEFAULT_URL, MAX_IN_FLIGHT, AsyncClient, Pair
from scorepool.sdk.batches import Batches
from scorepool.sdk.connection import RETRY_S
from scorepool.sdk.loop_thread import LoopThread

T = TypeVar("T")


class Job:
    """A job that was submitted. Iterate over it to get its tokens as they are generated, if it has `stream`."""

    def __init__(self, client: "Client", job_id: str) -> None:
        self.id = job_id
        self._client = client

    def __repr__(self) -> str:
        return f"<job {self.id} at {self._client.url}>"

    def result(self, timeout_s: float | None = None) -> wire.Result:
        """Wait for the result, however often the API restarts meanwhile.

        Raises JobFailed; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._client.result(self.id, timeout_s=timeout_s)

    def status(self) -> wire.Job:
        """Return the job as it is, without waiting. Raises ScorepoolError, Unreachable."""
        return self._client.job(self.id)

    def cancel(self) -> wire.Job:
        """Cancel the job. Raises ScorepoolError, Unreachable."""
        return self._client.cancel(self.id)

    def delete(self) -> None:
        """Delete the job, which has ended, and its result. Raises ScorepoolError, Unreachable."""
        self._client.delete(self.id)

    def detach(self) -> Self:
        """Let the job go on when the client is closed. Return it."""
        self._client.detach(self.id)
        return self

    def __iter__(self) -> Iterator[wire.TokenDelta]:
        return self._client.events(self.id)


class Client(Batches):
    """A connection to one API, safe to share between threads.

    Calls are repeated for `retry_s` while the API is away or busy. Leaving `with` cancels the jobs that were submitted
    here and not awaited, unless they were detached. Make a new client after a fork.
    """

    _async: AsyncClient

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, *, retry_s: float = RETRY_S) -> None:
        """Use the API at a URL, or at a unix socket: `unix:///PATH`."""
        self._async = AsyncClient(url, api_key, retry_s=retry_s)
        self._thread = LoopThread(self._async._connection.close)

    @property
    def url(self) -> str:
        return self._async.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what was not awaited, and close the connections."""
        if not self._thread.can_run:
            return
        try:
            self._run(self._async.close())
        finally:
            self._thread.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        try:
            while True:
                try:
                    yield self._run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            self._thread.close_generator(items)

    # Jobs.

    def submit(self, request: wire.Request, *, idempotency_key: str | None = None) -> Job:
        """Submit a job. Raises ScorepoolError, Unreachable."""
        return Job(self, self._run(self._async.submit(request, idempotency_key=idempotency_key)).id)

    def submit_many(self, requests: Iterable[wire.Request], *, idempotency_key: str | None = None) -> list[Job]:
        """Submit jobs, all or none, in the order of `requests`. Raises ScorepoolError, Unreachable."""
        submitted = self._run(self._async.submit_many(requests, idempotency_key=idempotency_key))
        return [Job(self, job.id) for job in submitted]

    def detach(self, job: Job | str) -> None:
        """Let a job go on when the client is closed."""
        self._async.detach(_id_of(job))

    def job(self, job: Job | str, *, wait_s: float = 0.0) -> wire.Job:
        """Return the job when it ends, or as it is after `wait_s`. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.job(_id_of(job), wait_s=wait_s))

    def jobs(
        self,
        *,
        status: wire.Status | None = None,
        model: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.JobPage:
        """Return a page of jobs, newest first, without results. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.jobs(status=status, model=model, cursor=cursor, limit=limit))

    def result(self, job: Job | str, *, timeout_s: float | None = None) -> wire.Result:
        """Wait for the job's result, however often the API restarts meanwhile.

        Raises JobFailed, ScorepoolError; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._run(self._async.result(_id_of(job), timeout_s=timeout_s))

    def cancel(self, job: Job | str) -> wire.Job:
        """Cancel a queued or running job and return it. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.cancel(_id_of(job)))

    def delete(self, job: Job | str) -> None:
        """Delete a job that has ended, with its result. Raises ScorepoolError, Unreachable."""
        self._run(self._async.delete(_id_of(job)))

    def as_completed(self, jobs: Iterable[Job | str], *, timeout_s: float | None = None) -> Iterator[wire.Job]:
        """Yield jobs as they end, each with its result or its failure.

        At most MAX_IN_FLIGHT are watched at a time, the first ones first. Raises ScorepoolError, Unreachable, and
        JobTimeout after `timeout_s`.
        """
        return self._iterate(self._async.as_completed(map(_id_of, jobs), timeout_s=timeout_s))

    def gather(self, requests: Iterable[wire.Request], *, max_in_flight: int = MAX_IN_FLIGHT) -> Iterator[wire.Job]:
        """Submit jobs and yield them in the order of `requests`, each with its result or its failure.

        At most `max_in_flight` are submitted and not yielded, so any number of requests fits into memory, here and on
        the server. Raises ScorepoolError, Unreachable; what was submitted is then canceled.
        """
        return self._iterate(self._async.gather(requests, max_in_flight=max_in_flight))

    def score(
        self, model: str, items: Iterable[Pair | str | list[int]], **options: Unpack[ScoreOptions]
    ) -> wire.Result:
        """Score (prompt, completion) pairs, or completions of one `prompt`, and wait for the result.

        Any number of items is divided into jobs, and their results are joined. Options are the fields of `Score`.
        Raises JobFailed, ScorepoolError, Unreachable, MixedResults.
        """
        return self._run(self._async.score(model, items, **options))

    def generate(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> wire.Result:
        """Continue a prompt, or answer `messages`, and wait for the result. Options are the fields of `Generate`."""
        return self._run(self._async.generate(model, prompt, **options))

    def events(self, job: Job | str) -> Iterator[wire.TokenDelta]:
        """Yield new tokens of a job with `stream` as they are generated, however often the API restarts meanwhile.

        Raises JobFailed if the job fails; TokensRestarted if it began again with other tokens; ScorepoolError.
        """
        return self._iterate(self._async.events(_id_of(job)))

    # Models.

    def models(self) -> list[wire.ServedModel]:
        """Return the models that live workers serve, one entry per worker. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.models())

    def metrics(self) -> str:
        """Return the API's metrics in Prometheus's text format. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.metrics())

    # Webhooks.

    def register_endpoint(
        self, url: str, events: Sequence[wire.EventType] = wire.ALL_EVENTS, description: str = ""
    ) -> wire.WebhookSecret:
        """Register a webhook endpoint; return it with its secret, which no other call shows. Raises ScorepoolError."""
        return self._run(self._async.register_endpoint(url, events, description))

    def endpoints(self) -> list[wire.WebhookEndpoint]:
        """Return your webhook endpoints, oldest first. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.endpoints())

    def change_endpoint(self, endpoint_id: str, change: wire.EndpointChange) -> wire.WebhookEndpoint:
        """Change the given fields of a webhook endpoint. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.change_endpoint(endpoint_id, change))

    def delete_endpoint(self, endpoint_id: str) -> None:
        """Delete a webhook endpoint. Raises ScorepoolError, Unreachable."""
        self._run(self._async.delete_endpoint(endpoint_id))

    def rotate_endpoint_secret(self, endpoint_id: str) -> wire.WebhookSecret:
        """Give an endpoint a new secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.rotate_endpoint_secret(endpoint_id))

    def webhook_secret(self) -> wire.JobWebhookSecret:
        """Return the secret that signs what your jobs send to their `webhook`. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.webhook_secret())

    def rotate_webhook_secret(self) -> wire.JobWebhookSecret:
        """Change that secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.rotate_webhook_secret())

    def send_test_event(self, endpoint_id: str) -> wire.Delivery:
        """Send the event `webhook.test` to an endpoint. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.send_test_event(endpoint_id))

    def deliveries(
        self,
        *,
        state: wire.DeliveryState | None = None,
        endpoint_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.DeliveryPage:
        """Return a page of deliveries, newest first. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.deliveries(state=state, endpoint_id=endpoint_id, cursor=cursor, limit=limit))

    def delivery(self, delivery_id: str) -> wire.Delivery:
        """Return a delivery with its attempts. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.delivery(delivery_id))

    def replay_delivery(self, delivery_id: str) -> wire.Delivery:
        """Send an event again. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.replay_delivery(delivery_id))

    def replay_deliveries(self, since: float, *, endpoint_id: str | None = None) -> int:
        """Send all failed events since a time (unix, s) again; return how many. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.replay_deliveries(since, endpoint_id=endpoint_id))


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)


def _id_of(job: Job | str) -> str:
    return job if isinstance(job, str) else job.id
