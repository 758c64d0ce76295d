"""The worker of one model, or of several: the jobs of each run in one continuous batch.

    rq worker -w scorepool.worker.BatchWorker --connection-class scorepool.worker.Redis --with-scheduler demo

SCOREPOOL_MODEL names the model, or SCOREPOOL_MODELS several. Engines start in `open`, so never before a fork.
"""

import gc
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from redis.client import Pipeline

from scorepool.engine import Engine, EngineClosed, EngineDeadError, EngineSettings, LoadError, ModelInfo, open_engines
from scorepool.engine.trial import prevent_torch_import
from scorepool.store import INFER, Keys, parse_model
from scorepool.store.weights import WeightsRecord
from scorepool.wire import WeightsSource
from scorepool.worker.claims.link_report import LinkReport
from scorepool.worker.claims.queue_group import QueueGroup, QueueGroups
from scorepool.worker.engine_settings import engine_settings
from scorepool.worker.inference.adapter_follower import AdapterFollower
from scorepool.worker.inference.budget import EVERY_S as BUDGET_EVERY_S
from scorepool.worker.inference.budget import Budget
from scorepool.worker.inference.checkpoints.checkpoint_store import CheckpointStore
from scorepool.worker.inference.configured_adapters import (
    check_models_of_adapters,
    configured_adapters,
    load_adapters,
)
from scorepool.worker.inference.configured_models import ConfiguredModel, configured_models
from scorepool.worker.inference.crosscheck_mail import CrosscheckMail
from scorepool.worker.inference.crosschecker import Crosschecker
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.hosted_model import HostedModel
from scorepool.worker.inference.own_server import check_own_server
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.registration import WorkerRegistration, served_adapters, served_model_of
from scorepool.worker.inference.result_cache.cache_store import CacheStore
from scorepool.worker.inference.result_cache.result_cache import ResultCache
from scorepool.worker.inference.run_inference import InferenceRunner
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.inference.weights_mover import WeightsMover
from scorepool.worker.inference.weights_store import WeightsStore, WeightsUnavailable
from scorepool.worker.machine.launcher import Launcher
from scorepool.worker.machine.periodic_tasks import PeriodicTask
from scorepool.worker.machine.watchdog import WatchedOperations
from scorepool.worker.rq.errors import StartError
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from scorepool.worker.rq.worker import Worker


