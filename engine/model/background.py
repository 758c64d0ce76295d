"""A second thread that computes prompts beside decoding steps, on CPUs of two cores.

A step that decodes a few rows of a small model keeps one core busy at a time: Python builds it, MLX's only thread runs
what is no product of matrices. Prompts that are only scored need nothing of it, so they run beside it, on a thread with
an MLX stream of its own, and no row waits for them. Products take one thread meanwhile: OpenBLAS computes one product
on several threads at a time, and others wait. With more cores than two, one thread each would leave the others idle.

Two threads may call one model only if a forward pass changes nothing in it: `suits` finds out.
"""

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import mlx.core as mx

from scorepool.engine import mlx_thread
from scorepool.engine.model import cpu_kernels, cpu_threads
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.skipped_layers import skip_equal_layers

log = logging.getLogger(__name__)

_NUM_CORES = 2
_TRIAL = [[0, 1, 2, 3]]  # token ids
_TOLERANCE = 1e-3  # of hidden states, over the largest

Result = TypeVar("Result")


class Job(Generic[Result]):
    """Work on a thread of its own; see mlx_thread.py. Arrays that it reads must be computed."""

    def __init__(self, work: Callable[[], Result]) -> None:
        """Start it."""
        self._future: Future[Result] = Future()
        self._returned = mlx_thread.start(partial(_resolve, self._future, work))

    def done(self) -> bool:
        """Return True if the thread has returned: it frees nothing later, when the process may end."""
        return self._returned.is_set()

    def result(self) -> Result:
        """Wait for the thread. Return what the work returned, or raise what it raised."""
        self._returned.wait()
        return self._future.result()


def suits(model: Any, split: BackboneAndHead) -> bool:
    """True if this host gains from a second thread, and the model computes the same there, and keeps nothing."""
    if not _is_gain():
        return False
    try:
        with skip_equal_layers(model):
            fault = _find_fault(model, split)
    except Exception as error:  # any: the architecture's own code, on a thread that has not made its arrays
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        log.info("prompts are not computed beside decoding rows: %s", fault)
    return fault is None


def _find_fault(model: Any, split: BackboneAndHead) -> str | None:
    """Say what keeps two threads from calling a model, or return None."""
    kept = _contents(model)
    token_ids = mx.array(_TRIAL)
    mx.eval(token_ids)
    expected = _hidden(split, token_ids)
    if any(value is not kept.get(place) for place, value in _contents(model).items()):
        return "a forward pass changes the model"
    found = Job(partial(_hidden, split, token_ids)).result()
    is_near = mx.abs(found - expected).max() <= _TOLERANCE * (1 + mx.abs(expected).max())
    return None if is_near.item() else "another thread computes other numbers"


def _is_gain() -> bool:
    """True with two cores, or with more of which products use two at most."""
    if sys.platform != "linux" or not cpu_kernels.are_used():
        return False
    return cpu_threads.num_threads() <= _NUM_CORES <= len(os.sched_getaffinity(0))


def _hidden(split: BackboneAndHead, token_ids: mx.array) -> mx.array:
    hidden = split.forward_hidden(token_ids).astype(mx.float32)
    mx.eval(hidden)
    return hidden


def _contents(model: Any) -> dict[tuple[int, str], Any]:
    """Return what each module of a model holds, by its place."""
    return {
        (number, name): value
        for number, module in enumerate(model.modules())
        for name, value in (*module.items(), *vars(module).items())
    }


def _resolve(future: "Future[Result]", work: Callable[[], Result]) -> None:
    try:
        result = work()
    except BaseException as error:  # whoever waits for it gets it
        future.set_exception(error)
    else:
        future.set_result(result)
