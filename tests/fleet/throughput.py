"""Scenarios that measure how fast a fleet is. Tests run them small, and bench.fleet in full.

Each runs a fleet of its own in an empty folder and returns what was measured.
"""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from redis import Redis

from scorepool import store
from tests.fleet.fleet import Fleet, Host, generate, score, until

FAST = {"FLEET_STEP_S": "0.02", "FLEET_TOKEN_S": "0.00003"}  # 1,000 tokens in 50 ms alone, 30 ms beside others


def uplink(folder: Path, *, num_jobs: int = 64, mbit_s: float = 4.0, timeout_s: float = 150.0) -> dict[str, float]:
    """Send results of 1,000 tokens with 20 top_logprobs through a narrow uplink."""
    with Fleet(folder, FAST) as fleet:
        host = fleet.host("narrow")
        fleet.wait_until_up()
        host.link.change(up_bytes_s=mbit_s * 1e6 / 8)
        started_at = fleet.now()
        job_ids = fleet.submit(*[score(1000, top_logprobs=20)] * num_jobs)
        try:
            needed_s = fleet.wait_until_done(job_ids, timeout_s) - started_at
        except TimeoutError:
            needed_s = math.inf
        ended = [job_id for job_id in job_ids if job_id in fleet.ends()]
        size = sum(fleet.redis.strlen(store.Keys.outcome(job_id)) for job_id in ended) / max(1, len(ended)) * num_jobs
        return {
            "ended": len(ended),
            "jobs": num_jobs,
            "seconds": needed_s,
            "link_s": size / (mbit_s * 1e6 / 8),
            "sent_bytes": host.link.num_bytes_up,
            "sent_twice": host.link.num_bytes_up / size if size else math.inf,
        }


def seconds_of(fleet: Fleet, num_jobs: int, request: Any) -> float:
    """Submit so many jobs; return the seconds until the last is recorded."""
    started_at = fleet.now()
    return fleet.wait_until_done(fleet.submit(*[request] * num_jobs), 120) - started_at


def slow_host(folder: Path, *, num_jobs: int = 100, slower: float = 10.0) -> dict[str, float]:
    """Run jobs on a fast worker alone, then on it and one `slower` times slower."""
    with Fleet(folder, FAST) as fleet:
        fast = fleet.host("fast")
        fleet.wait_until_up()
        seconds_of(fleet, 5, score(1000))  # measures its speed, if it does
        alone_s = seconds_of(fleet, num_jobs, score(1000))
        slow = fleet.host("slow", speed=1 / slower)
        fleet.wait_until_up()
        fast.stop()
        seconds_of(fleet, 5, score(1000))
        fast.wake()
        until(lambda: fast.is_up and slow.is_up)
        time.sleep(1)
        started_at = fleet.now()
        job_ids = fleet.submit(*[score(1000)] * num_jobs)
        together_s = fleet.wait_until_done(job_ids, 120) - started_at
        return {
            "alone_s": alone_s,
            "seconds": together_s,
            "ideal_s": alone_s / (1 + 1 / slower),
            "slow_jobs": shares_of(fleet, job_ids).get("slow", 0),
        }


def bulk(folder: Path, *, num_jobs: int = 200, num_workers: int = 30, max_tokens: int = 20) -> dict[str, float]:
    """Submit jobs in one go to idle workers. Steps are long, because all the workers share the cores of one machine."""
    with Fleet(folder, {"FLEET_STEP_S": "0.1", "FLEET_TOKEN_S": "0.0003", "SCOREPOOL_LOG_LEVEL": "WARNING"}) as fleet:
        for number in range(num_workers):
            fleet.host(f"h{number}")
        fleet.wait_until_up()
        time.sleep(3)  # for their start to be over
        share = math.ceil(num_jobs / num_workers)
        ideal_s = (max_tokens + 1) * (0.1 + share * 0.0003)  # of a worker that has its share at once
        started_at = fleet.now()
        job_ids = fleet.submit(*[generate(max_tokens)] * num_jobs)
        seconds = fleet.wait_until_done(job_ids, 120) - started_at
        shares = shares_of(fleet, job_ids)
        return {
            "seconds": seconds,
            "ideal_s": ideal_s,
            "largest_share": max(shares.values()),
            "idle_workers": num_workers - len(shares),
        }


def shares_of(fleet: Fleet, job_ids: list[str]) -> dict[str, int]:
    """Return how many of the jobs each worker ran."""
    shares: dict[str, int] = {}
    for job_id in job_ids:
        name = fleet.fields(job_id)["worker_name"]
        shares[name] = shares.get(name, 0) + 1
    return shares


