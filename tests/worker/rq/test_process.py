"""Behaviour that the worker shares with RQ's own: options, `rq info`, scheduler, queue order, registration."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from redis import Redis
from rq.command import send_shutdown_command, send_stop_job_command
from rq.worker_registration import clean_worker_registry

from scorepool import store, wire
from scorepool.worker import Queue
from tests.worker.conftest import Workers, done, failure, generate, outcome, status, submit, until


def worker_keys(redis: Redis) -> list[bytes]:
    return redis.keys("rq:worker:*")


def test_rq_info_shows_a_busy_worker_and_its_executing_jobs(redis: Redis, workers: Workers):
    for _ in range(12):
        submit(redis, generate(max_tokens=100_000))
    workers.start("--name", "mac", SCOREPOOL_MAX_JOBS_IN_FLIGHT="8", SCOREPOOL_LEASE_S="30")
    until(lambda: redis.zcard("rq:wip:demo") == 8)

    shown = workers.rq("info")

    assert "4, 8 executing, 0 finished, 0 failed" in shown
    assert "busy" in shown
    assert "1 workers, 1 queues" in shown
    current = redis.hget("rq:worker:mac", "current_job").decode()
    assert status(redis, current) == "started"


def test_rq_info_shows_an_idle_worker_and_its_counts(redis: Redis, workers: Workers):
    ids = [submit(redis, generate()), submit(redis, generate("NAN"))]
    workers.start("--name", "mac")
    until(lambda: sorted(done(redis)) == sorted(ids))

    shown = workers.rq("info")

    assert "0, 0 executing, 1 finished, 1 failed" in shown
    assert "idle" in shown
    assert redis.hmget("rq:worker:mac", "successful_job_count", "failed_job_count") == [b"1", b"1"]
    assert redis.hget("rq:worker:mac", "current_job") is None


def test_rq_info_does_not_touch_jobs_of_a_dead_worker(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=100_000))
    worker = workers.start()
    until(lambda: redis.zcard("rq:wip:demo"))
    worker.kill()
    worker.wait()
    until(lambda: not redis.keys("rq:execution:*"))  # the lease has expired

    workers.rq("info")

    assert redis.hget(f"rq:job:{job_id}", "retries_left") == b"3"  # RQ's cleaner would have used up one
    assert redis.zcard("rq:wip:demo") == 1


def test_a_worker_registers_its_model_and_unregisters_it_at_shutdown(redis: Redis, workers: Workers):
    worker = workers.start("--name", "mac")
    until(lambda: redis.get(store.Keys.served_model("mac")))

    card = msgspec.msgpack.decode(redis.get(store.Keys.served_model("mac")), type=wire.ServedModel)
    assert (card.id, card.worker, card.stamp.fingerprint, card.self_test) == ("demo", "mac", "f" * 64, "passed")
    assert redis.zscore(store.Keys.models, "mac")
    send_shutdown_command(redis, "mac")

    assert worker.wait(timeout=60) == 0
    assert not redis.get(store.Keys.served_model("mac"))
    assert redis.zscore(store.Keys.models, "mac") is None
    assert redis.smembers("rq:workers") == set()


def test_the_first_queue_is_drained_first(redis: Redis, workers: Workers):
    low = [submit(redis, generate(), queue="demo:low") for _ in range(4)]
    normal = [submit(redis, generate()) for _ in range(4)]
    high = [submit(redis, generate(), queue="demo:high") for _ in range(4)]

    workers.start("--burst", SCOREPOOL_MAX_JOBS_IN_FLIGHT="4").wait(timeout=60)

    order = done(redis)
    assert [set(order[:4]), set(order[4:8]), set(order[8:])] == [set(high), set(normal), set(low)]


def test_round_robin_takes_one_from_each_queue_in_turn(redis: Redis, workers: Workers):
    ids = {name: [submit(redis, generate(), queue=name) for _ in range(6)] for name in ("demo:high", "demo")}

    options = ("--burst", "--max-jobs", "6", "--dequeue-strategy", "round_robin")
    workers.start(*options, SCOREPOOL_MAX_JOBS_IN_FLIGHT="3").wait(timeout=60)

    assert set(done(redis)) == {*ids["demo:high"][:3], *ids["demo"][:3]}


def test_max_jobs_ends_the_worker_after_that_number_of_jobs(redis: Redis, workers: Workers):
    ids = [submit(redis, generate()) for _ in range(5)]

    assert workers.start("--max-jobs", "3").wait(timeout=60) == 0

    assert sorted(done(redis)) == sorted(ids[:3])
    assert redis.llen("rq:queue:demo") == 2


def test_work_can_be_called_twice_and_returns_whether_there_was_a_job(redis: Redis, redis_url: str, root: Path):
    submit(redis, generate())
    code = f"""
