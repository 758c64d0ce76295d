"""Load what comes before the language model in a model of mlx-vlm: the vision tower and its projector."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
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
    weights = architecture.Model.sanitize(model, dict(stored))
    weights = architecture.VisionModel.sanitize(model, weights)
    own = {name: weight for name, weight in weights.items() if not name.startswith((_LANGUAGE_MODEL, "lm_head"))}
    if packed := next((name for name in own if name.endswith((".scales", "_packed", ".qweight"))), None):
        raise LoadError(f"{packed}: the weights of the vision tower are quantised, expected floating-point numbers")
    model.load_weights(list(own.items()), strict=True)
    model.update(tree_map(lambda weight: weight.astype(dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model  # type: ignore[no-any-return]
