"""RQ's scheduler as a task of the worker. RQ forks it, and Metal does not survive a fork.

RQ lets one scheduler at a time look at a queue, and a killed one keeps its lock for a minute. Ours moves a job in one
step, so all may look, and a retry is not late because a worker died. The locks are held for RQ's own schedulers.
When it is time Redis's clock says, for workers whose clocks differ.
"""

from typing import Any

from redis.client import Pipeline
from rq.queue import Queue
from rq.scheduler import RQScheduler
from rq.utils import now, utcformat

from scorepool.store import Keys
from scorepool.store.scripts import load

SCHEDULE = "redis.call('ZADD', KEYS[1], redis.call('TIME')[1] + ARGV[2], ARGV[1])"
DUE = load("due.lua")


def schedule(pipeline: Pipeline, queue: Queue, job_id: str, delay_s: float) -> None:
    """Have the job queued again so much later."""
    pipeline.eval(SCHEDULE, 1, f"rq:scheduled:{queue.name}", job_id, int(delay_s))


class Scheduler(RQScheduler):
    """Moves jobs whose time has come (retries, `enqueue_at`) to their queues."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._due = self.connection.register_script(DUE)

    def start(self) -> None:
        self._status = self.Status.STARTED
        self.register_birth()

    def tick(self) -> None:
        """Due every `interval` seconds, from one thread."""
        if self.should_reacquire_locks:
            self.acquire_locks()
        self.heartbeat()
        self.enqueue_scheduled_jobs()

    def enqueue_scheduled_jobs(self) -> None:
        queues = [Queue(name, connection=self.connection) for name in sorted(self._queue_names)]
        self._due(
            keys=[
                key for queue in queues for key in (f"rq:scheduled:{queue.name}", queue.key, queue.redis_queues_keys)
            ],
            args=[utcformat(now()), *(Keys.wakeup(queue.name) for queue in queues)],
        )