from tests.worker.fake import FakeWorker
from scorepool.worker import Redis
worker = FakeWorker(["demo"], connection=Redis.from_url({redis_url!r}))
print(worker.work(burst=True), worker.work(burst=True))
"""
    environ = {**os.environ, "SCOREPOOL_MODEL": "demo=fake"}

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.endswith("True False\n"), done.stderr


def test_no_part_of_a_worker_is_made_when_two_threads_may_ask_for_it(redis: Redis, redis_url: str, root: Path):
    script = """
from functools import cached_property
from tests.worker.fake import FakeWorker
from scorepool.worker import Redis

class LookingWorker(FakeWorker):
    def bootstrap(self, *args, **kwargs):  # starts the first threads
        members = [member for kind in type(self).__mro__ for member in vars(kind).items()]
        parts = [name for name, value in members if type(value) is cached_property]
        print(len(parts) > 8, [name for name in parts if name not in vars(self)])
        super().bootstrap(*args, **kwargs)

LookingWorker(["demo"], connection=Redis.from_url("REDIS_URL")).work(burst=True)
"""
    command = [sys.executable, "-c", script.replace("REDIS_URL", redis_url)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert result.stdout == "True []\n", result.stderr


def test_max_idle_time_ends_an_idle_worker(redis: Redis, workers: Workers):
    job_id = submit(redis, generate())

    assert workers.start("--max-idle-time", "1").wait(timeout=60) == 0

    assert outcome(redis, job_id)


@pytest.mark.skipif(not Path("/proc").exists(), reason="counts children in /proc")
def test_the_scheduler_runs_in_the_workers_own_process(redis: Redis, workers: Workers):
    worker = workers.start("--with-scheduler", worker="FunctionsWorker")
    until(lambda: redis.get("rq:scheduler-lock:demo"))

    assert Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text() == ""
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    assert redis.get("rq:scheduler-lock:demo") is None


def test_a_scheduled_job_is_not_late_after_another_scheduler_was_killed(redis: Redis, workers: Workers):
    killed = workers.start("--with-scheduler", worker="FunctionsWorker")
    until(lambda: redis.get("rq:scheduler-lock:demo"))
    killed.kill()
    killed.wait()
    assert redis.ttl("rq:scheduler-lock:demo") > 30
    job = Queue("demo", connection=redis).enqueue_in(timedelta(seconds=1), "add", 1)

    workers.start("--with-scheduler", worker="FunctionsWorker")

    until(lambda: job.get_status() == "finished")


@pytest.mark.parametrize(
    ("environ", "queues", "complaint"),
    [
        ({"SCOREPOOL_MODEL": ""}, ("demo",), "give NAME=FOLDER_OR_HUB_ID"),
        (
            {"SCOREPOOL_MODEL": "other=fake"},
            ("demo",),
            "queue 'demo' is not one of those of SCOREPOOL_MODEL=other=fake",
        ),
        ({"SCOREPOOL_LEASE": "3"}, ("demo",), "did you mean SCOREPOOL_LEASE_S?"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_a_message_that_names_it(
    redis: Redis, workers: Workers, environ: dict[str, str], queues: tuple[str, ...], complaint: str
):
    assert workers.start(queues=queues, **environ).wait(timeout=60) == 1
    assert complaint in workers.log
    assert "Traceback" not in workers.log
    assert redis.smembers("rq:workers") == set()


def test_no_prompt_is_logged(redis: Redis, workers: Workers):
    secret = "a very private prompt"
    submit(redis, generate(secret)), submit(redis, generate("NAN " + secret))
    submit(redis, wire.encode({"type": "generate", "model": "demo", "prompt": secret, "n": secret}))

    workers.start("--burst").wait(timeout=60)

    assert len(done(redis)) == 3
    assert secret not in workers.log


def test_ids_without_a_job_do_not_block_the_queue(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    queue.push_job_id("gone")
    redis.rpush(queue.key, "not an id: at all", b"\xff\xfe")
    job_id = submit(redis, generate())

    workers.start("--burst").wait(timeout=60)

    assert outcome(redis, job_id)
    assert redis.llen(queue.key) == 0


def test_requeueing_all_failed_jobs_does_not_requeue_canceled_ones(redis: Redis, workers: Workers):
    canceled = submit(redis, generate(max_tokens=100_000))
    workers.start("--name", "mac")
    until(lambda: status(redis, canceled) == "started")
    send_stop_job_command(redis, canceled)
    until(lambda: outcome(redis, canceled))

    workers.rq("requeue", "--queue", "demo", "--all")
    last = submit(redis, generate())
    until(lambda: outcome(redis, last))

    assert failure(redis, canceled).code == "canceled"
    assert done(redis) == [canceled, last]
    assert redis.ttl(f"rq:job:{canceled}") > 0


def test_a_live_worker_that_was_unregistered_as_dead_registers_again(redis: Redis, workers: Workers):
    worker = workers.start("--name", "mac")
    until(lambda: redis.get(store.Keys.served_model("mac")))
    worker.send_signal(signal.SIGSTOP)
    redis.delete("rq:worker:mac")
    clean_worker_registry(Queue("demo", connection=redis))
    assert redis.smembers("rq:workers") == set()
    worker.send_signal(signal.SIGCONT)

    until(lambda: redis.smembers("rq:workers"))

    assert "mac" in workers.rq("info")


def test_a_worker_restarted_under_its_name_replaces_the_dead_one(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=300))
    first = workers.start("--name", "mac", SCOREPOOL_LEASE_S="30")
    until(lambda: status(redis, job_id) != "queued")
    first.kill()
    first.wait()

    second = workers.start("--name", "mac", SCOREPOOL_LEASE_S="30")

    until(lambda: outcome(redis, job_id))
    assert isinstance(outcome(redis, job_id), wire.Result)
    assert redis.hget("rq:worker:mac", "pid") == str(second.pid).encode()


def test_the_name_of_a_live_worker_stops_the_start_with_a_message(redis: Redis, workers: Workers):
    workers.start("--name", "mac")
    until(lambda: redis.get(store.Keys.served_model("mac")))

    assert workers.start("--name", "mac").wait(timeout=60) == 1

    assert "--name mac: a worker of that name lives" in workers.log
    assert "Traceback" not in workers.log
    assert redis.smembers("rq:workers") == {b"rq:worker:mac"}


def test_a_model_that_cannot_be_loaded_stops_the_start_with_the_reason(redis: Redis, workers: Workers, tmp_path: Path):
    model = f"demo={tmp_path}/none"

    assert workers.start(worker="BatchWorker", SCOREPOOL_MODEL=model).wait(timeout=60) == 1

    assert f"{tmp_path}/none" in workers.log.splitlines()[-1]
    assert "Traceback" not in workers.log
    assert redis.smembers("rq:workers") == set()


def test_a_model_that_crashes_native_code_stops_the_start_with_one_sentence(
    redis: Redis, workers: Workers, tmp_path: Path, root: Path
):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Crash:\n"
        "    def find_spec(self, name, *_):\n"
        "        name == 'mlx_lm.models.qwen3' and os.kill(os.getpid(), signal.SIGSEGV)\n"
        "sys.meta_path.insert(0, Crash())\n"
    )
    environ = {
        "SCOREPOOL_MODEL": f"demo={root}/scorepool/models/demo",
        "SCOREPOOL_STATE_DIR": str(tmp_path / "state"),
        "PYTHONPATH": f"{tmp_path}:{root}",
    }

    for _ in range(2):
        assert workers.start(worker="BatchWorker", **environ).wait(timeout=60) == 1

    reasons = [line for line in workers.log.splitlines() if line.startswith("scorepool: ")]
    assert len(reasons) == 2
    assert all(reason.endswith("cannot be loaded: a process that tried it was killed by SIGSEGV") for reason in reasons)
    assert "Traceback" not in workers.log
    assert redis.smembers("rq:workers") == set()


def test_a_worker_does_not_import_an_installed_torch(root: Path):
    start = f"""
