"""Threads for MLX that never end: each does the work of one engine, then waits for the next engine's.

MLX keeps Python objects in thread-local storage. When its thread ends, C++ takes the interpreter's lock once more to
drop them, after `Thread.join` has returned; if the interpreter is being finalised by then, the process is aborted. A
thread that waits for ever avoids this.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

_idle: list["MLXThread"] = []  # append and pop are atomic


class MLXThread:
    """A daemon thread that runs one piece of work after the other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        Thread(target=self._run, name="mlx", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` after what was submitted before."""
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()


def start(work: Callable[[], None]) -> Event:
    """Run `work`, which must not raise, on a thread of its own. The event is set when it has returned."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = MLXThread()
    returned = Event()

    def run_and_idle() -> None:
        work()
        _idle.append(thread)
        returned.set()

    thread.submit(run_and_idle)
    return returned
