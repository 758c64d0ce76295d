"""Keep the last hour of the deployment in Redis: a point per SLOT_S, written by one of the API processes."""

import asyncio
import logging
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.metrics.queue_snapshot import QueueSnapshots
from scorepool.api.repositories import decode
from scorepool.api.repositories.models import Models
from scorepool.store.outage import Outage

logger = logging.getLogger(__name__)
SLOT_S = 20
NUM_SLOTS = 3600 // SLOT_S


class Point(Struct, frozen=True, kw_only=True):
    """The deployment at one moment."""

    at: int  # unix, s
    num_queued: int
    num_running: int
    num_results: int  # since the beginning of the deployment, as the next
    num_failures: int
    tokens_per_s: float  # read and generated
    latency_ms: int = 0  # from submission to result, the sum since the beginning; 0 in points of an earlier release


def tokens_per_s(served: wire.ServedModel) -> float:
    """Return the tokens per second that a worker has just read and generated."""
    rates = served.load.rates if served.load else None
    return rates.prompt_tokens_per_s + rates.generated_tokens_per_s if rates else 0.0


class History:
    """The points of the last hour."""

    def __init__(self, redis: Redis, snapshots: QueueSnapshots, models: Models) -> None:
        self._redis, self._snapshots, self._models = redis, snapshots, models
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write points."""
        self._task = asyncio.create_task(self._write_points())

    async def close(self) -> None:
        """Stop writing."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def last_hour(self) -> list[Point]:
        """Return the points, oldest first. Raises RedisError."""
        found: Any = await self._redis.lrange(store.Keys.history, -NUM_SLOTS, -1)
        return [point for each in found if (point := decode.message(each, Point))]

    async def _write_points(self) -> None:
        outage = Outage(logger)
        while True:
            try:
                now = await decode.now_s(self._redis)
                await asyncio.sleep(SLOT_S - now % SLOT_S)
                await self.write_point()
                outage.ended("the history goes on")
            except RedisError as error:
                outage.failed("the history has a hole: %s", error)
                await asyncio.sleep(SLOT_S)

    async def write_point(self) -> None:
        """Write the point of the current slot, unless another process has or a server is missing. Raises RedisError."""
        slot = round(await decode.now_s(self._redis)) // SLOT_S * SLOT_S
        if not await self._redis.set(store.Keys.history_slot(slot), b"", nx=True, ex=2 * SLOT_S):
            return
        snapshot = await self._snapshots.latest()
        if snapshot.unreachable:
            return  # its sums would fall, and rise again
        jobs = [counts for queue, counts in snapshot.jobs.items() if queue != store.WEBHOOKS]
        num_results = snapshot.outcomes.get("result", 0)
        point = Point(
            at=slot,
            num_queued=sum(counts["queued"] for counts in jobs),
            num_running=sum(counts["started"] for counts in jobs),
            num_results=num_results,
            latency_ms=snapshot.latency_ms,
            num_failures=sum(snapshot.outcomes.values()) - num_results,
            tokens_per_s=sum(map(tokens_per_s, await self._models.live())),
        )
        length: Any = await self._redis.rpush(store.Keys.history, wire.encode(point))
        if length > NUM_SLOTS:
            await self._redis.lpop(store.Keys.history, length - NUM_SLOTS)
        await self._redis.expire(store.Keys.history, 2 * 3600)
