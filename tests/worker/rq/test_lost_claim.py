"""Redis is killed after it has leased jobs and before it answers, and comes back an hour behind."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis

from scorepool.local.redis_server import RedisServer
from tests.worker.conftest import Workers, done, generate, status, submit, until

HOUR_MS = 3_600_000
NUM_JOBS = 20
EXPIRY = re.compile(rb"((?:PEXPIREAT\r\n\$\d+\r\n[^\r]+|PXAT)\r\n\$13\r\n)(\d{13})")  # in Redis's append-only file


class LosesOneReply:
    """A proxy of Redis on a unix socket. It drops the first reply that holds `mark`, and restarts Redis instead."""

    def __init__(self, server: RedisServer, path: Path, mark: bytes) -> None:
        self.server = server
        self.mark = mark
        self.path = path
        self.leases_ms: list[int] = []  # until the leases of the lost reply end, after the restart
        self.has_lost = threading.Event()
        self.is_back = threading.Event()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield the URL."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen()
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()
            yield f"unix://{self.path}"
            listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=[listener.accept()[0]], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as backend, suppress(OSError):
            backend.connect(str(self.server.socket))
            commands = threading.Thread(target=forward, args=[client, backend], daemon=True)
            commands.start()
            forward(backend, client, self._loses)
            commands.join()

    def _loses(self, reply: bytes) -> bool:
        if self.mark not in reply or self.has_lost.is_set():
            return False
        self.has_lost.set()
        restart_an_hour_behind(self.server)
        with Redis.from_url(self.server.url) as redis:
            self.leases_ms = [redis.pttl(key) for key in redis.scan_iter("rq:execution:*")]
        self.is_back.set()
        return True


def forward(source: socket.socket, target: socket.socket, loses: Callable[[bytes], bool] = lambda data: False) -> None:
    """Send all data on, until either end closes or `loses` is true. Then close both directions."""
    with suppress(OSError):
        while (data := source.recv(1 << 20)) and not loses(data):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def restart_an_hour_behind(server: RedisServer) -> None:
    """Kill the server, and start it with its data as it is after its clock went back: keys expire an hour later."""
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    [log] = server.folder.glob("appendonlydir/*.incr.aof")
    log.write_bytes(EXPIRY.sub(lambda found: found[1] + b"%d" % (int(found[2]) + HOUR_MS), log.read_bytes()))
    server.start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def test_jobs_of_a_claim_whose_answer_was_lost_run_at_once(server: RedisServer, root: Path, tmp_path: Path):
    with Redis.from_url(server.url) as redis:
        ids = [submit(redis, generate()) for _ in range(NUM_JOBS)]
        proxy = LosesOneReply(server, tmp_path / "proxy", mark=ids[0].encode())
        with proxy.running() as url, Workers(url, root, tmp_path) as workers:
            workers.start()
            assert proxy.is_back.wait(60)
            assert proxy.leases_ms
            assert min(proxy.leases_ms) > HOUR_MS / 2  # nothing may wait for their end
            until(lambda: all(status(redis, id_) == "finished" for id_ in ids))

        assert sorted(done(redis)) == sorted(ids)
