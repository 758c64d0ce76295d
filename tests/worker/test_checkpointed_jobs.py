"""A long job whose workers die goes on where they were: through real processes and kill -9."""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from scorepool import wire
from scorepool.store import JobField, Keys
from tests.tiny_models import TinyModels
from tests.worker.conftest import MODEL, Workers, outcome, submit, until

pytestmark = pytest.mark.timeout(240)
Start = Callable[[int], dict[str, subprocess.Popen[bytes]]]


@pytest.fixture
def start(workers: Workers, redis: Redis, tiny_models: TinyModels, tmp_path: Path) -> Start:
    folder = tiny_models("llama")

    def start_one(name: str) -> subprocess.Popen[bytes]:
        return workers.start(
            *("--name", name),
            worker="tests.worker.counting.CountingWorker",
            SCOREPOOL_MODEL=f"{MODEL}={folder}",
            SCOREPOOL_MODE="exact",
            SCOREPOOL_MAX_BATCH_TOKENS="64",  # two rows a step
            SCOREPOOL_CHECKPOINT_S="0.02",
            SCOREPOOL_LEASE_S="5",
            COUNTED=str(tmp_path / "counted"),
            OPENBLAS_NUM_THREADS="1",
        )

    def start(count: int) -> dict[str, subprocess.Popen[bytes]]:
        """Start workers beside each other."""
        started = {name: start_one(name) for name in (f"mac{number}" for number in range(count))}
        until(lambda: all(redis.exists(Keys.served_model(name)) for name in started), 120)
        return started

    return start


def score(num_items: int) -> wire.Score:
    numbers = random.Random(1)
    texts = [[numbers.randrange(5, 500) for _ in range(32)] for _ in range(num_items)]
    items = [wire.ScoreItem(prompt=ids[:4], completion=ids[4:]) for ids in texts]
    return wire.Score(model=MODEL, items=items, top_logprobs=2)


def result(redis: Redis, job_id: str) -> wire.Result:
    until(lambda: outcome(redis, job_id), 120)
    found = outcome(redis, job_id)
    assert isinstance(found, wire.Result), found
    return found


def num_saved(redis: Redis, job_id: str) -> int:
    return int(redis.hget(f"rq:job:{job_id}", JobField.CHECKPOINT) or 0)


@pytest.mark.parametrize(
    ("num_rows", "kills"),
    [pytest.param(200, [0.5], id="once"), pytest.param(1000, [0.2, 0.5, 0.8], id="thrice", marks=pytest.mark.soak)],
)
def test_deaths_cost_only_the_rows_in_flight_and_change_no_bit(
    redis: Redis, start: Start, tmp_path: Path, num_rows: int, kills: list[float]
):
    started = start(len(kills) + 1)
    job_id = submit(redis, score(num_rows))
    for share in kills:
        until(lambda share=share: num_saved(redis, job_id) >= share * num_rows, 120)
        holder = started[redis.hget(f"rq:job:{job_id}", JobField.WORKER_NAME).decode()]
        holder.kill()
        holder.wait()
    resumed = result(redis, job_id)
    counted = (tmp_path / "counted").stat().st_size
    assert num_rows < counted < 1.1 * num_rows
    assert redis.exists(Keys.checkpoint(job_id)) == 0
    assert not redis.hexists(f"rq:job:{job_id}", JobField.CHECKPOINT)
    counts = {name.decode(): int(number) for name, number in redis.hgetall(Keys.checkpoint_counts).items()}
    assert counts["restored"] > num_rows * sum(kills) - 1
    undisturbed = result(redis, submit(redis, score(num_rows)))
    assert resumed.sequences == undisturbed.sequences
    assert resumed.usage == undisturbed.usage
