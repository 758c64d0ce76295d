"""Pause all models of this deployment: workers finish the jobs that they have, and claim none until it is resumed.

Redis holds the pause, and the scripts that lease jobs look at it (lua/claim.lua, lua/hand_out.lua). So it outlives the
API and the workers, and from the moment it is written no job is leased.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from scorepool import store
from scorepool.api.http.errors import Conflict, Unavailable
from scorepool.api.repositories import decode
from scorepool.store.clock import clock_s

POLL_S = 0.05  # while jobs end
MAX_NAMED = 5  # jobs that an error names


class Pause:
    """The pause of this deployment."""

    def __init__(self, *servers: Redis) -> None:
        self._servers = servers

    async def begin(self) -> None:
        """Let workers claim no more jobs. A pause that holds goes on.

        Raises RedisError if not all servers answer; then none is paused that was not before.
        """
        answers = await asyncio.gather(*map(_begin, self._servers), return_exceptions=True)
        if failures := _failures(answers):
            begun = [redis for redis, answer in zip(self._servers, answers, strict=True) if answer is True]
            await asyncio.gather(*map(_end, begun), return_exceptions=True)
            raise failures[0]

    async def wait(self, timeout_s: float) -> None:
        """Wait until no job runs, at most for `timeout_s`. Raises Unavailable, Conflict if somebody resumed."""
        ends_at = clock_s() + timeout_s
        while running := await self._running():
            if not await self.holds():
                raise Conflict("the pause was ended by POST /resume before all jobs had ended")
            if clock_s() >= ends_at:
                named = ", ".join(running[:MAX_NAMED]) + (", ..." if len(running) > MAX_NAMED else "")
                raise Unavailable(
                    f"no job begins any more, but after {timeout_s:g} s {len(running)} still run: {named}; send the "
                    "request again to wait on, or cancel them, or POST /resume"
                )
            await asyncio.sleep(POLL_S)

    async def clear_caches(self) -> None:
        """Tell workers to drop the KV caches of shared prompts."""
        for redis in self._servers:
            await redis.publish(store.Keys.reset_prefix_cache, b"")

    async def end(self) -> None:
        """Let workers claim jobs again, at once. Without a pause, nothing happens.

        Raises RedisError if not all servers answer; it is ended on those that do.
        """
        if failures := _failures(await asyncio.gather(*map(_end, self._servers), return_exceptions=True)):
            raise failures[0]

    async def holds(self) -> bool:
        """True if all servers of the deployment are paused."""
        return all([await redis.exists(store.Keys.paused) for redis in self._servers])

    async def _running(self) -> Sequence[str]:
        """Return the ids of the jobs that workers have."""
        return sorted([job_id for redis in self._servers for job_id in await _running(redis)])


async def _begin(redis: Redis) -> bool:
    """Pause one server. Return whether it was not paused."""
    return bool(await redis.set(store.Keys.paused, await decode.now_s(redis), nx=True))


async def _end(redis: Redis) -> None:
    """End the pause of one server and wake its workers."""
    await redis.delete(store.Keys.paused)
    workers: Any = await redis.smembers(store.RqKeys.workers)
    async with redis.pipeline(transaction=False) as pipeline:
        for key in workers:
            worker = decode.text(key).removeprefix(store.RqKeys.worker(""))
            pipeline.publish(store.Keys.wake(worker), "")
        await pipeline.execute()


def _failures(answers: Sequence[object]) -> list[BaseException]:
    return [answer for answer in answers if isinstance(answer, BaseException)]


async def _running(redis: Redis) -> list[str]:
    keys: Any = await redis.smembers(store.RqKeys.queues)
    queues = [decode.text(key).removeprefix(store.RqKeys.queue("")) for key in keys]
    async with redis.pipeline(transaction=False) as pipeline:
        for queue in queues:
            if store.is_own_queue(queue) and queue != store.WEBHOOKS:
                pipeline.zrange(store.RqKeys.registry("wip", queue), 0, -1)
        leases = await decode.execute(pipeline)
    return [decode.text(lease).partition(":")[0] for held in leases for lease in held or ()]
