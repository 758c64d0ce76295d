"""MLX threads never end, and each is used by one engine at a time."""

import pytest

from scorepool.engine import mlx_thread


class JustTaken(list[mlx_thread.MLXThread]):
    """A list of idle threads whose last one is taken between a check and the pop."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 1


def test_two_engines_that_race_for_the_last_idle_thread_both_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mlx_thread, "_idle", JustTaken())
    done: list[int] = []
    assert mlx_thread.start(lambda: done.append(1)).wait(60)
    assert done == [1]
