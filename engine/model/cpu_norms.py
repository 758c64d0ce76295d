"""Normalize few elements in three operations on CPUs for which MLX has no SIMD.

An RMS norm takes seven operations of MLX there, which take 65 µs of CPU for 192 elements, and most of that for 32 too.
MLX's compiler joins those behind the sum to one, which leaves 25 µs. Its loops are slower than MLX's own where there
are many elements. Values are those of MLX to the bit.

The compiler is g++, which MLX runs once per machine and loop, into a folder for temporary files.
"""

import fcntl
import logging
import tempfile
from functools import cache, partial
from pathlib import Path
from shutil import which
from typing import Any

import mlx.core as mx
from mlx.nn.layers.normalization import RMSNorm

from scorepool.engine.model import cpu_kernels

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 2**13  # of an array that is normalized in this way
_COMPILER = "g++"  # MLX runs no other one; without it, its compiler joins nothing
_LOCK = "scorepool-norms.lock"  # in the folder for temporary files


def install(model: Any) -> None:
    """Make the norms of a model compute in this way, where it is used."""
    if not cpu_kernels.are_used():
        return
    norms = [module for module in model.modules() if type(module) is RMSNorm]
    if norms and are_compiled():
        for norm in norms:
            norm.__class__ = _RMSNorm


@cache
def are_compiled() -> bool:
    """Compile the loops now, so that no step waits for it. False if that fails: then norms stay as they are.

    One process at a time, because MLX would load a library that another process is writing.
    """
    if which(_COMPILER) is None:
        return False
    try:
        with (Path(tempfile.gettempdir()) / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for num_rows in (1, 2):  # whose loops differ: the weights are repeated for more than one row
                x = mx.ones((num_rows, 1, 8))
                mx.eval(_normalize(x, x[0, 0], *_factors(8, 1e-6)))
    except (OSError, RuntimeError) as error:
        logger.info("the norms of models are not compiled, which costs small models some speed: %s", error)
        return False
    return True


@cache
def _factors(size: int, eps: float) -> tuple[mx.array, mx.array]:
    """Return what the sum of squares is multiplied with, and what is added: arrays, so that all norms share a loop."""
    return mx.array(1 / size), mx.array(eps)


@partial(mx.compile, shapeless=True)
def _normalize(x: mx.array, weight: mx.array, inverse: mx.array, eps: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.square(x).sum(axis=-1, keepdims=True) * inverse + eps) * weight


class _RMSNorm(RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        has_few = 0 < x.size <= MAX_ELEMENTS and weight.size > 1  # MLX's loops fail where the sums have the shape of x
        if not has_few or not x.dtype == weight.dtype == mx.float32:
            return mx.fast.rms_norm(x, weight, self.eps)
        normalized: mx.array = _normalize(x, weight, *_factors(weight.size, self.eps))
        return normalized


_RMSNorm.__name__ = _RMSNorm.__qualname__ = RMSNorm.__name__  # as messages show it
