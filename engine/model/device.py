"""Print as JSON what MLX computes with: `python -m scorepool.engine.model.device`.

For a process of its own, because a wrong installation of MLX may crash natively.
"""

# ruff: noqa: E402 - the BLAS must be loaded before mlx
from scorepool.engine.model import blas

_BLAS = blas.load()

import json

import mlx.core as mx


def main() -> None:
    """Compute a sum and print the BLAS, whether Metal is available, and the default device."""
    mx.eval(mx.ones(2) + mx.ones(2))
    description = {"blas": _BLAS, "metal": mx.metal.is_available(), "device": str(mx.default_device())}
    print(json.dumps(description))  # noqa: T201


if __name__ == "__main__":
    main()
