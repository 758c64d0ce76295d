"""Run tasks while the main thread is busy, each at its own interval, on one thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from types import TracebackType

from redis.exceptions import RedisError

JOIN_S = 1.0  # a task that waits for a Redis that does not answer is not waited for


@dataclass(slots=True)
class PeriodicTask:
    call: Callable[[], None]
    every_s: float
    due_at: float = 0.0  # time.monotonic()


class PeriodicTasks:
    """A thread that runs periodic tasks. It is a context manager, and the thread ends with the context."""

    def __init__(self, periodic_tasks: list[PeriodicTask], log: Logger) -> None:
        self.periodic_tasks = periodic_tasks
        self.log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="periodic-tasks", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, min(task.due_at for task in self.periodic_tasks) - time.monotonic())):
            for task in self.periodic_tasks:
                if task.due_at <= time.monotonic():
                    task.due_at = time.monotonic() + task.every_s
                    self._do(task)

    def _do(self, task: PeriodicTask) -> None:
        """Run a task and log its error; it runs again after its interval. The main thread handles a lost Redis."""
        try:
            task.call()
        except RedisError as error:
            self.log.warning("%s: %s", task.call.__qualname__, error)
        except Exception:
            self.log.exception("%s failed", task.call.__qualname__)
