"""Warn of jobs that wait on another server than that of their model: the map has moved it, and no worker takes them."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store
from scorepool.api.http import tasks
from scorepool.api.repositories import decode
from scorepool.api.repositories.reach import Reach
from scorepool.store.server_map import HOME

logger = logging.getLogger(__name__)
EVERY_S = 60.0


class StrandedJobs:
    """A task of each API process."""

    def __init__(self, servers: store.ServerMap, redis: Sequence[Redis], reach: Reach) -> None:
        self._servers = servers
        self._redis = redis
        self._reach = reach
        self._task: asyncio.Task[None] | None = None
        self._warned: set[tuple[int, str]] = set()  # servers and queues

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="stranded-jobs")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def look(self) -> None:
        """Log a line for each queue that has such jobs, once while it has any. A server that is down is left out."""
        for index, redis in enumerate(self._redis):
            try:
                found = await self._reach.ask(index, self._count(index, redis))
            except (RedisError, OSError):
                continue
            for queue, num_jobs in found.items():
                if not num_jobs:
                    self._warned.discard((index, queue))
                elif (index, queue) not in self._warned:
                    self._warned.add((index, queue))
                    logger.warning(
                        "%d jobs wait in the queue %s on the Redis of %s, where no worker takes them: "
                        "SCOREPOOL_REDIS_URLS has put that model on another. Give it the server of before until they "
                        "have ended, or cancel them",
                        num_jobs,
                        queue,
                        self._servers.servers[index].setting,
                    )

    async def _count(self, index: int, redis: Redis) -> dict[str, int]:
        """Return how many jobs wait in each queue of a model that is not of this server."""
        queues = {
            queue
            for other, server in enumerate(self._servers.servers)
            if other != index
            for queue in store.queue_names(*server.models)
        }
        if index != HOME:
            known: Any = await redis.smembers(store.RqKeys.queues)
            names = {decode.text(key).removeprefix(store.RqKeys.queue("")) for key in known}
            own = {store.WEBHOOKS, *store.queue_names(*self._servers.servers[index].models)}
            queues |= set(filter(store.is_own_queue, names)) - own
        ordered = sorted(queues)
        async with redis.pipeline(transaction=False) as pipeline:
            for queue in ordered:
                pipeline.llen(store.RqKeys.queue(queue))
                pipeline.zcard(store.RqKeys.registry("deferred", queue))
            sizes = [size or 0 for size in await decode.execute(pipeline)]
        return dict(zip(ordered, map(sum, zip(sizes[::2], sizes[1::2], strict=True)), strict=True))

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)
