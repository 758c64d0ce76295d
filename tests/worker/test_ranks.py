"""Workers that hold one model together under mlx.launch: jobs run on all ranks, and no job is lost with one of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from redis import Redis

from scorepool import wire
from scorepool.local.commands import DEMO_MODEL
from scorepool.store import Settings, SettingsError
from scorepool.worker.engine_settings import engine_settings
from tests.engine.test_ranks import free_ports
from tests.worker.conftest import Workers, done, outcome, submit, until

SCORES = wire.Score(model="demo", prompt="If the file", items=[wire.ScoreItem(completion=" does not exist")])


@contextmanager
def launched(redis_url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the worker as docs/deploy.md says, with two ranks on this machine."""
    bin_folder = Path(sys.executable).parent
    command = [
        *(str(bin_folder / "mlx.launch"), "-n", "2", "--backend", "ring", "-p", str(free_ports(1)[0])),
        *("--", str(bin_folder / "scorepool"), "worker", "--model", f"demo={DEMO_MODEL}", "--ranks", "2"),
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"SCOREPOOL_REDIS_URL": redis_url, "SCOREPOOL_LEASE_S": "2"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()
        print(log.read_text())


def logprobs(redis: Redis, job_id: str) -> list[float | None]:
    result = outcome(redis, job_id)
    assert isinstance(result, wire.Result), result
    return [logprob for sequence in result.sequences for logprob in sequence.logprobs]


def follower_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    [follower] = [child for child in children if "scorepool.worker.follow" in child.cmdline()]
    return follower


def first_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the `rq worker` process, whose signals end it after its jobs."""
    children = psutil.Process(process.pid).children(recursive=True)
    [first] = [child for child in children if "scorepool.worker.BatchWorker" in child.cmdline()]
    return first


@pytest.mark.soak
def test_jobs_run_on_two_ranks_and_survive_the_death_of_one(
    redis: Redis, redis_url: str, workers: Workers, tmp_path: Path
):
    with launched(redis_url, tmp_path / "ranks.log") as process:
        first = submit(redis, SCORES)
        until(lambda: outcome(redis, first) or process.poll() is not None, 250)
        until(lambda: follower_of(process), 60)
        long = [submit(redis, wire.Generate(model="demo", prompt="a", max_tokens=1500, seed=n)) for n in range(3)]
        until(lambda: redis.zcard("rq:wip:demo") == 3)

        follower_of(process).send_signal(signal.SIGKILL)

        process.wait(timeout=120)  # the others end, too
        assert not done(redis)[1:]
    worker = "scorepool.worker.BatchWorker"
    workers.start("--burst", worker=worker, SCOREPOOL_MODEL=f"demo={DEMO_MODEL}").wait(timeout=300)
    again = submit(redis, SCORES)
    workers.start("--burst", worker=worker, SCOREPOOL_MODEL=f"demo={DEMO_MODEL}").wait(timeout=300)

    assert sorted(done(redis)) == sorted([first, *long, again])
    assert logprobs(redis, first) == pytest.approx(logprobs(redis, again), abs=1e-4)
    result = outcome(redis, first)
    assert isinstance(result, wire.Result)
    assert "2 ranks" in result.stamp.backend


@pytest.mark.soak
def test_the_first_rank_drains_at_a_signal_and_the_others_end_with_it(redis: Redis, redis_url: str, tmp_path: Path):
    with launched(redis_url, tmp_path / "ranks.log") as process:
        job_id = submit(redis, wire.Generate(model="demo", prompt="a", max_tokens=100))
        until(lambda: redis.zcard("rq:wip:demo") == 1 or process.poll() is not None, 250)
        follower = follower_of(process)
        follower.terminate()  # as mlx.launch does with all of them: the first one still needs it

        first_of(process).terminate()

        process.wait(timeout=120)
        assert not follower.is_running()
    assert logprobs(redis, job_id)
    assert "the first rank has closed" in (tmp_path / "ranks.log").read_text()


def test_a_worker_with_ranks_that_nobody_launched_is_refused(redis_url: str):
    scorepool = str(Path(sys.executable).parent / "scorepool")
    found = subprocess.run(
        [scorepool, "worker", "--model", f"demo={DEMO_MODEL}", "--ranks", "2"],
        env=os.environ | {"SCOREPOOL_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert found.returncode == 1
    assert "this process has no rank; start one on each machine with `mlx.launch" in found.stderr


def test_ranks_refuse_to_unload_idle_weights():
    settings = Settings(ranks=2, idle_unload_s=600)
    with pytest.raises(SettingsError, match=r"SCOREPOOL_RANKS is 2 and SCOREPOOL_IDLE_UNLOAD_S 600.*leave one"):
        engine_settings("folder", settings)
