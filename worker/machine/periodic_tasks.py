"""Run tasks while the main thread is busy, each at its own interval, on one thread.

Intervals go on while a Mac sleeps: after it wakes, what was due runs within a second.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from types import TracebackType

from redis.exceptions import RedisError

from scorepool.store.clock import clock_s
from scorepool.store.outage import Outage

JOIN_S = 0.5  # a task that waits for a Redis that does not answer is not waited for
MAX_WAIT_S = 1.0  # a longer wait would go on after a sleep, for what was left of it


@dataclass(slots=True)
class PeriodicTask:
    call: Callable[[], None]
    every_s: float
    due_at: float = 0.0  # clock_s()
    outage: Outage | None = None  # of its Redis, since its first error


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
        while not self._stop.wait(self._wait_s()):
            for task in self.periodic_tasks:
                if task.due_at <= clock_s():
                    task.due_at = clock_s() + task.every_s
                    self._do(task)

    def _wait_s(self) -> float:
        due_in_s = min(task.due_at for task in self.periodic_tasks) - clock_s()
        return max(0.0, min(MAX_WAIT_S, due_in_s))

    def _do(self, task: PeriodicTask) -> None:
        """Run a task and log its error; it runs again after its interval. The main thread handles a lost Redis."""
        name = getattr(task.call, "__name__", "a task").strip("_").replace("_", " ")
        try:
            task.call()
        except RedisError as error:
            task.outage = task.outage or Outage(self.log)
            task.outage.failed("cannot %s: %s", name, error)
        except Exception:
            self.log.exception("cannot %s", name)
        else:
            if task.outage is not None:
                task.outage.ended(f"can {name} again")
