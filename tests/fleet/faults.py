"""Scenarios in which hosts sleep, links fail and clocks are wrong. Tests run them small, and bench.fleet in full.

Each runs a fleet of its own in an empty folder and returns what was measured.
"""

import math
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path

import msgspec

from scorepool import store, wire
from tests.fleet.fleet import Fleet, generate, score, until
from tests.fleet.throughput import hosts_rate

STEADY = {"FLEET_STEP_S": "0.02", "FLEET_TOKEN_S": "0.00005"}


def nap(folder: Path, *, nap_s: float = 12.0, lease_s: float = 2.0) -> dict[str, float]:
    """Let B sleep with one long job in flight, beside C that works on many. Measure C's rate before and after.

    The long job takes longer than what is left of the nap when C has it.
    """
    with Fleet(folder, STEADY | {"SCOREPOOL_LEASE_S": f"{lease_s}", "SCOREPOOL_LOG_LEVEL": "WARNING"}) as fleet:
        sleeper = fleet.host("b", SCOREPOOL_MAX_JOBS_IN_FLIGHT="1", SCOREPOOL_MAX_RUNNING_ROWS="1")
        fleet.wait_until_up()
        (long_id,) = fleet.submit(generate(int(2 * nap_s / 0.02)))
        until(lambda: fleet.holder(long_id) == "b")
        worker = fleet.host("c")
        fleet.wait_until_up()
        duration_s = 3 + lease_s + nap_s
        fleet.submit(*[score(20)] * int(duration_s * 800))  # more than it can do
        time.sleep(3)
        asleep_at = fleet.now()
        sleeper.sleep(nap_s)
        time.sleep(nap_s - 0.5)
        now = fleet.now()
        before = hosts_rate(fleet, worker, asleep_at - 2, asleep_at)
        after = hosts_rate(fleet, worker, asleep_at + lease_s * 1.5, now)
        return {"before_s": before, "after_s": after, "share": after / before, "is_taken": fleet.holder(long_id) == "c"}


def naps(
    folder: Path, *, num_naps: int = 6, lease_s: float = 1.0, last_s: float = 2.0, crash_limit: int = 5
) -> dict[str, float | str]:
    """Let two workers nap in turn, each when it has the one long job. The rest of the time all are awake."""
    settings = {"SCOREPOOL_LEASE_S": f"{lease_s}", "SCOREPOOL_CRASH_LIMIT": f"{crash_limit}"}
    with Fleet(folder, STEADY | settings) as fleet:
        hosts = {name: fleet.host(name) for name in ("a", "b")}
        fleet.wait_until_up()
        (job_id,) = fleet.submit(generate(int(last_s / 0.02)))
        started_at = time.monotonic()
        for _ in range(num_naps):
            until(lambda: fleet.holder(job_id) or job_id in fleet.ends(), 60 + 30 * lease_s)
            if job_id in fleet.ends():
                break
            name = fleet.holder(job_id) or ""
            time.sleep(0.3)
            hosts[name].stop()
            until(
                lambda name=name: fleet.holder(job_id) not in (name, None) or job_id in fleet.ends(), 60 + 30 * lease_s
            )  # type: ignore[misc]
            hosts[name].wake()
        fleet.wait_until_done([job_id], 60)
        outcome = fleet.outcome(job_id)
        return {
            "seconds": time.monotonic() - started_at,
            "end": outcome.code if isinstance(outcome, wire.Failure) else "result",
        }


def lost_reply(
    folder: Path, *, lease_s: float = 20.0, resets: bool = True, is_message: bool = False
) -> dict[str, float]:
    """Lose jobs on their way to an idle worker. The connection is reset, or half-open from then on.

    What is lost is the reply of a claim, or with `is_message` what is published for the worker, which may hold a job.
    """
    with Fleet(folder, STEADY | {"SCOREPOOL_LEASE_S": f"{lease_s}"}) as fleet:
        host = fleet.host("a")
        fleet.wait_until_up()
        fleet.wait_until_done(fleet.submit(score(20)))
        time.sleep(1.5)
        host.link.lose_next_reply(is_published if is_message else is_claim, resets=resets)
        started_at = fleet.now()
        job_ids = fleet.submit(*[score(20)] * (1 if is_message else 30))  # one might come with the message
        seconds = fleet.wait_until_done(job_ids, 120) - started_at
        return {"seconds": seconds, "was_lost": host.link.lost_reply.is_set()}


def is_published(data: bytes) -> bool:
    return b"$7\r\nmessage\r\n" in data


