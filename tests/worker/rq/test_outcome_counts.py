"""Redis counts how jobs ended, and how long results took."""

import time

from redis import Redis

from scorepool import store
from tests.worker.conftest import Workers, generate, outcome, submit, until


def test_ends_are_counted_and_the_latencies_of_results_are_summed(redis: Redis, workers: Workers):
    age_s = 5.0
    began = time.time()
    fields = {"owner": "alice", "created": repr(began - age_s)}
    ids = [submit(redis, generate(prompt), fields=fields) for prompt in ("a", "b", "NAN")]
    workers.start()
    until(lambda: all(outcome(redis, job_id) for job_id in ids))

    counts = redis.hgetall(store.Keys.outcome_counts)
    assert (counts[b"result"], counts[b"numeric"]) == (b"2", b"1")
    assert 2 * 1000 * age_s <= int(counts[b"latency_ms"]) <= 2 * 1000 * (age_s + time.time() - began)
