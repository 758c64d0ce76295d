"""Record ended jobs and claim new ones in one round trip. Runs on the thread of the link (link.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.commands.core import Script
from redis.exceptions import NoScriptError
from rq.queue import Queue
from rq.worker import WorkerStatus

from scorepool.worker.rq.clock import awake_s
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.leases import Claim, Claimed, Leases

ScriptCall = tuple[Script, list[str], Sequence[str | bytes | int | float]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a worker sends."""

    ended: Sequence[InFlightJob]  # jobs whose end is decided
    current: InFlightJob | None  # what RQ shows as the worker's current job afterwards; without one, its `idle_state`
    idle_state: WorkerStatus
    queues: Sequence[Queue]
    claim: Claim | None


@dataclass(slots=True)
class Exchanged:
    """What came of it. Ended jobs in none of the two lists are for the next exchange."""

    recorded: list[InFlightJob] = field(default_factory=list)
    lost: list[InFlightJob] = field(default_factory=list)  # another worker has the job: its end here does not count
    claimed: Claimed | None = None
    elapsed_s: float = 0.0  # of the one round trip


class Exchanger:
    def __init__(self, connection: Redis, leases: Leases, committer: ResultCommitter) -> None:
        self._connection = connection
        self._leases = leases
        self._committer = committer

    def run(self, exchange: Exchange) -> Exchanged:
        """Send an exchange. It may be repeated after an error: an end that was recorded is lost then."""
        done = Exchanged()
        successes = self._committer.successes
        batch = successes.next_batch([job for job in exchange.ended if successes.is_plain_success(job)])
        others = [job for job in exchange.ended if not successes.is_plain_success(job)]
        calls: list[ScriptCall] = []
        if batch:
            calls.append((successes.script, *successes.message(batch, exchange.current, exchange.idle_state)))
        if exchange.claim is not None:
            arguments = self._leases.claim_arguments(exchange.queues, exchange.claim)
            calls.append((self._leases.claim_script, *arguments))
        started_at = awake_s()
        replies = iter(self._run_scripts(calls))
        done.elapsed_s = awake_s() - started_at
        if batch:
            recorded, awaited = successes.read(batch, next(replies))
            done.recorded += recorded
            done.lost += [job for job in batch if job not in recorded and job not in awaited]
            others += awaited
        if exchange.claim is not None:
            done.claimed = self._leases.read_claim(exchange.queues, next(replies))
        if others:
            recorded = self._committer.write(others, exchange.current, exchange.idle_state)
            done.recorded += recorded
            done.lost += [job for job in others if job not in recorded]
        return done

    def _run_scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts in one round trip, and those that Redis does not know once more. Raises the first error."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for script, keys, args in calls:
                pipeline.evalsha(script.sha, len(keys), *keys, *args)
            replies = pipeline.execute(raise_on_error=False)
        for index, (script, keys, args) in enumerate(calls):
            if isinstance(replies[index], NoScriptError):
                replies[index] = script(keys=keys, args=args)
            if isinstance(replies[index], Exception):
                raise replies[index]
        return replies
