"""Whoever can write to Redis cannot make any process of ours run code: not by a pickle, not by a function's name."""

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
    """Whoever unpickles it leaves a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> object:
        return (os.system, (f"touch {self.canary}",))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    (tmp_path / "canary").mkdir()
    return tmp_path / "canary" / "pickled"


def poison(redis: Redis, canary: Path) -> list[str]:
    """Jobs whose every field that RQ would read with its serializer, or import, is an attack."""
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
    for id_ in ids:
        result = {"type": "1", "created_at": "2026-01-01T00:00:00.000000Z", "return_value": b64encode(bomb)}
        redis.xadd(f"rq:results:{id_}", result)
    return ids


def environment(root: Path) -> dict[str, str]:
    """Of an operator as docs/operations.md has it: RQ's tools load our classes."""
    ours = {
        "RQ_WORKER_CLASS": "scorepool.worker.BatchWorker",
        "RQ_JOB_CLASS": "scorepool.worker.Job",
        "RQ_QUEUE_CLASS": "scorepool.worker.Queue",
    }
    return {**os.environ, "PYTHONPATH": str(root), **ours}


def test_a_worker_and_rqs_own_tools_run_nothing_of_it(redis: Redis, workers: Workers, root: Path, canary: Path):
    ids = poison(redis, canary)
    redis.zadd("rq:wip:demo", {f"{ids[5]}:gone": 1.0})  # an abandoned job, which `rq info` cleans up
    commands = [["info"], ["info", "--by-queue"], ["requeue", "--queue", "demo", "--all"], ["info", "-R"]]

    def operate() -> None:
        for command in commands:
            arguments = [str(Path(sys.executable).with_name("rq")), *command, "--url", workers.redis_url]
            done = subprocess.run(arguments, cwd=root, env=environment(root), capture_output=True, timeout=60)
            assert done.returncode == 0, (command, done.stderr)

    operate()
    workers.start("--burst").wait(timeout=60)
    operate()
    workers.start("--burst").wait(timeout=60)

    assert list(canary.parent.iterdir()) == []
    assert {status(redis, id_) for id_ in ids} <= {"failed", "finished"}
    for id_ in ids[:5]:
        assert failure(redis, id_).code == "invalid"


def test_the_bomb_of_these_tests_goes_off(canary: Path):
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()


@pytest.mark.anyio
async def test_the_api_reads_none_of_it(serving: Serving, redis: Redis, canary: Path):
    async with serving() as http:
        ids = poison(redis, canary)
        for id_ in ids:
            redis.hset(f"rq:job:{id_}", mapping={"owner": "local", "created": "1.000001"})
            redis.zadd(store.Keys.owned("local"), {id_: 1.0})
            for reply in (
                await http.get(f"/v1/jobs/{id_}"),
                await http.post(f"/v1/jobs/{id_}/cancel"),
                await http.delete(f"/v1/jobs/{id_}"),
            ):
                assert reply.status_code < 500
        assert (await http.get("/v1/jobs")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    assert list(canary.parent.iterdir()) == []
