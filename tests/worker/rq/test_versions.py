"""Jobs written by another release, as during an upgrade: a worker runs them or fails single ones."""

import msgspec
from redis import Redis

from scorepool import wire
from tests.worker.conftest import Workers, failure, generate, outcome, submit


def with_fields(message: object, **changes: object) -> bytes:
    """Encode a message with other fields, as another release does."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(wire.encode(message)) | changes)


def test_a_request_with_an_unknown_field_or_type_fails_and_the_failure_names_it(redis: Redis, workers: Workers):
    field = submit(redis, with_fields(generate(), speculation="on"))
    kind = submit(redis, with_fields(generate(), type="translate"))
    good = submit(redis, generate())

    workers.start("--burst").wait(timeout=60)

    assert (failure(redis, field).code, failure(redis, field).field) == ("invalid", "speculation")
    assert "'generate'" in failure(redis, kind).message
    assert isinstance(outcome(redis, good), wire.Result)


def test_absent_fields_of_a_request_have_their_defaults(redis: Redis, workers: Workers):
    least = submit(redis, msgspec.msgpack.encode({"type": "generate", "model": "demo", "prompt": "a"}))

    workers.start("--burst").wait(timeout=60)

    assert isinstance(outcome(redis, least), wire.Result)


def test_unknown_fields_of_a_job_record_are_ignored(redis: Redis, workers: Workers):
    newer = submit(redis, generate(), webhook=True, fields={"priority_class": "gold"})

    workers.start("--burst").wait(timeout=60)

    assert isinstance(outcome(redis, newer), wire.Result)
    assert redis.llen("rq:queue:webhooks") == 1
