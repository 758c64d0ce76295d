import os
import signal
import time
from pathlib import Path

import pytest
from redis import Redis

from scorepool.local import machine_memory, redis_server
from scorepool.local.machine_memory import machine_memory_bytes
from scorepool.local.redis_server import RedisServer, RedisServerError


def test_acknowledged_writes_survive_kill_9(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        for number in range(1000):
            redis.set(f"key:{number}", number)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server.start()
        assert redis.dbsize() == 1000


def test_only_its_user_can_open_the_socket(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server:
        assert server.socket.stat().st_mode & 0o077 == 0
        assert server.folder.stat().st_mode & 0o077 == 0


def test_a_second_server_on_the_same_folder_is_refused(tmp_path: Path):
    with (
        RedisServer(tmp_path / "r"),
        pytest.raises(RedisServerError, match="already runs"),
        RedisServer(tmp_path / "r"),
    ):
        pass


def test_a_path_too_long_for_a_socket_says_what_to_set(tmp_path: Path):
    with pytest.raises(RedisServerError, match="SCOREPOOL_STATE_DIR"), RedisServer(tmp_path / ("x" * 100)):
        pass


def test_redis_never_evicts(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_result_stream_of_rq_is_small(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        redis.xadd("rq:results:1", {"type": "1", "worker_name": "mac"})
        assert int(redis.memory_usage("rq:results:1") or 0) < 1500


def test_start_waits_for_data_that_takes_long_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        with redis.pipeline(transaction=False) as pipeline:
            for number in range(10_000):  # while it loads, Redis answers about every 1000 keys
                pipeline.set(f"key:{number}", number)
            pipeline.execute()
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        slow = tmp_path / "slow-redis"
        slow.write_text(f'#!/bin/sh\nexec {redis_server.find_binary()} "$@" --key-load-delay 300\n')
        slow.chmod(0o755)
        monkeypatch.setattr(redis_server, "find_binary", lambda: slow)
        ping, monotonic, passed_s = server._ping, time.monotonic, 0.0

        def slow_ping() -> bytes:
            """Advance the clock by nearly the whole start timeout at each answer of the loading server."""
            nonlocal passed_s
            answer = ping()
            if answer.startswith(b"-LOADING"):
                passed_s += 0.9 * redis_server.START_TIMEOUT_S
            return answer

        monkeypatch.setattr(server, "_ping", slow_ping)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s)
        server.start()
        assert redis.dbsize() == 10_000


def test_the_memory_of_the_server_is_limited_by_default_to_a_quarter_of_the_machines(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        assert redis.config_get("maxmemory*")["maxmemory"] == str(machine_memory_bytes() // 4)
    with RedisServer(tmp_path / "r", maxmemory_bytes=10**8) as server, Redis.from_url(server.url) as redis:
        assert redis.config_get("maxmemory*")["maxmemory"] == str(10**8)
        assert redis.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {"memory.max": "1000000\n"}, 1_000_000),
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/a/b", {"a/memory.max": "2000000\n", "a/b/memory.max": "3000000\n"}, 2_000_000),
        ("5:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": "4000000\n", "memory.max": "x"}, 4_000_000),
        ("5:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        (None, {}, None),
    ],
)
def test_the_memory_of_a_container_is_what_its_cgroups_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], expected: int | None
):
    whole = machine_memory.os.sysconf("SC_PHYS_PAGES") * machine_memory.os.sysconf("SC_PAGE_SIZE")
    if own is not None:
        (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine_memory, "OWN_CGROUPS", tmp_path / "own")
    assert machine_memory_bytes() == (whole if expected is None else expected)
