"""Record ended jobs and claim new ones in one round trip. Runs on the threads of links (link.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.queue import Queue
from rq.worker import WorkerStatus

from scorepool.worker.claims.leases import Claim, Claimed, Leases
from scorepool.worker.claims.queue_group import QueueGroup
from scorepool.worker.redis_link.progress_connection import socket_timeout
from scorepool.worker.redis_link.script_calls import ScriptCall, load_scripts, run_scripts
from scorepool.worker.rq.clock import awake_s, clock_s
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.success_writer import Message


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a worker sends."""

    ended: Sequence[InFlightJob]  # jobs whose end is decided
    current: InFlightJob | None  # what RQ shows as the worker's current job afterwards; without one, its `idle_state`
    idle_state: WorkerStatus
    queues: Sequence[Queue]
    claim: Claim | None
    group: QueueGroup | None = None  # from whose queues it claims


@dataclass(slots=True)
class Exchanged:
    """What came of it. Ended jobs in neither list are for the next exchange."""

    recorded: list[InFlightJob] = field(default_factory=list)
    lost: list[InFlightJob] = field(default_factory=list)  # another worker has the job: its end here does not count
    awaited: list[InFlightJob] = field(default_factory=list)  # other jobs depend on them: RQ's own methods end them
    claimed: Claimed | None = None
    may_have_enqueued: bool = False  # dependents, or a job again: written after the claim, which found none of them
    elapsed_s: float = 0.0  # of the one round trip


class Exchanger:
    """Send exchanges. `heard_since` is true if Redis has answered others since a time (clock_s()), as a heartbeat."""

    def __init__(
        self, connection: Redis, leases: Leases, committer: ResultCommitter, heard_since: Callable[[float], bool]
    ) -> None:
        self._connection = connection
        self._leases = leases
        self._committer = committer
        self._heard_since = heard_since
        self.link_speed = committer.successes.link
        self._has_loaded_scripts = False
        self.stuck: list[InFlightJob] = []  # of the last exchange: jobs whose end cannot be sent, to be handed back

    def run(self, exchange: Exchange) -> Exchanged:
        """Send an exchange. It may be repeated after an error: an end that was recorded is found again."""
        if exchange.ended:
            self.stuck = []
        successes = self._committer.successes
        plain = [job for job in exchange.ended if successes.is_plain_success(job)]
        others = [job for job in exchange.ended if not successes.is_plain_success(job)]
        done = Exchanged()
        message = None
        if plain:
            budget = self.link_speed.message_bytes
            message = successes.next_message(plain, budget, exchange.current, exchange.idle_state)
        claims: list[ScriptCall] = []
        if exchange.claim is not None:
            claim = replace(exchange.claim, max_bytes=min(exchange.claim.max_bytes, self.link_speed.reply_bytes))
            keys, arguments = self._leases.claim_arguments(exchange.queues, claim)
            claims.append(ScriptCall(self._leases.claim_script, keys, arguments))
        if message or claims:
            self._send(exchange, message, claims, done)
        others += done.awaited
        if others:
            done.may_have_enqueued = True
            recorded = self._committer.write(others, exchange.current, exchange.idle_state)
            done.recorded += recorded
            done.lost += [job for job in others if job not in recorded]
        return done

    def _send(self, exchange: Exchange, message: Message | None, claims: Sequence[ScriptCall], done: Exchanged) -> None:
        """Run scripts in one round trip, which also measures the link."""
        calls = [*(message.calls if message else ()), *claims]
        size_bytes = (message.size_bytes if message else 0) + sum(call.size_bytes for call in claims)
        if not self._has_loaded_scripts:
            load_scripts(self._connection, [*self._committer.successes.scripts, self._leases.claim_script])
            self._has_loaded_scripts = True
        sent_at, started_at = clock_s(), awake_s()
        try:
            with socket_timeout(self.link_speed.timeout_s(size_bytes)):
                replies = run_scripts(self._connection, calls)
        except RedisTimeoutError:
            self.link_speed.record_timeout()
            if message is not None and self._heard_since(sent_at):
                self.stuck = self._committer.successes.fail(message, awake_s() - started_at)
            raise
        done.elapsed_s = awake_s() - started_at
        if message is not None:
            written = self._committer.successes.apply(message, replies)
            done.recorded, done.lost, done.awaited = written.recorded, written.lost, written.awaited
        reply_bytes = 0
        if exchange.claim is not None:
            done.claimed = self._leases.read_claim(exchange.queues, replies[-1])
            reply_bytes = sum(len(job.request or b"") for job in done.claimed.jobs)
        self.link_speed.record(size_bytes, done.elapsed_s, reply_bytes)
