"""RQ's own commands and tools, run against a worker that has many jobs in flight."""

import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import httpx
import pytest
from redis import Redis
from rq import Callback, Retry
from rq.command import send_shutdown_command, send_stop_job_command
from rq.serializers import JSONSerializer

from scorepool import store, wire
from scorepool.local.demo import free_port
from scorepool.worker import Queue
from tests.worker.conftest import Workers, done, failure, generate, outcome, status, submit, until


@pytest.mark.soak
def test_suspend_and_resume(redis: Redis, workers: Workers):
    running = [submit(redis, generate(max_tokens=200)) for _ in range(8)]
    workers.start("--name", "mac")
    until(lambda: all(status(redis, job_id) != "queued" for job_id in running))

    workers.rq("suspend")
    waiting = submit(redis, generate())
    until(lambda: len(done(redis)) == 8)
    time.sleep(1.2)  # longer than the interval at which a worker polls its queues
    assert status(redis, waiting) == "queued"
    assert "suspended" in workers.rq("info")
    workers.rq("resume")

    until(lambda: outcome(redis, waiting))
    assert sorted(done(redis)[:8]) == sorted(running)


def test_worker_pool(redis: Redis, workers: Workers):
    """The pool forks its processes after the import of `worker`. Each process starts its own engine."""
    ids = [submit(redis, generate(max_tokens=1 + i % 20)) for i in range(100)]
    pool = workers.start_pool("-n", "2", SCOREPOOL_MAX_JOBS_IN_FLIGHT="8")
    until(lambda: len(redis.smembers("rq:workers")) == 2)

    until(lambda: len(done(redis)) == 100)
    assert sorted(done(redis)) == sorted(ids)
    pool.send_signal(signal.SIGTERM)
    assert pool.wait(timeout=60) == 0
    until(lambda: redis.smembers("rq:workers") == set())


def test_worker_pool_burst(redis: Redis, workers: Workers):
    ids = [submit(redis, generate()) for _ in range(20)]

    assert workers.start_pool("-n", "2", "--burst").wait(timeout=60) == 0

    assert sorted(done(redis)) == sorted(ids)


def test_result_and_failure_ttl(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    kept = queue.enqueue("add", 1, result_ttl=-1)
    brief = queue.enqueue("add", 1, result_ttl=100)
    failed = queue.enqueue("add", "a", failure_ttl=100)
    ours = submit(redis, generate("NAN"), fields={"failure_ttl": 100})

    workers.start("--burst", worker="FunctionsWorker").wait(timeout=60)

    assert redis.ttl(kept.key) == -1
    for key in (brief.key, failed.key, f"rq:job:{ours}", store.Keys.outcome(ours), store.Keys.request(ours)):
        assert 0 < redis.ttl(key) <= 100, key


def test_retry_with_intervals_among_many_in_flight(redis: Redis, workers: Workers):
    others = [submit(redis, generate(max_tokens=500)) for _ in range(16)]
    flaky = Queue("demo", connection=redis).enqueue("flaky", retry=Retry(max=3, interval=[1, 1]))
    started = time.monotonic()

    workers.start("--with-scheduler", worker="FunctionsWorker")

    until(lambda: flaky.get_status() == "finished")
    assert time.monotonic() - started > 2
    assert flaky.return_value() == "at last"
    until(lambda: sorted(done(redis)) == sorted(others))


@pytest.mark.parametrize("kind", ["on_success", "on_failure", "on_stopped"])
def test_a_callback_that_is_not_listed_fails_the_job_with_a_message(redis: Redis, workers: Workers, kind: str):
    job = Queue("demo", connection=redis).enqueue("add", 1, **{kind: Callback("os.abort")})

    workers.start("--burst", worker="FunctionsWorker").wait(timeout=60)

    assert job.get_status() == "failed"
    assert "'os.abort' is not a callback that this worker calls" in job.latest_result().exc_string


def test_rq_empty_ends_all_waiting_jobs_as_canceled(redis: Redis, workers: Workers):
    """Jobs in the backlog end as canceled, too. Running jobs continue."""
    running = submit(redis, generate(max_tokens=300))
    workers.start("--max-jobs", "1")
    until(lambda: status(redis, running) != "queued")
    waiting = [submit(redis, generate(), webhook=True) for _ in range(3)]
    behind = submit(redis, generate(), fields={"status": "deferred"})
    redis.lrem("rq:queue:demo", 1, behind)
    redis.rpush(store.Keys.backlog("demo", "alice"), behind)
    redis.zadd(store.Keys.fair_share("demo"), {"alice": 1})
    redis.zadd("rq:deferred:demo", {behind: 1})
    other = Queue("demo", connection=redis).enqueue("add", 1)

    assert "5 jobs removed from demo queue" in workers.rq_as_documented("empty", "demo")

    ended = [*waiting, behind]
    assert [failure(redis, id_).code for id_ in ended] == ["canceled"] * 4
    assert {status(redis, id_) for id_ in ended} == {"canceled"}
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{id_}".encode() for id_ in waiting]
    assert not redis.exists(other.key, *map(store.Keys.request, ended))
    assert not redis.exists("rq:queue:demo", "rq:deferred:demo", store.Keys.fair_share("demo"))
    until(lambda: isinstance(outcome(redis, running), wire.Result))


def test_on_stopped_is_called_when_one_job_of_many_is_stopped(redis: Redis, workers: Workers):
    others = [submit(redis, generate(max_tokens=300)) for _ in range(8)]
    stopped = submit(redis, generate(max_tokens=100_000), fields={"stopped_callback_name": "note"})
    workers.start("--name", "mac", worker="FunctionsWorker")
    until(lambda: status(redis, stopped) == "started")

    send_stop_job_command(redis, stopped, serializer=JSONSerializer)

    until(lambda: sorted(done(redis)) == sorted([*others, stopped]))
    assert redis.lrange(f"noted:{stopped}", 0, -1) == [b"stopped"]


def test_the_shutdown_command_drains_jobs_in_flight_and_claims_no_more(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=150)) for _ in range(200)]
    worker = workers.start("--name", "mac", SCOREPOOL_MAX_JOBS_IN_FLIGHT="8")
    until(lambda: workers.log.count(": begins generate demo") >= 8)  # jobs that arrive after the command are put back

    send_shutdown_command(redis, "mac")

    assert worker.wait(timeout=60) == 0
    num_done = len(done(redis))
    assert 8 <= num_done < 200
    assert [id_.decode() for id_ in redis.lrange("rq:queue:demo", 0, -1)] == ids[num_done:]


