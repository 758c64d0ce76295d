"""Measure webhook deliveries to 100 receivers, and how much receivers that never answer delay the others.

    python -m bench.webhooks [--per-second 300] [--seconds 20] [--hanging 10] [--workers 1]

Two runs through real `rq worker` processes, a real Redis and a receiver in its own process: first all receivers answer,
then some accept connections and never answer. Prints deliveries per second and the time from the event to the POST for
the receivers that answer. Deliveries to a hanging receiver are late by design and are not waited for.
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

from scorepool.local.redis_server import RedisServer
from scorepool.local.stack import webhook_command
from scorepool.store.scripts import load

ROOT = Path(__file__).parent.parent
NUM_RECEIVERS = 100
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


class Receiver(asyncio.Protocol):
    """Record when each webhook-id arrives. Never answer on a path that begins with /hang."""

    arrived_at: ClassVar[dict[str, float]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.message = b""

    def data_received(self, data: bytes) -> None:
        self.message += data
        if b"}}" not in self.message or self.message.startswith(b"POST /hang"):
            return
        [line] = [line for line in self.message.split(b"\r\n") if line.lower().startswith(b"webhook-id:")]
        self.arrived_at.setdefault(line.partition(b":")[2].strip().decode(), time.monotonic())
        self.message = b""
        self.transport.write(ANSWER)  # type: ignore[attr-defined]


def receive(pipe: Connection) -> None:
    """Run the receiver process: send its port, then the arrival times whenever a message comes."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Receiver, "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        while True:
            await loop.run_in_executor(None, pipe.recv)
            pipe.send(dict(Receiver.arrived_at))

    asyncio.run(serve())


@contextmanager
def run_workers(url: str, count: int) -> Iterator[list[int]]:
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


def enqueue_events(redis: Redis, port: int, per_second: int, seconds: int, hanging: int) -> dict[str, float]:
    """Enqueue events at a steady rate. Return when each was enqueued, by delivery id, without hanging receivers."""
    script = redis.register_script(
        f"{load('outbox.lua')}\ndeliver(ARGV[1], 'bench', 600, ARGV[2], "
        "{event = 'job.finished', job = ARGV[1], at = ARGV[2], model = 'demo', url = ARGV[3]})"
    )
    enqueued_at: dict[str, float] = {}
    started_at = time.monotonic()
    for number in range(per_second * seconds):
        time.sleep(max(0.0, started_at + number / per_second - time.monotonic()))
        receiver = number % NUM_RECEIVERS
        name = f"hang{receiver}" if receiver < hanging else f"answer{receiver}"
        delivery_id = f"wh_{number:032x}"
        if receiver >= hanging:
            enqueued_at[delivery_id] = time.monotonic()
        script(args=[delivery_id, utcformat(now()), f"http://127.0.1.{receiver + 1}:{port}/{name}"])
    return enqueued_at


def print_latencies(name: str, enqueued_at: dict[str, float], arrived_at: dict[str, float]) -> None:
    delivered = enqueued_at.keys() & arrived_at.keys()
    waits_ms = sorted((arrived_at[delivery_id] - enqueued_at[delivery_id]) * 1000 for delivery_id in delivered)
    duration_s = max(arrived_at[delivery_id] for delivery_id in delivered) - min(enqueued_at.values())
    p50, p99 = waits_ms[len(waits_ms) // 2], waits_ms[int(len(waits_ms) * 0.99)]
    print(
        f"{name:<24} {len(waits_ms)} of {len(enqueued_at)} delivered, {len(waits_ms) / duration_s:.0f}/s; "
        f"event to POST p50 {p50:.0f} ms, p99 {p99:.0f} ms, worst {waits_ms[-1]:.0f} ms"
    )


def cpu_s(pids_by_name: dict[str, list[int]]) -> dict[str, float]:
    """Return the CPU seconds that the processes under each name have used so far."""
    return {name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids) for name, pids in pids_by_name.items()}


def measure(hanging: int, arguments: argparse.Namespace) -> None:
    here, there = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    port = here.recv()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), appendfsync="everysec") as server:
        redis = Redis.from_url(server.url)
        with run_workers(server.url, arguments.workers) as pids:
            while redis.scard("rq:workers") < arguments.workers:
                time.sleep(0.1)
            assert server.process is not None
            assert receiver.pid is not None
            pids_by_name = {
                "workers": pids,
                "redis": [server.process.pid],
                "receiver": [receiver.pid],
                "feeder": [os.getpid()],
            }
            before = cpu_s(pids_by_name)
            enqueued_at = enqueue_events(redis, port, arguments.per_second, arguments.seconds, hanging)
            deadline = time.monotonic() + 60
            arrived_at: dict[str, float] = {}
            while not enqueued_at.keys() <= arrived_at.keys() and time.monotonic() < deadline:
                time.sleep(0.5)
                here.send(None)
                arrived_at = here.recv()
            print_latencies(f"{hanging} of {NUM_RECEIVERS} hang", enqueued_at, arrived_at)
            after = cpu_s(pids_by_name)
            used = ", ".join(
                f"{name} {(after[name] - before[name]) / len(arrived_at) * 1e3:.2f}" for name in pids_by_name
            )
            print(f"{'':<24} CPU ms a delivery: {used}")
    receiver.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-second", type=int, default=300, help="events per second (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=20, help="seconds of each run (default: %(default)s)")
    parser.add_argument("--hanging", type=int, default=10, help="receivers that never answer (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="webhook workers (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"{arguments.per_second} events/s for {arguments.seconds} s, {arguments.workers} webhook worker(s)")
    for hanging in (0, arguments.hanging):
        measure(hanging, arguments)


if __name__ == "__main__":
    main()
