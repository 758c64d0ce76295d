"""One of the models of a worker: its queues, its engine, what runs its jobs, and what the worker shows of it."""

import time
from collections.abc import Set as AbstractSet

from redis.client import Pipeline

from scorepool.engine import Engine
from scorepool.store import Settings
from scorepool.store.clock import awake_s
from scorepool.wire import EngineLoad
from scorepool.worker.claims.queue_group import QueueGroup
from scorepool.worker.inference.adapter_follower import AdapterFollower
from scorepool.worker.inference.budget import Budget
from scorepool.worker.inference.crosschecker import Crosschecker
from scorepool.worker.inference.engine_rates import LongestStep, RateWindow
from scorepool.worker.inference.prefix_tokens import PrefixTokens
from scorepool.worker.inference.registration import WorkerRegistration
from scorepool.worker.inference.run_inference import InferenceRunner
from scorepool.worker.inference.weights_mover import WeightsMover
from scorepool.worker.inference.weights_store import WeightsStore

REST_EVERY_S = 0.5  # at most so often it is tried to drop weights
UNLOADED_JOBS = 1  # that a worker of several models has of one whose weights are not loaded


class HostedModel:
    """What a worker has of one model. The last six are set while it starts."""

    def __init__(
        self, engine: Engine, group: QueueGroup, settings: Settings, budget: Budget | None, is_one_of_several: bool
    ) -> None:
        self.engine = engine
        self.group = group
        self.budget = budget
        self._settings = settings
        self._is_one_of_several = is_one_of_several
        self.prefix_tokens = PrefixTokens()
        self._rate_window = RateWindow()
        self._longest_step = LongestStep()
        self._rests_at = 0.0  # awake_s()
        self.inference: InferenceRunner | None = None
        self.registration: WorkerRegistration | None = None
        self.crosschecker: Crosschecker | None = None
        self.weights: WeightsStore | None = None
        self.mover: WeightsMover | None = None
        self.adapters: AdapterFollower | None = None

    def read_load(self) -> EngineLoad:
        """Return how full the engine was at its last step."""
        running_rows, cached_tokens = self.engine.load
        return EngineLoad(
            running_rows=running_rows,
            max_running_rows=self._settings.max_running_rows,
            cached_tokens=cached_tokens,
            max_cached_tokens=self.engine.model_info.max_cached_tokens,
            prefix_bytes=self.engine.stats.prefixes.memory.num_bytes,
            prefix_disk_bytes=self.engine.stats.prefixes.disk.num_bytes,
            budget=1.0 if self.budget is None else self.budget.share,
            strains=[] if self.budget is None else sorted(self.budget.strains),
            is_loaded=self.engine.is_loaded,
            rates=self._rate_window.rates(self.engine.stats),
        )

    def num_wanted(self) -> int:
        """Return how many more jobs of the model the worker should have."""
        share = 1.0 if self.budget is None else self.budget.share
        plan = self.group.plan
        began_at = self.engine.step_started_at
        running_s = 0.0 if began_at is None else time.monotonic() - began_at
        plan.step_s = self._longest_step.read(self.engine.stats, running_s)
        wanted = plan.num_wanted(max(1, int(self._settings.max_running_rows * share)))
        if not self._is_one_of_several:
            return wanted
        plan.set_ready(self.engine.is_loaded and not self.engine.has_to_wait)
        return wanted if plan.is_ready else min(wanted, max(0, UNLOADED_JOBS - plan.load.num_jobs))

    def excluded_owners(self) -> AbstractSet[str]:
        """Return the owners whose jobs wait for the tokenizer."""
        return frozenset() if self.inference is None else self.inference.tokenizing.crowded_owners

    def rest(self, idle_s: float) -> None:
        """Drop the weights if there was no job for `idle_unload_s`. The engine does nothing while a crosscheck runs.

        Raises EngineDeadError.
        """
        limit_s = self._settings.idle_unload_s
        if limit_s and idle_s >= limit_s and self.engine.is_loaded and awake_s() >= self._rests_at:
            self._rests_at = awake_s() + REST_EVERY_S
            self.engine.drop_weights()

    def register(self, pipeline: Pipeline) -> None:
        """Write what the worker serves, with every heartbeat."""
        if self.registration is not None:
            self.registration.renew(pipeline)
            if self.weights is not None:
                self.weights.join(pipeline, 1.5 * self.registration.read_link().lease_s)
        self.prefix_tokens.count(pipeline, self.engine.stats)

    def unregister(self, pipeline: Pipeline) -> None:
        """Remove what `register` wrote."""
        self.prefix_tokens.count(pipeline, self.engine.stats)
        if self.registration is not None:
            self.registration.remove(pipeline)
        if self.weights is not None:
            self.weights.leave(pipeline)

    def close(self) -> None:
        """End what runs. The engine is closed before the thread that waits for it."""
        if self.inference is not None:
            self.inference.close()
        self.engine.close()
        if self.mover is not None:
            self.mover.close()
        if self.adapters is not None:
            self.adapters.close()
        if self.crosschecker is not None:
            self.crosschecker.close()
