"""The task of an API process that gives batches their turns, one after the other."""

import asyncio
import logging

from redis.exceptions import RedisError

from scorepool.api.batches.batch_lease import BatchLease, LeaseLost
from scorepool.api.batches.run import run
from scorepool.api.http import tasks
from scorepool.api.state import State

logger = logging.getLogger(__name__)

POLL_S = 0.5  # between looks while no batch is due
PAUSE_S = 2.0  # after Redis did not answer


class Driver:
    def __init__(self, parts: State) -> None:
        self._parts = parts
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="batch-driver")

    async def close(self) -> None:
        """In the middle of whatever: the batch goes on elsewhere, or here later."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                turn = await BatchLease.claim(self._parts.redis, self._parts.settings.lease_s)
                await (asyncio.sleep(POLL_S) if turn is None else self._drive(turn))
            except (RedisError, OSError) as error:
                logger.warning("batches wait for Redis: %r", error)
                await asyncio.sleep(PAUSE_S)
            except Exception:  # one batch's fault, or its record's: the others have their turns
                logger.exception("a batch's turn failed; its next comes after the lease")

    async def _drive(self, turn: BatchLease) -> None:
        try:
            due_in_s = await run(self._parts, turn)
        except LeaseLost:
            due_in_s = 0.0
        await turn.release(due_in_s)
