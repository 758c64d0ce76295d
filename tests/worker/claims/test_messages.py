"""Messages to one worker: what Lua packs is read as it was, and what any client publishes ends no worker."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from scorepool import store
from scorepool.store.scripts import load
from scorepool.worker import Queue
from scorepool.worker.claims.messages import read_leased, read_message
from scorepool.worker.rq.in_flight import InFlightJob
from tests.worker.conftest import Workers, done, generate, submit, until

PACK = f"{load('wake.lua')}\nreturn pack(ARGV)"
LEASED = [b"demo", b"job", b"execution", b"1700000000.5", b"", b"data", b"[]", b"status", b"started"]
any_strings = st.lists(st.binary(max_size=300), max_size=20)


@given(strings=any_strings)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_lua_packs_is_read_as_it_was(redis: Redis, strings: list[bytes]):
    assert read_message(redis.eval(PACK, 0, *strings)) == strings


@given(
    st.one_of(
        st.binary(max_size=60), any_strings.map(lambda strings: b"".join(b"%d:%b" % (len(s), s) for s in strings))
    )
)
def test_any_bytes_are_a_list_of_strings_or_a_value_error(data: bytes):
    with suppress(ValueError):
        assert sum(map(len, read_message(data))) <= len(data)


@pytest.mark.parametrize("data", [b"5", b"5:", b"5:four", b":a", b"-1:a", b"1:a2:b", b"x:a", b"1:ab"])
def test_a_message_that_is_cut_off_is_refused(data: bytes):
    with pytest.raises(ValueError, match=r"."):
        read_message(data)


def test_a_leased_job_is_read_from_its_message(redis: Redis):
    queues = [Queue(name, connection=redis) for name in ("demo:high", "demo")]

    job = read_leased(LEASED, queues)

    assert (job.queue, job.job_id, job.execution_id, job.leased_at) == (queues[1], "job", "execution", 1700000000.5)
    assert job.request is None
    assert job.fields == {b"data": b"[]", b"status": b"started"}
    assert read_leased([*LEASED[:4], b"request", *LEASED[5:]], queues).request == b"request"


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (0, b"other"),
        (1, b"\xff"),
        (1, b""),
        (1, b"a b"),
        (1, b"a:b"),
        (2, b"\xff"),
        (3, b"soon"),
        (3, b"nan"),
        (3, b"inf"),
        (3, b"1e300"),
        (3, b"-1"),
        (5, b"a"),
    ],
)
def test_a_message_that_holds_no_leased_job_is_refused(redis: Redis, at: int, wrong: bytes):
    with pytest.raises(ValueError, match=r"."):
        read_leased([*LEASED[:at], wrong, *LEASED[at + 1 :]], [Queue("demo", connection=redis)])


@given(
    st.lists(st.binary(max_size=8), max_size=4),
    st.dictionaries(st.sampled_from([b"data", b"meta", b"timeout", b"started_at", b"company"]), st.binary(max_size=12)),
    st.floats().map(lambda number: b"%r" % number),
)
def test_a_forged_job_is_refused_or_can_be_started(extra: list[bytes], fields: dict[bytes, bytes], leased_at: bytes):
    flat = [text for item in fields.items() for text in item]
    connection = Redis()
    with suppress(ValueError):
        claimed = read_leased([*LEASED[:3], leased_at, b"", *flat, *extra], [Queue("demo", connection=connection)])
        assert InFlightJob.from_claimed(claimed, connection, "mac", {}).lease_key == "job:execution"


def test_a_worker_goes_on_after_forged_messages(redis: Redis, workers: Workers):
    workers.start("--name", "mac")
    until(lambda: redis.pubsub_numsub(store.Keys.wake("mac"))[0][1])
    forged = [b"x", b"5:taken", b"5:taken1:\xff", b"6:leased"]
    for leased_at in (b"nan", b"1e300", b"1700000000"):
        forged.append(redis.eval(PACK, 0, "leased", "demo", "job", "execution", leased_at, ""))
        forged.append(redis.eval(PACK, 0, "leased", "demo", "job", "execution", leased_at, "", "data", "x"))
    for message in forged:
        redis.publish(store.Keys.wake("mac"), message)

    job_id = submit(redis, generate())

    until(lambda: job_id in done(redis))
    assert workers.processes[0].poll() is None
