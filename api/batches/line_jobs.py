"""Look at the jobs of lines, each on the server that its id names. A batch itself is on home."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.repositories import decode
from scorepool.api.repositories.jobs import status_of
from scorepool.api.repositories.reach import Reach
from scorepool.store.server_map import HOME
from scorepool.wire.stored_result import MAX_RECORD_BYTES, StoredResult, decode_recorded

logger = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
SILENT: Literal["silent"] = "silent"  # instead of the status of a job whose server does not answer
ENDED_JOB_TTL_S = 60  # how long jobs are kept after the output of their line is written


class LineJobs:
    """The jobs of all lines. `redis` has the servers in the order of the map."""

    def __init__(self, servers: store.ServerMap, redis: Sequence[Redis], reach: Reach) -> None:
        self.servers = servers
        self._redis = redis
        self._reach = reach

    def tag(self, request: wire.Request) -> str:
        """Return the tag of the server of a job that names the model's own name."""
        return self.servers.servers[self.servers.of_model(request.model)].tag

    async def statuses(self, job_ids: Sequence[str]) -> list[wire.Status | None]:
        """Return the status of each job; None if it does not exist.

        A job that its server lacks is looked for on the others. It counts as queued while its server does not answer.
        """
        read = await self._on_each(job_ids, _statuses, SILENT)
        found = dict(zip(job_ids, read, strict=True))
        for index in range(len(self._redis)) if not self.servers.is_one else ():
            missing = [each for each in found if found[each] in (None, SILENT) and self.servers.of_job(each) != index]
            try:
                elsewhere = await self._reach.ask(index, _statuses(self._redis[index], missing)) if missing else []
            except (RedisError, OSError):
                continue
            found |= {job_id: status for job_id, status in zip(missing, elsewhere, strict=False) if status is not None}
        return ["queued" if status == SILENT else status for status in found.values()]

    async def outcome_bytes(self, job_ids: Sequence[str]) -> list[int]:
        """Return the bytes of what each job ended with."""
        return await self._on_each(job_ids, _outcome_bytes, 0)

    async def let_expire(self, owner: str, job_ids: Sequence[str], now: float) -> None:
        """Let jobs expire that are on other servers than home. If this fails, they expire as others do."""

        async def expire(redis: Redis, own: Sequence[str]) -> list[None]:
            async with redis.pipeline(transaction=False) as pipeline:
                let_expire(pipeline, owner, own, now)
                await pipeline.execute()
            return [None] * len(own)

        await self._on_each([job_id for job_id in job_ids if self.servers.of_job(job_id) != HOME], expire, None)

    async def _on_each(
        self, job_ids: Sequence[str], read: Callable[[Redis, Sequence[str]], Awaitable[list[T]]], unknown: U
    ) -> list[T | U]:
        """Read jobs from the servers that their ids name; `unknown` if such a server does not answer.

        Raises RedisError if home does not.
        """
        found: dict[str, T | U] = {}
        for index, redis in enumerate(self._redis):
            own = [job_id for job_id in job_ids if self.servers.of_job(job_id) == index]
            if not own:
                continue
            try:
                found |= zip(own, await self._reach.ask(index, read(redis, own)), strict=True)
            except (RedisError, OSError) as error:
                if index == HOME:
                    raise
                logger.info("lines of batches wait for the Redis of %s: %r", self.servers.servers[index].setting, error)
                found |= dict.fromkeys(own, unknown)
        return [found[job_id] for job_id in job_ids]


def let_expire(pipeline: Any, owner: str, job_ids: Sequence[str], now: float) -> None:
    """Add the commands that let jobs expire, and count them no more. `now` is a unix time, s."""
    for job_id in job_ids:
        for key in (store.RqKeys.job(job_id), store.Keys.request(job_id), store.Keys.outcome(job_id)):
            pipeline.expire(key, ENDED_JOB_TTL_S)
    if job_ids:
        checks = dict.fromkeys(job_ids, now + ENDED_JOB_TTL_S + 1)
        pipeline.zadd(store.Keys.ledger_of(owner), checks, xx=True, lt=True)


async def _statuses(redis: Redis, job_ids: Sequence[str]) -> list[wire.Status | None]:
    async with redis.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(store.RqKeys.job(job_id), "status")
        found: Any = await pipeline.execute()
    return [status_of(status) if status else None for status in found]


async def _outcome_bytes(redis: Redis, job_ids: Sequence[str]) -> list[int]:
    async with redis.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.strlen(store.Keys.outcome(job_id))
            pipeline.getrange(store.Keys.outcome(job_id), 0, MAX_RECORD_BYTES - 1)
        found = await decode.execute(pipeline)
    return [_result_bytes(*each) for each in zip(found[::2], found[1::2], strict=True)]


def _result_bytes(num_bytes: int | None, beginning: bytes | None) -> int:
    """Return the bytes of a result, from the length and the beginning of what Redis holds."""
    if not num_bytes or not beginning or num_bytes > MAX_RECORD_BYTES:
        return num_bytes or 0
    try:
        outcome = decode_recorded(beginning)
    except wire.Invalid:
        return num_bytes
    return outcome.num_bytes if isinstance(outcome, StoredResult) else num_bytes
