"""A thread that talks to Redis for the main thread, so that a slow or dead connection holds up nothing but itself."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from scorepool.worker.redis_link.progress_connection import socket_timeout

Reply = TypeVar("Reply")
CALL_TIMEOUT_S = 3.0  # without any progress, until a connection is given up. An exchange has a timeout of its own


class Link:
    """Run calls one after the other. Each ends with a call that is posted to the main thread."""

    def __init__(self, post_call: Callable[[Callable[[], object]], None]) -> None:
        self._post_call = post_call
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_left = 0
        self._changed = threading.Condition()  # guards the count
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def call(
        self,
        function: Callable[[], Reply],
        on_reply: Callable[[Reply], object],
        on_error: Callable[[Exception], object],
    ) -> None:
        """Run a function that talks to Redis on the thread, and pass what it returns or raises to the main thread."""

        def run() -> None:
            try:
                with socket_timeout(CALL_TIMEOUT_S):
                    reply = function()
            except Exception as error:
                raised = error  # `error` is unbound when this block ends
                self._post_call(lambda: on_error(raised))
            else:
                self._post_call(lambda: on_reply(reply))

        with self._changed:
            self._num_left += 1
        self._calls.put(run)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all calls have ended; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_left, max(0.0, timeout_s))

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            call()
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
