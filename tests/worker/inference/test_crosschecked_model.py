"""Crosschecks of a real model: workers agree within rounding, and one whose weights are corrupted stops."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from scorepool import wire
from scorepool.store import Keys
from tests.tiny_models import TinyModels
from tests.worker.conftest import MODEL, Workers, outcome, submit, until
from tests.worker.inference.test_crosschecker import counts, ran_on, status, submit_and_wait

pytestmark = pytest.mark.timeout(240)
REAL = "scorepool.worker.BatchWorker"
CORRUPTED = "tests.worker.corrupted.CorruptedWorker"


@pytest.fixture
def start(workers: Workers, redis: Redis, tiny_models: TinyModels) -> Callable[..., subprocess.Popen[bytes]]:
    folder: Path = tiny_models("llama")

    def start(name: str, worker: str = REAL, **environ: str) -> subprocess.Popen[bytes]:
        settings = {
            "SCOREPOOL_MODEL": f"{MODEL}={folder}",
            "SCOREPOOL_CROSSCHECK": "1",
            "SCOREPOOL_MAX_JOBS_IN_FLIGHT": "2",
            "SCOREPOOL_LEASE_S": "10",
            "OPENBLAS_NUM_THREADS": "1",
        }
        process = workers.start("--name", name, worker=worker, **(settings | environ))
        until(lambda: redis.exists(Keys.served_model(name)), 120)
        return process

    return start


Start = Callable[..., subprocess.Popen[bytes]]


def score_ids(index: int, length: int = 40) -> wire.Score:
    rows = [[(7 * index + 3 * row + 11 * place) % 500 + 3 for place in range(length)] for row in range(4)]
    items = [wire.ScoreItem(prompt=row[:5], completion=row[5:]) for row in rows]
    return wire.Score(model=MODEL, items=items, score="all", temperature=0.7)


@pytest.mark.parametrize("mode", [pytest.param("default", marks=pytest.mark.soak), "exact"])
def test_workers_of_one_model_agree(redis: Redis, start: Start, mode: str):
    for name in "ab":  # portions of 64 tokens: the rows run in another batch than the job's
        start(name, SCOREPOOL_MODE=mode, SCOREPOOL_MAX_BATCH_TOKENS="64")
    ids = [submit(redis, score_ids(index)) for index in range(6)]
    until(lambda: all(outcome(redis, job_id) for job_id in ids))
    until(lambda: counts(redis) == {"agreed": 6})


def test_a_worker_with_corrupted_weights_stops(redis: Redis, workers: Workers, start: Start):
    start("a")
    start("b")
    start("c", CORRUPTED)
    until(lambda: submit_and_wait(redis, 4) and status(redis, "c").stopped, 120)
    ids = submit_and_wait(redis, 8)
    assert {ran_on(redis, job_id) for job_id in ids} <= {"a", "b"}
    assert [status(redis, name).stopped for name in "ab"] == [None, None]
    assert "worker c differed from " in (status(redis, "c").stopped or "")
