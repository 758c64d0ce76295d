"""Jobs in real `rq worker` processes: each ends exactly once, with an outcome."""

import pickle
import time

import pytest
from msgspec.structs import replace
from redis import Redis
from rq import Callback, Repeat, Retry
from rq.command import send_stop_job_command
from rq.job import Dependency
from rq.job import Job as StockJob
from rq.serializers import JSONSerializer

from scorepool import store, wire
from scorepool.worker import Queue
from tests.worker.conftest import Workers, done, failure, generate, most_at_once, outcome, status, submit, until


def test_two_hundred_jobs_end_once_each_with_32_in_flight(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=1 + i % 20)) for i in range(200)]
    workers.start("--burst", SCOREPOOL_MAX_JOBS_IN_FLIGHT="32", FAKE_STEP_S="0.01").wait(timeout=60)

    assert sorted(done(redis)) == sorted(ids)
    assert all(isinstance(outcome(redis, job_id), wire.Result) for job_id in ids)
    assert most_at_once(redis, ids) == 32


def test_a_finished_job_leaves_the_keys_that_stock_rq_leaves_and_its_outcome(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=3))

    workers.start("--burst").wait(timeout=60)

    # A burst worker may end before it registers its model.
    ignored = (b"rq:worker", b"rq:clean", b"scorepool:recent_model")
    keys = {key.decode() for key in redis.keys("*") if not key.startswith(ignored)}
    assert keys == {
        "rq:queues",
        f"rq:job:{job_id}",
        f"rq:results:{job_id}",
        "rq:finished:demo",
        f"scorepool:request:{job_id}",
        f"scorepool:outcome:{job_id}",
        "scorepool:done",
        "scorepool:outcomes",
    }
    assert status(redis, job_id) == "finished"
    assert redis.hget(f"rq:job:{job_id}", "meta") is None
    assert 0 < redis.ttl(store.Keys.request(job_id)) <= redis.ttl(store.Keys.outcome(job_id)) <= 3600
    result = outcome(redis, job_id)
    assert isinstance(result, wire.Result)
    assert result.sequences[0].text == "xxx"
    assert result.stamp.model == "demo"


def test_a_large_request_is_kept_only_while_its_job_can_run_again(redis: Redis, workers: Workers):
    stop = [f"{number}" * 500 for number in range(40, 80)]  # 40 KB in all
    good, bad = [submit(redis, replace(generate(prompt, max_tokens=3), stop=stop)) for prompt in ("hello", "NAN")]

    workers.start("--burst").wait(timeout=60)

    assert (status(redis, good), status(redis, bad)) == ("finished", "failed")
    assert redis.exists(store.Keys.request(good)) == 0
    assert 0 < redis.ttl(store.Keys.request(bad)) <= redis.ttl(store.Keys.outcome(bad))


def test_a_job_that_ends_releases_its_webhook_in_the_same_transaction(redis: Redis, workers: Workers):
    good, bad = submit(redis, generate(), webhook=True), submit(redis, generate("NAN"), webhook=True)
    plain = submit(redis, generate())

    workers.start("--burst").wait(timeout=60)

    assert {i.decode() for i in redis.lrange("rq:queue:webhooks", 0, -1)} == {f"wh_{good}", f"wh_{bad}"}
    assert redis.hget(f"rq:job:wh_{good}", "status") == b"queued"
    assert redis.exists(f"rq:job:wh_{plain}") == 0
    assert redis.sismember("rq:queues", "rq:queue:webhooks")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xc1 no msgpack", "invalid"),
        (b"", "invalid"),
        (wire.encode({"type": "score", "model": "demo"}), "invalid"),
        (wire.encode({"type": "dance"}), "invalid"),
        (wire.encode(generate("NAN")), "numeric"),
        (wire.encode(generate("BUG")), "internal"),
    ],
)
def test_a_job_that_cannot_be_run_fails_alone(redis: Redis, workers: Workers, body: bytes, code: str):
    bad, good = submit(redis, body), submit(redis, generate())

    workers.start("--burst").wait(timeout=60)

    assert failure(redis, bad).code == code
    assert status(redis, bad) == "failed"
    assert redis.hget(f"rq:job:{bad}", "retries_left") == b"0"
    assert redis.zscore("rq:failed:demo", bad)
    assert redis.exists(store.Keys.request(bad))  # `rq requeue` needs it
    assert isinstance(outcome(redis, good), wire.Result)
    assert "a bug met BUG" not in workers.log  # the message of an error may quote the prompt


