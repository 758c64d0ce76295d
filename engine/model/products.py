"""Prepare how MLX multiplies matrices: with a fast BLAS on Linux, and float32 in full on GPUs. Before mlx is imported.

BLAS: MLX's wheel for Linux bundles the reference BLAS, 1.5 GFLOP/s against 50 to 120. mlx looks for `cblas_*` in the
global scope first, so a library that is loaded there before mlx replaces the bundled one. Only the distributions'
unprefixed builds work (Debian: libopenblas0-pthread). Without one, everything works but is slow. Between two products
its threads sleep: waiting in a loop, as they do by default, they take a quarter of the CPU time of a small model from
the other threads and processes, and save nothing. torch, which transformers imports where it is installed, is imported
before it: torch takes what it finds in the global scope too, is ten times slower with it on two threads, and with
OpenBLAS 0.3.29 ends the process by a segmentation fault.

OpenBLAS's kernels on x86: chosen here, by what the processor can do. OpenBLAS before 0.3.25 goes by names only, and
takes SSE3 on one that is newer than itself: Debian 12's, 0.3.21, makes 28 GFLOP/s on Intel's Emerald Rapids, and 110
with AVX-512. On AMD's Zen 4 it takes its kernels for Intel's AVX-512. That processor has units of 256 bits, for which
the kernels of earlier Zens are made: prompts of the shape of Qwen3-0.6B take 8 to 10 % less time with them, 32 to 96
tokens with one of its weights 15 to 25 % less.

GPUs: with the matrix units of NVIDIA's GPUs and of Apple's from the M5 on, MLX rounds the factors of float32 products
to TF32, 10 bits of mantissa, unless it is told not to. On an H200 a product then has an error of 3e-4 of its size in
the place of 2e-7, and no model agrees with transformers in float32 within 1e-4.
"""

import ctypes
import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

log = logging.getLogger(__name__)

_NAMES = ("libopenblas.so.0", "libopenblas.so")
_REFERENCE = "reference blas"
_THREAD_TIMEOUT = "14"  # log2 of the cycles, about 6 µs, for which OpenBLAS's idle threads keep their cores; else 2**26
_CORE_TYPE = "OPENBLAS_CORETYPE"  # the processor whose kernels OpenBLAS takes
_AVX2 = {"avx2", "fma"}  # what the kernels of Haswell and Zen use, as Linux names it
_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", *_AVX2}  # of Skylake-X: not of Knights Landing
_PROCESSORS = Path("/proc/cpuinfo")
_TF32 = "MLX_ENABLE_TF32"  # which MLX reads at its first product
_loaded = _REFERENCE


def prepare() -> str:
    """Keep float32 in full, load OpenBLAS if it is installed, and describe the BLAS that a CPU uses.

    Call before importing mlx and before the process has threads. What the environment says stays. OpenBLAS's rounding
    depends on its kernels for the processor and on the number of its threads, so both are named.
    """
    global _loaded
    os.environ.setdefault(_TF32, "0")
    if sys.platform != "linux":
        return "accelerate"
    if _loaded == _REFERENCE and "mlx.core" not in sys.modules:
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _THREAD_TIMEOUT)
        with suppress(OSError):  # a sandbox without /proc
            if (kernels := find_kernels(_PROCESSORS.read_text())) is not None:
                os.environ.setdefault(_CORE_TYPE, kernels)
        with suppress(ImportError):  # not installed, or prevented: see engine/trial.py
            import_module("torch")
        _loaded = next(filter(None, map(_try_load, _NAMES)), _REFERENCE)
    if _loaded == _REFERENCE:
        log.warning(
            "OpenBLAS was not loaded before mlx, so a CPU uses the wheel's slow BLAS; install libopenblas0-pthread"
        )
    else:
        log.info("mlx uses OpenBLAS on a CPU")
    return _loaded


def find_kernels(processors: str) -> str | None:
    """Return the name of OpenBLAS's kernels that suit the processors that Linux describes, or None: it finds them.

    Family 25 of AMD's is Zen 3 and Zen 4. Zen 5, the next, has units of 512 bits.
    """
    fields = dict(line.split(":", 1) for line in processors.partition("\n\n")[0].splitlines() if ":" in line)
    described = {name.strip(): value.split() for name, value in fields.items()}
    flags = set(described.get("flags", []))
    is_amd = described.get("vendor_id") == ["AuthenticAMD"]
    if flags >= _AVX512 and not (is_amd and described.get("cpu family") == ["25"]):
        return "SKYLAKEX"
    if flags >= _AVX2:
        return "ZEN" if is_amd else "HASWELL"
    return None


def _try_load(name: str) -> str | None:
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:  # not installed
        return None
    library.openblas_get_corename.restype = ctypes.c_char_p
    return f"openblas {library.openblas_get_corename().decode()}, {library.openblas_get_num_threads()} threads"
