"""SCOREPOOL_CROSSCHECK: a second worker computes a share of the score jobs, and a worker that is outvoted stops."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from scorepool import wire
from scorepool.store import Keys, RqKeys
from scorepool.worker.inference.crosscheck_mail import MAX_MESSAGES, is_chosen
from tests.worker.conftest import MODEL, Workers, done, generate, outcome, submit, until

Start = Callable[..., subprocess.Popen[bytes]]
POLL_S = 0.05


@pytest.fixture
def start(workers: Workers, redis: Redis) -> Start:
    """Start a worker by its name, with every score job checked, and wait until it is registered with its status."""

    def start(name: str, worker: str = "FakeWorker", **environ: str) -> subprocess.Popen[bytes]:
        settings = {"SCOREPOOL_CROSSCHECK": "1", "SCOREPOOL_MAX_JOBS_IN_FLIGHT": "2", "SCOREPOOL_LEASE_S": "3"}
        settings |= {"FAKE_CROSSCHECK_POLL_S": str(POLL_S)}
        process = workers.start("--name", name, worker=worker, **(settings | environ))
        until(lambda: card(redis, name))
        return process

    return start


def card(redis: Redis, name: str) -> wire.ServedModel | None:
    packed = redis.get(Keys.served_model(name))
    return None if packed is None else wire.parse(packed, wire.ServedModel, "msgpack")


def status(redis: Redis, name: str) -> wire.CrosscheckStatus:
    found = card(redis, name)
    assert found is not None
    assert found.crosscheck is not None
    return found.crosscheck


def score(index: int = 0, **fields: Any) -> wire.Score:
    items = [wire.ScoreItem(prompt=f"prompt {index}", completion=" ab"), wire.ScoreItem(prompt="p", completion=" abc")]
    return wire.Score(model=MODEL, items=items, **fields)


def submit_and_wait(redis: Redis, num: int, **fields: Any) -> list[str]:
    ids = [submit(redis, score(index, **fields)) for index in range(num)]
    until(lambda: all(outcome(redis, job_id) for job_id in ids))
    return ids


def counts(redis: Redis) -> dict[str, int]:
    return {name.decode(): int(count) for name, count in redis.hgetall(Keys.crosscheck_counts).items()}


def ran_on(redis: Redis, job_id: str) -> str:
    return (redis.hget(RqKeys.job(job_id), "worker_name") or b"").decode()


def test_the_worker_that_two_others_outvote_stops(redis: Redis, workers: Workers, start: Start):
    start("a")
    start("b")
    liar = start("c", "LyingWorker")
    ids = []
    deadline = time.monotonic() + 60
    while status(redis, "c").stopped is None:
        assert time.monotonic() < deadline
        ids += submit_and_wait(redis, 3)
    ids += (later := submit_and_wait(redis, 12))

    assert liar.poll() is None  # it shows its reason
    reason = status(redis, "c").stopped
    assert reason is not None
    assert "worker c differed from " in reason
    assert "and differed again, by up to 0.25 nats" in reason
    for honest in ("a", "b"):
        assert (status(redis, honest).stopped, status(redis, honest).difference) == (None, None)
    assert "c" not in {ran_on(redis, job_id) for job_id in later}
    assert sorted(done(redis)) == sorted(ids)
    assert all(isinstance(outcome(redis, job_id), wire.Result) for job_id in ids)
    assert counts(redis)["stopped"] == 1
    assert counts(redis)["differed"] >= 1
    errors = [line for line in workers.log.splitlines() if "crosscheck of job" in line]
    assert any("workers " in line and "first at sequence 0, position 11, token 98" in line for line in errors)
    assert redis.hget(RqKeys.worker("c"), "state") == b"suspended"
    assert redis.exists(Keys.recent_model(MODEL))


def test_a_restart_clears_a_stop(redis: Redis, start: Start):
    start("a")
    start("b")
    liar = start("c", "LyingWorker")
    until(lambda: submit_and_wait(redis, 2) and status(redis, "c").stopped)
    liar.terminate()
    assert liar.wait(60) == 0

    start("c")

    until(lambda: "c" in {ran_on(redis, job_id) for job_id in submit_and_wait(redis, 6)})
    assert status(redis, "c") == wire.CrosscheckStatus(share=1.0)


def test_jobs_in_flight_of_a_stopped_worker_run_elsewhere(redis: Redis, workers: Workers, start: Start):
    liar = start("c", "LyingWorker", FAKE_STEP_S="0.05")
    long_job = submit(redis, generate(max_tokens=100_000))
    until(lambda: ran_on(redis, long_job) == "c")
    start("a", SCOREPOOL_MAX_JOBS_IN_FLIGHT="1", FAKE_STEP_S="0.001")
    start("b", SCOREPOOL_MAX_JOBS_IN_FLIGHT="1", FAKE_STEP_S="0.001")

    until(lambda: submit_and_wait(redis, 6) and status(redis, "c").stopped)

    until(lambda: ran_on(redis, long_job) in ("a", "b"))
    assert liar.poll() is None


def test_of_two_workers_that_differ_none_stops_and_both_show_it(redis: Redis, workers: Workers, start: Start):
    start("a")
    start("c", "LyingWorker")

    until(lambda: submit_and_wait(redis, 2) and status(redis, "a").difference and status(redis, "c").difference)

    for name in ("a", "c"):
        shown = status(redis, name)
        assert shown.stopped is None
        assert shown.difference is not None
        assert "differ by up to 0.25 nats; no third worker can decide" in shown.difference
    [*lines] = [line for line in workers.log.splitlines() if "no third worker can decide" in line]
    assert "workers a and c" in lines[0] or "workers c and a" in lines[0]
    assert "stopped" not in counts(redis)
    until(lambda: {ran_on(redis, job_id) for job_id in submit_and_wait(redis, 6)} == {"a", "c"})


def test_the_status_which_every_key_may_read_names_neither_job_nor_token(redis: Redis, workers: Workers, start: Start):
    start("a")
    start("c", "LyingWorker")
    ids = submit_and_wait(redis, 2)
    until(lambda: status(redis, "a").difference)
    shown = status(redis, "a").difference or ""
    assert "token" not in shown
    assert not any(job_id in shown for job_id in ids)
    [line, *_] = [line for line in workers.log.splitlines() if "first at sequence 0, position 11, token 98" in line]
    assert any(job_id in line for job_id in ids)


def test_a_worker_that_is_wrong_once_is_reported_and_goes_on(redis: Redis, workers: Workers, start: Start):
    start("a")
    start("b")
    start("c", "WaveringWorker")

    until(lambda: submit_and_wait(redis, 2) and status(redis, "c").difference)

    assert "agreed when it computed the job again" in (status(redis, "c").difference or "")
    assert [status(redis, name).stopped for name in "abc"] == [None] * 3
    assert [status(redis, name).difference for name in "ab"] == [None] * 2


def test_workers_without_a_majority_go_on(redis: Redis, workers: Workers, start: Start):
    """Two liars agree with each other, and the one honest worker is outvoted: two workers always remain."""
    for name in "ab":
        start(name, "LyingWorker")
    start("c")
    until(lambda: submit_and_wait(redis, 2) and status(redis, "c").stopped)
    submit_and_wait(redis, 4)
    assert [status(redis, name).stopped for name in "ab"] == [None] * 2


def test_the_only_worker_checks_nothing(redis: Redis, workers: Workers, start: Start):
    start("a")
    submit_and_wait(redis, 5)
    time.sleep(10 * POLL_S)
    assert not redis.exists(Keys.crosscheck_counts)
    assert not list(redis.scan_iter(Keys.crosscheck_inbox("*")))
    assert status(redis, "a") == wire.CrosscheckStatus(share=1.0)


@pytest.mark.parametrize(
    "other",
    [{"FAKE_FINGERPRINT": "e" * 64}, {"SCOREPOOL_CROSSCHECK": "0"}],
    ids=["of other weights", "that takes no part"],
)
def test_a_worker_is_not_asked(redis: Redis, start: Start, other: dict[str, str]):
    start("a")
    start("c", "LyingWorker", **other)
    submit_and_wait(redis, 6)
    time.sleep(10 * POLL_S)
    assert counts(redis) == {}
    assert not list(redis.scan_iter(Keys.crosscheck_inbox("*")))


def test_just_the_share_is_checked_and_only_score_jobs(redis: Redis, start: Start):
    share = 0.2
    for name in "ab":
        start(name, SCOREPOOL_CROSSCHECK=str(share))
    ids = submit_and_wait(redis, 60)
    others = [submit(redis, generate()) for _ in range(20)]
    until(lambda: all(outcome(redis, job_id) for job_id in others))
    expected = sum(is_chosen(job_id, share) for job_id in ids)

    until(lambda: counts(redis).get("agreed") == expected)
    time.sleep(10 * POLL_S)

    assert counts(redis) == {"agreed": expected}


def test_the_choice_follows_from_the_id_and_keeps_to_the_share():
    ids = [f"{index:032x}" for index in range(20_000)]
    chosen = {job_id for job_id in ids if is_chosen(job_id, 0.1)}
    assert 1_800 <= len(chosen) <= 2_200
    assert chosen <= {job_id for job_id in ids if is_chosen(job_id, 0.2)}
    assert not any(is_chosen(job_id, 0.0) for job_id in ids)
    assert all(is_chosen(job_id, 1.0) for job_id in ids)


def test_a_dead_second_worker_delays_no_result_and_leaves_nothing_for_ever(redis: Redis, start: Start):
    start("a")
    frozen = start("b")
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        ids = [submit(redis, score(index)) for index in range(8)]
        until(lambda: all(outcome(redis, job_id) for job_id in ids if ran_on(redis, job_id) == "a"))
        until(lambda: redis.llen(Keys.crosscheck_inbox("b")) > 0)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: all(outcome(redis, job_id) for job_id in ids))
    until(lambda: counts(redis))

    assert sorted(done(redis)) == sorted(ids)
    found = list(redis.scan_iter(f"{Keys.crosscheck_counts[:-1]}*"))
    assert found
    assert all(redis.ttl(key) != -1 for key in found)  # an inbox may have been emptied meanwhile


def test_a_worker_that_is_behind_gets_no_more_checks(redis: Redis, start: Start):
    start("a")
    frozen = start("b", SCOREPOOL_LEASE_S="60")
    os.kill(frozen.pid, signal.SIGSTOP)
    inbox = Keys.crosscheck_inbox("b")
    redis.rpush(inbox, *["x"] * MAX_MESSAGES)
    try:
        job_id = submit(redis, score())
        until(lambda: outcome(redis, job_id))
        time.sleep(10 * POLL_S)
        assert redis.llen(inbox) == MAX_MESSAGES
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: redis.llen(inbox) == 0)  # messages that cannot be read are dropped
    until(lambda: submit_and_wait(redis, 2) and counts(redis).get("agreed"))


def test_messages_from_anybody_neither_end_nor_stop_a_worker(redis: Redis, workers: Workers, start: Start):
    process = start("a")
    good = wire.Crosscheck(
        job_id="j",
        temperature=1.0,
        token_ids=[[1, 2, 3]],
        first=[1],
        computations=[
            wire.Computation(worker="b", stamp=card(redis, "a").stamp, logprobs=[wire.Floats([-0.5, -0.5])])  # type: ignore[union-attr]
        ],
    )
    plain = wire.parse(wire.encode(good), dict, "msgpack")
    changed: list[dict[str, Any]] = [
        {"token_ids": []},
        {"token_ids": [[1]]},
        {"first": [-1]},
        {"first": [7]},
        {"first": [1, 2]},
        {"computations": []},
        {"computations": plain["computations"] * 4},
        {"token_ids": [[1, 2, -3]]},
        {"token_ids": [[1, 2, 2**40]]},
        {"temperature": "hot"},
        {"type": "unknown"},
    ]
    inbox = Keys.crosscheck_inbox("a")
    for change in changed:
        redis.rpush(inbox, wire.encode(plain | change))
    redis.rpush(inbox, b"\xff", wire.encode(replace_workers(good, "b", "c", "d")), wire.encode(good))

    until(lambda: counts(redis).get("agreed"))

    redis.delete(inbox)
    redis.set(inbox, "a string")
    submit_and_wait(redis, 2)
    assert process.poll() is None
    assert status(redis, "a").stopped is None
    assert counts(redis) == {"agreed": 1}


def replace_workers(check: wire.Crosscheck, *workers: str) -> wire.Crosscheck:
    """Return the check with a computation of each worker, the first of which differs."""
    [one] = check.computations
    computations = [
        wire.Computation(worker=name, stamp=one.stamp, logprobs=[wire.Floats([-9.0, -9.0])]) for name in workers
    ]
    return wire.Crosscheck(
        job_id="j", temperature=1.0, token_ids=check.token_ids, first=check.first, computations=computations
    )


@pytest.mark.parametrize("fields", [{"score": "all", "top_logprobs": 2}, {"temperature": 0.5}])
def test_every_kind_of_score_job_agrees(redis: Redis, start: Start, fields: dict[str, Any]):
    for name in "ab":
        start(name)
    submit_and_wait(redis, 3, **fields)
    until(lambda: counts(redis) == {"agreed": 3})


def test_jobs_end_if_the_counters_have_a_wrong_type(redis: Redis, start: Start):
    redis.set(Keys.crosscheck_counts, "a string")
    processes = [start(name) for name in "ab"]
    ids = submit_and_wait(redis, 3)
    time.sleep(10 * POLL_S)
    assert sorted(done(redis)) == sorted(ids)
    assert [process.poll() for process in processes] == [None, None]
