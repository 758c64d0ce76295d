"""Two versions side by side, as during an upgrade: what the other one wrote is read, or refused job by job."""

import msgspec
from redis import Redis

from scorepool import wire
from tests.worker.conftest import Workers, failure, generate, outcome, submit


def other(message: object, **changes: object) -> bytes:
    """As a version writes it whose messages have other fields."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(wire.encode(message)) | changes)


def test_a_request_of_a_later_api_is_refused_by_the_name_of_what_is_not_known(redis: Redis, workers: Workers):
    field = submit(redis, other(generate(), speculation="on"))
    kind = submit(redis, other(generate(), type="embed"))
    good = submit(redis, generate())

    workers.start("--burst").wait(timeout=60)

    assert (failure(redis, field).code, failure(redis, field).field) == ("invalid", "speculation")
    assert "'generate'" in failure(redis, kind).message
    assert isinstance(outcome(redis, good), wire.Result)


def test_a_request_of_an_earlier_api_lacks_fields_and_runs_with_their_defaults(redis: Redis, workers: Workers):
    early = submit(redis, msgspec.msgpack.encode({"type": "generate", "model": "demo", "prompt": "a"}))

    workers.start("--burst").wait(timeout=60)

    assert isinstance(outcome(redis, early), wire.Result)


def test_a_record_of_a_later_api_may_have_fields_that_are_not_known(redis: Redis, workers: Workers):
    later = submit(redis, generate(), webhook=True, fields={"priority_class": "gold"})

    workers.start("--burst").wait(timeout=60)

    assert isinstance(outcome(redis, later), wire.Result)
    assert redis.llen("rq:queue:webhooks") == 1
