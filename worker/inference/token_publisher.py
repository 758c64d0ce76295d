"""Publish the tokens of jobs that stream, and the progress of jobs of many items, to Redis while the jobs run.

    engine's thread         put: notes that a stream has new tokens, and returns
    publisher's own thread  takes the tokens of all streams that were not written yet, and writes them to Redis

A slow or unavailable Redis delays no step of the engine. What could not be written stays in its JobStream and is
written when Redis answers again. A write whose reply was lost is repeated: deltas carry the index of their first token,
so the API drops what it has. With its reply, a write gets the requests of API processes that missed deltas, and those
are written again. The tokens of a job that has ended come with its result. Progress that cannot be written is dropped:
a second later there is newer.
"""

import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from threading import Condition, Thread

from redis import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.store.scripts import load
from scorepool.worker.inference.job_progress import RunningJobs
from scorepool.worker.inference.job_stream import JobStream
from scorepool.worker.inference.stream_connection import StreamConnection

log = logging.getLogger(__name__)

APPEND_DELTAS = load("append_deltas.lua")
MAX_STREAM_LENGTH = 10_000  # entries, approximately: steps of all workers
MAX_STREAM_BYTES = 64 * 2**20  # approximately: the length at which entries like the largest of a write take this
MAX_ENTRY_BYTES = 64 * 2**10  # approximately
CLOSE_TIMEOUT_S = 2.0
ASK_EVERY_S = 0.5  # for missing tokens: the ids of 64 jobs are as long as a step's deltas
BACKOFF_S = (0.1, 1.0)  # the first and the longest pause after a failure
NO_DELTAS = wire.encode(wire.TokenDeltas())

Entry = list[tuple[JobStream, wire.TokenDelta]]


class TokenPublisher:
    """Write the deltas of streams to Redis, on a thread of its own.

    `running_jobs` are those whose progress it writes. Call `notify` after the first was added.
    """

    def __init__(self, redis: Redis) -> None:
        self.running_jobs = RunningJobs()
        self._connection = StreamConnection(redis)
        self._changed = Condition()  # guards the three below
        self._streams: dict[JobStream, None] = {}  # those of the jobs that run
        self._pending: dict[JobStream, None] = {}  # those with new tokens, the one that waits longest first
        self._is_closed = False
        self._is_failing = False
        self._asked_at = -math.inf  # time.monotonic()
        self._thread = Thread(target=self._run, name="token-publisher", daemon=True)
        self._thread.start()

    def add(self, stream: JobStream) -> None:
        """Publish a stream until it is removed."""
        with self._changed:
            self._streams[stream] = None

    def put(self, stream: JobStream) -> None:
        """Note that a stream has new tokens. The engine may call it once more after the stream was removed."""
        with self._changed:
            if stream in self._streams:
                self._pending[stream] = None
                self._changed.notify()

    def remove(self, stream: JobStream) -> None:
        """Forget a stream, because its job runs no more. Its last tokens come with the result."""
        with self._changed:
            self._streams.pop(stream, None)
            self._pending.pop(stream, None)

    def notify(self) -> None:
        """Find the next time at which there is progress to write."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Try once more to write what is pending, then stop. Wait for CLOSE_TIMEOUT_S at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        backoff_s = 0.0
        while self._wait(backoff_s):
            try:
                entries, progress = self._take(), self.running_jobs.take()
                if entries or progress:  # the tokens of a step may all have to wait: for a stop string, a tool call
                    self._write(entries, progress)
            except RedisError as error:
                if not self._is_failing:
                    log.warning("token deltas cannot be written and are kept until Redis answers: %r", error)
                if self._is_closed:
                    break
                self._is_failing, backoff_s = True, min(max(2 * backoff_s, BACKOFF_S[0]), BACKOFF_S[1])
            except Exception:  # one job's deltas must not end the streams of all; an API process asks for them again
                log.exception("token deltas were not written")
                backoff_s = BACKOFF_S[1]
            else:
                if self._is_failing:
                    log.info("token deltas are written again")
                self._is_failing, backoff_s = False, 0.0
        self._connection.close()

    def _wait(self, backoff_s: float) -> bool:
        """Wait for the pause, then for new tokens or the time of progress. Return False when it is time to stop."""
        with self._changed:
            if backoff_s:
                self._changed.wait_for(lambda: self._is_closed, backoff_s)
            while not self._pending and not self._is_closed:
                due_in_s = self.running_jobs.due_in_s
                if due_in_s == 0.0:
                    break
                self._changed.wait(due_in_s)
            return bool(self._pending) or not self._is_closed

    def _take(self) -> list[Entry]:
        """Take tokens for one write, in entries of at most about MAX_ENTRY_BYTES."""
        with self._changed:
            pending = list(self._pending)
        entries: list[Entry] = []
        left = self._connection.max_message_bytes
        room = 0  # in the last entry
        for stream in pending:
            with self._changed:
                self._pending.pop(stream, None)  # before its tokens are taken: `put` may come meanwhile
            while left > 0:
                if room <= 0:
                    entries, room = [*entries, []], MAX_ENTRY_BYTES
                deltas, num_bytes = stream.take(min(room, left))
                entries[-1] += [(stream, delta) for delta in deltas]
                room, left = room - num_bytes, left - num_bytes
                if not deltas:
                    break
            if left <= 0:
                break
        for stream in pending:
            if stream.has_pending:
                self.put(stream)
        return [entry for entry in entries if entry]

    def _write(self, entries: list[Entry], progress: wire.Progresses) -> None:
        """Append entries to the stream of tokens, all or none. Raises RedisError: their tokens are pending again."""
        encoded = [wire.encode([delta for _, delta in entry]) for entry in entries]
        max_length = min(MAX_STREAM_LENGTH, MAX_STREAM_BYTES // max(map(len, encoded), default=1))
        arguments: list[bytes | str | int] = [max_length, wire.encode(progress) if progress else b"", NO_DELTAS]
        arguments += [len(encoded), *encoded, *self._askable_ids()]
        try:
            missing = self._connection.run_script(APPEND_DELTAS, [store.TOKENS, store.Keys.missing_tokens], arguments)
        except RedisError:
            for entry in entries:
                for stream, delta in entry:
                    self._rewind(stream, delta.sequence, delta.first)
            raise
        self._repeat(missing)

    def _askable_ids(self) -> list[str]:
        """Return the ids of the jobs whose missing tokens this write asks for: none between two times."""
        now = time.monotonic()
        if now - self._asked_at < ASK_EVERY_S:
            return []
        self._asked_at = now
        with self._changed:
            return [stream.job_id for stream in self._streams]

    def _repeat(self, missing: Iterable[bytes]) -> None:
        """Take the tokens again that API processes miss (wire.MissingTokens). What cannot be decoded is ignored."""
        for body in missing:
            with suppress(wire.Invalid):
                tokens = wire.parse(body, wire.MissingTokens, "msgpack")
                with self._changed:
                    streams = [stream for stream in self._streams if stream.job_id == tokens.id]
                for stream in streams:
                    self._rewind(stream, tokens.sequence, tokens.first)

    def _rewind(self, stream: JobStream, sequence: int, first: int) -> None:
        stream.rewind(sequence, first)
        self.put(stream)
