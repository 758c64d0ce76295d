"""Run 30 real workers with a paced engine, and the same fleet in the simulation."""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import msgspec
import redis.asyncio

from bench.fleet_simulation.costs import OWNER, Costs, Meter
from bench.fleet_simulation.simulation import WARM_UP, Measured, Simulation, Workload, quantile
from bench.fleet_simulation.simulation import Fleet as SimulatedFleet
from scorepool import store
from scorepool.api.auth import Keyring
from scorepool.api.repositories.queue import Queue
from tests.fleet.fleet import Fleet, generate

DELAY_S = 0.005  # one way
WORKLOAD = Workload(name="check", rows=4, step_s=0.1, num_steps=21)
SETTINGS = {
    "FLEET_STEP_S": str(WORKLOAD.step_s),
    "FLEET_TOKEN_S": "0",
    "SCOREPOOL_MAX_RUNNING_ROWS": str(WORKLOAD.rows),
    "SCOREPOOL_LOG_LEVEL": "WARNING",
    "SCOREPOOL_RESULT_CACHE_BYTES": "0",
    "SCOREPOOL_CHECKPOINT_S": "0",
}


def run(num_workers: int, load: float, seconds: float) -> Measured:
    """Run real workers."""
    with tempfile.TemporaryDirectory(prefix="fleet") as folder, Fleet(Path(folder), SETTINGS) as fleet:
        for number in range(num_workers):
            fleet.host(f"h{number}", link={"delay_s": DELAY_S})
        fleet.wait_until_up()
        time.sleep(3)  # for their start to be over
        per_s = load * num_workers * WORKLOAD.jobs_per_s
        meter = Meter(fleet.redis)
        begun_at = fleet.now()
        submitted, busy_s, window_s = asyncio.run(_submit(fleet, per_s, seconds, meter))
        time.sleep(2 * WORKLOAD.job_s)
        ends = fleet.ends()
        warm_at, end_at = begun_at + WARM_UP * seconds, begun_at + seconds
        totals = sorted(
            ends[job_id] - at for job_id, at in submitted.items() if warm_at <= ends.get(job_id, 0) < end_at
        )
        waits = [max(0.0, total - WORKLOAD.job_s) for total in totals]
        return Measured(
            offered_per_s=len(submitted) / seconds,
            ended_per_s=len(totals) / (end_at - warm_at),
            redis_busy=busy_s / window_s,
            wait_p50_s=quantile(waits, 0.5),
            wait_p99_s=quantile(waits, 0.99),
            total_p50_s=quantile(totals, 0.5),
            total_p99_s=quantile(totals, 0.99),
        )


async def _submit(fleet: Fleet, per_s: float, seconds: float, meter: Meter) -> tuple[dict[str, float], float, float]:
    """Submit at random times; return when each job was submitted, and Redis's CPU and wall seconds after warm-up."""
    numbers, loop = random.Random(1), asyncio.get_running_loop()
    submitted: dict[str, float] = {}
    started_at = loop.time()
    due_at, warm, warm_at = started_at, 0.0, 0.0
    async with redis.asyncio.Redis.from_url(fleet.server.url) as connection:
        queue = Queue(connection, store.Settings(max_queue_depth=10**7), Keyring([]).weight, False)
        while due_at < started_at + seconds:
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            job_id = uuid4().hex
            await queue.submit(OWNER, [generate(WORKLOAD.num_steps - 1)], [job_id])
            submitted[job_id] = await _created(connection, job_id)
            if not warm_at and loop.time() >= started_at + WARM_UP * seconds:
                warm, warm_at = meter.read_s(), loop.time()
            due_at += numbers.expovariate(per_s)
    return submitted, meter.read_s() - warm, loop.time() - warm_at


async def _created(connection: "redis.asyncio.Redis", job_id: str) -> float:
    """Return when a job was submitted, by Redis's clock."""
    found = await connection.hget(store.RqKeys.job(job_id), store.JobField.CREATED)
    return float(found or 0.0)


def simulated(costs: Costs, num_workers: int, load: float, seconds: float) -> Measured:
    """Simulate the same fleet, with costs of the same run. Nobody reads results, and each submission reads a field."""
    own = msgspec.structs.replace(costs, read=0.0)
    fleet = SimulatedFleet(
        num_workers=num_workers, workload=WORKLOAD, load=load, rtt_s=2 * DELAY_S + costs.rtt_s, seconds=seconds
    )
    return Simulation(fleet, own).run()
