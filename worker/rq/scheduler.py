"""RQ's scheduler as a periodic task of the worker. RQ forks it, and Metal does not survive a fork.

RQ lets one scheduler at a time serve a queue, and a killed one keeps its lock for a minute. This one moves a job in one
step, so every worker may run one, and the death of a worker does not delay a retry. The locks are held for RQ's own
schedulers. Redis's clock decides when a job is due, because the workers' clocks differ.
"""

from typing import Any

from redis import Redis
from rq.scheduler import RQScheduler

from scorepool.store.scripts import load
from scorepool.worker.redis_link.wrong_types import WrongTypeLog

ENQUEUE = load("enqueue.lua")


def enqueue(connection: Redis, queue: str, job_id: str, *, delay_s: int = 0, is_at_front: bool = False) -> None:
    """Put a job that RQ has saved on its queue, at once or after a delay. `connection` may be a pipeline."""
    connection.eval(ENQUEUE, 0, queue, job_id, delay_s, int(is_at_front))


class Scheduler(RQScheduler):
    """Move jobs that are due (retries, `enqueue_at`) to their queues."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wrong_types = WrongTypeLog(self.log)
        self._due = self.connection.register_script(load("enqueue_due.lua"))

    def start(self) -> None:
        self._status = self.Status.STARTED
        with self._wrong_types.tolerate("register the scheduler"):
            self.register_birth()
        with self._wrong_types.tolerate("lock the queues for the scheduler"):
            self.acquire_locks()

    def tick(self) -> None:
        """Run the scheduler once. Call it every `interval` seconds, from one thread."""
        with self._wrong_types.tolerate("heartbeat of the scheduler"):
            self.heartbeat()
        with self._wrong_types.tolerate("lock the queues for the scheduler"):
            if self.should_reacquire_locks:
                self.acquire_locks()
        self.enqueue_scheduled_jobs()

    def enqueue_scheduled_jobs(self) -> None:
        """Put the jobs that are due on their queues."""
        wrong_types = self._due(args=sorted(self._queue_names))
        self._wrong_types.report(wrong_types)
