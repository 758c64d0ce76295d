"""No accepted job is lost and no recorded result changes, whatever process dies: driver, chaos, then an audit.

The last lines of each test's output are the audit; `pytest -s` shows them for a passed test too.
"""

import time
from hashlib import sha256
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from scorepool import store
from tests.soak.audit import Audit
from tests.soak.chaos import Chaos
from tests.soak.cluster import PROCESSES, Cluster
from tests.soak.driver import Driver
from tests.soak.log import Log
from tests.soak.receiver import receiver

SECRET = "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
SECRETS = [store.webhook_secrets(SECRET, name, None, 0.0)[0] for name in ("a", "b")]
SETTINGS = {
    "SCOREPOOL_WEBHOOK_SECRET": SECRET,
    "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "1",
    "SCOREPOOL_API_KEYS": ",".join(f"{key[-1]}:{sha256(key.encode()).hexdigest()}" for key in ("soak-a", "soak-b")),
    "SCOREPOOL_MAX_JOBS_IN_FLIGHT": "16",  # few, so that jobs wait in the backlog
    "SCOREPOOL_LEASE_S": "3",
    "SCOREPOOL_DRAIN_TIMEOUT_S": "4",
    "SCOREPOOL_LOG_LEVEL": "WARNING",
    "FAKE_STEP_S": "0.005",
}


def wait_until_idle(redis: Redis, timeout_s: float, model: str = "demo") -> None:
    """Wait until no job or delivery waits or runs. Make scheduled deliveries due now instead of waiting for them."""
    deadline = time.monotonic() + timeout_s
    busy: list[str] = []
    while True:
        assert time.monotonic() < deadline, f"jobs or deliveries still wait or run: {busy}"
        try:
            for delivery in redis.zrange(f"rq:scheduled:{store.WEBHOOKS}", 0, -1):
                redis.zadd(f"rq:scheduled:{store.WEBHOOKS}", {delivery: 0}, xx=True)
            queues = [*store.queue_names(model), store.WEBHOOKS]
            keys = [f"rq:{kind}:{queue}" for queue in queues for kind in ("queue", "deferred", "wip", "scheduled")]
            busy = [key for key in keys if redis.exists(key)]
            if not busy:
                return
        except RedisError as error:
            print(error)
        time.sleep(0.5)


def soak(
    root: Path,
    folder: Path,
    *,
    seed: int,
    worker: str,
    model: str,
    num_jobs: int,
    num_signals: int,
    duration_s: float,
    appendfsync: str = "always",
) -> Audit:
    driver_log, receiver_log, chaos_log = (Log(folder / f"{name}.log") for name in ("driver", "receiver", "chaos"))
    cluster = Cluster(folder, root, worker=worker, model=model, settings=SETTINGS, appendfsync=appendfsync)
    with (
        driver_log,
        receiver_log,
        chaos_log,
        receiver(SECRETS, receiver_log) as webhook,
        cluster,
        cluster.connect() as redis,
    ):
        cluster.wait_until_ready()
        driver = Driver(cluster.urls, webhook, driver_log, seed, num_jobs, duration_s)
        driver.start()
        try:
            Chaos(cluster, chaos_log, seed, num_signals, duration_s / num_signals).run()
            driver.join()
            wait_until_idle(redis, timeout_s=60 + duration_s)
        finally:
            driver.stop()
            cluster.stop()
        cuts = power_cuts(chaos_log) if appendfsync == "everysec" else []
        audit = Audit(redis, driver_log, receiver_log, cuts)
        audit.counts.update(f"faults of {fault['process']}" for fault in chaos_log)
        return audit


def power_cuts(chaos_log: Log) -> list[float]:
    return [entry["at"] for entry in chaos_log if (entry["process"], entry["action"]) == ("redis", "kill")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "num_jobs", "num_signals", "duration_s"),
    [
        pytest.param(11111, 400, 18, 36, id="short"),  # this seed kills each process and breaks networks in all ways
        pytest.param(1, 1200, 40, 110, id="long", marks=pytest.mark.soak),
    ],
)
def test_signals_to_every_process_lose_no_job(
    root: Path, tmp_path: Path, seed: int, num_jobs: int, num_signals: int, duration_s: float
):
    audit = soak(
        root,
        tmp_path,
        seed=seed,
        worker="scorepool.worker.BatchWorker",
        model=str(root / "scorepool" / "models" / "demo"),
        num_jobs=num_jobs,
        num_signals=num_signals,
        duration_s=duration_s,
    )

    print(audit)
    assert audit.findings == {}
    assert audit.counts["accepted"] >= num_jobs
    faults = [audit.counts[f"faults of {process}"] for process in PROCESSES]
    assert sum(faults) == num_signals
    assert min(faults) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_100_000_jobs_and_200_signals(root: Path, tmp_path: Path):
    audit = soak(
        root,
        tmp_path,
        seed=2,
        worker="tests.worker.fake.FakeWorker",
        model="fake",
        num_jobs=100_000,
        num_signals=200,
        duration_s=600,
    )

    print(audit)
    assert audit.findings == {}
    assert audit.counts["accepted"] >= 100_000


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_everysec_loses_only_the_last_second_before_a_power_cut(root: Path, tmp_path: Path):
    audit = soak(
        root,
        tmp_path,
        seed=3,
        worker="tests.worker.fake.FakeWorker",
        model="fake",
        num_jobs=20_000,
        num_signals=100,
        duration_s=200,
        appendfsync="everysec",
    )

    print(audit)
    assert audit.findings == {}
    assert audit.counts["lost by a power cut"] > 0
