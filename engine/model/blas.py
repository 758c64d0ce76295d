"""Load a fast BLAS for mlx on Linux. The wheel bundles the reference BLAS: 1.5 GFLOP/s against 50 to 120.

mlx looks for `cblas_*` in the global scope first, so a library that is loaded there before mlx replaces the bundled
one. Only the distributions' unprefixed builds work (Debian: libopenblas0-pthread). Without one, everything
works but is slow.
"""

import ctypes
import logging
import sys

log = logging.getLogger(__name__)

_NAMES = ("libopenblas.so.0", "libopenblas.so")
_loaded = "reference blas"


def load() -> str:
    """Load OpenBLAS if it is installed, and return the name of the BLAS that a CPU uses. Call before importing mlx."""
    global _loaded
    if sys.platform != "linux":
        return "accelerate"
    if _loaded == "reference blas" and "mlx.core" not in sys.modules:
        for name in _NAMES:
            if _try_load(name):
                _loaded = "openblas"
                break
    if _loaded == "reference blas":
        log.warning(
            "OpenBLAS was not loaded before mlx, so a CPU uses the wheel's slow BLAS; install libopenblas0-pthread"
        )
    else:
        log.info("mlx uses OpenBLAS on a CPU")
    return _loaded


def _try_load(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:  # not installed
        return False
    return True