def test_a_job_without_a_request_in_redis_fails(redis: Redis, workers: Workers):
    job_id = submit(redis, generate())
    redis.delete(store.Keys.request(job_id))

    workers.start("--burst").wait(timeout=60)

    assert "no longer in Redis" in failure(redis, job_id).message


def test_a_worker_reads_no_pickle_and_imports_no_function_named_in_redis(redis: Redis, workers: Workers, tmp_path):
    class Bomb:
        def __reduce__(self) -> object:
            return (open, (str(tmp_path / "pickled"), "w"))

    canary = str(tmp_path / "imported")
    bad = [
        submit(redis, generate(), fields={"data": pickle.dumps(("worker.infer", None, [Bomb()], {}))}),
        submit(redis, generate(), fields={"data": JSONSerializer.dumps(["os.system", None, [f"touch {canary}"], {}])}),
        submit(redis, generate(), fields={"data": JSONSerializer.dumps([store.INFER, "instance", [], {}])}),
        submit(redis, generate(), fields={"data": JSONSerializer.dumps([{}, None, [], {}])}),
        submit(redis, generate(), fields={"data": JSONSerializer.dumps("nonsense")}),
        submit(redis, generate(), fields={"failure_callback_name": "os.abort"}),
        submit(redis, generate(), fields={"created_at": "not a time"}),
        submit(redis, generate(), fields={"meta": pickle.dumps(Bomb()), "data": b"\x80"}),
    ]
    good = submit(redis, generate())

    workers.start("--burst").wait(timeout=60)
    workers.rq("info")

    assert {failure(redis, job_id).code for job_id in bad} <= {"invalid", "internal"}
    assert all(status(redis, job_id) == "failed" for job_id in bad)
    assert isinstance(outcome(redis, good), wire.Result)
    assert list(tmp_path.iterdir()) == [workers.log_path]


def test_the_timeout_of_one_job_among_thirty_ends_only_that_job(redis: Redis, workers: Workers):
    slow = submit(redis, generate(max_tokens=100_000, timeout_s=1))
    others = [submit(redis, generate(max_tokens=150)) for _ in range(29)]

    workers.start("--burst", FAKE_STEP_S="0.01").wait(timeout=60)

    assert failure(redis, slow).code == "timeout"
    assert all(isinstance(outcome(redis, job_id), wire.Result) for job_id in others)
    assert sorted(done(redis)) == sorted([slow, *others])


def test_a_job_neither_starts_nor_continues_after_its_expires_at(redis: Redis, workers: Workers):
    late = submit(redis, generate(), webhook=True, fields={"expires_at": repr(time.time() - 0.01)})
    running = submit(redis, generate(max_tokens=100_000), fields={"expires_at": repr(time.time() + 4)})
    in_time = submit(redis, generate(), fields={"expires_at": repr(time.time() + 60)})

    workers.start("--burst").wait(timeout=60)

    assert failure(redis, late).code == failure(redis, running).code == "expired"
    assert status(redis, late) == "failed"
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{late}".encode()]
    assert isinstance(outcome(redis, in_time), wire.Result)


