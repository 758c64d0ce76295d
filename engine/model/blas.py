"""A fast BLAS for mlx on Linux, where the wheel bundles the reference one (1.5 GFLOP/s beside 50 to 120).

mlx finds `cblas_*` in the global scope first, so a library loaded there before mlx takes the place of its
own. Only the unprefixed builds of the distributions serve (Debian: libopenblas0-pthread); without one
everything works, slowly.
"""

import ctypes
import logging
import sys

log = logging.getLogger(__name__)

_NAMES = ("libopenblas.so.0", "libopenblas.so")
_got = "reference blas"


def load() -> str:
    """Call before the first import of mlx. Returns which BLAS a CPU computes with."""
    global _got
    if sys.platform != "linux":
        return "accelerate"
    if _got == "reference blas" and "mlx.core" not in sys.modules:
        for name in _NAMES:
            if _load(name):
                _got = "openblas"
                break
    if _got == "reference blas":
        log.warning("no OpenBLAS before mlx: a CPU computes with the wheel's slow one; install libopenblas0-pthread")
    else:
        log.info("mlx computes with OpenBLAS on a CPU")
    return _got


def _load(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:  # not installed
        return False
    return True
