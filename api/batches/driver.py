"""Claim batches and advance them, one at a time, in a task of the API process."""

import asyncio
import logging

from redis.exceptions import RedisError

from scorepool.api.batches.advance import advance
from scorepool.api.batches.batch_lease import BatchLease, LeaseLost
from scorepool.api.batches.services import BatchServices
from scorepool.api.http import tasks
from scorepool.store.outage import Outage

logger = logging.getLogger(__name__)

POLL_S = 0.5  # pause while no batch is due
RETRY_S = 2.0  # pause if none can be claimed: a loop that never waits would block the process, and its signals


class Driver:
    """Run the task while the application lives."""

    def __init__(self, services: BatchServices) -> None:
        self._services = services
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="batch-driver")

    async def close(self) -> None:
        """Cancel immediately; another process resumes the batch when the lease expires."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def _run(self) -> None:
        outage = Outage(logger)
        while True:
            try:
                lease = await BatchLease.claim(self._services.redis, self._services.settings.lease_s)
                await (asyncio.sleep(POLL_S) if lease is None else self._advance(lease))
                outage.ended("batches go on")
            except (RedisError, OSError) as error:
                outage.failed("batches wait for Redis: %s", error)
                await asyncio.sleep(RETRY_S)
            except Exception:  # a record that cannot be read does not stop the other batches
                logger.exception("a batch cannot be claimed; it is due again after its lease")
                await asyncio.sleep(RETRY_S)

    async def _advance(self, lease: BatchLease) -> None:
        """Advance a batch, then charge its owner for the time. Raise RedisError if home does not answer.

        A batch that fails does not stop the others: it is due again as if its driver had died.
        """
        failure: Exception | None = None
        try:
            due_in_s = await advance(self._services, lease)
        except LeaseLost:
            due_in_s = 0.0
        except Exception as error:
            due_in_s, failure = self._services.settings.lease_s, error
        await lease.release(due_in_s)
        if failure is not None:
            has_traceback = not isinstance(failure, RedisError | OSError)
            logger.error(
                "the batch %s failed to advance; it is due again in %g s: %r",
                *(lease.batch_id, due_in_s, failure),
                exc_info=failure if has_traceback else None,
            )
