"""A file of any size is scored in the same memory, here and on the server. SOAK_ROWS sets how large it is."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from redis import Redis

from scorepool import wire
from scorepool.files.output.journal import beside
from scorepool.local.demo import free_port
from scorepool.local.redis_server import RedisServer
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import eventually, running, serves
from tests.soak.fake_server import MAX_LIVE, result
from tests.soak.memory import MemorySampler, rss_bytes

NUM_ROWS = int(os.environ.get("SOAK_ROWS", "200000"))
NUM_ROWS_OF_A_STACK = NUM_ROWS // 4
MAX_GROWTH = 20 * 2**20  # bytes, of a process
MAX_REDIS_GROWTH = 2 * 2**20  # less than the results of a third of the rows


def write_rows(path: Path, num_rows: int) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"prompt": "{number}", "completion": "one word"}}\n' for number in range(num_rows))


@contextmanager
def scoring(path: Path, out: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `scorepool score`, which has written its first rows."""
    command = [str(Path(sys.executable).with_name("scorepool")), "score", str(path), "-o", str(out), "--url", url]
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: process.poll() is not None or has_rows(out))
            yield process
        finally:
            process.kill()


def has_rows(out: Path) -> bool:
    return any(path.exists() and path.stat().st_size for path in (out, beside(out, ".partial")))


@contextmanager
def fake_server(root: Path) -> Iterator[str]:
    """Yield the URL of a FakeServer."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([sys.executable, "-m", "tests.soak.fake_server", str(port)], cwd=root) as process:
        try:
            eventually(lambda: is_up(url))
            yield url
        finally:
            process.terminate()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/counts", trust_env=False).is_success
    except httpx.TransportError:
        return False


def check_rows(out: Path, num_rows: int) -> None:
    """Check that every row is there once, in order."""
    with out.open() as file:
        for number, line in enumerate(file):
            assert json.loads(line)["prompt"] == str(number)
    assert number == num_rows - 1


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_memory_of_the_command_does_not_grow_with_the_file(root: Path, tmp_path: Path):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(path, NUM_ROWS)
    with fake_server(root) as url:
        started_at = time.monotonic()
        with (
            scoring(path, out, url) as command,
            MemorySampler({"command": lambda: rss_bytes(command.pid)}) as memory,
        ):
            assert command.wait() == 0
        seconds = time.monotonic() - started_at
        counts = httpx.get(f"{url}/counts", trust_env=False).text
    num_submitted, num_deleted, max_live, num_live = map(int, counts.split())
    print(f"\n{NUM_ROWS:,} rows in {seconds:.1f} s, {NUM_ROWS / seconds:,.0f} rows/s; at most {max_live} jobs live")
    print(memory.table("command"))
    check_rows(out, NUM_ROWS)
    assert (num_live, num_deleted) == (0, num_submitted)
    assert max_live < MAX_LIVE
    assert memory.growth("command") < MAX_GROWTH


@contextmanager
def working(redis: Redis) -> Iterator[None]:
    """End each job as soon as it is submitted."""
    worker = FakeWorker(redis)
    worker.register()
    stopping = threading.Event()

    def work() -> None:
        while not stopping.wait(0.005):
            for job_id in worker.waiting():
                request = worker.start(job_id)
                assert isinstance(request, wire.Score)
                worker.end(job_id, result(request))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_memory_of_api_and_redis_does_not_grow_with_the_file(root: Path, tmp_path: Path):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(path, NUM_ROWS_OF_A_STACK)
    with (
        RedisServer(tmp_path / "redis") as server,
        Redis.from_url(server.url) as redis,
        running(root, server.url, tmp_path / "log") as (http, api),
        working(redis),
    ):
        eventually(lambda: serves(http, "demo"))
        started_at = time.monotonic()
        with scoring(path, out, str(http.base_url)) as command:
            measures = {
                "command": lambda: rss_bytes(command.pid),
                "API": lambda: rss_bytes(api.pid),
                "Redis": lambda: int(redis.info("memory")["used_memory"]),
            }
            with MemorySampler(measures) as memory:
                assert command.wait() == 0
        seconds = time.monotonic() - started_at
    print(f"\n{NUM_ROWS_OF_A_STACK:,} rows in {seconds:.1f} s, {NUM_ROWS_OF_A_STACK / seconds:,.0f} rows/s")
    for name in memory.samples:
        print(memory.table(name))
    check_rows(out, NUM_ROWS_OF_A_STACK)
    assert memory.growth("command") < MAX_GROWTH
    assert memory.growth("API") < MAX_GROWTH
    assert memory.growth("Redis") < MAX_REDIS_GROWTH
