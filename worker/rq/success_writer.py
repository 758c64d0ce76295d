"""Write the usual end: a job succeeded, and no other job depends on it. One script writes many of them.

The ends travel in messages of a size that the link carries (link_speed.py). An outcome that is too large for one
message travels in parts, which Redis keeps until the job's end comes with the last bytes. One message after the other:

    message = writer.next_message(jobs, link.message_bytes, current, idle_state)
    replies = run_scripts(connection, [*message.calls, ...])  # a timeout: writer.fail(message, seconds), and again
    written = writer.apply(message, replies[: len(message.calls)])

Any message may be repeated: what Redis has already taken is found there, and an upload goes on where Redis has it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.results import Result as RqResult
from rq.utils import utcformat
from rq.worker import WorkerStatus

from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.worker.claims.leases import Leases
from scorepool.worker.redis_link.link_speed import MIN_MESSAGE_BYTES, LinkSpeed
from scorepool.worker.redis_link.progress_connection import socket_timeout
from scorepool.worker.redis_link.script_calls import Argument, ScriptCall, run_scripts
from scorepool.worker.rq.clock import awake_s
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import elapsed_s

UPLOAD_KEPT_S = 600  # a part of an outcome in Redis, from the last one on
CALL_BYTES = 256  # about, of a call without its jobs
DETAILS_BYTES = 512  # about, of a job's end beside its outcome and what its function wrote


@dataclass(slots=True)
class Success:
    """A success that is not recorded yet, and how much of its outcome Redis has."""

    inflight: InFlightJob
    details: list[Argument]  # what finish.lua writes beside the outcome
    details_bytes: int  # about
    num_uploaded: int = 0
    failing_s: float = 0.0  # that its smallest messages took without an answer, since one was answered

    @property
    def outcome(self) -> bytes:
        return self.inflight.job.outcome or b""

    @property
    def registry_key(self) -> str:
        return str(self.inflight.queue.started_job_registry.key)

    @property
    def num_left(self) -> int:
        """Bytes of the outcome that are not uploaded."""
        return len(self.outcome) - self.num_uploaded

    @property
    def size_bytes(self) -> int:
        """The size of a message that ends the job."""
        return self.num_left + self.details_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """Calls of scripts for one round trip. They end the jobs of `ends`, and send a part of the outcome of `part_of`."""

    budget_bytes: int
    size_bytes: int  # about
    ends: list[Success]
    part_of: Success | None
    calls: list[ScriptCall]

    @property
    def successes(self) -> list[Success]:
        return self.ends if self.part_of is None else [*self.ends, self.part_of]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the jobs of a message. Those in none of the lists are due again."""

    recorded: list[InFlightJob] = field(default_factory=list)
    awaited: list[InFlightJob] = field(default_factory=list)  # the caller must end them: other jobs depend on them
    lost: list[InFlightJob] = field(default_factory=list)  # their lease was lost

    @property
    def all(self) -> list[InFlightJob]:
        return [*self.recorded, *self.awaited, *self.lost]

    def add(self, inflight: InFlightJob, answer: bytes) -> None:
        {b"recorded": self.recorded, b"awaited": self.awaited, b"lost": self.lost}[answer].append(inflight)


