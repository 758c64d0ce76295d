"""Call for a limited time what may hang, such as the files of a share whose server is away."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")
FORGOTTEN_AFTER_S = 600.0


class LimitedCalls:
    """Calls that have a thread each, which is left behind if one takes too long. Any thread may call `run`.

    While such a thread is left, other calls fail at once: what it might still write is not written by another one
    meanwhile. After FORGOTTEN_AFTER_S it is taken for one that never ends, as those of a share that was mounted anew
    may be, and calls are tried again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left: list[tuple[Thread, float]] = []  # with the time.monotonic() from which it is forgotten

    def run(self, call: Callable[[], T], timeout_s: float, undo: Callable[[], object] = lambda: None) -> T:
        """Return what the call returns, or raise what it raises. Raises TimeoutError if it takes too long.

        If a call that was left behind returns after all, `undo` runs. What that raises is ignored.
        """
        with self._lock:
            now = time.monotonic()
            self._left = [(thread, until) for thread, until in self._left if thread.is_alive() and now < until]
            if self._left:
                raise TimeoutError
        reply: Future[T] = Future()
        thread = Thread(target=_run, args=(call, reply, undo), name="limited-call", daemon=True)
        thread.start()
        wait([reply], timeout_s)
        if reply.cancel():
            with self._lock:
                self._left.append((thread, time.monotonic() + FORGOTTEN_AFTER_S))
            raise TimeoutError
        return reply.result()


def _run(call: Callable[[], T], reply: Future[T], undo: Callable[[], object]) -> None:
    """Make a call and pass its reply on, unless that was canceled."""
    try:
        result = call()
    except Exception as error:
        if reply.set_running_or_notify_cancel():
            reply.set_exception(error)
        return
    if reply.set_running_or_notify_cancel():
        reply.set_result(result)
        return
    with suppress(Exception):
        undo()