import importlib.util, sys
assert importlib.util.find_spec("torch")
from types import SimpleNamespace
from scorepool.store import Settings
from scorepool.worker import BatchWorker
engine = BatchWorker.start_engine(SimpleNamespace(settings=Settings()), {str(root / "scorepool/models/demo")!r})
torch = [name for name, module in sys.modules.items() if module and name.startswith("torch")]
print(engine.model_info.vocab_size, torch)
engine.close()
"""
    run = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=100, cwd=root)

    assert run.stdout == "3072 []\n", run.stderr
    assert "PyTorch" not in run.stderr


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_log_lines_of_the_engine_are_shown_at_the_configured_level(redis: Redis, workers: Workers, level: str):
    workers.start(worker="LoggingEngineWorker", SCOREPOOL_LOG_LEVEL=level)
    until(lambda: redis.keys("scorepool:card:*"))

    assert ("the engine has started" in workers.log) == (level == "INFO")
    assert "the engine has a warning" in workers.log


@pytest.mark.parametrize("level", ["wArning", "Info", "debug"])
def test_log_lines_of_rq_follow_the_log_level_in_any_letter_case(redis: Redis, workers: Workers, level: str):
    workers.start(worker="LoggingEngineWorker", SCOREPOOL_LOG_LEVEL=level)
    until(lambda: redis.keys("scorepool:card:*"))

    assert ("Listening on" in workers.log) == (level != "wArning")
    assert "the engine has a warning" in workers.log
