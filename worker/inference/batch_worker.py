"""The worker of one model: the jobs of its queues run in one continuous batch.

    rq worker -w scorepool.worker.BatchWorker --connection-class scorepool.worker.Redis --with-scheduler demo

SCOREPOOL_MODEL names the model. Its engine starts in `open`, so never before a fork.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from redis.client import Pipeline

from scorepool.engine import Engine, EngineDeadError, EngineSettings, LoadError, ModelInfo
from scorepool.engine.trial import prevent_torch_import
from scorepool.store import INFER, Keys, parse_model
from scorepool.wire import EngineLoad, WeightsSource
from scorepool.worker.claims.link_report import LinkReport
from scorepool.worker.engine_settings import engine_settings
from scorepool.worker.inference.budget import EVERY_S as BUDGET_EVERY_S
from scorepool.worker.inference.budget import Budget
from scorepool.worker.inference.configured_adapters import configured_adapters, load_adapters
from scorepool.worker.inference.crosscheck_mail import CrosscheckMail
from scorepool.worker.inference.crosschecker import Crosschecker
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.engine_rates import RateWindow
from scorepool.worker.inference.prefix_tokens import PrefixTokens
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.registration import (
    WorkerRegistration,
    configured_model,
    served_adapters,
    served_model_of,
)
from scorepool.worker.inference.result_cache.cache_store import CacheStore
from scorepool.worker.inference.result_cache.result_cache import ResultCache
from scorepool.worker.inference.run_inference import InferenceRunner
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.inference.weights_mover import WeightsMover
from scorepool.worker.inference.weights_store import WeightsStore, WeightsUnavailable
from scorepool.worker.machine.periodic_tasks import PeriodicTask
from scorepool.worker.machine.watchdog import WatchedOperations
from scorepool.worker.rq.errors import StartError
from scorepool.worker.rq.worker import Worker


class BatchWorker(Worker):
    takes_over = True

    def log_fields(self) -> dict[str, str]:
        return super().log_fields() | {"model": self.settings.model.partition("=")[0].partition(",")[0]}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine: Engine | None = None
        self.inference: InferenceRunner | None = None
        self.registration: WorkerRegistration | None = None
        self.crosschecker: Crosschecker | None = None
        self.budget: Budget | None = None
        self.prefix_tokens = PrefixTokens()
        self.weights: WeightsStore | None = None
        self.mover: WeightsMover | None = None
        self._rate_window = RateWindow()

    def open(self) -> None:
        (model, *aliases), source = configured_model(self.settings, self.queue_names())
        weights = WeightsStore(self.connection, model, self.name, self.settings.state_folder() / "weights")
        self.engine, weights_source = self.start_version(source, weights)
        load_adapters(self.engine, configured_adapters(self.settings, [model, *aliases]))
        self.budget = Budget(self.engine) if self.settings.adapt_budget else None
        provenance = provenance_of(model, self.engine.model_info)
        served_model = served_model_of(provenance, self.engine.model_info, self.engine.chat, self.name, aliases)
        link_report = LinkReport(self.plan, self.exchanger.link_speed, self.leases)
        registration = WorkerRegistration(served_model, link_report.read, self.settings.model_grace_s, self.read_load)
        registration.read_adapters = partial(served_adapters, self.engine)
        if self.settings.crosscheck:
            self.crosschecker = self.start_crosschecks(self.engine, model, registration)
        self.registration = registration  # from now on each heartbeat shows the model
        self.functions[INFER] = self.inference = InferenceRunner(
            self.engine, model, TokenPublisher(self.connection), self.crosschecker, self.open_cache(self.engine)
        )
        self.weights = weights
        self.mover = self.start_mover(self.engine, weights, weights_source, registration)

    def read_load(self) -> EngineLoad | None:
        """Return how full the engine was at its last step."""
        if self.engine is None:
            return None
        running_rows, cached_tokens = self.engine.load
        return EngineLoad(
            running_rows=running_rows,
            max_running_rows=self.settings.max_running_rows,
            cached_tokens=cached_tokens,
            max_cached_tokens=self.engine.model_info.max_cached_tokens,
            budget=1.0 if self.budget is None else self.budget.share,
            strains=[] if self.budget is None else sorted(self.budget.strains),
            is_loaded=self.engine.is_loaded,
            rates=self._rate_window.rates(self.engine.stats),
        )

    def num_wanted(self) -> int:
        share = 1.0 if self.budget is None else self.budget.share
        return self.plan.num_wanted(max(1, int(self.settings.max_running_rows * share)))

    def periodic_tasks(self) -> list[PeriodicTask]:
        return [*super().periodic_tasks(), PeriodicTask(self._update_budget, every_s=BUDGET_EVERY_S)]

    def _update_budget(self) -> None:
        if self.budget is not None:
            self.budget.update()

    def rest(self, idle_s: float) -> None:
        """Drop the weights after `idle_unload_s`. The engine does nothing while a crosscheck runs."""
        limit_s = self.settings.idle_unload_s
        if limit_s and idle_s >= limit_s and self.engine is not None and self.engine.is_loaded:
            try:
                self.engine.drop_weights()
            except EngineDeadError as error:
                raise map_engine_error(error) from error

    def excluded_owners(self) -> AbstractSet[str]:
        return frozenset() if self.inference is None else self.inference.tokenizing.crowded_owners

    def start_engine(self, source: str) -> Engine:
        """Start the engine; block until the model is loaded. Raises StartError."""
        return open_engine(engine_settings(source, self.settings, parse_model(self.settings.model)[0][0]))

    def start_version(self, source: str, weights: WeightsStore) -> tuple[Engine, WeightsSource | None]:
        """Start the engine with the version of the weights that is committed. Raises StartError."""
        weights.forget(keep=None)
        record = weights.read()
        if record.source is None:
            return self.start_engine(source), None
        what = f"version {record.version} of the weights of {weights.model}"
        try:
            folder = weights.fetch(record.source)
        except WeightsUnavailable as error:
            raise StartError(f"{what} is missing: {error}") from None
        engine = open_engine(engine_settings(source, self.settings, weights.model, folder, record.version))
        if record.fingerprint not in (None, found := engine.model_info.fingerprint):
            engine.close()
            raise StartError(
                f"{what} has the fingerprint {record.fingerprint}, and the weights in {folder} have {found}: they were "
                "changed since; push a version, or put them back"
            )
        return engine, record.source

    def start_mover(
        self, engine: Engine, weights: WeightsStore, source: WeightsSource | None, registration: WorkerRegistration
    ) -> WeightsMover:
        """Follow the versions of the weights from now on. Raises StartError."""

        def show(model_info: ModelInfo) -> None:
            registration.show_model(provenance_of(weights.model, model_info), model_info)
            with self.connection.pipeline() as pipeline:
                registration.renew(pipeline)
                pipeline.execute()

        mover = WeightsMover(engine, weights, source, show, self._fail_engine)
        try:
            mover.start(1.5 * registration.read_link().lease_s)
        except EngineDeadError as error:
            raise StartError(error.message) from None
        return mover

    def _fail_engine(self, error: EngineDeadError) -> None:
        self._post_call(partial(raise_error, map_engine_error(error)))

    def wake_up_calls(self) -> dict[str, Callable[[], None]]:
        if not self.settings.model:
            return {}
        (model, *_), _ = parse_model(self.settings.model)
        return {Keys.weights_changed(model): self._wake_mover}

    def _wake_mover(self) -> None:
        if self.mover is not None:
            self.mover.wake()

    def open_cache(self, engine: Engine) -> ResultCache | None:
        """Return the result cache; None if the settings give it no room."""
        if not self.settings.result_cache_bytes:
            return None
        settings = self.settings
        store = CacheStore(self.connection, settings.result_cache_bytes, settings.result_cache_ttl_s)
        return ResultCache(engine, store)

    def start_crosschecks(self, engine: Engine, model: str, registration: WorkerRegistration) -> Crosschecker:
        crosschecker = Crosschecker(
            engine,
            model,
            CrosscheckMail(self.connection, self.name),
            self.settings.crosscheck,
            self.settings.max_batch_tokens,
            show=registration.show_crosscheck,
            stop_claiming=self.stop_claiming,
            fail=self._fail_engine,
        )
        crosschecker.start()
        return crosschecker

    def close(self) -> None:
        if self.inference is not None:
            self.inference.close()
        if self.engine is not None:
            self.engine.close()
        if self.mover is not None:
            self.mover.close()
        if self.crosschecker is not None:
            self.crosschecker.close()

    def watched_operations(self) -> WatchedOperations:
        step = None if self.engine is None else self.engine.step_started_at
        tokenizing = None if self.inference is None else self.inference.tokenizing.since
        return {**super().watched_operations(), "a step of the engine": step, "the tokenizing of one text": tokenizing}

    def register(self, pipeline: Pipeline) -> None:
        if self.registration is not None:
            self.registration.renew(pipeline)
        if self.engine is not None:
            self.prefix_tokens.count(pipeline, self.engine.stats)
        if self.weights is not None and self.registration is not None:
            self.weights.join(pipeline, 1.5 * self.registration.read_link().lease_s)

    def unregister(self, pipeline: Pipeline) -> None:
        if self.engine is not None:
            self.prefix_tokens.count(pipeline, self.engine.stats)
        if self.registration is not None:
            self.registration.remove(pipeline)
        if self.weights is not None:
            self.weights.leave(pipeline)


def open_engine(settings: EngineSettings) -> Engine:
    """Open an engine; block until the model is loaded. Raises StartError."""
    prevent_torch_import()
    try:
        return Engine(settings)
    except LoadError as error:
        raise StartError(error.message) from None


def raise_error(error: BaseException) -> None:
    raise error
