"""What must go on while the main thread is busy: chores, each at its own interval, on one thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from types import TracebackType

from redis.exceptions import RedisError


@dataclass(slots=True)
class PeriodicTask:
    call: Callable[[], None]
    every_s: float
    due_at: float = 0.0  # time.monotonic()


class PeriodicTasks:
    """Use as a context: the thread ends with it."""

    def __init__(self, chores: list[PeriodicTask], log: Logger) -> None:
        self.chores = chores
        self.log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, min(chore.due_at for chore in self.chores) - time.monotonic())):
            for chore in self.chores:
                if chore.due_at <= time.monotonic():
                    chore.due_at = time.monotonic() + chore.every_s
                    self._do(chore)

    def _do(self, chore: PeriodicTask) -> None:
        """A chore that fails is due again in its turn: the main thread decides what a lost Redis means."""
        try:
            chore.call()
        except RedisError as error:
            self.log.warning("%s: %s", chore.call.__qualname__, error)
        except Exception:
            self.log.exception("%s failed", chore.call.__qualname__)
