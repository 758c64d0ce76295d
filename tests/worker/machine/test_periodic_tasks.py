"""Periodic tasks whose Redis is away say so once, in words, and when they run again."""

import logging

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from scorepool.worker.machine.periodic_tasks import PeriodicTask, PeriodicTasks


def test_a_task_without_redis_is_one_line_until_it_runs_again(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    errors: list[Exception | None] = [RedisConnectionError("refused")] * 5 + [None, None]

    def _send_heartbeat() -> None:
        if error := errors.pop(0):
            raise error

    task = PeriodicTask(_send_heartbeat, every_s=1.0)
    tasks = PeriodicTasks([task], logging.getLogger("scorepool.test"))
    while errors:
        tasks._do(task)
    assert caplog.messages == ["cannot send heartbeat: refused", "can send heartbeat again after 0 s"]
