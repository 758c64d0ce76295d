"""Read the weights that a quantised checkpoint of MLX stands for."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from scorepool.engine.model.checkpoint import stored_tensors
from scorepool.engine.model.config import load_raw_config

_PARTS = ("scales", "biases", "global_scale")
_NVFP4_LIMITS = 448 * 6  # the largest scale of a group, times the largest number of 4 bits


def dequantized_weights(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Yield the name and the value of every tensor, in float32, one at a time."""
    stored = stored_tensors(folder)
    quantization = load_raw_config(folder)["quantization"]
    for name, weight in stored.items():
        path, _, leaf = name.rpartition(".")
        if leaf in _PARTS and f"{path}.weight" in stored and f"{path}.scales" in stored:
            continue
        if leaf == "weight" and f"{path}.scales" in stored:
            own = quantization.get(path)
            settings = own if isinstance(own, dict) else quantization
            weight = mx.dequantize(
                weight,
                stored[f"{path}.scales"],
                stored.get(f"{path}.biases"),
                group_size=settings["group_size"],
                bits=settings["bits"],
                mode=settings.get("mode", "affine"),
            )
            if f"{path}.global_scale" in stored:  # an expert's largest number, by which its groups' scales were divided
                weight = weight.astype(mx.float32) * (stored[f"{path}.global_scale"][:, None, None] / _NVFP4_LIMITS)
        yield name, weight.astype(mx.float32)
