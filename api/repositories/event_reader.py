"""Read the streams of one server: the ends of its jobs, and their tokens.

What it reads goes to the process's registry (waiting.py), in the order of the streams.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.http.turns import Turns

logger = logging.getLogger(__name__)

BLOCK_S = 1.0  # how long one read of the stream may find nothing
READ_COUNT = 1000
BACKFILL_COUNT = 16  # entries of the first page of a backfill
BACKFILL_BYTES = 2**20  # of later pages, if their entries are as large as those of the page before
MISSING_TOKENS_TTL_S = 60  # of requests to which no worker answers
AT_ONCE_S = 0.05  # pause after an empty reply that came before BLOCK_S / 2: what answers there does not block
RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # pauses after one, two, ... failures in a row; the last repeats


class Registry(Protocol):
    """What is told of the entries of the streams."""

    def end(self, job_id: str) -> None:
        """Wake the clients of a job that has ended."""

    def count_ends(self, number: int) -> None:
        """Count ends that one read found."""

    def publish(self, fields: Mapping[bytes, bytes]) -> None:
        """Pass on an entry of the stream of tokens."""

    def wake_all(self) -> None:
        """Wake all clients."""


class EventReader:
    """The reader of one server.

    `redis` is for the one read that blocks, so its timeout must be longer than BLOCK_S; `commands` is for all other
    commands.
    """

    def __init__(self, redis: Redis, commands: Redis) -> None:
        self._redis = redis
        self._commands = commands
        self._task: asyncio.Task[None] | None = None
        self._backfills = Turns()
        self._positions: dict[str, str] = {}  # by stream: id of the last entry that was seen
        self.is_connected = False
        self.is_silent = False  # the last read failed

    def start(self, registry: Registry) -> None:
        """Start to read."""
        self._task = asyncio.create_task(self._read(registry), name="done-reader")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])
        await self._redis.aclose()

    @property
    def is_alive(self) -> bool:
        """True if the streams are being read."""
        return self._task is not None and not self._task.done() and self.is_connected

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
                for delta in deltas_of(fields):
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

    async def _read(self, registry: Registry) -> None:
        num_failures = 0
        while True:
            try:
                await self._read_once(registry)
                num_failures = 0
            except Exception as error:  # of any kind: without this reader no client is answered
                if num_failures == 0:
                    is_of_redis = isinstance(error, (RedisError, OSError))
                    message = "the stream of ended jobs cannot be read and is tried again: %s"
                    logger.warning(message, error, exc_info=None if is_of_redis else error)
                self.is_connected, self.is_silent = False, True  # /readyz reports it
                await asyncio.sleep(RECONNECT_S[min(num_failures, len(RECONNECT_S) - 1)])
                num_failures += 1

    async def _read_once(self, registry: Registry) -> None:
        """Run one XREAD from where the last one ended, even if that was on another connection."""
        if not self._positions:
            self._positions = await self._newest()
        if not self.is_connected:
            for stream, entry_id in (await self._newest()).items():  # after a failover the stream may be shorter
                self._positions[stream] = min(self._positions[stream], entry_id, key=_sort_key)
            self.is_connected, self.is_silent = True, False
            registry.wake_all()  # entries may be lost after a failure: let every client read its job once more
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
                    registry.end(fields[b"id"].decode(errors="replace"))
                else:
                    registry.publish(fields)
            if stream == store.DONE.encode():
                registry.count_ends(len(entries))

    async def _newest(self) -> dict[str, str]:
        """Read the id of each stream's last entry."""
        newest: dict[str, str] = {}
        for stream in (store.DONE, store.TOKENS):
            entries: Any = await self._redis.xrevrange(stream, count=1)
            newest[stream] = entries[0][0].decode() if entries else "0-0"
        return newest


def deltas_of(fields: Mapping[bytes, bytes]) -> wire.TokenDeltas:
    """Decode one entry of the stream of tokens; empty if it cannot be decoded, as one of another version."""
    try:
        return wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack")
    except (KeyError, wire.Invalid) as error:
        logger.warning("an entry of %s cannot be decoded: %s", store.TOKENS, type(error).__name__)
        return []


def _sort_key(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