def test_rqs_other_worker_options_are_accepted_and_its_serializer_option_is_ignored(redis: Redis, workers: Workers):
    options = ("-S", "pickle", "--job-class", "rq.job.Job", "--queue-class", "rq.Queue", "--dequeue-strategy", "random")
    ids = [submit(redis, generate(), queue=queue) for queue in ("demo:low", "demo", "demo:high") * 5]

    assert workers.start("--burst", *options).wait(timeout=60) == 0

    assert sorted(done(redis)) == sorted(ids)
    assert "Traceback" not in workers.log


@pytest.mark.skipif(find_spec("rq_dashboard") is None, reason="rq-dashboard is not installed")
def test_rq_dashboard_shows_its_pages(redis: Redis, workers: Workers):
    good, bad = submit(redis, generate(max_tokens=1)), submit(redis, generate("NAN"))
    workers.start("--name", "mac")
    until(lambda: sorted(done(redis)) == sorted([good, bad]))
    running = submit(redis, generate(max_tokens=100_000))
    until(lambda: status(redis, running) == "started")
    port = free_port()
    # Without the import of the worker, the dashboard unpickles jobs and answers 500.
    program = "import scorepool.worker.rq; from rq_dashboard.cli import main; main()"
    command = [sys.executable, "-c", program, "-b", "127.0.0.1", "-p", str(port), "--json"]

    with (
        subprocess.Popen([*command, "-u", workers.redis_url], stdout=subprocess.DEVNULL) as dashboard,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, follow_redirects=True) as http,
    ):
        try:
            until(lambda: answers(http))
            pages = {
                path: http.get(path)
                for path in (
                    "/0/view/queues",
                    "/0/data/queues.json",
                    "/0/data/workers.json",
                    "/0/data/jobs/demo/finished/10/asc/1.json",
                    "/0/data/jobs/demo/failed/10/asc/1.json",
                    "/0/data/jobs/demo/started/10/asc/1.json",
                    f"/0/data/job/{good}.json",
                )
            }
        finally:
            dashboard.kill()
    assert {path: page.status_code for path, page in pages.items()} == dict.fromkeys(pages, 200)
    assert "mac" in pages["/0/data/workers.json"].text
    assert good in pages["/0/data/jobs/demo/finished/10/asc/1.json"].text
    assert bad in pages["/0/data/jobs/demo/failed/10/asc/1.json"].text


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/0/view/queues").status_code == 200
    except httpx.TransportError:
        return False
