"""Write access to Redis is not enough to run code in any process: neither a pickle nor a function's name does."""

import os
import pickle
import subprocess
import sys
import zlib
from base64 import b64encode
from pathlib import Path

import pytest
from redis import Redis
from rq.serializers import JSONSerializer

from scorepool import store
from tests.api.conftest import Serving
from tests.worker.conftest import Workers, failure, generate, status, submit


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> object:
        return (os.system, (f"touch {self.canary}",))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    (tmp_path / "canary").mkdir()
    return tmp_path / "canary" / "pickled"


def submit_attacks(redis: Redis, canary: Path) -> list[str]:
    """Submit jobs with an attack in each field that RQ would deserialise or import."""
    bomb = pickle.dumps(Bomb(canary))
    system = JSONSerializer.dumps(["os.system", None, [f"touch {canary}"], {}])
    attacks: list[dict[str, object]] = [
        {"data": bomb},
        {"data": zlib.compress(bomb)},
        {"data": pickle.dumps(("os.system", None, (f"touch {canary}",), {}))},
        {"data": system},
        {"data": zlib.compress(system)},
        {"meta": bomb},
        {"result": bomb},
        {"success_callback_name": "os.system", "failure_callback_name": "os.system"},
        {"stopped_callback_name": "os.system"},
        {"webhooks": f'[{{"url": "file://{canary}"}}]'},
    ]
    ids = [submit(redis, generate(), fields=attack) for attack in attacks]
    for job_id in ids:
        result = {"type": "1", "created_at": "2026-01-01T00:00:00.000000Z", "return_value": b64encode(bomb)}
        redis.xadd(f"rq:results:{job_id}", result)
    return ids


def environment(root: Path) -> dict[str, str]:
    """Return the environment that docs/operations.md recommends: RQ's tools load scorepool's classes."""
    classes = {
        "RQ_WORKER_CLASS": "scorepool.worker.BatchWorker",
        "RQ_JOB_CLASS": "scorepool.worker.Job",
        "RQ_QUEUE_CLASS": "scorepool.worker.Queue",
    }
    return {**os.environ, "PYTHONPATH": str(root), **classes}


def test_workers_and_rqs_tools_run_no_code_from_redis(redis: Redis, workers: Workers, root: Path, canary: Path):
    ids = submit_attacks(redis, canary)
    redis.zadd("rq:wip:demo", {f"{ids[5]}:gone": 1.0})  # an abandoned job, which `rq info` cleans up
    requeue = ["requeue", "--queue", "demo", "--all"]

    def run_rq_tools(*commands: list[str]) -> None:
        for command in commands:
            arguments = [str(Path(sys.executable).with_name("rq")), *command, "--url", workers.redis_url]
            completed = subprocess.run(arguments, cwd=root, env=environment(root), capture_output=True, timeout=60)
            assert completed.returncode == 0, (command, completed.stderr)

    run_rq_tools(["info"], requeue, ["info", "-R"])
    workers.start("--burst").wait(timeout=60)
    run_rq_tools(["info", "--by-queue"], requeue, ["info", "-R"])
    workers.start("--burst").wait(timeout=60)

    assert list(canary.parent.iterdir()) == []
    assert {status(redis, job_id) for job_id in ids} <= {"failed", "finished"}
    for job_id in ids[:5]:
        assert failure(redis, job_id).code == "invalid"


def test_unpickling_the_bomb_runs_its_code(canary: Path):
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()


@pytest.mark.anyio
async def test_the_api_runs_no_code_from_redis(serving: Serving, redis: Redis, canary: Path):
    async with serving() as http:
        ids = submit_attacks(redis, canary)
        for job_id in ids:
            redis.hset(f"rq:job:{job_id}", mapping={"owner": "local", "created": "1.000001"})
            redis.zadd(store.Keys.jobs_of("local"), {job_id: 1.0})
            for reply in (
                await http.get(f"/v1/jobs/{job_id}"),
                await http.post(f"/v1/jobs/{job_id}/cancel"),
                await http.delete(f"/v1/jobs/{job_id}"),
            ):
                assert reply.status_code < 500
        assert (await http.get("/v1/jobs")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    assert list(canary.parent.iterdir()) == []
