"""Deliveries to a hundred receivers of which some never answer: are the others told late?

    python bench/webhooks.py [--per-second 300] [--seconds 20] [--hanging 10] [--workers 1]

Two runs through real `rq worker` processes, a real Redis and a receiver in a process of its own: first with all
receivers well, then with some that accept and say nothing. Prints deliveries per second and the wait from the event to
the POST of the receivers that are well. What goes to a receiver that hangs is late by design, and not waited for.
"""

import argparse
import asyncio
import base64
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import psutil
from redis import Redis
from rq.utils import now, utcformat

from scorepool import store
from scorepool.local.redis_server import RedisServer
from scorepool.local.stack import webhook_command

ROOT = Path(__file__).parent.parent
NUM_RECEIVERS = 100
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


class Receiver(asyncio.Protocol):
    """Notes when each webhook-id came. On a path that begins with /hang it says nothing for ever."""

    seen: ClassVar[dict[str, float]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.message = b""

    def data_received(self, data: bytes) -> None:
        self.message += data
        if b"}}" not in self.message or self.message.startswith(b"POST /hang"):
            return
        [line] = [line for line in self.message.split(b"\r\n") if line.lower().startswith(b"webhook-id:")]
        self.seen.setdefault(line.partition(b":")[2].strip().decode(), time.monotonic())
        self.message = b""
        self.transport.write(ANSWER)  # type: ignore[attr-defined]


def receive(pipe: Connection) -> None:
    """A process: sends its port, and what it saw when it is asked."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Receiver, "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        while True:
            await loop.run_in_executor(None, pipe.recv)
            pipe.send(dict(Receiver.seen))

    asyncio.run(serve())


@contextmanager
def workers(url: str, count: int) -> Iterator[list[int]]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RQ_REDIS_URL": url,
        "SCOREPOOL_REDIS_URL": url,
        "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true",
        "SCOREPOOL_LOG_LEVEL": "ERROR",
        "SCOREPOOL_DRAIN_TIMEOUT_S": "1",
    }
    command = [*webhook_command(), "--quiet"]
    processes = [
        subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)


def feed(redis: Redis, port: int, per_second: int, seconds: int, hanging: int) -> dict[str, float]:
    """Put events at a steady pace. Returns when each was put, by the id of its delivery, of those that are well."""
    script = redis.register_script(
        f"{store.OUTBOX}\ndeliver(ARGV[1], 'bench', 600, ARGV[2], "
        "{event = 'job.finished', job = ARGV[1], at = ARGV[2], model = 'demo', url = ARGV[3]})"
    )
    put: dict[str, float] = {}
    started_at = time.monotonic()
    for number in range(per_second * seconds):
        time.sleep(max(0.0, started_at + number / per_second - time.monotonic()))
        receiver = number % NUM_RECEIVERS
        name = f"hang{receiver}" if receiver < hanging else f"well{receiver}"
        id_ = f"wh_{number:032x}"
        if receiver >= hanging:
            put[id_] = time.monotonic()
        script(args=[id_, utcformat(now()), f"http://127.0.1.{receiver + 1}:{port}/{name}"])
    return put


def report(name: str, put: dict[str, float], seen: dict[str, float]) -> None:
    waits_ms = sorted((seen[id_] - at) * 1000 for id_, at in put.items() if id_ in seen)
    took_s = max(seen[id_] for id_ in put if id_ in seen) - min(put.values())
    p50, p99 = waits_ms[len(waits_ms) // 2], waits_ms[int(len(waits_ms) * 0.99)]
    print(
        f"{name:<24} {len(waits_ms)} of {len(put)} told, {len(waits_ms) / took_s:.0f}/s; "
        f"event to POST p50 {p50:.0f} ms, p99 {p99:.0f} ms, worst {waits_ms[-1]:.0f} ms"
    )


def cpu_s(parts: dict[str, list[int]]) -> dict[str, float]:
    """What the processes of each part have used so far."""
    return {part: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids) for part, pids in parts.items()}


def measure(hanging: int, options: argparse.Namespace) -> None:
    here, there = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    port = here.recv()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), appendfsync="everysec") as server:
        redis = Redis.from_url(server.url)
        with workers(server.url, options.workers) as pids:
            while redis.scard("rq:workers") < options.workers:
                time.sleep(0.1)
            assert server.process is not None
            assert receiver.pid is not None
            parts = {
                "workers": pids,
                "redis": [server.process.pid],
                "receiver": [receiver.pid],
                "feeder": [os.getpid()],
            }
            before = cpu_s(parts)
            put = feed(redis, port, options.per_second, options.seconds, hanging)
            deadline = time.monotonic() + 60
            seen: dict[str, float] = {}
            while not put.keys() <= seen.keys() and time.monotonic() < deadline:
                time.sleep(0.5)
                here.send(None)
                seen = here.recv()
            report(f"{hanging} of {NUM_RECEIVERS} hang", put, seen)
            after = cpu_s(parts)
            used = ", ".join(f"{part} {(after[part] - before[part]) / len(seen) * 1e3:.2f}" for part in parts)
            print(f"{'':<24} CPU ms a delivery: {used}")
    receiver.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-second", type=int, default=300)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--hanging", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.per_second} events/s for {options.seconds} s, {options.workers} webhook worker(s)")
    for hanging in (0, options.hanging):
        measure(hanging, options)


if __name__ == "__main__":
    main()
