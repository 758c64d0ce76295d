"""A worker without jobs drops its weights. It stays listed, and its next job loads them again, or goes back."""

import shutil
from pathlib import Path

import pytest
from redis import Redis

from scorepool import store, wire
from tests.worker.conftest import Workers, done, outcome, status, submit, until

QUEUES = ("demo",)


@pytest.fixture
def model(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "scorepool" / "models" / "demo", tmp_path / "model"))


def start(workers: Workers, model: Path, state: Path) -> None:
    workers.start(
        *("--name", "mac"),
        worker="scorepool.worker.BatchWorker",
        queues=QUEUES,
        SCOREPOOL_MODEL=f"demo={model}",
        SCOREPOOL_IDLE_UNLOAD_S="0.2",
        SCOREPOOL_STATE_DIR=str(state),
    )


def is_loaded(redis: Redis) -> bool | None:
    card = redis.get(store.Keys.served_model("mac"))
    load = wire.parse(card, wire.ServedModel, "msgpack").load if card else None
    return load.is_loaded if load else None


def test_a_worker_drops_its_weights_while_it_is_idle_and_loses_no_job(
    redis: Redis, workers: Workers, model: Path, tmp_path: Path
):
    state = tmp_path / "state"
    request = wire.Generate(model="demo", prompt="hello", max_tokens=5, seed=1)
    start(workers, model, state)
    first = submit(redis, request)
    until(lambda: first in done(redis))
    until(lambda: is_loaded(redis) is False)  # with a registration that is renewed, so new jobs are accepted

    again = submit(redis, request)
    until(lambda: again in done(redis))
    one, other = outcome(redis, first), outcome(redis, again)
    assert isinstance(one, wire.Result)
    assert one.sequences == other.sequences
    assert one.stamp == other.stamp
    until(lambda: workers.log.count("idle: dropped the weights") == 2)
    assert workers.log.count("loaded the weights again") == 1

    (model / "model.safetensors").unlink()
    kept = [submit(redis, request) for _ in range(3)]
    assert workers.processes[-1].wait(timeout=60) == 1
    assert workers.log.splitlines()[-1].startswith("scorepool: the weights cannot be loaded again: ")
    assert [status(redis, job_id) for job_id in kept] == ["queued"] * 3
    assert redis.hmget(f"rq:job:{kept[0]}", "retries_left") == [b"3"]

    workers.start("--burst")
    until(lambda: {*kept} <= {*done(redis)})
