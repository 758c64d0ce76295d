"""RQ's scheduler as a chore of the worker. RQ forks it, and Metal does not survive a fork."""

from rq.scheduler import RQScheduler


class Scheduler(RQScheduler):
    """Moves jobs whose time has come (retries, `enqueue_at`) to their queues, for the queues whose lock it holds."""

    def start(self) -> None:
        self._status = self.Status.STARTED
        self.register_birth()

    def tick(self) -> None:
        """Due every `interval` seconds, from one thread."""
        if self.should_reacquire_locks:
            self.acquire_locks()
        self.heartbeat()
        self.enqueue_scheduled_jobs()