def is_claim(reply: bytes) -> bool:
    """True for bytes with a job's fields, unless they are a published message."""
    return b"enqueued_at" in reply and not is_published(reply)


def clocks(folder: Path, *, ahead_s: float = 300.0) -> dict[str, float]:
    """Run a job on a worker whose clock is wrong. Return how far its times are off by Redis's clock."""
    with Fleet(folder, STEADY | {"FAKE_CLOCK_AHEAD_S": f"{ahead_s}"}) as fleet:
        fleet.host("a")
        fleet.wait_until_up()
        (job_id,) = fleet.submit(score(20))
        ended_at = fleet.wait_until_done([job_id])
        fields = fleet.fields(job_id)
        time.sleep(0.5)
        heartbeat = fleet.redis.hget(store.RqKeys.worker("a"), "last_heartbeat")
        return {
            "started_off_s": _unix(fields["started_at"]) - ended_at,
            "ended_off_s": _unix(fields["ended_at"]) - ended_at,
            "heartbeat_age_s": fleet.now() - _unix((heartbeat or b"").decode()),
        }


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def sigterm(folder: Path, *, drain_s: float = 5.0, is_busy: bool = True, timeout_s: float = 120.0) -> dict[str, float]:
    """Stop a worker with SIGTERM while Redis is silent. Return the seconds until it has ended, and its status."""
    with Fleet(folder, STEADY | {"SCOREPOOL_DRAIN_TIMEOUT_S": f"{drain_s}"}) as fleet:
        host = fleet.host("a")
        fleet.wait_until_up()
        if is_busy:
            (job_id,) = fleet.submit(generate(100_000))
            until(lambda: fleet.holder(job_id) == "a")
        host.link.drop()
        try:
            seconds, status = host.terminate(timeout_s)
        except subprocess.TimeoutExpired:
            seconds, status = math.inf, -1
        return {"seconds": seconds, "status": status, "drain_s": drain_s}


class Arrivals:
    """A thread that notes when tokens of a streaming job are written to Redis: (time.monotonic(), tokens so far)."""

    def __init__(self, fleet: Fleet, job_id: str) -> None:
        self.seen: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._fleet, self._job_id = fleet, job_id
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        last_id, seen = b"0-0", set()
        while not self._is_over.is_set():
            for entry_id, fields in self._fleet.redis.xrange(store.TOKENS, b"(" + last_id):
                last_id = entry_id
                for delta in msgspec.msgpack.decode(fields[b"step"]):
                    if delta["id"] == self._job_id:
                        seen |= {delta["first"] + index for index in range(len(delta["token_ids"]))}
                self.seen.append((time.monotonic(), len(seen)))
            time.sleep(0.02)

    @property
    def num_seen(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def at(self, moment: float) -> int:
        """Return how many tokens had come at a time of time.monotonic()."""
        return max([num for at, num in self.seen if at <= moment], default=0)


def hole(folder: Path, *, hole_s: float = 15.0, kind: str = "pause") -> dict[str, float]:
    """Stream a long answer through a hole of the worker's link. `kind` is "pause", "drop" or "cut".

    `silence_s` is the time from the hole's end to the next token, and `missing` the share of the tokens computed in the
    hole that have not come two seconds after that.
    """
    with Fleet(folder, {"FLEET_STEP_S": "0.05", "FLEET_TOKEN_S": "0", "SCOREPOOL_LEASE_S": "60"}) as fleet:
        host = fleet.host("a")
        fleet.wait_until_up()
        (job_id,) = fleet.submit(generate(int((hole_s + 20) / 0.05), stream=True))
        arrivals = Arrivals(fleet, job_id)
        until(lambda: arrivals.seen)
        time.sleep(2)
        began_at = time.monotonic()
        num_before = arrivals.at(began_at)
        host.link.pause() if kind == "pause" else host.link.drop()
        time.sleep(hole_s)
        if kind == "cut":
            host.link.cut()
        host.link.restore()
        over_at = time.monotonic()
        until(lambda: arrivals.seen[-1][0] > over_at or job_id in fleet.ends(), 60 + hole_s)
        silence_s = next((at - over_at for at, _ in arrivals.seen if at > over_at), math.inf)
        time.sleep(2)
        now = time.monotonic()
        expected = num_before + (now - began_at) / 0.051
        num_now = arrivals.at(now)
        arrivals.close()
        return {"silence_s": silence_s, "missing": max(0.0, (expected - num_now) / (hole_s / 0.051))}