class BatchWorker(Worker):
    takes_over = True
    keeps_results = True

    def log_fields(self) -> dict[str, str]:
        names = (spec.strip().partition("=")[0].partition(",")[0] for spec in self.settings.model_specs)
        return super().log_fields() | {"model": ",".join(names)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.models: list[HostedModel] = []
        self.budget: Budget | None = None
        self.checkpoints: CheckpointStore | None = None  # of all models

    def open(self) -> None:
        configured = configured_models(self.settings, self.queue_names())
        check_own_server(self.connection, self.settings, [name for one in configured for name in one.names])
        check_models_of_adapters(self.settings, [one.names for one in configured])
        stores = [self.open_weights(one, is_alone=len(configured) == 1) for one in configured]
        engines, sources = self.start_engines(configured, stores)
        self.budget = Budget(*engines) if self.settings.adapt_budget else None
        groups = [QueueGroup(one.queues) for one in configured]
        self.models = [
            HostedModel(engine, group, self.settings, self.budget, is_one_of_several=len(engines) > 1)
            for engine, group in zip(engines, groups, strict=True)
        ]
        self.queue_groups = QueueGroups(groups)
        publisher = TokenPublisher(self.connection)
        if self.settings.checkpoint_s:
            self.checkpoints = CheckpointStore(
                self.connection, self.settings.checkpoint_s, self.settings.checkpoint_bytes
            )
        for hosted, one in zip(self.models, configured, strict=True):
            self.host(hosted, one, publisher)
        for hosted, store, weights_source in zip(self.models, stores, sources, strict=True):
            hosted.weights = store
            hosted.mover = self.start_mover(hosted, store, weights_source)
        self.functions[INFER] = self.run_inference
        gc.collect()
        gc.freeze()  # a full collection looks at what jobs made: at everything it would stop all streams for 60 ms

    def host(self, hosted: HostedModel, configured: ConfiguredModel, publisher: TokenPublisher) -> None:
        """Get ready for the jobs of one of the models, and show it from the next heartbeat on."""
        engine, (name, *aliases) = hosted.engine, configured.names
        load_adapters(engine, configured_adapters(self.settings, configured.names))
        card = self.name if len(self.models) == 1 else f"{self.name}/{name}"
        provenance = provenance_of(name, engine.model_info)
        served_model = served_model_of(provenance, engine.model_info, engine.chat, self.name, aliases)
        link_report = LinkReport(hosted.group.plan, self.exchanger.link_speed, self.leases)
        registration = WorkerRegistration(
            served_model, link_report.read, self.settings.model_grace_s, hosted.read_load, card
        )
        registration.read_adapters = partial(served_adapters, engine)
        if self.settings.crosscheck:
            hosted.crosschecker = self.start_crosschecks(engine, name, registration)
        hosted.adapters = AdapterFollower(
            engine, self.connection, name, self.name, partial(self.show_now, registration)
        )
        hosted.inference = InferenceRunner(
            engine,
            name,
            publisher,
            hosted.crosschecker,
            self.open_cache(engine),
            self.connection,
            self.checkpoints,
            self.result_store,
            hosted.adapters.is_missing,
        )
        hosted.adapters.start()
        hosted.registration = registration

    def show_now(self, registration: WorkerRegistration) -> None:
        """Write a registration before the next heartbeat does."""
        with self.connection.pipeline() as pipeline:
            registration.renew(pipeline)
            pipeline.execute()

    def run_inference(self, job: Job) -> AsyncResult:
        """Start a job on the model of its queue. Raises wire.Invalid, JobError."""
        group = self.queue_groups.of_queue(job.origin)
        [inference] = [hosted.inference for hosted in self.models if hosted.group is group]
        assert inference is not None
        return inference(job)

    def num_wanted(self, group: QueueGroup) -> int:
        return sum(hosted.num_wanted() for hosted in self.models if hosted.group is group)

    def excluded_owners(self, group: QueueGroup) -> AbstractSet[str]:
        return frozenset().union(*(hosted.excluded_owners() for hosted in self.models if hosted.group is group))

    def periodic_tasks(self) -> list[PeriodicTask]:
        tasks = [*super().periodic_tasks(), PeriodicTask(self._update_budget, every_s=BUDGET_EVERY_S)]
        if self.settings.ranks > 1:
            launcher = Launcher(lambda: self._stop_requested, self.log)
            tasks.append(PeriodicTask(launcher.check, every_s=1.0))
        return tasks

    def _update_budget(self) -> None:
        if self.budget is not None:
            self.budget.update()

    def rest(self, group: QueueGroup, idle_s: float) -> None:
        """Drop the weights of a model that had no job for `idle_unload_s`."""
        for hosted in self.models:
            if hosted.group is group:
                try:
                    hosted.rest(idle_s)
                except EngineDeadError as error:
                    raise map_engine_error(error) from error

    def open_weights(self, configured: ConfiguredModel, *, is_alone: bool) -> WeightsStore:
        """Return the versions of a model's weights. Of several models, each keeps what was sent in its own folder."""
        name, folder = configured.names[0], self.settings.state_folder() / "weights"
        own_folder = folder if is_alone else folder / f"of-{quote(name, '')}"
        return WeightsStore(self.connection, name, self.name, own_folder, configured.queues)

    def start_engines(
        self, configured: Sequence[ConfiguredModel], stores: Sequence[WeightsStore]
    ) -> tuple[list[Engine], list[WeightsSource | None]]:
        """Start the engines with the versions of the weights that are committed. Raises StartError."""
        if len(configured) == 1:
            engine, source = self.start_version(configured[0].source, stores[0])
            return [engine], [source]
        prevent_torch_import()
        settings, records = {}, []
        for one, store in zip(configured, stores, strict=True):
            record, folder = committed_weights(store)
            records.append(record)
            name = one.names[0]
            settings[name] = engine_settings(one.source, self.settings, name, folder, record.version if folder else 0)
        try:
            engines = list(open_engines(settings, self.settings.model_turn_s).values())
        except LoadError as error:
            raise StartError(error.message) from None
        try:
            for engine, store, record in zip(engines, stores, records, strict=True):
                check_fingerprint(engine, store, record)
        except StartError:
            for engine in engines:
                engine.close()
            raise
        return engines, [record.source for record in records]

    def start_engine(self, source: str) -> Engine:
        """Start the only engine; block until the model is loaded. Raises StartError."""
        name = next((parse_model(spec)[0][0] for spec in self.settings.model_specs), "")
        return open_engine(engine_settings(source, self.settings, name))

    def start_version(self, source: str, weights: WeightsStore) -> tuple[Engine, WeightsSource | None]:
        """Start the only engine with the version of the weights that is committed. Raises StartError."""
        record, folder = committed_weights(weights)
        if folder is None:
            return self.start_engine(source), None
        engine = open_engine(engine_settings(source, self.settings, weights.model, folder, record.version))
        try:
            check_fingerprint(engine, weights, record)
        except StartError:
            engine.close()
            raise
        return engine, record.source

    def start_mover(self, hosted: HostedModel, weights: WeightsStore, source: WeightsSource | None) -> WeightsMover:
        """Follow the versions of a model's weights from now on. Raises StartError."""
        registration = hosted.registration
        assert registration is not None

        def show(model_info: ModelInfo) -> None:
            registration.show_model(provenance_of(weights.model, model_info), model_info)
            self.show_now(registration)

        mover = WeightsMover(hosted.engine, weights, source, show, self._fail_engine)
        try:
            mover.start(1.5 * registration.read_link().lease_s)
        except EngineDeadError as error:
            raise StartError(error.message) from None
        return mover

    def _fail_engine(self, error: EngineDeadError) -> None:
        self._post_call(partial(raise_error, map_engine_error(error)))

    def wake_up_calls(self) -> dict[str, Callable[[], None]]:
        names = [parse_model(spec)[0][0] for spec in self.settings.model_specs]
        calls: dict[str, Callable[[], None]] = {Keys.reset_prefix_cache: self._reset_prefix_caches}
        return calls | {Keys.weights_changed(name): partial(self._wake_mover, name) for name in names}

    def _reset_prefix_caches(self) -> None:
        for hosted in self.models:
            with suppress(EngineClosed, EngineDeadError):  # the loop reports the end of an engine
                hosted.engine.clear_prefix_cache()

    def _wake_mover(self, name: str) -> None:
        for hosted in self.models:
            if hosted.mover is not None and hosted.weights is not None and hosted.weights.model == name:
                hosted.mover.wake()

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
            CrosscheckMail(self.connection, registration.card),
            self.settings.crosscheck,
            self.settings.max_batch_tokens,
            show=registration.show_crosscheck,
            stop_claiming=self.stop_all_models,
            fail=self._fail_engine,
        )
        crosschecker.start()
        return crosschecker

    def stop_all_models(self, reason: str) -> None:
        """Claim no more jobs of any model, because a crosscheck found that this machine computes wrong numbers."""
        self.stop_claiming(reason)
        for hosted in self.models:
            if hosted.crosschecker is not None:
                hosted.crosschecker.show_stopped(reason)

    def close(self) -> None:
        for hosted in self.models:
            hosted.close()
        if self.checkpoints is not None:
            self.checkpoints.close()

    def watched_operations(self) -> WatchedOperations:
        steps = [hosted.engine.step_started_at for hosted in self.models]
        tokenizing = [hosted.inference.tokenizing.since for hosted in self.models if hosted.inference]
        return {
            **super().watched_operations(),
            "a step of the engine": min((at for at in steps if at is not None), default=None),
            "the tokenizing of one text": min((at for at in tokenizing if at is not None), default=None),
        }

    def register(self, pipeline: Pipeline) -> None:
        for hosted in self.models:
            hosted.register(pipeline)

    def unregister(self, pipeline: Pipeline) -> None:
        for hosted in self.models:
            hosted.unregister(pipeline)


