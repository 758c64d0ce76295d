"""Identical jobs through real worker processes: those that wait for a computation survive the death of its worker."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis import Redis

from scorepool import wire
from scorepool.store import Keys
from tests.tiny_models import TinyModels
from tests.worker.conftest import MODEL, Workers, outcome, submit, until

pytestmark = pytest.mark.timeout(240)
LONG = wire.Generate(model=MODEL, prompt=[5, 6, 7], temperature=0, max_tokens=400, ignore_eos=True)
WIP = f"rq:wip:{MODEL}"  # the jobs that workers have

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(workers: Workers, redis: Redis, tiny_models: TinyModels) -> Start:
    folder: Path = tiny_models("llama")

    def start(name: str) -> subprocess.Popen[bytes]:
        process = workers.start(
            "--name",
            name,
            worker="scorepool.worker.BatchWorker",
            SCOREPOOL_MODEL=f"{MODEL}={folder}",
            SCOREPOOL_RESULT_CACHE_BYTES="1000000",
            SCOREPOOL_LEASE_S="2",
            OPENBLAS_NUM_THREADS="1",
        )
        until(lambda: redis.exists(Keys.served_model(name)), 120)
        return process

    return start


def results(redis: Redis, ids: list[str]) -> list[wire.Result]:
    until(lambda: all(outcome(redis, job_id) for job_id in ids), 120)
    found = [outcome(redis, job_id) for job_id in ids]
    assert all(isinstance(each, wire.Result) for each in found), found
    return found  # type: ignore[return-value]


def stop_amid_identical_jobs(redis: Redis, worker: subprocess.Popen[bytes]) -> list[str]:
    """Return the ids of ten jobs that a worker has and has not ended, and leave it stopped."""
    for last in range(8, 40):  # on a busy machine a computation may be over before it is looked at
        ids = [submit(redis, replace(LONG, prompt=[5, 6, last])) for _ in range(10)]
        until(lambda: redis.zcard(WIP) == 10 or any(outcome(redis, job_id) for job_id in ids))  # noqa: B023
        worker.send_signal(signal.SIGSTOP)
        if redis.zcard(WIP) == 10 and not any(outcome(redis, job_id) for job_id in ids):
            return ids
        worker.send_signal(signal.SIGCONT)
        results(redis, ids)
    raise AssertionError("the worker was never stopped amid its jobs")


def test_jobs_that_wait_for_a_killed_worker_are_computed_by_another(redis: Redis, start: Start):
    first = start("first")
    ids = stop_amid_identical_jobs(redis, first)
    first.kill()
    first.wait()
    start("second")
    found = results(redis, ids)
    assert sorted(result.stamp.cached for result in found) == [False] + [True] * 9
    assert len({wire.encode(result.sequences) for result in found}) == 1


def test_another_worker_of_the_same_weights_gives_the_result_again(redis: Redis, start: Start):
    first = start("first")
    [computed] = results(redis, [submit(redis, LONG)])
    until(lambda: redis.zcard(Keys.result_cache_uses) == 1)
    first.terminate()
    first.wait()
    start("second")
    [again] = results(redis, [submit(redis, LONG)])
    assert (computed.stamp.cached, again.stamp.cached) == (False, True)
    assert again.sequences == computed.sequences
    assert again.usage == replace(computed.usage, cached_tokens=3)
