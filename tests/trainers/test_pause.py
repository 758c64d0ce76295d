"""vLLM's pause around a push of weights, on real processes: what runs ends, nothing begins, and it outlives them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack, worker_command
from scorepool.store import Keys, RqKeys
from tests.api.conftest import ALICE, BOB, KEYS, bearer
from tests.engine.test_pushed_weights import changed_copy
from tests.tiny_models import TinyModels
from tests.worker.conftest import until

MODEL = "policy"
URL = f"/v1/models/{MODEL}/weights"
SECURED = {"SCOREPOOL_API_KEYS": KEYS, "SCOREPOOL_OPERATOR_KEYS": "bob"}
WAIT = {"mode": "wait", "clear_cache": "false"}  # as SkyRL sends them
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def base(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


@pytest.fixture(scope="module")
def stack(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pause")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_LEASE_S": "4",
        "SCOREPOOL_MAX_WAIT_S": "3",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with Stack([f"{MODEL}={base}"], state=folder / "s", environ=environ | SECURED, logs=folder / "logs") as stack:
        yield stack


@pytest.fixture
def pushed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that is kept after the test: workers that start later read what was pushed from it."""
    return tmp_path_factory.mktemp("pushed")


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60, headers=bearer(BOB)) as http:
        yield http
        http.post("/resume")


@pytest.fixture
def redis(stack: Stack) -> Iterator[Redis]:
    with Redis.from_url(stack.redis_url) as redis:
        yield redis


def submit(http: httpx.Client, **fields: Any) -> str:
    job = {"type": "generate", "model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "cache": False}
    answer = http.post("/v1/jobs", json=job | fields)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def statuses(http: httpx.Client, jobs: list[str]) -> set[str]:
    return {http.get(f"/v1/jobs/{job}").json()["status"] for job in jobs}


def ends(http: httpx.Client, job: str) -> dict[str, Any]:
    until(lambda: http.get(f"/v1/jobs/{job}").json()["status"] in ("finished", "failed"), 60)
    ended: dict[str, Any] = http.get(f"/v1/jobs/{job}").json()
    assert ended["status"] == "finished", ended
    return ended


def test_jobs_wait_during_a_pause_while_weights_are_pushed_and_then_run_on_them(
    base: Path, pushed_folder: Path, http: httpx.Client, redis: Redis
):
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.post("/pause", params=WAIT).json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}

    jobs = [submit(http, seed=seed) for seed in range(5)]
    pushed = http.post(URL, json={"path": str(changed_copy(base, pushed_folder / "v1", seed=1))})

    assert pushed.status_code == 200, pushed.text
    assert pushed.json()["state"] == "serving"
    assert statuses(http, jobs) == {"queued"}
    assert redis.zcard(RqKeys.registry("wip", MODEL)) == 0
    assert http.post("/resume").json() == {"status": "resumed"}
    assert http.get("/is_paused").json() == {"is_paused": False}
    for job in jobs:
        assert ends(http, job)["result"]["stamp"]["weights_version"] == pushed.json()["version"]


def test_a_pause_waits_for_jobs_that_run_and_for_none_that_waits(http: httpx.Client):
    running = submit(http, max_tokens=200)
    until(lambda: statuses(http, [running]) != {"queued"})

    while (answer := http.post("/pause", params=WAIT)).status_code == 503:
        assert "1 still run" in answer.json()["error"]["message"]

    assert answer.json() == {"status": "paused"}
    assert statuses(http, [running]) == {"finished"}


def test_keep_answers_at_once_and_what_runs_ends_with_the_weights_that_it_began_with(
    base: Path, pushed_folder: Path, http: httpx.Client
):
    before = http.get(URL).json()["version"]
    running = submit(http, max_tokens=400)
    until(lambda: statuses(http, [running]) == {"started"})

    assert http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).json() == {"status": "paused"}
    waiting = submit(http)
    pushed = http.post(URL, json={"path": str(changed_copy(base, pushed_folder / "v", seed=7))}).json()

    assert pushed["version"] > before
    assert ends(http, running)["result"]["stamp"]["weights_version"] == before
    assert statuses(http, [waiting]) == {"queued"}
    http.post("/resume")
    assert ends(http, waiting)["result"]["stamp"]["weights_version"] == pushed["version"]


