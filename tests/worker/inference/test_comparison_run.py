"""A compare job reads its base's result without harm to others, and waits while Redis is away."""

from pathlib import Path

import pytest
from redis import Redis

from scorepool import wire
from scorepool.worker.inference.comparison_run import BaseIsPending, ComparisonRun
from scorepool.worker.inference.tokenizing import SLICE_CHARACTERS


def comparison(redis: Redis) -> ComparisonRun:
    request = wire.Compare(model="demo", base="base", items=[wire.ScoreItem(prompt="a", completion="b")])
    return ComparisonRun(request, "j", redis)


def test_the_base_is_pending_while_redis_is_away(tmp_path: Path):
    steps = comparison(Redis(unix_socket_path=str(tmp_path / "absent"))).steps(vocab_size=10)
    next(steps)

    with pytest.raises(BaseIsPending):
        next(steps)


def test_the_result_of_the_base_is_read_on_the_thread_of_long_texts(redis: Redis):
    assert next(comparison(redis).steps(vocab_size=10)) > SLICE_CHARACTERS
