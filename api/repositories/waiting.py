"""Waiting for jobs to end, and for their tokens: one reader of the shared streams per process for all clients.

    worker: MULTI ... XADD done id=J ... EXEC          the job's state and its entry appear together
    here:   1 register for J   2 read J's state once   3 wait for the entry

An end before step 2 is seen by the read; one after step 1 wakes the future. There is no gap between the two. Tokens are
passed on to who listens, and nothing waits for them: a job's result holds them all again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.http import tasks

logger = logging.getLogger(__name__)

BLOCK_S = 5.0  # how long one read of the stream may find nothing
READ_COUNT = 1000
RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # pauses after one, two, ... failures in a row; the last repeats


class Waiting:
    """`redis` is for the one read that blocks, and should have no timeout below BLOCK_S; `commands` for the others.
    `on_ended` is told how many jobs each read saw end."""

    def __init__(self, redis: Redis, commands: Redis, on_ended: Callable[[int], Any]) -> None:
        self._redis = redis
        self._commands = commands
        self._on_ended = on_ended
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._listeners: dict[str, set[Callable[[wire.TokenDelta], None]]] = {}
        self._positions: dict[str, str] = {}  # by stream: id of the last entry that was seen
        self._is_closing = False
        self.is_connected = False

    def start(self) -> None:
        self._reader = asyncio.create_task(self._read(), name="done-reader")

    async def close(self) -> None:
        self.release()
        if self._reader is not None:
            await tasks.end([self._reader])
        await self._redis.aclose()

    def release(self) -> None:
        """Let every waiting client go with what is known now: the server is about to stop."""
        self._is_closing = True
        self._wake_all()

    @property
    def is_alive(self) -> bool:
        return self._reader is not None and not self._reader.done() and self.is_connected

    def __len__(self) -> int:
        return sum(len(futures) for futures in self._waiters.values())

    async def until_ended(
        self,
        id: str,  # noqa: A002
        read: Callable[[], Awaitable[wire.Job]],
        timeout_s: float,
    ) -> wire.Job:
        """The job as soon as it has ended, or as it is when the time is over. `read` may raise; so does this."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            with self._registered(id) as ended:
                job = await read()
                if job.status not in ("queued", "started") or self._is_closing:
                    return job
                try:
                    async with asyncio.timeout_at(deadline):
                        await ended
                except TimeoutError:
                    return await read()

    @contextmanager
    def listening(self, ids: Sequence[str], tell: Callable[[wire.TokenDelta], None]) -> Iterator[None]:
        """`tell` gets every growth of these jobs that comes from now on; it must not block."""
        for id_ in ids:
            self._listeners.setdefault(id_, set()).add(tell)
        try:
            yield
        finally:
            for id_ in ids:
                self._listeners[id_].discard(tell)
                if not self._listeners[id_]:
                    del self._listeners[id_]

    async def past(self, id: str, since: float) -> list[wire.TokenDelta]:  # noqa: A002
        """What the stream still holds of a job, from `since` (unix, s) on."""
        found: list[wire.TokenDelta] = []
        start = f"{int(since * 1000)}-0"
        while True:
            entries: Any = await self._commands.xrange(store.TOKENS, min=start, count=READ_COUNT)
            for _, fields in entries:
                found += [growth for growth in _step(fields) if growth.id == id]
            if len(entries) < READ_COUNT:
                return found
            start = f"({entries[-1][0].decode()}"

    def _pass_on(self, fields: Mapping[bytes, bytes]) -> None:
        if self._listeners:
            for growth in _step(fields):
                for tell in self._listeners.get(growth.id, ()):
                    tell(growth)

    @contextmanager
    def _registered(self, id: str) -> Iterator[asyncio.Future[None]]:  # noqa: A002
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures = self._waiters.setdefault(id, set())
        futures.add(future)
        try:
            yield future
        finally:
            futures.discard(future)
            if not futures and self._waiters.get(id) is futures:
                del self._waiters[id]

    def _wake(self, id: str) -> None:  # noqa: A002
        for future in self._waiters.get(id, ()):
            if not future.done():
                future.set_result(None)

    def _wake_all(self) -> None:
        for id_ in list(self._waiters):
            self._wake(id_)

    async def _read(self) -> None:
        num_failures = 0
        while True:
            try:
                await self._read_once()
                num_failures = 0
            except (RedisError, OSError) as error:
                if num_failures == 0:
                    logger.warning("the stream of ended jobs cannot be read, trying on: %r", error)
                self.is_connected = False
                await asyncio.sleep(RECONNECT_S[min(num_failures, len(RECONNECT_S) - 1)])
                num_failures += 1
            except Exception:
                logger.exception("the reader of ended jobs stopped")  # and /readyz says so
                raise

    async def _read_once(self) -> None:
        """One XREAD, from where the last one ended, also when that was on another connection."""
        if not self._positions:
            self._positions = await self._newest()
        if not self.is_connected:
            for stream, entry_id in (await self._newest()).items():  # after a failover there may be less of it
                self._positions[stream] = min(self._positions[stream], entry_id, key=_place)
            self.is_connected = True
            self._wake_all()  # entries may be gone from a stream that was away: let everyone look once more
        positions: Any = self._positions
        streams: Any = await self._redis.xread(positions, count=READ_COUNT, block=int(BLOCK_S * 1000))
        for stream, entries in sorted(streams, key=lambda part: bool(part[0] == store.DONE.encode())):  # ends come last
            for entry_id, fields in entries:
                self._positions[stream.decode()] = entry_id.decode()
                if b"id" in fields:
                    self._wake(fields[b"id"].decode(errors="replace"))
                else:
                    self._pass_on(fields)
            if stream == store.DONE.encode():
                self._on_ended(len(entries))

    async def _newest(self) -> dict[str, str]:
        """By stream, the id of its last entry."""
        newest: dict[str, str] = {}
        for stream in (store.DONE, store.TOKENS):
            entries: Any = await self._redis.xrevrange(stream, count=1)
            newest[stream] = entries[0][0].decode() if entries else "0-0"
        return newest


def _step(fields: Mapping[bytes, bytes]) -> wire.TokenDeltas:
    """One entry of the stream of tokens. What another version wrote, or nobody of ours, is passed over."""
    try:
        return wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack")
    except (KeyError, wire.Invalid) as error:
        logger.warning("an entry of %s cannot be read: %s", store.TOKENS, type(error).__name__)
        return []


def _place(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
