"""Redis's clock for a worker and for RQ's own methods. See store/clock.py for the clocks of the machine."""

from types import ModuleType

import rq.executions
import rq.intermediate_queue
import rq.job
import rq.queue
import rq.registry
import rq.results
import rq.scheduler
import rq.utils
import rq.worker.base
import rq.worker.worker_classes

from scorepool.store.clock import RedisClock, awake_s, clock_s

__all__ = ["REDIS_CLOCK", "awake_s", "clock_s"]

REDIS_CLOCK = RedisClock()  # one for the process: a worker has one Redis. Its heartbeats measure it (process.py)

# RQ writes times to Redis, and compares them with its own, in thirty places of these modules: births and heartbeats,
# scores of registries and what their cleaners take, times of enqueueing. Each module holds the function `now` by name,
# and RQ has no other hook: overriding the methods would mean a copy of each.
_MODULES: tuple[ModuleType, ...] = (
    rq.executions,
    rq.intermediate_queue,
    rq.job,
    rq.queue,
    rq.registry,
    rq.results,
    rq.scheduler,
    rq.utils,
    rq.worker.base,
    rq.worker.worker_classes,
)
for _module in _MODULES:
    vars(_module)["now"] = REDIS_CLOCK.now
