"""Threads that do not end, and are taken by one engine at a time."""

import pytest

from scorepool.engine import mlx_thread


class JustTaken(list[mlx_thread.MLXThread]):
    """Another thread takes the last idle lane between a look at it and the pop."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 1


def test_two_engines_that_want_the_last_idle_lane_both_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mlx_thread, "_idle", JustTaken())
    done: list[int] = []
    assert mlx_thread.start(lambda: done.append(1)).wait(10)
    assert done == [1]
