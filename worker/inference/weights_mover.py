"""Move a worker to the version of its model's weights that is committed, and check versions that are pending.

    pending      load and check beside what serves ──► report; the script commits it when the last worker reports
    committed    switch between two steps ──► show it in the registration

It has a thread of its own, which messages wake; it also looks once a second, for messages can be lost.
"""

import logging
from collections.abc import Callable
from threading import Event, Thread

from redis.exceptions import RedisError

from scorepool.engine import Engine, EngineClosed, EngineDeadError, EngineError, LoadError, ModelInfo, ReloadError
from scorepool.store.weights import WeightsRecord
from scorepool.wire import WeightsSource
from scorepool.worker.inference.weights_store import WeightsStore, WeightsUnavailable

POLL_S = 1.0
RETRY_S = 5.0  # after an error
JOIN_TIMEOUT_S = 0.5  # Redis may be silent, and a worker that was asked to stop must end in time

log = logging.getLogger(__name__)


class WeightsMover:
    """The versions of one model in one worker."""

    def __init__(
        self,
        engine: Engine,
        store: WeightsStore,
        source: WeightsSource | None,
        show: Callable[[ModelInfo], None],
        fail: Callable[[EngineDeadError], None],
    ) -> None:
        """`source` is that of what the engine serves. `show` and `fail` are called on the thread of the moves."""
        self._engine = engine
        self._store = store
        self._source = source
        self._show = show
        self._fail = fail
        self._staged: tuple[WeightsSource, str] | None = None  # and the fingerprint
        self._refused: WeightsSource | None = None
        self._kept: int | None = None  # the version that was written as this worker's
        self._changed = Event()
        self._ended = False
        self._thread = Thread(target=self._run, name="weights", daemon=True)

    @property
    def version(self) -> int:
        """The version that serves."""
        return self._engine.model_info.weights_version

    def start(self, ttl_s: float) -> None:
        """Join, move to what is committed by now, and follow what comes. Raises EngineError, RedisError."""
        while (record := self._store.join_and_read(ttl_s)).version > self.version:
            self._move(record)
        self._keep()
        self._thread.start()

    def wake(self) -> None:
        """Look now. Any thread may call it."""
        self._changed.set()

    def close(self) -> None:
        """End after the running move. Close the engine first, so that it does not wait for it."""
        self._ended = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)
        self._store.forget(keep=None)

    def _run(self) -> None:
        while not self._ended:
            self._changed.clear()
            wait_s = POLL_S
            try:
                self._look()
            except EngineClosed:
                return
            except EngineDeadError as error:
                self._fail(error)
                return
            except RedisError as error:
                log.warning("the versions of the weights cannot be read: %s", error)
                wait_s = RETRY_S
            except Exception:
                log.exception("the versions of the weights cannot be followed")
                wait_s = RETRY_S
            self._changed.wait(wait_s)

    def _look(self) -> None:
        record = self._store.read()
        if record.version > self.version:
            self._move(record)
            record = self._store.read()
        if self._kept != self.version or record.version < self.version:
            self._keep()
        if record.pending is not None and record.pending_source not in (None, self._refused):
            self._check(record.pending, record.pending_source)
        elif record.pending is None and self._staged is not None:
            self._engine.discard_staged().result()
            self._staged = None
            self._store.forget(keep=self._source)

    def _keep(self) -> None:
        """Write which version this worker serves. Redis may have lost it."""
        source = self._source or WeightsSource(path="")
        self._store.keep(self.version, source, self._engine.model_info.fingerprint)
        self._kept = self.version

    def _check(self, version: int, source: WeightsSource) -> None:
        """Load and check a pending version, and report it, also again: other workers may have gone since."""
        if self._staged is None or self._staged[0] != source:
            try:
                self._stage(version, source)
            except (LoadError, WeightsUnavailable) as error:
                log.warning("refused version %d of the weights: %s", version, error)
                self._refused = source
                self._store.report(version, source.id, refusal=str(error))
                self._store.forget(keep=self._source)
                return
        if (
            self._staged is not None
            and self._store.report(version, source.id, fingerprint=self._staged[1]) == "committed"
        ):
            self._changed.set()

    def _stage(self, version: int, source: WeightsSource) -> None:
        """Load a version beside what serves. Raises LoadError, WeightsUnavailable."""
        folder = self._store.fetch(source)
        info = self._engine.stage_weights(folder, version).result()
        self._staged = source, info.fingerprint

    def _move(self, record: WeightsRecord) -> None:
        """Switch to the committed version. Raises EngineDeadError if it cannot be had."""
        source = record.source
        if source is None:
            return
        try:
            if self._staged is None or self._staged[0] != source:
                self._stage(record.version, source)
            if self._staged is not None and record.fingerprint not in (None, self._staged[1]):
                raise LoadError(f"their fingerprint is {self._staged[1]}, expected {record.fingerprint}")
            info = self._engine.switch_weights(restart=source.on_running == "restart").result().result()
        except EngineDeadError:
            raise
        except (EngineError, WeightsUnavailable) as error:
            if isinstance(error, EngineClosed):
                raise
            raise ReloadError(f"version {record.version} of the weights cannot be served: {error}") from error
        finally:
            self._staged = None
        self._source = source
        self._store.forget(keep=source)
        log.info("serves version %d of the weights, fingerprint %s", record.version, info.fingerprint[:12])
        self._show(info)
        self._keep()
