"""Wait for jobs to end, and for their tokens: one reader of the shared streams per process serves all clients.

    worker: MULTI ... XADD done id=J ... EXEC          the job's state and its entry appear together
    here:   1 register for J   2 read J's state once   3 wait for the entry

An end before step 2 is seen by the read; an end after step 1 wakes the future. There is no gap between the two.
Deltas of tokens are passed to the subscribers of a job and are not kept. A subscriber that misses some asks the job's
worker to write them again, and gets the rest with the result, which holds all tokens.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.http.turns import Turns
from scorepool.api.repositories.progress import ProgressBoard

logger = logging.getLogger(__name__)

BLOCK_S = 1.0  # how long one read of the stream may find nothing
READ_COUNT = 1000
BACKFILL_COUNT = 16  # entries of the first page of a backfill
BACKFILL_BYTES = 2**20  # of later pages, if their entries are as large as those of the page before
MISSING_TOKENS_TTL_S = 60  # of requests to which no worker answers
AT_ONCE_S = 0.05  # pause after an empty reply that came before BLOCK_S / 2: what answers there does not block
RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # pauses after one, two, ... failures in a row; the last repeats

OnDelta = Callable[[wire.TokenDelta, int], None]  # called with a delta and the bytes that it takes in Redis


class Waiting:
    """Wake clients when their jobs end.

    `redis` is for the one read that blocks, so its timeout must be longer than BLOCK_S; `commands` is for all other
    commands. `on_ended` is called with the number of ends that each read found.
    """

    def __init__(self, redis: Redis, commands: Redis, on_ended: Callable[[int], Any]) -> None:
        self._redis = redis
        self._commands = commands
        self._on_ended = on_ended
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.progress = ProgressBoard()
        self._subscribers: dict[str, set[OnDelta]] = {}
        self._backfills = Turns()
        self._positions: dict[str, str] = {}  # by stream: id of the last entry that was seen
        self.is_closing = False
        self.is_connected = False

    def start(self) -> None:
        """Start the reader of the streams."""
        self._reader = asyncio.create_task(self._read(), name="done-reader")

    async def close(self) -> None:
        """Answer all clients and stop the reader."""
        self.release()
        if self._reader is not None:
            await tasks.cancel_and_wait([self._reader])
        await self._redis.aclose()

    def release(self) -> None:
        """Answer every waiting client with the present state of its job, because the server is about to stop."""
        self.is_closing = True
        self._wake_all()

    @property
    def is_alive(self) -> bool:
        """True if the streams are being read."""
        return self._reader is not None and not self._reader.done() and self.is_connected

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

        `read` returns the job and the seconds until it expires in its queue, which no entry of a stream reports.
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

    async def backfill(self, owner: str, job_id: str, since: float) -> AsyncGenerator[wire.TokenDelta]:
        """Yield the deltas of a job that the stream still holds, from `since` (unix, s) on.

        The stream has the deltas of all jobs, in entries of any size. One page is read at a time, and owners take turns
        at that.
        """
        start, count = f"{int(since * 1000)}-0", BACKFILL_COUNT
        name = job_id.encode()
        while True:
            async with self._backfills.turn(owner):
                entries: Any = await self._commands.xrange(store.TOKENS, min=start, count=count)
            num_entries, num_bytes = len(entries), sum(len(fields.get(b"step", b"")) for _, fields in entries)
            if entries:
                start = f"({entries[-1][0].decode()}"
            own = [fields for _, fields in entries if name in fields.get(b"step", b"")]
            del entries  # the caller may take long for each delta
            for fields in own:
                for delta in _deltas(fields):
                    if delta.id == job_id:
                        yield delta
            if num_entries < count:
                return
            count = min(count * 4, READ_COUNT, BACKFILL_BYTES * num_entries // (num_bytes or 1) + 1)

    async def request_tokens(self, missing: Sequence[wire.MissingTokens]) -> None:
        """Ask the worker of a job to publish tokens again. A request that cannot be sent is logged."""
        try:
            async with self._commands.pipeline(transaction=False) as pipeline:
                pipeline.sadd(store.Keys.missing_tokens, *map(wire.encode, missing))
                pipeline.expire(store.Keys.missing_tokens, MISSING_TOKENS_TTL_S)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            logger.warning("missing tokens of %s cannot be requested: %r", missing[0].id, error)

    def _end(self, job_id: str) -> None:
        self.progress.forget(job_id)
        self._wake(job_id)

    def _publish(self, fields: Mapping[bytes, bytes]) -> None:
        self.progress.publish(fields)
        if self._subscribers:
            deltas = _deltas(fields)
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

    def _wake_all(self) -> None:
        for job_id in list(self._waiters):
            self._wake(job_id)

    async def _read(self) -> None:
        num_failures = 0
        while True:
            try:
                await self._read_once()
                num_failures = 0
            except Exception as error:  # of any kind: without this reader no client is answered
                if num_failures == 0:
                    is_of_redis = isinstance(error, (RedisError, OSError))
                    message = "the stream of ended jobs cannot be read and is tried again: %s"
                    logger.warning(message, error, exc_info=None if is_of_redis else error)
                self.is_connected = False  # /readyz reports it
                await asyncio.sleep(RECONNECT_S[min(num_failures, len(RECONNECT_S) - 1)])
                num_failures += 1

    async def _read_once(self) -> None:
        """Run one XREAD from where the last one ended, even if that was on another connection."""
        if not self._positions:
            self._positions = await self._newest()
        if not self.is_connected:
            for stream, entry_id in (await self._newest()).items():  # after a failover the stream may be shorter
                self._positions[stream] = min(self._positions[stream], entry_id, key=_sort_key)
            self.is_connected = True
            self._wake_all()  # entries may be lost after a failure: let every client read its job once more
        positions: Any = self._positions
        clock = asyncio.get_running_loop().time
        read_at = clock()
        streams: Any = await self._redis.xread(positions, count=READ_COUNT, block=int(BLOCK_S * 1000))
        if not streams and clock() - read_at < BLOCK_S / 2:
            await asyncio.sleep(AT_ONCE_S)
            return
        for stream, entries in sorted(streams, key=lambda item: bool(item[0] == store.DONE.encode())):  # ends come last
            for entry_id, fields in entries:
                self._positions[stream.decode()] = entry_id.decode()
                if b"id" in fields:
                    self._end(fields[b"id"].decode(errors="replace"))
                else:
                    self._publish(fields)
            if stream == store.DONE.encode():
                self._on_ended(len(entries))

    async def _newest(self) -> dict[str, str]:
        """Read the id of each stream's last entry."""
        newest: dict[str, str] = {}
        for stream in (store.DONE, store.TOKENS):
            entries: Any = await self._redis.xrevrange(stream, count=1)
            newest[stream] = entries[0][0].decode() if entries else "0-0"
        return newest


def _deltas(fields: Mapping[bytes, bytes]) -> wire.TokenDeltas:
    """Decode one entry of the stream of tokens; empty if it cannot be decoded, as one of another version."""
    try:
        return wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack")
    except (KeyError, wire.Invalid) as error:
        logger.warning("an entry of %s cannot be decoded: %s", store.TOKENS, type(error).__name__)
        return []


def _sort_key(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
