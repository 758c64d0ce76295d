"""Load what comes before the language model in a model of mlx-vlm: the vision tower and its projector."""

from collections.abc import Mapping
from inspect import getattr_static
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map

from scorepool.engine.errors import LoadError
from scorepool.engine.model.surveyed import Config

_LANGUAGE_MODEL = "language_model"


def check_constants(config: Config, constants: Mapping[str, object]) -> None:
    """Check settings, by their paths, that mlx-vlm does not read. Raises LoadError."""
    for path, expected in constants.items():
        found: Any = config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found != expected:
            raise LoadError(f"{path} is {found!r}, expected {expected!r}")


def load_tower(architecture: ModuleType, config: Config, stored: dict[str, mx.array], dtype: mx.Dtype) -> Module:
    """Return the model of an architecture of mlx-vlm without its language model, with its weights in `dtype`.

    All of its weights must be there. Raises LoadError, ValueError.
    """
    settings = architecture.ModelConfig.from_dict(dict(config))
    settings.text_config = architecture.TextConfig.from_dict(config["text_config"])
    settings.vision_config = architecture.VisionConfig.from_dict(config["vision_config"])
    model = architecture.Model(settings)  # lazy: the language model's weights are never computed
    del model[_LANGUAGE_MODEL]
    weights = dict(stored)
    for part in (architecture.Model, architecture.VisionModel):
        weights = _sanitize(part, model, weights)
    own = {name: weight for name, weight in weights.items() if not name.startswith((_LANGUAGE_MODEL, "lm_head"))}
    if packed := next((name for name in own if name.endswith(("_packed", ".qweight"))), None):
        raise LoadError(f"{packed}: the weights of the vision tower are packed, expected MLX's form or floating point")
    _quantise(model, config, own)
    model.load_weights(list(own.items()), strict=True)
    model.update(tree_map(lambda weight: _cast(weight, dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model  # type: ignore[no-any-return]


def _sanitize(part: Any, model: Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights by the names of mlx-vlm, as a class of the architecture says, if it does."""
    found = getattr_static(part, "sanitize", None)
    if found is None:
        return weights
    named: dict[str, mx.array] = (
        part.sanitize(weights) if isinstance(found, staticmethod) else part.sanitize(model, weights)
    )
    return named


def _quantise(model: Module, config: Config, weights: Mapping[str, mx.array]) -> None:
    """Let the layers be quantised that are stored so, as `quantization` says for all of them or for each."""
    settings: dict[str, Any] = config.get("quantization") or config.get("quantization_config") or {}
    common = {name: settings[name] for name in ("group_size", "bits", "mode") if name in settings}

    def chosen(path: str, module: Module) -> Any:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        own = settings.get(path)
        return own if isinstance(own, dict) else True

    if any(name.endswith(".scales") for name in weights):
        quantize(model, **common, class_predicate=chosen)


def _cast(weight: mx.array, dtype: mx.Dtype) -> mx.array:
    return weight.astype(dtype) if mx.issubdtype(weight.dtype, mx.floating) else weight
