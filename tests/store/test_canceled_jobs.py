"""RQ's registry of canceled jobs lists each for as long as it is kept, and a canceled job leaves its queue."""

import time

from redis import Redis

from scorepool.store import JobField, Keys, RqKeys
from scorepool.store.scripts import load

CANCELED = RqKeys.registry("canceled", "demo")


def cancel(redis: Redis, job_id: str, kept_s: int) -> None:
    """Cancel a waiting job, which is kept for so long."""
    fields = {JobField.OWNER: "alice", JobField.STATUS: "deferred", JobField.ORIGIN: "demo"}
    redis.hset(RqKeys.job(job_id), mapping=fields | {JobField.FAILURE_TTL: kept_s})
    answer = redis.register_script(load("cancel.lua"))(
        args=[job_id, "alice", b"outcome", 3600, "2026-01-01T00:00:00Z", b""]
    )
    assert answer == [b"canceled"]


def test_a_job_that_is_kept_for_a_short_time_does_not_unlist_those_that_are_kept_longer(redis: Redis):
    cancel(redis, "long", kept_s=3600)
    redis.zadd(CANCELED, {"long": time.time() - 100})

    cancel(redis, "short", kept_s=60)

    assert set(redis.zrange(CANCELED, 0, -1)) == {b"long", b"short"}


def test_the_ids_of_expired_jobs_do_not_add_up(redis: Redis):
    for index in range(200):
        cancel(redis, f"j{index}", kept_s=60)
        redis.delete(RqKeys.job(f"j{index}"))

    assert redis.zcard(CANCELED) < 50


def test_a_canceled_job_leaves_its_owners_backlog(redis: Redis):
    redis.rpush(Keys.backlog("demo", "alice"), "a", "b", "c")

    cancel(redis, "b", kept_s=60)

    assert redis.lrange(Keys.backlog("demo", "alice"), 0, -1) == [b"a", b"c"]


def test_a_queue_whose_backlog_was_canceled_and_deleted_leaves_nothing(redis: Redis):
    redis.sadd(Keys.unserved_of("alice"), "demo")
    redis.zadd(Keys.fair_share("demo"), {"alice": 1})
    redis.rpush(Keys.backlog("demo", "alice"), "a", "b")
    redis.zadd(RqKeys.registry("deferred", "demo"), {"a": 1, "b": 1})

    for job_id in ("a", "b"):
        cancel(redis, job_id, kept_s=60)
        assert redis.exists(Keys.fair_share("demo"))
        assert redis.eval(load("delete.lua"), 0, job_id, "alice") == [b"deleted"]

    assert not redis.exists(Keys.fair_share("demo"), Keys.unserved_of("alice"))