def test_a_stop_command_cancels_one_running_job(redis: Redis, workers: Workers):
    long, other = submit(redis, generate(max_tokens=100_000)), submit(redis, generate(max_tokens=200))
    workers.start("--burst")
    until(lambda: status(redis, long) == "started")

    send_stop_job_command(redis, long, serializer=JSONSerializer)

    until(lambda: outcome(redis, long) and outcome(redis, other))
    assert failure(redis, long).code == "canceled"
    assert status(redis, long) == "stopped"
    assert redis.exists(store.Keys.request(long)) == 0
    assert isinstance(outcome(redis, other), wire.Result)


def test_a_cancellation_without_a_command_is_found_by_the_claim_and_the_heartbeat(redis: Redis, workers: Workers):
    queued = submit(redis, generate(max_tokens=100_000), fields={"cancel_requested": "1"})
    running = submit(redis, generate(max_tokens=100_000))
    workers.start()
    until(lambda: status(redis, running) == "started")

    redis.hset(f"rq:job:{running}", "cancel_requested", "1")

    until(lambda: outcome(redis, running) and outcome(redis, queued))
    assert failure(redis, running).code == failure(redis, queued).code == "canceled"


def test_a_job_that_is_deleted_while_it_runs_is_dropped(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=100_000))
    workers.start()
    until(lambda: status(redis, job_id) == "started")

    redis.delete(f"rq:job:{job_id}", store.Keys.request(job_id))

    until(lambda: "its lease is lost" in workers.log)
    assert not redis.keys(f"*{job_id}*")
    assert redis.zcard("rq:wip:demo") == 0


def test_a_worker_obeys_commands_after_invalid_messages(redis: Redis, workers: Workers):
    workers.start("--name", "mac")
    until(lambda: b"rq:pubsub:mac" in redis.pubsub_channels())
    for message in ("no json", "5", "{}", '{"command": "stop-job"}', "[" * 100_000):
        redis.publish("rq:pubsub:mac", message)
    job_id = submit(redis, generate(max_tokens=100_000))
    until(lambda: status(redis, job_id) == "started")

    send_stop_job_command(redis, job_id, serializer=JSONSerializer)

    until(lambda: outcome(redis, job_id))
    assert failure(redis, job_id).code == "canceled"


def test_a_failed_job_that_is_requeued_by_hand_gets_a_new_outcome(redis: Redis, workers: Workers):
    job_id = submit(redis, generate("NAN"))
    workers.start()
    until(lambda: outcome(redis, job_id))
    redis.set(store.Keys.request(job_id), wire.encode(generate("mended")))

    assert "Requeueing 1 jobs" in workers.rq("requeue", "--queue", "demo", job_id)

    until(lambda: isinstance(outcome(redis, job_id), wire.Result))
    assert done(redis) == [job_id, job_id]


def test_a_requeued_job_keeps_its_request_and_reports_its_new_end_with_another_event(redis: Redis, workers: Workers):
    job_id = submit(redis, generate("NAN"), webhook=True)
    workers.start("--burst").wait(timeout=60)
    redis.set(store.Keys.request(job_id), wire.encode(generate(max_tokens=100_000)), ex=60)
    workers.rq("requeue", "--queue", "demo", job_id)
    workers.start()
    until(lambda: redis.zcard("rq:wip:demo"))

    assert redis.ttl(store.Keys.request(job_id)) == -1
    send_stop_job_command(redis, job_id, serializer=JSONSerializer)
    until(lambda: outcome(redis, job_id))
    first = store.Keys.delivery(job_id)
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [first.encode(), f"{first}-2".encode()]
    events = [redis.hget(f"rq:job:{id_}", "event") for id_ in (first, f"{first}-2")]
    assert events == [b"job.failed", b"job.canceled"]


