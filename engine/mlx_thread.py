"""Threads for MLX, which do not end: each does one engine's work, then waits for the next engine's.

MLX keeps Python objects in thread-local storage. Where its thread ends, C++ takes the interpreter's lock once more to
drop them, after `Thread.join` has returned; if the interpreter is being finalised by then, the process is aborted. A
thread that waits for ever is left alone.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

_idle: list["MLXThread"] = []  # append and pop are atomic


class MLXThread:
    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        Thread(target=self._run, name="mlx", daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()


def start(work: Callable[[], None]) -> Event:
    """Run `work`, which raises nothing, on a thread of its own. The event is set when it has returned."""
    try:
        lane = _idle.pop()
    except IndexError:
        lane = MLXThread()
    returned = Event()

    def then_idle() -> None:
        work()
        _idle.append(lane)
        returned.set()

    lane.give(then_idle)
    return returned
