"""The worker of one model: its queues' jobs run in one continuous batch.

    rq worker -w scorepool.worker.BatchWorker --with-scheduler demo:high demo demo:low

SCOREPOOL_MODEL says which model; its engine is started in `open`, so never before a fork.
"""

import os
import sys
from typing import Any

from redis.client import Pipeline

from scorepool.engine import Engine, LoadError
from scorepool.store import INFER
from scorepool.worker.inference.infer import Infer, engine_settings, stamp_of
from scorepool.worker.inference.registration import WorkerRegistration, card_of, served_model
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.rq.errors import StartError
from scorepool.worker.rq.watchdog import WatchedOperations
from scorepool.worker.rq.worker import Worker


class BatchWorker(Worker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine: Engine | None = None
        self.infer: Infer | None = None
        self.presence: WorkerRegistration | None = None

    def open(self) -> None:
        (model, *aliases), source = served_model(self.settings, self.queue_names())
        self.engine = self.start_engine(source)
        stamp = stamp_of(model, self.engine.model_info)
        self.functions[INFER] = self.infer = Infer(self.engine, stamp, TokenPublisher(self.connection))
        self.presence = WorkerRegistration(
            card_of(stamp, self.engine.model_info, self.engine.tokenizer, self.name, aliases), self.settings.lease_s
        )

    def start_engine(self, source: str) -> Engine:
        """Start the engine; block until the model is loaded. Raises StartError."""
        _leave_torch_out()
        try:
            return Engine(engine_settings(source, self.settings))
        except LoadError as error:
            raise StartError(error.message) from None

    def close(self) -> None:
        if self.infer is not None:
            self.infer.close()
        if self.engine is not None:
            self.engine.close()
        if self.presence is not None:
            with self.connection.pipeline() as pipeline:
                self.presence.withdraw(pipeline)
                pipeline.execute()

    def watched_operations(self) -> WatchedOperations:
        step = None if self.engine is None else self.engine.step_started_at
        tokenizing = None if self.infer is None else self.infer.tokenizing_since
        return {**super().watched_operations(), "a step of the engine": step, "the tokenizing of one job": tokenizing}

    def register(self, pipeline: Pipeline) -> None:
        if self.presence is not None:
            self.presence.show(pipeline)


def _leave_torch_out() -> None:
    """transformers, from which mlx-lm has its tokenizers, imports torch wherever it is installed: nearly half a GiB of
    memory and two seconds of the start, for nothing. A process that has torch already keeps it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment] # an import raises ModuleNotFoundError
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that models of torch cannot be had