def test_jobs_that_end_together_each_release_their_own_dependents(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    parents = [queue.enqueue("add", n) for n in range(6)]
    dependents = [queue.enqueue("add", 1, depends_on=parent) for parent in parents]
    both = queue.enqueue("add", 1, depends_on=parents[:2])
    broken = queue.enqueue("add", "a")
    never = queue.enqueue("add", 1, depends_on=broken)
    anyway = queue.enqueue("add", 1, depends_on=Dependency(jobs=[broken], allow_failure=True))

    workers.start("--burst", worker="FunctionsWorker").wait(timeout=60)

    assert [job.get_status() for job in (*dependents, both, anyway)] == ["finished"] * 8
    assert never.get_status() == "deferred"  # as in RQ: the job that it depends on has failed


def test_a_burst_worker_runs_what_the_end_of_its_last_job_released(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    jobs = [queue.enqueue("add", 1)]
    for _ in range(20):
        jobs.append(queue.enqueue("add", 1, depends_on=jobs[-1]))

    workers.start("--burst", worker="FunctionsWorker").wait(timeout=60)

    assert [job.get_status() for job in jobs] == ["finished"] * 21


def test_a_wake_up_message_makes_an_idle_worker_claim_at_once(redis: Redis, workers: Workers):
    workers.start()
    until(lambda: b"scorepool:bell:demo" in redis.pubsub_channels() and redis.keys("scorepool:card:*"))
    times = []
    for _ in range(5):
        started = time.monotonic()
        job_id = submit(redis, generate(max_tokens=1))
        until(lambda job_id=job_id: outcome(redis, job_id))
        times.append(time.monotonic() - started)
    assert min(times) < 0.5  # polling alone takes up to 1 s, 0.5 s on average


def test_listed_functions_support_callbacks_retries_dependencies_and_timeouts_of_rq(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    summed = queue.enqueue("add", 2, 3, on_success=Callback("note"))
    flaky = queue.enqueue("flaky", retry=Retry(max=3), on_success=Callback("show_status"))
    broken = queue.enqueue("add", "a", on_failure=Callback("note"))
    late = queue.enqueue("flaky", retry=Retry(max=2, interval=1))
    after = queue.enqueue("add", 1, depends_on=summed)
    repeated = queue.enqueue("add", 1, repeat=Repeat(times=2, interval=[0, 1]))
    discarded = queue.enqueue("add", 1, result_ttl=0)
    stuck = queue.enqueue("sleep", 30, job_timeout=1, on_failure=Callback("show_status"))
    refused = queue.enqueue("add", 1, on_success=Callback("os.abort"))

    workers.start("--with-scheduler", worker="FunctionsWorker")

    until(lambda: status(redis, after.id) == "finished" and status(redis, late.id) == "finished")
    until(lambda: status(redis, stuck.id) == status(redis, refused.id) == "failed")
    results = {job.id: job.return_value() for job in (summed, flaky, late, after)}
    assert results == {summed.id: 5, flaky.id: "at last", late.id: "at last", after.id: 1}
    assert redis.lrange(f"noted:{summed.id}", 0, -1) == [b"int"]
    assert redis.lrange(f"noted:{broken.id}", 0, -1)[1] == b"TypeError"
    assert [redis.get(f"shown:{job.id}") for job in (flaky, stuck)] == [b"finished", b"failed"]
    assert status(redis, broken.id) == "failed"
    assert "JobTimeoutException" in (stuck.latest_result().exc_string or "")
    until(lambda: not redis.exists(discarded.key))
    until(lambda: redis.xlen(f"rq:results:{repeated.id}") == 3)


def test_importing_the_worker_removes_pickle_from_rq(redis: Redis):
    redis.hset("rq:job:a", mapping={"data": JSONSerializer.dumps(["f", None, [], {}]), "meta": pickle.dumps({})})

    assert "unserialized" in StockJob.fetch("a", connection=redis).meta


def test_functions_and_callbacks_can_get_the_current_job(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    job = queue.enqueue("current", on_success=Callback("note_current"))

    workers.start("--burst", worker="FunctionsWorker").wait(timeout=60)

    assert job.return_value() == job.id
    assert redis.get(f"current:{job.id}") == job.id.encode()
