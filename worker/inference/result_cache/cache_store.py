"""The entries of the result cache in Redis, by a thread of its own: one script for all that wait to be looked up.

Entries are written a little later, many at once. What Redis does not answer is not there: jobs never wait for a cache
that is away. What it holds is untrusted: an entry that cannot be decoded, or is one of another sequence, is not used.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Literal

from redis import Redis
from redis.exceptions import RedisError

from scorepool.store.outage import Outage
from scorepool.store.scripts import load
from scorepool.wire import CachedSequence, Invalid, encode, parse
from scorepool.worker.inference.stream_connection import StreamConnection

MAX_ENTRY_BYTES = 2**18  # of a larger one it is cheaper to have it computed
MAX_LOOKED_UP = 64  # digests in one script
MAX_WRITTEN, MAX_WRITTEN_BYTES = 256, 2**20  # entries in one script
WRITE_AFTER_S = 0.02  # so that many are written at once
RETRY_S = 5.0  # after an error, for which nothing is looked up
MAX_WAITING = 10_000  # entries that wait to be written; more are dropped
JOIN_TIMEOUT_S = 1.0
READ, WRITE = load("read_cache.lua"), load("write_cache.lua")

log = logging.getLogger(__name__)
Found = list[CachedSequence | None]
Use = Literal["hits", "misses", "shared"]


@dataclass(frozen=True, slots=True)
class Lookup:
    digests: Sequence[bytes]
    on_found: Callable[[Found], object]  # called on the thread of the cache, or that of the caller; raises nothing


@dataclass(frozen=True, slots=True)
class Write:
    """An entry that waits to be written. It is encoded by the thread of the cache."""

    digest: bytes
    entry: Callable[[], CachedSequence]
    on_done: Callable[[], object]  # called whether or not it was written; raises nothing


class CacheStore:
    """The result cache of one deployment. Any thread may call it."""

    def __init__(self, redis: Redis, max_bytes: int, ttl_s: int) -> None:
        self._max_bytes, self._ttl_s = max_bytes, ttl_s
        self._connection = StreamConnection(redis)
        self._outage = Outage(log)
        self._failed_at: float | None = None  # time.monotonic()
        self._changed = Condition()  # guards the four below
        self._lookups: deque[Lookup] = deque()
        self._writes: deque[Write] = deque()
        self._write_at: float | None = None  # time.monotonic()
        self._is_closed = False
        self._uses: Counter[Use] = Counter()  # since they were counted in Redis last
        self._thread = Thread(target=self._run, name="result_cache", daemon=True)
        self._thread.start()

    def look_up(self, digests: Sequence[bytes], on_found: Callable[[Found], object]) -> None:
        """Look entries up; `on_found` gets one for each digest, None if there is none."""
        with self._changed:
            if not self._is_closed:
                self._lookups.append(Lookup(digests, on_found))
                self._changed.notify()
                return
        on_found([None] * len(digests))

    def write(self, writes: Sequence[Write]) -> None:
        """Write entries soon."""
        with self._changed:
            room = 0 if self._is_closed else max(0, MAX_WAITING - len(self._writes))
            self._writes += writes[:room]
            if self._writes and self._write_at is None:
                self._write_at = time.monotonic() + WRITE_AFTER_S
            self._changed.notify()
        for write in writes[room:]:
            write.on_done()

    def count(self, use: Use, number: int = 1) -> None:
        """Count how sequences were answered."""
        with self._changed:
            self._uses[use] += number
            if self._write_at is None:
                self._write_at = time.monotonic() + WRITE_AFTER_S
                self._changed.notify()

    def close(self) -> None:
        """Write what waits, then stop. Wait for JOIN_TIMEOUT_S at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(JOIN_TIMEOUT_S)

    # On the thread of the cache.

    def _run(self) -> None:
        while self._wait():
            try:
                self._answer_lookups()
                self._write_due()
            except Exception:  # the cache must not hold up jobs
                log.exception("the result cache failed")
        self._connection.close()

    def _wait(self) -> bool:
        """Wait for something to do. Return False when it is time to stop."""
        with self._changed:
            while not (self._lookups or self._is_closed):
                left_s = None if self._write_at is None else self._write_at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return bool(self._lookups or self._write_at is not None)

    def _answer_lookups(self) -> None:
        while lookups := self._take_lookups():
            found: Found = []
            try:
                for start in range(0, num_digests := sum(len(one.digests) for one in lookups), MAX_LOOKED_UP):
                    digests = [digest for one in lookups for digest in one.digests]
                    found += self._read(digests[start : start + MAX_LOOKED_UP])
            finally:
                found += [None] * (num_digests - len(found))
                start = 0
                for one in lookups:
                    try:
                        one.on_found(found[start : start + len(one.digests)])
                    except Exception:  # a fault of ours that must not hold up the other jobs
                        log.exception("a job could not be told what the result cache has")
                    start += len(one.digests)

    def _take_lookups(self) -> list[Lookup]:
        """Take lookups for about one script."""
        taken: list[Lookup] = []
        num_digests = 0
        with self._changed:
            while self._lookups and num_digests < MAX_LOOKED_UP:
                taken.append(self._lookups.popleft())
                num_digests += len(taken[-1].digests)
        return taken

    def _read(self, digests: list[bytes]) -> Found:
        reply = self._run_script(READ, [self._ttl_s, *digests])
        if reply is None:
            return [None] * len(digests)
        return [_decode(digest, body) for digest, body in zip(digests, reply[0], strict=True)]

    def _write_due(self) -> None:
        """Write the entries that wait, and count the uses, if it is time."""
        with self._changed:
            is_due = self._write_at is not None and (self._is_closed or time.monotonic() >= self._write_at)
            if not is_due:
                return
            writes, self._writes, self._write_at = self._writes, deque(), None
            uses, self._uses = self._uses, Counter()
        try:
            while writes or uses:
                arguments: list[bytes | str | int] = [self._max_bytes, self._ttl_s]
                arguments += [uses[name] for name in ("hits", "misses", "shared")]
                uses.clear()
                done = _take_writes(writes, arguments)
                self._run_script(WRITE, arguments)
                for write in done:
                    write.on_done()
        finally:
            for write in writes:
                write.on_done()

    def _run_script(self, script: str, arguments: Sequence[bytes | str | int]) -> list[list[bytes | None]] | None:
        """Return a script's reply; None if Redis does not answer, or did not lately."""
        if self._failed_at is not None and time.monotonic() < self._failed_at + RETRY_S:
            return None
        try:
            reply: list[list[bytes | None]] = self._connection.run_script(script, [], arguments)
        except RedisError as error:
            self._failed_at = time.monotonic()
            self._outage.failed("the result cache is not used, everything is computed: %s", error)
            return None
        self._failed_at = None
        if reply[1]:
            self._outage.failed("the result cache is not used: keys in Redis have a wrong type: %s", reply[1])
        else:
            self._outage.ended("the result cache is used again")
        return reply


def _take_writes(writes: deque[Write], arguments: list[bytes | str | int]) -> list[Write]:
    """Take entries for one script, and append their arguments. An entry that is too large is left out."""
    taken: list[Write] = []
    num_bytes = 0
    while writes and num_bytes < MAX_WRITTEN_BYTES and len(taken) < MAX_WRITTEN:
        write = writes.popleft()
        taken.append(write)
        try:
            body = encode(write.entry())
        except Exception:  # the others are written
            log.exception("an entry of the result cache cannot be encoded")
            continue
        if len(body) <= MAX_ENTRY_BYTES:
            arguments += [write.digest, body]
            num_bytes += len(body)
    return taken


def _decode(digest: bytes, body: bytes | None) -> CachedSequence | None:
    if body is None:
        return None
    try:
        entry = parse(body, CachedSequence, "msgpack")
    except Invalid as error:
        log.warning("an entry of the result cache is not used: %s", error)
        return None
    if entry.digest != digest:
        log.warning("an entry of the result cache is not used: it is that of another sequence")
        return None
    return entry
