"""Measure a fleet on bad links: hosts that sleep, stall, are slow or far away. Compare with what issue 13 asks for.

    python -m bench.fleet [SCENARIO ...]
    python -m bench.fleet --simulate

Every host is a worker process behind a proxy of its own (tests/fleet/link.py), with an engine that takes the time of a
GPU and computes nothing (tests/fleet/fake_engine.py). A scenario takes up to two minutes; without arguments all run.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.fleet_simulation import __main__ as fleet_simulation
from tests.fleet import faults, throughput

Row = tuple[str, str, str, bool]  # what, measured, target, and whether it is met


def uplink(folder: Path) -> Iterator[Row]:
    for mbit_s in (4, 2):
        found = throughput.uplink(folder / str(mbit_s), mbit_s=mbit_s, timeout_s=100)
        measured = f"{found['ended']:.0f} of {found['jobs']:.0f} in {found['seconds']:.1f} s"
        limit_s = 1.25 * found["link_s"]
        target = f"<= {limit_s:.1f} s: the link needs {found['link_s']:.1f} s"
        yield f"64 results of 1,000 tokens, top-20, {mbit_s} Mbit/s", measured, target, found["seconds"] <= limit_s


def slow_host(folder: Path) -> Iterator[Row]:
    found = throughput.slow_host(folder)
    limit_s = 1.1 * found["ideal_s"]
    target = f"<= {limit_s:.1f} s; the fast one alone needs {found['alone_s']:.1f} s"
    yield "100 jobs, one of two workers 10x slower", f"{found['seconds']:.1f} s", target, found["seconds"] <= limit_s


def bulk(folder: Path) -> Iterator[Row]:
    found = throughput.bulk(folder)
    limit_s = 1.3 * found["ideal_s"]
    shares = f"largest share {found['largest_share']:.0f}, {found['idle_workers']:.0f} workers idle"
    measured = f"{found['seconds']:.2f} s; {shares}"
    yield "200 jobs over 30 workers", measured, f"<= {limit_s:.2f} s", found["seconds"] <= limit_s


def nap(folder: Path) -> Iterator[Row]:
    found = faults.nap(folder)
    measured = f"{found['share']:.0%} ({found['before_s']:.0f} -> {found['after_s']:.0f} jobs/s)"
    yield "rate of C while B sleeps", measured, ">= 95 %", found["share"] >= 0.95


def naps(folder: Path) -> Iterator[Row]:
    found = faults.naps(folder)
    measured = f"{found['end']} after {found['seconds']:.0f} s"
    yield "a long job on two workers that nap six times", measured, "result", found["end"] == "result"


def lost_reply(folder: Path) -> Iterator[Row]:
    for is_message, what in ((False, "a claim's reply"), (True, "a wake-up message")):
        for resets, how in ((True, "connection reset"), (False, "silently")):
            found = faults.lost_reply(folder / f"{is_message}-{resets}", resets=resets, is_message=is_message)
            seconds = found["seconds"]
            yield f"{what} is lost, {how}", f"{seconds:.1f} s", "< 2 s", seconds < 2 and bool(found["was_lost"])


def round_trips(folder: Path) -> Iterator[Row]:
    base = 0.0
    for rtt_ms in (0, 20, 80, 200):
        found = throughput.round_trips(folder / str(rtt_ms), rtt_s=rtt_ms / 1000)
        base = base or found["jobs_s"]
        measured = f"{found['jobs_s']:.0f} jobs/s, {found['rows']:.1f} rows"
        target = f">= {0.8 * base:.0f} jobs/s" if rtt_ms in (20, 80) else "-"
        is_met = found["jobs_s"] >= 0.8 * base or rtt_ms == 200
        yield f"2,000 short scores at RTT {rtt_ms} ms", measured, target, is_met
        lone = f"{found['lone_s'] * 1e3:.0f} ms, {found['own_s'] * 1e3:.0f} of them its own"
        if rtt_ms:
            measured = f"{found['lone_rtts']:.2f} RTT ({lone})"
            yield f"a lone job at RTT {rtt_ms} ms", measured, "1 RTT", found["lone_rtts"] <= 1.25 + 5 / rtt_ms
        else:
            yield "a lone job at RTT 0 ms", lone, "-", True


def herd(folder: Path) -> Iterator[Row]:
    found = throughput.herd(folder)
    measured = f"{found['scripts_a_job']:.1f} scripts, {found['commands_a_job']:.0f} commands a job"
    is_met = found["scripts_a_job"] <= 8 and found["commands_a_job"] <= 150
    yield "30 idle workers", measured, "O(1): <= 8 scripts, <= 150 commands", is_met


def clocks(folder: Path) -> Iterator[Row]:
    found = faults.clocks(folder)
    for name, what in (("started_off_s", "started_at"), ("ended_off_s", "ended_at"), ("heartbeat_age_s", "heartbeat")):
        limit_s = 30 if name == "heartbeat_age_s" else 2
        is_met = abs(found[name]) < limit_s
        yield f"{what}, worker 300 s off", f"off by {found[name]:.1f} s", f"< {limit_s} s", is_met


def sigterm(folder: Path) -> Iterator[Row]:
    for is_busy in (False, True):
        found = faults.sigterm(folder / str(is_busy), is_busy=is_busy)
        measured = f"{found['seconds']:.1f} s, status {found['status']:.0f}"
        is_met = found["seconds"] <= found["drain_s"] + 2 and found["status"] == 0
        what = f"SIGTERM while Redis is silent, {'busy' if is_busy else 'idle'}"
        yield what, measured, f"<= {found['drain_s']:.0f} s, status 0", is_met


def hole(folder: Path) -> Iterator[Row]:
    for kind in ("pause", "drop", "cut"):
        found = faults.hole(folder / kind, kind=kind)
        measured = f"{found['silence_s']:.1f} s until the next token, {found['missing']:.0%} missing"
        is_met = found["silence_s"] <= 3 and found["missing"] < 0.05
        yield f"streaming through a hole of 15 s ({kind})", measured, "<= 3 s, none missing", is_met


SCENARIOS: dict[str, Callable[[Path], Iterator[Row]]] = {
    scenario.__name__: scenario
    for scenario in (*(uplink, slow_host, bulk, nap, naps, lost_reply, round_trips, herd, clocks, sigterm, hole),)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="simulate 10 to 10,000 workers: bench.fleet_simulation")
    parser.add_argument("scenario", nargs="*", help=f"{', '.join(SCENARIOS)} (default: all)")
    options = parser.parse_args()
    if options.simulate and options.scenario:
        parser.error(f"--simulate takes no scenario: {' '.join(options.scenario)}")
    if options.simulate:
        fleet_simulation.run(fleet_simulation.WORKERS)
        return
    names = options.scenario or list(SCENARIOS)
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    print("| scenario | case | measured | target | |\n|---|---|---|---|---|", flush=True)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fleet") as folder:
            for what, measured, target, is_met in SCENARIOS[name](Path(folder)):
                print(f"| {name} | {what} | {measured} | {target} | {'met' if is_met else 'missed'} |", flush=True)


if __name__ == "__main__":
    main()
