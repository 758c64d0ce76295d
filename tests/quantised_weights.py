"""Weights in a few bits, and the same in floating point for transformers: those that were rounded to them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch

GROUP_SIZE = 32


def _is_quantised(name: str, weight: Any) -> bool:
    """True for matrices of linear layers and embeddings of tokens, as mlx-vlm's `convert` quantises them."""
    left_out = any(word in name for word in ("pos", "norm", "conv", "patch_emb", "mm_input_projection", "gate.weight"))
    return weight.ndim == 2 and weight.shape[1] % GROUP_SIZE == 0 and name.endswith(".weight") and not left_out


def round_weights(model: Any, bits: int) -> dict[bytes, tuple[mx.array, mx.array, mx.array]]:
    """Round a model's weights to those of `bits` bits. Return the quantised ones by the bytes of the rounded ones."""
    quantised: dict[bytes, tuple[mx.array, mx.array, mx.array]] = {}
    for name, weight in model.named_parameters():
        if _is_quantised(name, weight):
            parts = mx.quantize(mx.array(weight.detach().numpy()), GROUP_SIZE, bits)
            rounded = np.array(mx.dequantize(*parts, GROUP_SIZE, bits))
            quantised[rounded.tobytes()] = parts
            weight.data.copy_(torch.tensor(rounded))
    return quantised


def store_quantised(path: Path, quantised: dict[bytes, tuple[mx.array, mx.array, mx.array]]) -> None:
    """Write the quantised weights in the place of the rounded ones, as mlx-vlm does."""
    stored: dict[str, mx.array] = {}
    for name, weight in mx.load(str(path)).items():
        layer, parts = name.removesuffix(".weight"), quantised.get(np.array(weight).tobytes())
        if parts is None:
            stored[name] = weight
        else:
            stored[name], stored[f"{layer}.scales"], stored[f"{layer}.biases"] = parts
    assert len(stored) > 2 * len(quantised)
    assert any("vis" in name and name.endswith(".scales") for name in stored)
    mx.save_safetensors(str(path), stored, {"format": "mlx"})
