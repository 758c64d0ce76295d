"""Find the layer of the loaded model that each change of an adapter belongs to, and check that it fits.

An adapter names layers as the checkpoint does. mlx-lm may store a layer under another path, or change its weight when
it loads it (join it with others, transpose it): then the same change would mean something else. So the loaded weight is
compared with the checkpoint's, of one layer of each kind, and the adapter is refused if they differ. Adapters that
mlx-lm trained name layers of mlx-lm's model, so there is nothing to compare.
"""

import re
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.errors import AdapterError
from scorepool.engine.model.adapters.layer import Term, term_of, widths
from scorepool.engine.model.adapters.weights import AdapterWeights, LowRank

_RENAMED = (  # beginnings of paths, in the checkpoint and in mlx-lm's models
    ("", ""),
    ("", "language_model."),
    ("model.language_model.", "language_model.model."),
    ("model.", ""),
    ("gpt_neox.layers.", "model.h."),
)


def place(weights: AdapterWeights, model: Any, stored: dict[str, mx.array]) -> dict[str, Term]:
    """Return the terms by path in the loaded model. `stored` has the checkpoint's tensors. Raises AdapterError."""
    modules: dict[str, Module] = dict(model.named_modules())
    placed: dict[str, Term] = {}
    compared: set[str] = set()
    for path, change in weights.layers.items():
        _refuse_non_finite(path, change, weights.part_names)
        own_path, module = _find(path, modules) if weights.names_checkpoint else (path, modules[path])
        width = widths(module)
        if width is None:
            raise AdapterError(f"{path} is a {type(module).__name__}, expected a linear layer: no other can be changed")
        if (change.a.shape[1], change.b.shape[1]) != width:
            raise AdapterError(
                f"{path}: the adapter takes {change.a.shape[1]} numbers and gives {change.b.shape[1]}, expected "
                f"{width[0]} and {width[1]}, those of the base model's layer"
            )
        kind = re.sub(r"\d+", "*", path)
        if weights.names_checkpoint and kind not in compared:
            _refuse_other_weight(path, module, stored)
            compared.add(kind)
        placed[own_path] = term_of(path, change, module)
    return placed


def _find(path: str, modules: dict[str, Module]) -> tuple[str, Module]:
    for old, new in _RENAMED:
        if path.startswith(old) and (module := modules.get(new + path.removeprefix(old))) is not None:
            return new + path.removeprefix(old), module
    raise AdapterError(
        f"the base model has no layer {path}, expected an adapter of its architecture (mlx-lm may have joined layers "
        "that the checkpoint has apart)"
    )


def _refuse_non_finite(path: str, change: LowRank, part_names: tuple[str, str, str]) -> None:
    for name, array in zip(part_names, (change.a, change.b, change.magnitude), strict=True):
        if array is not None and not mx.isfinite(array).all().item():
            raise AdapterError(f"{path}: {name} holds numbers that are not finite (NaN or infinite)")


def _refuse_other_weight(path: str, module: Any, stored: dict[str, mx.array]) -> None:
    """Refuse a layer whose weight is not the one that the checkpoint has under this path."""
    weight = stored.get(f"{path}.weight")
    if weight is None:
        if f"{path}.qweight" in stored:  # of AWQ or GPTQ, unpacked layer by layer
            return
        raise AdapterError(f"the base checkpoint has no {path}.weight, so its layer cannot be told")
    own: mx.array = module.weight
    if weight.dtype.size == 1 and weight.shape == own.shape:  # fp8, which has scales of its own
        return
    for candidate in (weight, weight.T):  # GPT-2's layers are stored transposed
        if candidate.shape == own.shape and bool((candidate.astype(own.dtype) == own).all().item()):
            return
    raise AdapterError(f"{path}: mlx-lm computes it with another weight than the checkpoint's, so no change of it fits")
