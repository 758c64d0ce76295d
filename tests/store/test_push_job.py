"""A job that is queued is on its queue's list or scheduled, also if one of the two keys has a wrong type."""

from datetime import datetime

import pytest
from redis import Redis

from scorepool.store import WEBHOOKS, JobField, RqKeys
from scorepool.store.scripts import load

LIST, SCHEDULED = RqKeys.queue(WEBHOOKS), RqKeys.registry("scheduled", WEBHOOKS)


@pytest.mark.parametrize(
    ("delay_s", "wrong", "status"),
    [(0, None, "queued"), (5, None, "scheduled"), (0, LIST, "scheduled"), (5, SCHEDULED, "queued")],
)
def test_a_job_goes_to_the_other_key_if_one_has_a_wrong_type(
    redis: Redis, delay_s: int, wrong: str | None, status: str
):
    if wrong:
        redis.set(wrong, "wrong")

    redis.eval(load("enqueue.lua"), 0, WEBHOOKS, "a", delay_s, "0")

    found = redis.lrange(LIST, 0, -1) if status == "queued" else redis.zrange(SCHEDULED, 0, -1)
    assert found == [b"a"]
    assert redis.hget(RqKeys.job("a"), JobField.STATUS) == status.encode()


def test_a_replayed_delivery_waits_until_its_queue_is_a_list_again(redis: Redis):
    fields = {JobField.OWNER: "alice", JobField.STATUS: "failed", JobField.EVENT: "job.failed"}
    redis.hset(RqKeys.job("wh_a"), mapping=fields)
    redis.set(LIST, "wrong")

    assert redis.eval(load("replay.lua"), 0, "alice", "0", "wh_a") == [b"replayed"]
    assert redis.zrange(SCHEDULED, 0, -1) == [b"wh_a"]

    redis.delete(LIST)
    redis.eval(load("enqueue_due.lua"), 0, WEBHOOKS)
    assert redis.lrange(LIST, 0, -1) == [b"wh_a"]


def test_a_job_is_enqueued_at_the_time_of_redis(redis: Redis):
    """RQ writes the time of its caller's clock first, as for `rq requeue`."""
    wrong = "2020-01-01T00:00:00.000000Z"
    redis.hset(RqKeys.job("a"), JobField.ENQUEUED_AT, wrong)

    redis.eval(load("enqueue.lua"), 0, WEBHOOKS, "a", 5, "0")
    assert redis.hget(RqKeys.job("a"), JobField.ENQUEUED_AT) == wrong.encode()

    redis.eval(load("enqueue.lua"), 0, WEBHOOKS, "a", 0, "0")
    enqueued_at = datetime.fromisoformat(redis.hget(RqKeys.job("a"), JobField.ENQUEUED_AT).decode())
    assert enqueued_at.timestamp() == pytest.approx(redis.time()[0], abs=2)
