"""Say where one Redis ends, and what a job waits, by a simulation that is checked against a real run.

python -m bench.fleet_simulation [--workers 10,30,...,10000] [--quick] [--without-check]
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from redis import Redis

from bench.fleet_simulation import real_run
from bench.fleet_simulation.costs import Costs, measure
from bench.fleet_simulation.simulation import Fleet, Simulation, Workload
from scorepool.local.redis_server import RedisServer

WORKERS = (10, 30, 100, 300, 1000, 3000, 10_000)
MAX_WORKERS = 100_000  # whose simulation takes minutes
LOAD = 0.7
RTT_S = 0.002
SILENT_PER_HOUR = 0.5
FULL = 0.95  # of a core: above it, Redis is what limits the fleet
MAX_EXCESS = 2  # jobs are submitted at most so many times as fast as Redis's thread can take them
WORKLOADS = (
    Workload(name="scores, 32 rows in 0.32 s", rows=32, step_s=0.32, num_steps=1),
    Workload(name="128 tokens at 20/s, 32 rows", rows=32, step_s=0.05, num_steps=128),
    Workload(name="the same, streamed", rows=32, step_s=0.05, num_steps=128, streams=True),
    Workload(name="1,000 tokens at 20/s, 8 rows", rows=8, step_s=0.05, num_steps=1000),
)


def cost_table(costs: Costs) -> Iterator[str]:
    yield "| CPU of Redis's main thread | microseconds |\n|---|---|"
    for name in costs.__struct_fields__:
        yield f"| `{name}` | {getattr(costs, name) * 1e6:.2f} |"


def fleet_of(costs: Costs, workload: Workload, num_workers: int) -> Fleet:
    """Return the fleet to simulate: for seconds, and with jobs, that take a minute of this machine at most."""
    seconds = max(20.0, 4 * workload.job_s) if num_workers < 3000 else max(10.0, 3 * workload.job_s)
    return Fleet(
        num_workers=num_workers,
        workload=workload,
        load=LOAD,
        rtt_s=RTT_S,
        seconds=seconds,
        silent_per_hour=SILENT_PER_HOUR,
        max_jobs_per_s=MAX_EXCESS / (costs.submit + costs.claim_job + costs.finish_job + costs.read),
    )


def fleet_table(costs: Costs, counts: Sequence[int]) -> Iterator[str]:
    yield "| jobs | workers | submitted/s | ended/s | Redis busy | wait p50 | wait p99 |\n|---|---|---|---|---|---|---|"
    for workload in WORKLOADS:
        for count in counts:
            found = Simulation(fleet_of(costs, workload, count), costs).run()
            wanted = LOAD * count * workload.jobs_per_s
            of_wanted = f" of {wanted:.0f}" if found.offered_per_s < wanted else ""
            yield (
                f"| {workload.name} | {count} | {found.offered_per_s:.0f}{of_wanted} | {found.ended_per_s:.0f} | "
                f"{found.redis_busy:.0%} | {found.wait_p50_s * 1e3:.0f} ms | {found.wait_p99_s * 1e3:.0f} ms |"
            )
            if found.redis_busy > FULL:
                break


def check_table(costs: Costs, num_workers: int, seconds: float) -> Iterator[str]:
    yield f"| {num_workers} workers, rows of 2.1 s | real | simulated | deviation |\n|---|---|---|---|"
    real = real_run.run(num_workers, LOAD, seconds)
    simulated = real_run.simulated(costs, num_workers, LOAD, seconds)
    for name in real.__struct_fields__:
        one, other = getattr(real, name), getattr(simulated, name)
        deviation = f"{(other - one) / one:+.0%}" if one else "-"
        yield f"| `{name}` | {one:.3f} | {other:.3f} | {deviation} |"


def worker_counts(text: str) -> list[int]:
    """Read numbers of workers. Raises ArgumentTypeError."""
    counts = [int(count) if count.strip().isdecimal() else 0 for count in text.split(",")]
    if not all(1 <= count <= MAX_WORKERS for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1 to {MAX_WORKERS}, separated by commas")
    return counts


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Ends the process with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=worker_counts, default=WORKERS, help="how many, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few workers, and a real run of two")
    parser.add_argument("--without-check", action="store_true", help="leave out the real run")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    run((10, 30) if options.quick else options.workers, is_quick=options.quick, is_checked=not options.without_check)


def run(counts: Sequence[int], *, is_quick: bool = False, is_checked: bool = True) -> None:
    """Measure, check and simulate, and print a table of each."""
    with (
        tempfile.TemporaryDirectory(prefix="fleet") as folder,
        RedisServer(Path(folder) / "r", appendfsync="everysec") as server,
        Redis.from_url(server.url) as connection,
    ):
        costs = measure(connection)
    tables = [cost_table(costs)]
    if is_checked:
        tables.append(check_table(costs, 2 if is_quick else 30, 8.0 if is_quick else 40.0))
    for table in (*tables, fleet_table(costs, counts)):
        for line in table:
            print(line, flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
