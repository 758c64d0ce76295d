"""A real worker with a memory fault: its weights change after they were loaded, fingerprinted and tested."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from scorepool.engine import Engine
from scorepool.worker.inference.batch_worker import BatchWorker


class ScaleWeights:
    """A control message that multiplies every weight by 1.02."""

    def apply(self, core: Any) -> None:
        model = core.runner._head._model
        model.update(tree_map(lambda weight: weight * 1.02, model.parameters()))
        mx.eval(model.parameters())


class CorruptedWorker(BatchWorker):
    def start_engine(self, source: str) -> Engine:
        engine = super().start_engine(source)
        engine.control(ScaleWeights()).result()
        return engine
