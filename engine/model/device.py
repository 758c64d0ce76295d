"""Print as JSON what MLX computes with: `python -m scorepool.engine.model.device`.

For a process of its own, because a wrong installation of MLX may crash natively.
"""

# ruff: noqa: E402 - MLX must be prepared before it is imported
from scorepool.engine.model import products

_BLAS = products.prepare()

import json
from importlib.metadata import distributions

import mlx.core as mx

_BACKENDS = "mlx-cpu", "mlx-cuda-"  # beginnings of distributions that hold one of MLX's backends for Linux


def main() -> None:
    """Compute a sum and print the BLAS, the kind of GPU, the default device and the installed backends."""
    mx.eval(mx.ones(2) + mx.ones(2))
    description = {
        "blas": _BLAS,
        "gpu": gpu_kind(),
        "device": str(mx.default_device()),
        "name": str(mx.device_info().get("device_name", "")),
        "backends": sorted({one.name for one in distributions() if one.name.startswith(_BACKENDS)}),
    }
    print(json.dumps(description))  # noqa: T201


def gpu_kind() -> str | None:
    """Return "metal" or "cuda" if MLX can compute on such a GPU."""
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def rounds_to_tf32() -> bool:
    """Return whether the device rounds the factors of float32 products to TF32's 10 bits of mantissa. Measured.

    MLX does on GPUs whose environment has MLX_ENABLE_TF32=1, or where it multiplied before `products.prepare`.
    """
    factors = mx.full((64, 64), 1 + 2**-12)  # with 10 bits: 1
    return (factors @ factors)[0, 0].item() == 64


if __name__ == "__main__":
    main()
