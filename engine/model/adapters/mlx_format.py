"""Read an adapter that mlx-lm trained: adapter_config.json and adapters.safetensors.

Its tensors are named after layers of mlx-lm's model, not of the checkpoint:

<path>.lora_a  [in, rank]       x ↦ y + scale * (x A) B
<path>.lora_b  [rank, out]
<path>.m       [out]            DoRA: the norms of the changed weight's rows
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.errors import AdapterError
from scorepool.engine.model.adapters.layer import widths
from scorepool.engine.model.adapters.mlx_settings import MlxSettings
from scorepool.engine.model.adapters.weights import LowRank

TENSORS = "adapters.safetensors"
PARTS = ("lora_a", "lora_b", "m")
_WHERE_NAMED = "adapter_config.json: num_layers and lora_parameters.keys"


def read_mlx(settings: MlxSettings, tensors: dict[str, mx.array], model: Any) -> dict[str, LowRank]:
    """Return the changes of layers by path in the loaded model. Raises AdapterError."""
    modules: dict[str, Module] = dict(model.named_modules())
    wanted = PARTS if settings.use_dora else PARTS[:2]
    parts = _parts_by_path(tensors, wanted)
    expected = settings.changed_paths(model)
    for path in parts:
        if path not in modules:
            raise AdapterError(f"the base model has no layer {path}, expected an adapter of its architecture")
        if path not in expected:
            raise AdapterError(f"{TENSORS} changes {path}, which {_WHERE_NAMED} do not name: mlx-lm refuses it")
    for path in expected:
        if missing := [part for part in wanted if part not in parts.get(path, {})]:
            raise AdapterError(
                f"{TENSORS} has no {path}.{missing[0]}, expected one of each layer that {_WHERE_NAMED} name"
            )
    return {path: _low_rank(path, parts[path], modules[path], settings) for path in expected}


def _parts_by_path(tensors: dict[str, mx.array], wanted: tuple[str, ...]) -> dict[str, dict[str, mx.array]]:
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in sorted(tensors.items()):
        path, _, part = name.rpartition(".")
        if part not in wanted or not path:
            hint = ", because fine_tune_type is not dora" if part in PARTS else ": no whole weights and biases"
            raise AdapterError(
                f"{TENSORS} has a tensor {name!r:.200}, expected only <layer>.{', <layer>.'.join(wanted)}{hint}"
            )
        found.setdefault(path, {})[part] = tensor
    if not found:
        raise AdapterError(f"{TENSORS} has no tensors")
    return found


def _low_rank(path: str, found: dict[str, mx.array], module: Module, settings: MlxSettings) -> LowRank:
    if widths(module) is None:
        raise AdapterError(
            f"{path} is a {type(module).__name__}, expected linear layers only: train with lora_parameters.keys that "
            "leave experts and embeddings out"
        )
    a, b, rank = found["lora_a"], found["lora_b"], settings.rank
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != rank or b.shape[0] != rank:
        raise AdapterError(
            f"{path}: lora_a is {list(a.shape)} and lora_b {list(b.shape)}, expected [in, {rank}] and [{rank}, out] "
            "for lora_parameters.rank of adapter_config.json"
        )
    magnitude = found.get("m")
    return LowRank(
        a.astype(mx.float32).T,
        b.astype(mx.float32) * settings.scale,
        None if magnitude is None else magnitude.reshape(-1).astype(mx.float32),
    )
