"""A real worker that counts the rows it begins to compute, and computes them no faster than STEP_S a step.

Each row is one byte in the file COUNTED, which outlives kill -9.
"""

import os
import time
from typing import Any

from scorepool.engine.core import EngineCore
from scorepool.engine.scheduling.slice import SchedulerOutput
from scorepool.engine.sequence import Sequence
from scorepool.worker import BatchWorker

STEP_S = float(os.environ.get("STEP_S", "0.01"))


class CountingWorker(BatchWorker):
    def open(self) -> None:
        file = os.open(os.environ["COUNTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        launch = EngineCore._launch
        counted: set[Sequence] = set()

        def counting_launch(core: EngineCore, output: SchedulerOutput, began_at: float) -> Any:
            new = {slice_.sequence for slice_ in output.slices if slice_.fills_prefix is None} - counted
            if len(self.in_flight) and new:
                counted.update(new)
                os.write(file, b"." * len(new))
                time.sleep(STEP_S)
            return launch(core, output, began_at)

        EngineCore._launch = counting_launch  # type: ignore[method-assign]
        super().open()
