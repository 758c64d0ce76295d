"""The blocking client: the methods of AsyncClient, run by an event loop in a thread of its own."""

from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

from scorepool import wire
from scorepool.options import (
    ClassifyOptions,
    CompareOptions,
    EmbedOptions,
    GenerateOptions,
    ScoreOptions,
    TokenizeOptions,
)
from scorepool.sdk.async_client import AsyncClient
from scorepool.sdk.async_jobs import MAX_IN_FLIGHT
from scorepool.sdk.batches import Batches
from scorepool.sdk.comparing import compare_requests
from scorepool.sdk.connection import RETRY_S, AsyncConnection, url_and_key
from scorepool.sdk.embedding_jobs import EmbedInput, embed_requests
from scorepool.sdk.errors import ERRORS, ScorepoolError
from scorepool.sdk.loop_thread import LoopThread
from scorepool.sdk.models import Models
from scorepool.sdk.splitting import ClassifyInput, Division, Item, ItemsRequest, classify_requests, score_requests
from scorepool.sdk.webhooks import Webhooks

T = TypeVar("T")


class JobHandle:
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

    def progress(self, timeout_s: float | None = None) -> Iterator[wire.Progress]:
        """Yield how many items of a score or classify job are done, about once a second until it ends.

        Raises JobFailed if the job fails; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._client.progress(self.id, timeout_s=timeout_s)


class Client(Models, Batches, Webhooks):
    """A connection to one API, safe to share between threads.

    Calls are repeated for `retry_s` while the API is away or busy. Waits for jobs and their tokens outlive any restart;
    so do `score`, `generate` and `gather`, once the API has answered. Leaving `with` cancels the jobs that were
    submitted here and not awaited, unless they were detached. Make a new client after a fork.
    """

    _async: AsyncClient

    def __init__(self, url: str | None = None, api_key: str | None = None, *, retry_s: float = RETRY_S) -> None:
        """Use the API at a URL, or at a unix socket: `unix:///PATH`.

        Without them, SCOREPOOL_URL and SCOREPOOL_API_KEY are used; without the former, the address of
        `scorepool serve`.
        """
        url, api_key = url_and_key(url, api_key)
        self._async = AsyncClient(url, api_key or "", retry_s=retry_s)
        self._arguments = url, api_key or "", retry_s
        self._iterated = WeakSet[AsyncGenerator[Any]]()
        self._thread = LoopThread(partial(_end, self._async._connection, self._iterated))

    @property
    def url(self) -> str:
        return self._async.url

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a new client with the same arguments: `datasets.map`, Ray and multiprocessing copy functions."""
        return _client, (type(self), *self._arguments)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

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
        try:
            return self._thread.run(work)
        except ERRORS as error:
            raise error.with_traceback(None) from None  # the frames of the other thread tell nothing more

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        self._iterated.add(items)
        try:
            while True:
                try:
                    yield self._run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            self._thread.finish(_close(items))

    # Jobs.

    def submit(self, request: wire.Request, *, idempotency_key: str | None = None) -> JobHandle:
        """Submit a job. Raises ScorepoolError, Unreachable."""
        return JobHandle(self, self._run(self._async.submit(request, idempotency_key=idempotency_key)).id)

    def submit_many(self, requests: Iterable[wire.Request], *, idempotency_key: str | None = None) -> list[JobHandle]:
        """Submit jobs, all or none, in the order of `requests`. Raises ScorepoolError, Unreachable."""
        submitted = self._run(self._async.submit_many(list(requests), idempotency_key=idempotency_key))
        return [JobHandle(self, job.id) for job in submitted]

    def attach(self, job: JobHandle | str) -> None:
        """Cancel a job when the client is closed, unless it was awaited until then."""
        self._async.attach(_id_of(job))

    def detach(self, job: JobHandle | str) -> None:
        """Let a job go on when the client is closed."""
        self._async.detach(_id_of(job))

    def job(self, job: JobHandle | str, *, wait_s: float = 0.0) -> wire.Job:
        """Return the job when it ends, or as it is after `wait_s`. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.job(_id_of(job), wait_s=wait_s))

    def jobs(
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
        return self._run(
            self._async.jobs(
                status=status,
                model=model,
                kind=kind,
                created_from=created_from,
                created_before=created_before,
                cursor=cursor,
                limit=limit,
            )
        )

    def result(self, job: JobHandle | str, *, timeout_s: float | None = None) -> wire.Result:
        """Wait for the job's result, however often the API restarts meanwhile.

        Raises JobFailed, ScorepoolError; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._run(self._async.result(_id_of(job), timeout_s=timeout_s))

    def cancel(self, job: JobHandle | str) -> wire.Job:
        """Cancel a queued or running job and return it. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.cancel(_id_of(job)))

    def delete(self, job: JobHandle | str) -> None:
        """Delete a job that has ended, with its result. Raises ScorepoolError, Unreachable."""
        self._run(self._async.delete(_id_of(job)))

    def as_completed(self, jobs: Iterable[JobHandle | str], *, timeout_s: float | None = None) -> Iterator[wire.Job]:
        """Yield jobs as they end, each with its result or its failure.

        At most MAX_IN_FLIGHT are watched at a time, the first ones first. Raises ScorepoolError, Unreachable, and
        JobTimeout after `timeout_s`.
        """
        return self._iterate(self._async.as_completed([_id_of(job) for job in jobs], timeout_s=timeout_s))

    def in_order(self, jobs: Iterable[JobHandle | str], *, timeout_s: float | None = None) -> Iterator[wire.Job]:
        """Yield jobs in the order given, each when it has ended, with its result or its failure.

        Several that have ended come with one request: this is the fastest way to read many small results. Raises
        ScorepoolError, Unreachable, and JobTimeout after `timeout_s`.
        """
        return self._iterate(self._async.in_order([_id_of(job) for job in jobs], timeout_s=timeout_s))

    def gather(
        self, requests: Iterable[wire.Request], *, max_in_flight: int = MAX_IN_FLIGHT, timeout_s: float | None = None
    ) -> Iterator[wire.Job]:
        """Submit jobs and yield them in the order of `requests`, each with its result or its failure.

        At most `max_in_flight` are submitted and not yielded, so any number of requests fits into the memory of this
        process. The server keeps what was yielded, usually for a day: of very many, call `delete(job.id)`. Raises
        ScorepoolError, Unreachable, and JobTimeout after `timeout_s`; what was submitted is then canceled.
        """
        window = self._run(self._async._open_window(max_in_flight, timeout_s))
        left = iter(requests)  # in this thread: a slow source must not stop the loop
        try:
            while True:
                while not window.is_full and (request := next(left, None)) is not None:
                    self._run(window.start(request))
                if window.is_empty:
                    return
                yield self._run(window.next())
        finally:
            self._thread.finish(window.close())

    def score(self, model: str, items: Iterable[Item], **options: Unpack[ScoreOptions]) -> wire.Result:
        """Score (prompt, completion) pairs, or completions of one `prompt`, and wait for the result.

        Any number of items is divided into jobs, and their results are joined. Options are the fields of `Score`.
        Raises JobFailed, ScorepoolError, Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return self._run_all(score_requests(model, items, options))

    def compare(self, model: str, base: str, items: Iterable[Item], **options: Unpack[CompareOptions]) -> wire.Result:
        """Compare a model with its base on (prompt, completion) pairs, or completions of one `prompt`.

        Any number of items is divided into jobs, and their results are joined: `comparison` of the result says how far
        the models are apart, `sequences` what `model` finds. Options are fields of `Compare`. Raises JobFailed,
        ScorepoolError, Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return self._run_all(compare_requests(model, base, items, options))

    def classify(self, model: str, items: Iterable[ClassifyInput], **options: Unpack[ClassifyOptions]) -> wire.Result:
        """Classify texts, token ids or chats, and wait for the result. Options are the fields of `Classify`.

        Any number of items is divided into jobs, and their results are joined. Raises JobFailed, ScorepoolError,
        Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return self._run_all(classify_requests(model, items, options))

    def embed(self, model: str, items: Iterable[EmbedInput], **options: Unpack[EmbedOptions]) -> wire.Result:
        """Embed texts or token ids, and wait for the result. Options are the fields of `Embed`.

        Any number of items is divided into jobs, and their results are joined. Raises JobFailed, ScorepoolError,
        Unreachable, MixedResults; TypeError, ValueError for items that are none.
        """
        return self._run_all(embed_requests(model, items, options))

    def _run_all(self, requests: Iterable[ItemsRequest]) -> wire.Result:
        """Run the jobs of one call, and join their results."""
        division = Division(requests)
        jobs: list[wire.Job] = []
        try:
            for job in self.gather(division):
                jobs.append(job)
        except ScorepoolError as error:
            raise division.refusal(error, len(jobs)) from None
        return division.join(jobs, self.url)

    def generate(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> wire.Result:
        """Continue a prompt, or answer `messages`, and wait for the result. Options are the fields of `Generate`.

        Raises JobFailed, ScorepoolError, Unreachable.
        """
        return self._run(self._async.generate(model, prompt, **options))

    def tokenize(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[TokenizeOptions]
    ) -> wire.SequenceResult:
        """Return the tokens of a text or of `messages`, without logprobs. Options are the fields of `Tokenize`.

        Raises JobFailed, ScorepoolError, Unreachable.
        """
        return self._run(self._async.tokenize(model, prompt, **options))

    def detokenize(self, model: str, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises JobFailed, ScorepoolError, Unreachable."""
        return self._run(self._async.detokenize(model, token_ids))

    def events(self, job: JobHandle | str, *, timeout_s: float | None = None) -> Iterator[wire.TokenDelta]:
        """Yield new tokens of a job with `stream` as they are generated, however often the API restarts meanwhile.

        Raises JobFailed if the job fails; TokensRestarted if it began again with other tokens; ScorepoolError;
        JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._iterate(self._async.events(_id_of(job), timeout_s=timeout_s))

    def progress(self, job: JobHandle | str, *, timeout_s: float | None = None) -> Iterator[wire.Progress]:
        """Yield how many items of a score or classify job are done, about once a second until it ends.

        A job that takes less than a second yields nothing. Raises JobFailed if the job fails; ScorepoolError;
        JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._iterate(self._async.progress(_id_of(job), timeout_s=timeout_s))


def _client(kind: type[Client], url: str, api_key: str | None, retry_s: float) -> Client:
    return kind(url, api_key, retry_s=retry_s)


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)


async def _end(connection: AsyncConnection, iterated: Iterable[AsyncGenerator[Any]]) -> None:
    """Close what is iterated, from the outside in: the loop would close all generators at once, which they refuse."""
    for items in list(iterated):
        with suppress(Exception):
            await items.aclose()
    await connection.close()


async def _close(items: AsyncGenerator[T]) -> None:
    await items.aclose()


def _id_of(job: JobHandle | str) -> str:
    return job if isinstance(job, str) else job.id
