"""Wait for jobs to end, and for their tokens: one reader of each server's streams serves all clients.

    worker: MULTI ... XADD done id=J ... EXEC          the job's state and its entry appear together
    here:   1 register for J   2 read J's state once   3 wait for the entry

An end before step 2 is seen by the read; an end after step 1 wakes the future. There is no gap between the two.
Deltas of tokens are passed to the subscribers of a job and are not kept. A subscriber that misses some asks the job's
worker to write them again, and gets the rest with the result, which holds all tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from scorepool import wire
from scorepool.api.repositories.event_reader import EventReader, deltas_of
from scorepool.api.repositories.progress import ProgressBoard

OnDelta = Callable[[wire.TokenDelta, int], None]  # called with a delta and the bytes that it takes in Redis


class Waiting:
    """Wake clients when their jobs end. `on_ended` is called with the number of ends that each read found."""

    def __init__(
        self,
        readers: Sequence[EventReader],
        on_ended: Callable[[int], Any],
        server_of: Callable[[str], int] | None = None,
    ) -> None:
        """`server_of` returns which reader reads the streams of a job's server, by the job's id; None: there is one."""
        self._readers = readers
        self._server_of = server_of
        self._on_ended = on_ended
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self.progress = ProgressBoard()
        self._subscribers: dict[str, set[OnDelta]] = {}
        self.is_closing = False

    def start(self) -> None:
        """Start the readers of the streams."""
        for reader in self._readers:
            reader.start(self)

    async def close(self) -> None:
        """Answer all clients and stop the readers."""
        self.release()
        for reader in self._readers:
            await reader.close()

    def release(self) -> None:
        """Answer every waiting client with the present state of its job, because the server is about to stop."""
        self.is_closing = True
        self.wake_all()

    @property
    def is_alive(self) -> bool:
        """True if the streams of all servers are being read."""
        return all(reader.is_alive for reader in self._readers)

    def _reader_of(self, job_id: str) -> EventReader:
        return self._readers[self._server_of(job_id) if self._server_of else 0]

    def __len__(self) -> int:
        """Return how many clients wait."""
        return sum(len(futures) for futures in self._waiters.values())

    async def until_ended(
        self,
        job_id: str,
        read: Callable[[], Awaitable[tuple[wire.Job, float]]],
        timeout_s: float,
    ) -> wire.Job:
        """Return the job as soon as it has ended, or as it is after `timeout_s`. Raises what `read` raises.

        `read` returns the job and the seconds until it expires as things stand, which no entry of a stream reports.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while True:
            with self._registered(job_id) as ended:
                job, expires_in_s = await read()
                now = clock()
                if job.status not in ("queued", "started") or self.is_closing or now >= deadline:
                    return job
                await asyncio.wait([ended], timeout=min(deadline - now, expires_in_s))

    @contextmanager
    def subscribe(self, job_ids: Sequence[str], on_delta: OnDelta) -> Iterator[None]:
        """Call `on_delta` with every delta of these jobs that comes from now on; it must not block."""
        for job_id in job_ids:
            self._subscribers.setdefault(job_id, set()).add(on_delta)
        try:
            yield
        finally:
            for job_id in job_ids:
                self._subscribers[job_id].discard(on_delta)
                if not self._subscribers[job_id]:
                    del self._subscribers[job_id]

    def backfill(self, owner: str, job_id: str, since: float) -> AsyncGenerator[wire.TokenDelta]:
        """Yield the deltas of a job that its server's stream still holds, from `since` (unix, s) on."""
        return self._reader_of(job_id).backfill(owner, job_id, since)

    async def request_tokens(self, missing: Sequence[wire.MissingTokens]) -> None:
        """Ask the worker of a job to publish tokens again. A request that cannot be sent is logged."""
        await self._reader_of(missing[0].id).request_tokens(missing)

    def end(self, job_id: str) -> None:
        """Wake the clients of a job that has ended."""
        self.progress.forget(job_id)
        self._wake(job_id)

    def count_ends(self, number: int) -> None:
        """Count ends that one read found."""
        self._on_ended(number)

    def publish(self, fields: Mapping[bytes, bytes]) -> None:
        """Pass on an entry of the stream of tokens."""
        self.progress.publish(fields)
        if self._subscribers:
            deltas = deltas_of(fields)
            for delta in deltas:
                for on_delta in self._subscribers.get(delta.id, ()):
                    on_delta(delta, len(fields[b"step"]) // len(deltas))

    @contextmanager
    def _registered(self, job_id: str) -> Iterator[asyncio.Future[None]]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures = self._waiters.setdefault(job_id, set())
        futures.add(future)
        try:
            yield future
        finally:
            futures.discard(future)
            if not futures and self._waiters.get(job_id) is futures:
                del self._waiters[job_id]

    def _wake(self, job_id: str) -> None:
        for future in self._waiters.get(job_id, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """Let every client read its job once more."""
        for job_id in list(self._waiters):
            self._wake(job_id)
