"""Lease a batch to one driver. Every write is fenced: of two drivers that hold a lease, the late one writes nothing."""

from collections.abc import Callable
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from scorepool import store, wire
from scorepool.api.repositories.batches import BatchProgress
from scorepool.store.clock import clock_s
from scorepool.store.scripts import load
from scorepool.wire.batch import Batch

CLAIM = load("claim_batch.lua")
DUE = load("schedule_batch.lua")


class LeaseLost(Exception):
    """Report that the batch was cancelled, or claimed by another driver. The next lease reads its state again."""


class BatchLease:
    """Hold a batch, as it was at the claim or the last commit."""

    def __init__(
        self,
        redis: Redis,
        lease_s: float,
        batch_id: str,
        owner: str,
        progress: BatchProgress,
        cancel_at: float | None,
        turn: int,
        claimed_at: float,
    ) -> None:
        self._redis = redis
        self._lease_s = lease_s
        self.batch_id = batch_id
        self.owner = owner
        self.progress = progress
        self.cancel_at = cancel_at  # unix, s
        self._fencing_token = turn
        self._clock_offset_s = claimed_at - clock_s()
        self._renewed_at = self._charged_at = clock_s()

    @classmethod
    async def claim(cls, redis: Redis, lease_s: float) -> Self | None:
        """Claim a batch, in turns between owners; return None if no batch is due."""
        claimed: Any = await redis.eval(CLAIM, 1, store.Keys.batches, str(lease_s))
        if not claimed:
            return None
        batch_id, owner, progress, cancel_at, turn, claimed_at = claimed
        return cls(
            redis,
            lease_s,
            batch_id.decode(),
            owner.decode(),
            wire.parse(progress, BatchProgress, "msgpack"),
            None if cancel_at is None else float(cancel_at),
            turn,
            float(claimed_at),
        )

    @property
    def now(self) -> float:
        """Return the unix time in seconds, by Redis's clock at the claim."""
        return clock_s() + self._clock_offset_s

    @property
    def batch(self) -> Batch:
        """Return the batch as its owner sees it."""
        return self.progress.batch

    @property
    def should_renew(self) -> bool:
        """True if a third of the lease is over. `commit` and `extend` renew it.

        A driver that works until the lease is lost has written nothing, and the next driver would not be faster.
        """
        return clock_s() - self._renewed_at > self._lease_s / 3

    async def extend(self) -> None:
        """Renew the lease; raise LeaseLost."""
        if not await self._set_due(self._lease_s):
            raise LeaseLost
        self._renewed_at = clock_s()

    async def check(self, max_age_s: float) -> None:
        """Renew the lease if it was not renewed for so long; raise LeaseLost."""
        if clock_s() - self._renewed_at > max_age_s:
            await self.extend()

    async def release(self, due_in_s: float) -> None:
        """Make the batch due again. A batch that has ended, or that another driver has claimed, stays unchanged.

        Two drivers that cut each other's leases short would never finish.
        """
        await self._set_due(due_in_s)

    async def commit(self, progress: BatchProgress, write: Callable[[Pipeline], None] | None = None) -> None:
        """Write the progress and what `write` adds to the transaction, all or nothing. Raise LeaseLost."""
        key = store.Keys.batch(self.batch_id)
        async with self._redis.pipeline() as pipeline:
            try:
                await pipeline.watch(key)
                if await pipeline.hget(key, "turn") != str(self._fencing_token).encode():
                    raise LeaseLost
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.hset(key, "state", wire.encode(progress))
                pipeline.zadd(store.Keys.batches, {self.batch_id: self.now + self._lease_s}, xx=True)
                if write is not None:
                    write(pipeline)
                await pipeline.execute()
            except WatchError:  # also after a lost connection, when it is not known whether this was written
                raise LeaseLost from None
        self.progress = progress
        self._renewed_at = clock_s()

    async def _set_due(self, in_s: float) -> bool:
        """Set when the batch is due; return False if the lease is lost."""
        charged_at, self._charged_at = self._charged_at, clock_s()
        spent_s = f"{self._charged_at - charged_at:.6f}"
        args = (self.batch_id, f"{self.now + in_s:.6f}", str(self._fencing_token), self.owner, spent_s)
        return bool(await self._redis.eval(DUE, 2, store.Keys.batches, store.Keys.batch(self.batch_id), *args))
