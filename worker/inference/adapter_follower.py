"""Follow which adapters are loaded and unloaded at run time: one thread of a worker, which looks twice a second.

    staged    load and test beside those that are served ──► report; the API decides when all have reported
    served    serve it between two steps ──► show it in the registration
    unloaded  serve it no more; jobs that run with it end

A worker that starts does at once what Redis says. An adapter that it cannot load is tried again, and its jobs wait
meanwhile: a worker that ended instead would take the base and the other adapters with it. A staged record holds the
one before it, which is followed until the API has decided. The records are in api/repositories/adapters.py's hands.
"""

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from scorepool.engine import AdapterError, Engine, EngineClosed, EngineDeadError
from scorepool.engine.adapter_messages import ServeAdapter, StageAdapter, UnstageAdapter
from scorepool.store import Keys
from scorepool.store.clock import awake_s
from scorepool.wire import AdapterRecord, AdapterReport, Invalid, encode, parse

POLL_S = 0.5
RETRY_S = 5.0  # after an error
LOAD_RETRY_S = 30.0  # after an adapter could not be loaded: to try takes the engine's time, and the weights
REPORTS_TTL_S = 600
JOIN_TIMEOUT_S = 0.5  # Redis may be silent, and a worker that was asked to stop must end in time

log = logging.getLogger(__name__)


class AdapterFollower:
    """The adapters of one model in one worker."""

    def __init__(self, engine: Engine, redis: Redis, model: str, worker: str, show: Callable[[], None]) -> None:
        """`show` writes the registration. It is called on the follower's thread."""
        self._engine = engine
        self._redis = redis
        self._model = model
        self._worker = worker
        self._show = show
        self._staged: dict[str, str] = {}  # serials by name
        self._refused: dict[str, str] = {}  # serials by name
        self._done: dict[str, str] = {}  # serials of what was served or unloaded last, by name
        self._missing: dict[str, tuple[str, float]] = {}  # by name: the serial, and awake_s() of the next attempt
        self._ended = Event()
        self._thread = Thread(target=self._run, name="adapters", daemon=True)

    def is_missing(self, name: str) -> bool:
        """True if Redis says that an adapter is served and this worker could not load it. Any thread may call it."""
        return name in self._missing

    def start(self) -> None:
        """Do what Redis says, and follow what comes. Raises RedisError, EngineError."""
        self._look()
        self._thread.start()

    def close(self) -> None:
        """End after the running act. Close the engine first, so that it does not wait for it."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        wait_s = POLL_S
        while not self._ended.wait(wait_s):
            wait_s = POLL_S
            try:
                if self._look():
                    self._show()
            except (EngineClosed, EngineDeadError):
                return  # the main thread learns it from its jobs
            except RedisError as error:
                log.warning("the adapters of the model cannot be read: %s", error)
                wait_s = RETRY_S
            except Exception:
                log.exception("the adapters of the model cannot be followed")
                wait_s = RETRY_S

    def _look(self) -> bool:
        """Do what the records say; return True if other adapters are served now."""
        records = self._read()
        for name in [name for name, serial in self._staged.items() if not _has(records.get(name), serial)]:
            del self._staged[name]
            self._engine.control(UnstageAdapter(name)).result()
        has_changed = False
        for name, record in records.items():
            if (in_force := record.in_force) is not None:
                has_changed |= self._apply(name, in_force)
            if record.state == "staged":
                self._stage(name, record)
        return has_changed

    def _read(self) -> dict[str, AdapterRecord]:
        """Return the records by name. Data in Redis is untrusted: one that cannot be read is not there."""
        found: dict[str, AdapterRecord] = {}
        stored: Any = self._redis.hgetall(Keys.adapters(self._model))
        for name, value in stored.items():
            try:
                found[name.decode()] = parse(value, AdapterRecord, "msgpack")
            except (Invalid, UnicodeDecodeError) as error:
                log.warning("a record of an adapter in Redis cannot be read: %s", error)
        return found

    def _stage(self, name: str, record: AdapterRecord) -> None:
        """Load and test an adapter once, and report it."""
        if record.serial in (self._staged.get(name), self._refused.get(name)):
            return
        try:
            adapter = self._engine.control(StageAdapter(name, record.path)).result()
        except AdapterError as error:
            log.warning("refused: %s", error.message)
            self._refused[name] = record.serial
            report = AdapterReport(error=error.message)
        else:
            self._staged[name] = record.serial
            report = AdapterReport(fingerprint=adapter.fingerprint)
        key = Keys.adapter_reports(self._model)
        with self._redis.pipeline() as pipeline:
            pipeline.hset(key, f"{record.serial}:{self._worker}", encode(report))
            pipeline.expire(key, REPORTS_TTL_S)
            pipeline.execute()

    def _apply(self, name: str, record: AdapterRecord) -> bool:
        """Serve or unload what a record in force names; return True if other adapters are served now."""
        serial, retry_at = self._missing.get(name, ("", 0.0))
        if self._done.get(name) == record.serial or (serial == record.serial and awake_s() < retry_at):
            return False
        if record.state == "served":
            has_changed = self._serve(name, record)
            if not has_changed:
                self._missing[name] = record.serial, awake_s() + LOAD_RETRY_S
                return False
        else:
            has_changed = self._unload(name)
        self._missing.pop(name, None)
        self._done[name] = record.serial
        return has_changed

    def _serve(self, name: str, record: AdapterRecord) -> bool:
        try:
            if self._staged.pop(name, None) != record.serial:
                adapter = self._engine.load_adapter(name, record.path).result()
            else:
                adapter = self._engine.control(ServeAdapter(name)).result()
        except AdapterError as error:
            log.error("not served, so its jobs wait: %s", error.message)
            return False
        log.info("serves adapter %s from %s", adapter.label, adapter.folder)
        return True

    def _unload(self, name: str) -> bool:
        adapter = self._engine.unload_adapter(name).result()
        if adapter is not None:
            log.info("unloaded adapter %s", adapter.label)
        return adapter is not None


def _has(record: AdapterRecord | None, serial: str) -> bool:
    return record is not None and record.serial == serial
