"""One driver's hold on a batch: every write is fenced, so that of two who believe they have it one writes nothing."""

import time
from collections.abc import Callable
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from scorepool import store, wire
from scorepool.api.dialects.openai.batch import Batch
from scorepool.api.repositories.batches import BatchProgress
from scorepool.store.scripts import load

CLAIM = load("claim_batch.lua")
DUE = load("due_batch.lua")


class LeaseLost(Exception):
    """The batch was touched: cancelled, or claimed by another driver. What is true is read again in another turn."""


class BatchLease:
    def __init__(
        self,
        redis: Redis,
        lease_s: float,
        id: str,  # noqa: A002
        owner: str,
        progress: BatchProgress,
        cancel_at: float | None,
        number: int,
        claimed_at: float,
    ) -> None:
        self._redis = redis
        self._lease_s = lease_s
        self.id = id
        self.owner = owner
        self.progress = progress
        self.cancel_at = cancel_at  # unix, s
        self.number = number
        self._ahead_s = claimed_at - time.monotonic()
        self._whole_at = time.monotonic()  # the lease was whole

    @classmethod
    async def claim(cls, redis: Redis, lease_s: float) -> Self | None:
        """None if no batch is due."""
        found: Any = await redis.eval(CLAIM, 1, store.Keys.batches, str(lease_s), store.Keys.batch(""))
        if not found:
            return None
        id_, owner, progress, cancel, number, claimed_at = found
        return cls(
            redis,
            lease_s,
            id_.decode(),
            owner.decode(),
            wire.parse(progress, BatchProgress, "msgpack"),
            None if cancel is None else float(cancel),
            number,
            float(claimed_at),
        )

    @property
    def now(self) -> float:
        """Unix, s, by Redis's clock as it was when the turn began."""
        return time.monotonic() + self._ahead_s

    @property
    def batch(self) -> Batch:
        return self.progress.batch

    @property
    def is_waning(self) -> bool:
        """Whether it is time to commit what is done, which makes the lease whole again, as `extend` does. A driver that
        lost it first would have done nothing, and the next one be no faster."""
        return time.monotonic() - self._whole_at > self._lease_s / 3

    async def extend(self) -> None:
        """Raises LeaseLost."""
        if not await self._due(self._lease_s):
            raise LeaseLost
        self._whole_at = time.monotonic()

    async def release(self, due_in_s: float) -> None:
        """Nothing happens to a batch that has ended, nor to one that another driver has by now: two that cut each
        other's turns short would never come to an end."""
        await self._due(due_in_s)

    async def commit(self, progress: BatchProgress, write: Callable[[Pipeline], None] | None = None) -> None:
        """The new progress, and what `write` puts beside it, all or nothing. Raises LeaseLost."""
        key = store.Keys.batch(self.id)
        async with self._redis.pipeline() as pipeline:
            try:
                await pipeline.watch(key)
                if await pipeline.hget(key, "turn") != str(self.number).encode():
                    raise LeaseLost
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.hset(key, "state", wire.encode(progress))
                pipeline.zadd(store.Keys.batches, {self.id: self.now + self._lease_s}, xx=True)
                if write is not None:
                    write(pipeline)
                await pipeline.execute()
            except WatchError:  # also of a connection that was lost: then it is not known whether this was written
                raise LeaseLost from None
        self.progress = progress
        self._whole_at = time.monotonic()

    async def _due(self, in_s: float) -> bool:
        """Whether the turn still was this driver's."""
        terms = (self.id, f"{self.now + in_s:.6f}", str(self.number))
        return bool(await self._redis.eval(DUE, 2, store.Keys.batches, store.Keys.batch(self.id), *terms))
