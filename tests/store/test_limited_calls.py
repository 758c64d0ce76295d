"""Calls that hang are left behind, few at once, and calls work again when they have ended."""

import time
from threading import Event

import pytest

from scorepool.store.limited_calls import LimitedCalls


def test_a_call_returns_or_raises_what_it_does():
    calls = LimitedCalls()
    assert calls.run(lambda: 7, 30) == 7
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, 30)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_hangs_is_left_behind_and_undone_if_it_returns(fails: bool):
    calls, ends, events = LimitedCalls(), Event(), []

    def hang() -> None:
        ends.wait()
        if fails:
            raise ValueError
        events.append("written")

    def undo() -> None:
        events.append("undone")
        raise OSError

    with pytest.raises(TimeoutError):
        calls.run(hang, 0.05, undo)
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            calls.run(lambda: events.append("called"), 30)
    assert time.monotonic() - begun < 10  # at once
    [(thread, _)] = calls._left
    ends.set()
    thread.join(30)
    assert events == ([] if fails else ["written", "undone"])
    assert calls.run(lambda: 7, 30) == 7


def test_a_call_that_never_ends_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.store.limited_calls.FORGOTTEN_AFTER_S", 0.2)
    calls, ends = LimitedCalls(), Event()
    with pytest.raises(TimeoutError):
        calls.run(ends.wait, 0.05)
    with pytest.raises(TimeoutError):
        calls.run(lambda: 7, 30)
    time.sleep(0.3)
    assert calls.run(lambda: 7, 30) == 7
    ends.set()
