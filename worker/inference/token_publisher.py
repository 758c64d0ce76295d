"""Publish the tokens of jobs that stream to Redis, while the jobs run.

    engine's thread         put: queues the deltas of a step and returns
    publisher's own thread  writes one entry to the Redis stream with all deltas that were queued since the last

A slow or unavailable Redis delays no step of the engine: deltas are then joined into fewer entries, or dropped, and the
API takes the tokens from the job's result.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from redis import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.store.scripts import load

log = logging.getLogger(__name__)

APPEND_DELTAS = load("append_deltas.lua")
MAX_STREAM_LENGTH = 10_000  # entries, approximately: steps of all workers
CLOSE_TIMEOUT_S = 5.0
MAX_QUEUED = 100_000  # deltas that wait for Redis; above it new ones are dropped


class TokenPublisher:
    """Write deltas from any thread to Redis, on a thread of its own."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._append = redis.register_script(APPEND_DELTAS)
        self._changed = Condition()  # guards the two below
        self._queued: list[Callable[[], wire.TokenDelta]] = []
        self._is_closed = False
        self._thread = Thread(target=self._run, name="token-publisher", daemon=True)
        self._thread.start()

    def put(self, deltas: Sequence[Callable[[], wire.TokenDelta]]) -> None:
        """Queue deltas. They are made on the publisher's thread, so that the caller does no work."""
        with self._changed:
            if len(self._queued) < MAX_QUEUED:
                self._queued += deltas
                self._changed.notify()

    def close(self) -> None:
        """Write what is queued, then stop."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        connected: Redis | None = None  # one connection: the pool would fetch and check it for every entry
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closed)
                if not self._queued:
                    return
                queued, self._queued = self._queued, []
            deltas: wire.TokenDeltas = [make_delta() for make_delta in queued]
            try:
                connected = connected or self._redis.client()
                self._append([store.TOKENS], [MAX_STREAM_LENGTH, wire.encode(deltas)], connected)
            except RedisError as error:
                log.warning("%d token deltas were not streamed, their jobs' results have them: %r", len(deltas), error)
