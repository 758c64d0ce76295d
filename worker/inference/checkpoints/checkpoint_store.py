"""Keep the finished rows of long jobs in Redis, and read those of an earlier run, on a thread of its own.

A job that ends within the interval is never looked at: it costs a dict's entry. A job that Redis cannot take rows of
goes on without them. Every script is fenced by the job's lease: a worker that lost it neither reads, writes nor drops
the rows of the worker that has it now.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread

from redis import Redis
from redis.exceptions import RedisError

from scorepool.engine import ModelInfo
from scorepool.store.outage import Outage
from scorepool.store.scripts import load
from scorepool.worker.inference.checkpoints.job_checkpoint import JobCheckpoint, Rows
from scorepool.worker.inference.stream_connection import StreamConnection

SAVE, READ = load("save_checkpoint.lua"), load("read_checkpoint.lua")
KEPT_S = 86_400  # after the last chunk, if the job waits for so long for its next worker
MAX_SHARE = 0.1  # of the thread's time for which it saves: the encoding takes the time of other threads
JOIN_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restore:
    checkpoint: JobCheckpoint
    rows: Rows
    info: ModelInfo  # whose values are looked for
    on_restored: Callable[[frozenset[int]], object]  # called on the thread of the store; raises nothing


class CheckpointStore:
    """The checkpoints of one worker's jobs. Any thread may call it."""

    def __init__(self, redis: Redis, every_s: float, max_bytes: int) -> None:
        self._every_s, self._max_bytes = every_s, max_bytes
        self._connection = StreamConnection(redis)
        self._outage = Outage(log)
        self._changed = Condition()  # guards the three below
        self._restores: deque[Restore] = deque()
        self._running: dict[JobCheckpoint, None] = {}
        self._is_closed = False
        self._thread = Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def restore(
        self, checkpoint: JobCheckpoint, rows: Rows, info: ModelInfo, on_restored: Callable[[frozenset[int]], object]
    ) -> None:
        """Give rows what an earlier run has computed of them; `on_restored` gets their indexes."""
        with self._changed:
            if not self._is_closed:
                self._restores.append(Restore(checkpoint, rows, info, on_restored))
                self._changed.notify()
                return
        on_restored(frozenset())

    def add(self, checkpoint: JobCheckpoint) -> None:
        """Keep the rows of a job from now on, until it is removed."""
        with self._changed:
            self._running[checkpoint] = None

    def remove(self, checkpoint: JobCheckpoint) -> None:
        with self._changed:
            self._running.pop(checkpoint, None)

    def close(self) -> None:
        """Stop. Wait for JOIN_TIMEOUT_S at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(JOIN_TIMEOUT_S)

    # On the thread of the store.

    def _run(self) -> None:
        save_at = time.monotonic() + self._every_s
        while self._wait(save_at):
            self._answer_restores()
            began_at = time.monotonic()
            if began_at < save_at:
                continue
            try:
                self._save_all(began_at)
            except RedisError as error:
                self._outage.failed("finished rows are not kept, a death costs them: %s", error)
            except Exception:  # checkpoints must not hold up jobs
                log.exception("finished rows are not kept")
            now = time.monotonic()
            save_at = now + max(self._every_s, (now - began_at) / MAX_SHARE)
        self._answer_restores()
        self._connection.close()

    def _wait(self, save_at: float) -> bool:
        """Wait for something to do. Return False when it is time to stop."""
        with self._changed:
            if not (self._restores or self._is_closed):
                self._changed.wait(max(0.0, save_at - time.monotonic()))
            return not self._is_closed

    def _answer_restores(self) -> None:
        while True:
            with self._changed:
                if not self._restores:
                    return
                one = self._restores.popleft()
            try:
                one.checkpoint.restore(one.rows, one.info, partial(self._read, one.checkpoint))
            except Exception:  # the other rows are computed
                log.exception("finished rows cannot be read", extra={"job": one.checkpoint.job_id})
            restored = one.checkpoint.saved
            log.info(
                "%d of %d rows were computed before", len(restored), len(one.rows), extra={"job": one.checkpoint.job_id}
            )
            one.on_restored(restored)

    def _read(self, checkpoint: JobCheckpoint, identity: bytes, number: int, num_rows: int) -> bytes | None:
        """Return a chunk of finished rows; None if there is none, or if Redis does not answer."""
        arguments: list[bytes | str | int] = [checkpoint.lease_key, identity, number, num_rows]
        try:
            chunk: bytes | None = self._connection.run_script(READ, [checkpoint.registry_key], arguments)
        except RedisError as error:
            self._outage.failed("finished rows cannot be read, they are computed again: %s", error)
            return None
        return chunk

    def _save_all(self, now: float) -> None:
        """Save the new rows of the jobs that run for long. Raises RedisError."""
        with self._changed:
            running = [one for one in self._running if now - one.began_at >= self._every_s]
        for checkpoint in running:
            self._save(checkpoint)
        if running:
            self._outage.ended("finished rows are kept again")

    def _save(self, checkpoint: JobCheckpoint) -> None:
        """Save the new rows of a job, chunk by chunk. Raises RedisError."""
        while chunk := checkpoint.take(self._connection.max_message_bytes):
            num_rows = len(checkpoint.saved) + len(chunk.indexes)
            arguments: list[bytes | str | int] = [checkpoint.lease_key, chunk.identity, chunk.number, chunk.body]
            arguments += [self._max_bytes, KEPT_S, len(chunk.indexes), num_rows]
            reply = self._connection.run_script(SAVE, [checkpoint.registry_key], arguments)
            if reply == b"saved":
                checkpoint.confirm(chunk)
                continue
            if reply == b"gone":
                checkpoint.forget()
            elif reply != b"refused":  # lost, or full
                checkpoint.is_stopped = True
                if reply == b"full":
                    log.info("its finished rows have no more room in Redis", extra={"job": checkpoint.job_id})
            return