def raise_error(error: BaseException) -> None:
    raise error


def committed_weights(store: WeightsStore) -> tuple[WeightsRecord, str | None]:
    """Return the committed version of a model's weights, and its folder; None for those of the model itself.

    Raises StartError.
    """
    store.forget(keep=None)
    record = store.read()
    if record.source is None:
        return record, None
    try:
        return record, store.fetch(record.source)
    except WeightsUnavailable as error:
        raise StartError(f"{describe_version(store, record)} is missing: {error}") from None


def check_fingerprint(engine: Engine, store: WeightsStore, record: WeightsRecord) -> None:
    """Refuse weights that are not those that were committed. Raises StartError."""
    if record.source is None or record.fingerprint in (None, found := engine.model_info.fingerprint):
        return
    raise StartError(
        f"{describe_version(store, record)} has the fingerprint {record.fingerprint}, and the weights in its folder "
        f"have {found}: they were changed since; push a version, or put them back"
    )


def describe_version(store: WeightsStore, record: WeightsRecord) -> str:
    return f"version {record.version} of the weights of {store.model}"


def open_engine(settings: EngineSettings) -> Engine:
    """Open an engine; block until the model is loaded. Raises StartError."""
    prevent_torch_import()
    try:
        return Engine(settings)
    except LoadError as error:
        raise StartError(error.message) from None
