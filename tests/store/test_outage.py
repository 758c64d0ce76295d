"""What fails until Redis is back is logged at once, once a minute, and when it is over."""

import logging

import pytest

from scorepool.store import outage


class Clock:
    now_s = 100.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(outage, "clock_s", lambda: fake.now_s)
    return fake


def test_an_outage_is_logged_once_a_minute_and_at_its_end(now: Clock, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    redis = outage.Outage(logging.getLogger("scorepool.test"))
    redis.ended("Redis is back")
    assert caplog.messages == []
    for _ in range(600):  # 2 minutes
        redis.failed("Redis is away (%s)", "refused")
        now.now_s += 0.2
    assert caplog.messages == ["Redis is away (refused)"] * 2
    redis.ended("Redis is back")
    redis.ended("Redis is back")
    assert caplog.messages[2:] == ["Redis is back after 120 s"]
    redis.failed("Redis is away (%s)", "again")  # the next outage begins at once
    assert caplog.messages[3:] == ["Redis is away (again)"]