def round_trips(folder: Path, *, rtt_s: float, num_jobs: int = 2000, num_lone: int = 10) -> dict[str, float]:
    """Run short jobs at a distance: many at once, then one at a time.

    `rows` is the mean of the engine's rows at a step. `lone_rtts` is the time of a lone job from its submission to its
    outcome in Redis, without its own step, in round trips.
    """
    settings = {"FLEET_STEP_S": "0.02", "FLEET_TOKEN_S": "0.00005", "SCOREPOOL_LOG_LEVEL": "WARNING"}
    with Fleet(folder, settings) as fleet:
        host = fleet.host("far")
        fleet.wait_until_up()
        host.link.change(delay_s=rtt_s / 2)
        time.sleep(1 + 2 * rtt_s)
        seconds_of(fleet, 200, score(20))
        time.sleep(0.5)
        before = host.stats()[-1]
        seconds = seconds_of(fleet, num_jobs, score(20))
        time.sleep(0.5)
        after = host.stats()[-1]
        lone_s = sorted(_lone_s(fleet) for _ in range(num_lone))[num_lone // 2]
        own_s = 0.02 + 21 * 0.00005
        return {
            "jobs_s": num_jobs / seconds,
            "rows": (after.row_steps - before.row_steps) / (after.steps - before.steps),
            "lone_s": lone_s,
            "own_s": own_s,
            "lone_rtts": (lone_s - own_s) / rtt_s if rtt_s else math.nan,
        }


def _lone_s(fleet: Fleet) -> float:
    """Return the seconds from the submission of a job, when Redis has it, to its outcome. The worker is idle."""
    time.sleep(0.3)
    (job_id,) = fleet.submit(score(20))
    ended_at = fleet.wait_until_done([job_id])
    return ended_at - float(fleet.fields(job_id)["created"])


def herd(
    folder: Path, *, num_workers: int = 30, num_jobs: int = 40, every_s: float = 0.25, settle_s: float = 5.0
) -> dict[str, float]:
    """Submit one job after the other to idle workers, and count what Redis does for each.

    What idle workers do in the same time is subtracted. It comes in bursts, so the lease is short.
    The rest may be below 0, because an exchange for a job postpones the next look of its worker.
    """
    settings = {"FLEET_STEP_S": "0.005", "SCOREPOOL_LEASE_S": "5", "SCOREPOOL_LOG_LEVEL": "WARNING"}
    with Fleet(folder, settings) as fleet:
        for number in range(num_workers):
            fleet.host(f"h{number}")
        fleet.wait_until_up()
        time.sleep(settle_s)
        duration_s = num_jobs * every_s
        before = commands(fleet.redis)
        time.sleep(duration_s)
        start, started_at = commands(fleet.redis), time.monotonic()
        job_ids = []
        for number in range(num_jobs):
            time.sleep(max(0.0, started_at + number * every_s - time.monotonic()))
            job_ids += fleet.submit(score(20))
        time.sleep(max(0.0, started_at + duration_s - time.monotonic()))
        assert set(job_ids) <= fleet.ends().keys()
        end = commands(fleet.redis)
        busy = difference(end, start)
        time.sleep(duration_s)
        both = Counter(difference(start, before)) + Counter(difference(commands(fleet.redis), end))
        idle = {name: count / 2 for name, count in both.items()}
        scripts = ("eval", "evalsha", "fcall")
        return {
            "commands_a_job": (sum(busy.values()) - sum(idle.values())) / num_jobs,
            "scripts_a_job": sum(busy.get(name, 0) - idle.get(name, 0) for name in scripts) / num_jobs,
            "idle_commands_s": sum(idle.values()) / duration_s,
        }


def commands(redis: Redis) -> dict[str, int]:
    """Return how often each command ran, those of scripts included."""
    stats = redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): fields["calls"] for name, fields in stats.items()}


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


def hosts_rate(fleet: Fleet, host: Host, since: float, until_at: float) -> float:
    """Return the jobs a second that a host ended between two times of Redis's clock."""
    ended = [job_id for job_id, at in fleet.ends().items() if since <= at < until_at]
    with fleet.redis.pipeline(transaction=False) as pipeline:
        for job_id in ended:
            pipeline.hget(store.RqKeys.job(job_id), "worker_name")
        names = pipeline.execute()
    return names.count(host.name.encode()) / (until_at - since)
