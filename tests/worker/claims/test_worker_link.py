"""The thread that talks to Redis for the main thread: calls in order, replies and errors as posted calls."""

import queue
import threading
import time
from collections.abc import Callable

import pytest

from scorepool.worker.redis_link.link import Link


class MainThread:
    """What the loop does with posted calls, and a link that posts them."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.link = Link(self.calls.put)
        self.replies: list[object] = []
        self.errors: list[Exception] = []

    def call(self, function: Callable[[], object]) -> None:
        self.link.call(function, self.replies.append, self.errors.append)

    def run(self, num_calls: int) -> None:
        for _ in range(num_calls):
            self.calls.get(timeout=10)()


@pytest.fixture
def main() -> MainThread:
    return MainThread()


def test_calls_run_one_after_the_other_in_order(main: MainThread):
    running = []

    def function(number: int) -> tuple[int, int]:
        running.append(number)
        time.sleep(0.001)
        assert running.pop() == number
        return number, threading.get_ident()

    for number in range(50):
        main.call(lambda number=number: function(number))
    main.run(50)

    assert [number for number, _ in main.replies] == [*range(50)]
    assert {thread for _, thread in main.replies} == {main.link._thread.ident}
    assert threading.get_ident() != main.link._thread.ident


def test_an_error_is_posted_and_later_calls_run(main: MainThread):
    error = OSError("gone")

    def fail() -> None:
        raise error

    main.call(fail)
    main.call(lambda: 1)
    main.run(2)

    assert main.errors == [error]
    assert main.replies == [1]


def test_a_reply_is_taken_on_the_main_thread_only(main: MainThread):
    main.call(lambda: 1)
    assert main.link.wait(60)
    assert main.replies == []

    main.run(1)
    assert main.replies == [1]


def test_a_call_that_hangs_holds_up_nobody_who_does_not_wait_for_it(main: MainThread):
    go_on = threading.Event()
    main.call(go_on.wait)
    main.call(lambda: 2)

    started_at = time.monotonic()
    assert not main.link.wait(0.05)
    assert not main.link.wait(-1)
    assert time.monotonic() - started_at < 5

    go_on.set()
    assert main.link.wait(60)
    main.run(2)
    assert main.replies == [True, 2]
