"""A job that is queued is on its queue's list or scheduled, also if one of the two keys has a wrong type."""

from datetime import datetime

import pytest
from redis import Redis

from scorepool.store import LIST_LENGTH, WEBHOOKS, JobField, Keys, RqKeys
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


def add_deliveries(redis: Redis, owner: str, count: int, status: str) -> list[str]:
    ids = [f"wh_{owner}{number}" for number in range(count)]
    for delivery_id in ids:
        fields = {JobField.OWNER: owner, JobField.STATUS: status, JobField.EVENT: "job.failed"}
        redis.hset(RqKeys.job(delivery_id), mapping=fields)
    return ids


@pytest.mark.parametrize("script", ["replay.lua", "enqueue_due.lua"])
def test_deliveries_that_are_sent_again_leave_the_next_turn_to_another_owner(redis: Redis, script: str):
    if script == "replay.lua":
        ids = add_deliveries(redis, "alice", 300, "failed")
        assert redis.eval(load(script), 0, "alice", "1", *ids) == [b"replayed"] * 300
        assert redis.eval(load(script), 0, "alice", "0", ids[-1]) == [b"deferred"]  # it is pending
    else:
        ids = add_deliveries(redis, "alice", 300, "scheduled")
        redis.zadd(SCHEDULED, {delivery_id: float(number) for number, delivery_id in enumerate(ids)})
        redis.eval(load(script), 0, WEBHOOKS)

    assert redis.lrange(LIST, 0, -1) == [delivery_id.encode() for delivery_id in ids[:LIST_LENGTH]]
    [bobs] = add_deliveries(redis, "bob", 1, "failed")
    redis.eval(load("replay.lua"), 0, "bob", "1", bobs)
    assert redis.zscore(Keys.fair_share(WEBHOOKS), "bob") == redis.zscore(Keys.fair_share(WEBHOOKS), "alice")
    assert redis.llen(Keys.backlog(WEBHOOKS, "alice")) == 300 - LIST_LENGTH


def test_a_job_is_enqueued_at_the_time_of_redis(redis: Redis):
    """RQ writes the time of its caller's clock first, as for `rq requeue`."""
    wrong = "2020-01-01T00:00:00.000000Z"
    redis.hset(RqKeys.job("a"), JobField.ENQUEUED_AT, wrong)

    redis.eval(load("enqueue.lua"), 0, WEBHOOKS, "a", 5, "0")
    assert redis.hget(RqKeys.job("a"), JobField.ENQUEUED_AT) == wrong.encode()

    redis.eval(load("enqueue.lua"), 0, WEBHOOKS, "a", 0, "0")
    enqueued_at = datetime.fromisoformat(redis.hget(RqKeys.job("a"), JobField.ENQUEUED_AT).decode())
    assert enqueued_at.timestamp() == pytest.approx(redis.time()[0], abs=2)
