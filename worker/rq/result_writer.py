"""Write results that are too large for Redis to the result store, before the ends of their jobs are recorded.

The job keeps its lease meanwhile. Its end is then recorded as any other, with a `wire.StoredResult` as its outcome, so
a result is visible once or not at all. Redis knows of an object before it is written, and after: one that no end names
is deleted later (store/result_store.py).

The main thread calls `take`; a thread of its own writes.
"""

import time
from collections.abc import Callable
from functools import partial
from logging import Logger

from redis import Redis

from scorepool import wire
from scorepool.store.outage import Outage
from scorepool.store.result_store import CHECK_AFTER_S, ResultStore, ResultStoreError, path_of_lease
from scorepool.store.scripts import load
from scorepool.wire.stored_result import StoredResult, to_frames
from scorepool.worker.redis_link.link import Link
from scorepool.worker.rq.clock import awake_s
from scorepool.worker.rq.errors import JobError, failure_of
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE

GIVE_UP_S = 120.0  # a job whose result the store has refused for so long fails
MAX_PENDING_BYTES = 2**28  # of results that wait for the store, above which the worker claims no more jobs
MAX_PAUSE_S = 5.0  # between two attempts


class ResultWriter:
    """Write the results of one worker's jobs. `is_held` is true for the key of a lease that the worker still has."""

    def __init__(
        self,
        connection: Redis,
        store: ResultStore | None,
        inline_bytes: int,
        post_call: Callable[[Callable[[], object]], None],
        is_held: Callable[[str], bool],
        log: Logger,
    ) -> None:
        self._store = store
        self._inline_bytes = inline_bytes
        self._is_held = is_held
        self._log = log
        self._outage = Outage(log)
        self._expect = connection.register_script(load("expect_object.lua"))
        self._link = None if store is None else Link(post_call)
        self._pending_bytes = 0
        self.give_up_s = GIVE_UP_S

    @property
    def has_room(self) -> bool:
        """True if the worker may claim jobs, whose results may have to wait for the store."""
        return self._pending_bytes < MAX_PENDING_BYTES

    def take(self, inflight: InFlightJob) -> None:
        """Begin to write the result of a job whose end has just been decided, if it is too large for Redis."""
        outcome = inflight.job.outcome
        if outcome is None or inflight.error is not None or len(outcome) <= self._inline_bytes:
            return
        if self._store is None or self._link is None:
            limit = f"the {self._inline_bytes} of SCOREPOOL_MAX_INLINE_RESULT_BYTES"
            _fail(inflight, f"more than {limit}, and SCOREPOOL_RESULT_STORE, which holds larger ones, is not set")
            return
        inflight.is_being_stored = True
        self._pending_bytes += len(outcome)
        self._link.call(
            partial(self._write, self._store, inflight),
            partial(self._take_stored, inflight, len(outcome)),
            partial(self._take_error, inflight, len(outcome)),
        )

    def _write(self, store: ResultStore, inflight: InFlightJob) -> StoredResult | None:
        """Write an object, again and again; return None if the lease is lost. Runs on the thread of the link.

        Raises ResultStoreError once the store has refused it for `give_up_s`.
        """
        assert isinstance(inflight.value, wire.Result)
        path = path_of_lease(inflight.lease_key)
        body = b"".join(to_frames(inflight.value, path))
        refused_s, pause_s = 0.0, 0.1
        while self._is_held(inflight.lease_key):
            started_at = awake_s()
            try:
                self._expect(args=[inflight.lease_key, CHECK_AFTER_S])
                try:
                    store.put(path, body)
                finally:  # the API forgets the object if this process, or its machine, slept in between
                    self._expect(args=[inflight.lease_key, CHECK_AFTER_S])
            except REDIS_UNAVAILABLE:
                pass  # the loop says so, and the job could not end without Redis
            except ResultStoreError as error:
                self._outage.failed("the result store does not take results, trying again: %s", error)
                refused_s += awake_s() - started_at + pause_s
                if refused_s > self.give_up_s:
                    raise
            else:
                self._outage.ended("the result store takes results again")
                num_sequences = len(inflight.value.sequences)
                return StoredResult(execution=inflight.execution.id, num_bytes=len(body), num_sequences=num_sequences)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return None

    def _take_stored(self, inflight: InFlightJob, num_bytes: int, stored: StoredResult | None) -> None:
        self._pending_bytes -= num_bytes
        if stored is not None:
            inflight.job.outcome = wire.encode(stored)
        inflight.is_being_stored = False

    def _take_error(self, inflight: InFlightJob, num_bytes: int, error: Exception) -> None:
        self._pending_bytes -= num_bytes
        inflight.is_being_stored = False
        if isinstance(error, ResultStoreError):
            _fail(inflight, f"which the result store has not taken for {self.give_up_s:g} s: {error}")
            return
        self._log.error("a result is not stored: %r", error, extra={"job": inflight.job.id})
        inflight.error = JobError(failure_of(error, inflight.job.timeout))
        inflight.job.outcome = wire.encode(inflight.error.failure)


def _fail(inflight: InFlightJob, reason: str) -> None:
    """Let a decided job fail: its result is not kept."""
    message = f"the result has {len(inflight.job.outcome or b'')} bytes, {reason}"
    failure = wire.Failure(code="not_stored", message=message)
    inflight.job.outcome = wire.encode(failure)
    inflight.job.retries_left = 0
    inflight.error = JobError(failure)