class SuccessWriter:
    """Write successes. Used by one thread only.

    `give_up_s`: how long the smallest message may fail before the job is handed back, see `fail`.
    """

    def __init__(
        self, connection: Redis, leases: Leases, default_result_ttl_s: int, give_up_s: float | None = None
    ) -> None:
        self.link = LinkSpeed()
        self._connection = connection
        self._leases = leases
        self._default_result_ttl_s = default_result_ttl_s
        self._give_up_s = leases.lease_ms / 1000 if give_up_s is None else give_up_s
        self._finish = connection.register_script(load("finish.lua"))
        self._upload_part = connection.register_script(load("upload_part.lua"))
        self.scripts = (self._finish, self._upload_part)
        self._successes: dict[str, Success] = {}  # by lease key: those of the last call of next_message
        self._recorded: set[str] = set()  # lease keys of what `write` has recorded and not returned

    def is_plain_success(self, inflight: InFlightJob) -> bool:
        """True if a message can end the job."""
        is_last = inflight.error is None and inflight.retry_delay_s is None
        return is_last and not inflight.job._dependency_ids and self._ttl_s(inflight) > 0

    def next_message(
        self, jobs: Iterable[InFlightJob], budget_bytes: int, current: InFlightJob | None, idle_state: WorkerStatus
    ) -> Message:
        """Return the message that is due. It holds no calls if there are no jobs.

        `jobs` are all plain successes that are not recorded, the first to be ended first. What is known of others is
        forgotten. `current` is what RQ shows as the worker's current job afterwards; without one, its state is
        `idle_state`.

        A message ends the jobs that fit, and takes a part of the first that does not. If that one is the first of all
        and larger than a message, half of the message is kept for it. So small results do not wait for a large one.
        """
        known = self._successes
        waiting = [known.get(job.lease_key) or self._success(job) for job in jobs]
        self._successes = {success.inflight.lease_key: success for success in waiting}
        is_split = bool(waiting) and waiting[0].num_left > 0 and waiting[0].size_bytes > budget_bytes
        room = budget_bytes // 2 if is_split else budget_bytes
        ends: list[Success] = []
        part_of: Success | None = None
        ends_bytes = 0
        for success in waiting:
            size = success.size_bytes
            if ends_bytes + size <= room or not (ends or success.num_left):
                ends.append(success)
                ends_bytes += size
            elif part_of is None and success.num_left:
                part_of = success
        calls = [self._end_call(ends, current, idle_state)] if ends else []
        size_bytes = len(calls) * CALL_BYTES + ends_bytes
        part_bytes = 0 if part_of is None else min(budget_bytes - ends_bytes, part_of.num_left)
        if part_of is None or (ends and part_bytes < max(MIN_MESSAGE_BYTES, budget_bytes // 4)):
            return Message(budget_bytes, size_bytes, ends, None, calls)
        calls.append(self._part_call(part_of, part_bytes))
        return Message(budget_bytes, size_bytes + CALL_BYTES + part_bytes, ends, part_of, calls)

    def apply(self, message: Message, replies: Sequence[Any]) -> Written:
        """Take the replies to the calls of a message."""
        written = Written()
        left = iter(replies)
        if message.ends:
            self._apply_ends(message.ends, next(left), written)
        if message.part_of is not None:
            self._apply_part(message.part_of, next(left), written)
        for inflight in written.all:
            self._successes.pop(inflight.lease_key, None)
        return written

    def fail(self, message: Message, seconds: float) -> list[InFlightJob]:
        """Take a message that was not answered for `seconds`, while Redis answered others, as a heartbeat.

        Return the jobs that the caller hands back: their messages, as small as they get, have failed for `give_up_s`.
        A message that failed because nothing of Redis is heard must not be passed: its jobs wait for the link.
        """
        if message.budget_bytes > MIN_MESSAGE_BYTES:
            return []
        for success in message.successes:
            success.failing_s += seconds
        stuck = [success.inflight for success in message.successes if success.failing_s >= self._give_up_s]
        for inflight in stuck:
            self._successes.pop(inflight.lease_key, None)
        return stuck

    def write(
        self, jobs: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus
    ) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """Write successes, message by message. Return the jobs recorded, and those that the caller must end.

        A job in neither list has lost its lease. After an error of Redis, the next call goes on where this one stopped.
        """
        left = [inflight for inflight in jobs if not self.is_plain_success(inflight)]
        waiting = [job for job in jobs if self.is_plain_success(job) and job.lease_key not in self._recorded]
        while waiting:
            message = self.next_message(waiting, self.link.message_bytes, current, idle_state)
            written = self._exchange(message)
            self._recorded |= {inflight.lease_key for inflight in written.recorded}
            left += written.awaited
            over = {inflight.lease_key for inflight in written.all}
            waiting = [inflight for inflight in waiting if inflight.lease_key not in over]
        recorded, self._recorded = self._recorded, set()
        return [inflight for inflight in jobs if inflight.lease_key in recorded], left

    def _exchange(self, message: Message) -> Written:
        """Send a message and take its replies."""
        started_at = awake_s()
        try:
            with socket_timeout(self.link.timeout_s(message.size_bytes)):
                replies = run_scripts(self._connection, message.calls)
        except RedisTimeoutError:
            self.link.record_timeout()
            raise
        self.link.record(message.size_bytes, awake_s() - started_at)
        return self.apply(message, replies)

    def _end_call(self, ends: Sequence[Success], current: InFlightJob | None, idle_state: WorkerStatus) -> ScriptCall:
        current_job = "" if current is None else current.job.id
        arguments: list[Argument] = [self._leases.worker_key, idle_state.value, current_job]
        for success in ends:
            rest = success.outcome[success.num_uploaded :]
            arguments += [success.inflight.lease_key, success.num_uploaded, rest, *success.details]
        return ScriptCall(self._finish, [success.registry_key for success in ends], arguments)

    def _part_call(self, success: Success, num_bytes: int) -> ScriptCall:
        offset = success.num_uploaded
        part = success.outcome[offset : offset + num_bytes]
        arguments: list[Argument] = [success.inflight.lease_key, offset, part, UPLOAD_KEPT_S]
        return ScriptCall(self._upload_part, [success.registry_key], arguments)

    def _apply_ends(self, ends: Sequence[Success], reply: Any, written: Written) -> None:
        answers, wrong_types = reply
        self._leases.wrong_types.report(wrong_types)
        for success, one in zip(ends, answers, strict=True):
            if one == b"incomplete":  # the answer to its next part says how much Redis still has
                success.num_uploaded = 0
            else:
                written.add(success.inflight, one)

    def _apply_part(self, success: Success, reply: int | bytes, written: Written) -> None:
        if isinstance(reply, bytes):
            written.add(success.inflight, reply)
        else:
            success.num_uploaded = min(reply, len(success.outcome))
            success.failing_s = 0.0

    def _success(self, inflight: InFlightJob) -> Success:
        job = inflight.job
        assert job.ended_at is not None
        result = RqResult(
            job.id,
            RqResult.Type.SUCCESSFUL,
            connection=job.connection,
            return_value=None if job.has_outcome else inflight.value,
            worker_name=self._leases.worker_name,
            execution_id=inflight.execution.id,
            execution_started_at=inflight.execution.created_at,
            execution_ended_at=job.ended_at,
        )
        result.serializer = job.serializer  # set here: RQ's check of an argument takes longer than the rest
        fields = {JobField.ENDED_AT: utcformat(job.ended_at), **job.extra_fields}
        written = result.serialize()
        details: list[Argument] = [self._ttl_s(inflight), elapsed_s(job.started_at, job.ended_at)]
        for mapping in (fields, written):
            details.append(2 * len(mapping))
            for name, value in mapping.items():
                details += (name, value)
        num_bytes = sum(map(len, fields.values())) + len(written.get("return_value", ""))
        return Success(inflight, details, DETAILS_BYTES + num_bytes)

    def _ttl_s(self, inflight: InFlightJob) -> int:
        return inflight.job.get_result_ttl(self._default_result_ttl_s)