def test_a_pause_says_what_still_runs_and_nothing_begins_meanwhile(http: httpx.Client, redis: Redis):
    redis.sadd(RqKeys.queues, RqKeys.queue("other"))
    redis.zadd(RqKeys.registry("wip", "other"), {"job-1:e1": 1e11, "job-2:e2": 1e11})  # of a worker elsewhere

    answer = http.post("/pause", params=WAIT)

    assert answer.status_code == 503
    assert "after 3 s 2 still run: job-1, job-2; send the request again" in answer.json()["error"]["message"]
    assert http.get("/is_paused").json() == {"is_paused": True}
    waiting = submit(http)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(http.post, "/pause", params=WAIT)
        until(pausing.running)
        redis.delete(RqKeys.registry("wip", "other"))
        assert pausing.result().json() == {"status": "paused"}
    assert statuses(http, [waiting]) == {"queued"}


def test_a_resume_ends_a_pause_that_waits(http: httpx.Client, redis: Redis):
    redis.zadd(RqKeys.registry("wip", "other"), {"job-1:e1": 1e11})
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(http.post, "/pause", params=WAIT)
        until(lambda: redis.exists(Keys.paused))
        http.post("/resume")
        answer = pausing.result()
    redis.delete(RqKeys.registry("wip", "other"))
    assert answer.status_code == 409
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_two_pauses_are_one_and_a_resume_without_one_does_nothing(http: httpx.Client):
    assert http.post("/resume").json() == {"status": "resumed"}
    for _ in range(2):
        assert http.post("/pause", params=WAIT).json() == {"status": "paused"}
    job = submit(http)
    assert http.post("/resume").json() == {"status": "resumed"}
    ends(http, job)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "expected wait or keep, found abort"),
        ({"mode": "abort"}, "expected wait or keep, found abort"),
        ({"mode": "sleep"}, "expected 'abort', 'wait' or 'keep'"),
        ({"mode": "wait", "clear_cache": "perhaps"}, "clear_cache"),
        ({"mode": "wait", "model": MODEL}, "unknown query parameter"),
    ],
)
def test_other_modes_are_refused_by_name_and_pause_nothing(http: httpx.Client, params: dict[str, str], says: str):
    answer = http.post("/pause", params=params)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_only_operators_pause_and_resume(http: httpx.Client):
    for path, params in (("/pause", WAIT), ("/resume", {})):
        assert http.post(path, params=params, headers=bearer(ALICE)).status_code == 403
        assert httpx.post(f"{http.base_url}".rstrip("/") + path, params=params).status_code == 401
    assert http.get("/is_paused", headers=bearer(ALICE)).json() == {"is_paused": False}


def test_a_worker_that_is_killed_and_started_again_stays_paused(
    stack: Stack, base: Path, tmp_path: Path, http: httpx.Client, redis: Redis
):
    assert http.post("/pause", params=WAIT).status_code == 200
    jobs = [submit(http, seed=seed) for seed in range(5)]
    [key] = redis.smembers(RqKeys.workers_of(MODEL))
    redis_url = {"SCOREPOOL_REDIS_URL": stack.redis_url, "RQ_REDIS_URL": stack.redis_url}
    environ = os.environ | redis_url | {"SCOREPOOL_MODEL": f"{MODEL}={base}", "SCOREPOOL_LEASE_S": "4"}
    os.kill(int(redis.hget(key, "pid") or 0), signal.SIGKILL)
    log = tmp_path / "log"
    with log.open("wb") as out:
        worker = subprocess.Popen(worker_command([MODEL]), env=environ, stdout=out, stderr=out)
    try:
        until(lambda: b"suspended, until `rq resume` or `POST /resume`" in log.read_bytes(), 120)
        assert statuses(http, jobs) == {"queued"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        http.post("/resume")
        for job in jobs:
            ends(http, job)
    finally:
        worker.kill()
        worker.wait()
