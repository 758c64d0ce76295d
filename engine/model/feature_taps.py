"""Let features of images stand in hidden states of a model of texts: for embeddings, or added to a layer's output."""

from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.errors import LoadError

EMBEDDINGS = ".embed_tokens"


class Features(NamedTuple):
    """Features of one forward pass, and where they stand in it."""

    rows: mx.array  # [n]
    columns: mx.array  # [n]
    values: mx.array  # [n, width]


class FeatureTap:
    """The output [rows, length, width] of a module, which takes features until `clear`. Not thread-safe."""

    def __init__(self, module: Module, *, is_sum: bool = False) -> None:
        """Let features stand for the module's output; with `is_sum`, add them to it."""
        self._features: Features | None = None
        tap, kind = self, type(module)

        class TappedModule(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
                output: mx.array = kind.__call__(self, *args, **kwargs)
                if tap._features is not None:
                    rows, columns, values = tap._features
                    values = values.astype(output.dtype)
                    output[rows, columns] = output[rows, columns] + values if is_sum else values
                return output

        module.__class__ = TappedModule

    def place(self, features: Features) -> None:
        """Let features stand at their places until `clear`."""
        self._features = features

    def clear(self) -> None:
        """Leave the output alone again."""
        self._features = None


def tap_features(model: Any, num_deep_layers: int) -> list[FeatureTap]:
    """Tap the model's only embeddings, and the output of its first layers. Raises LoadError."""
    found = [module for name, module in model.named_modules() if name.endswith(EMBEDDINGS)]
    if len(found) != 1:
        raise LoadError(f"the model has {len(found)} embeddings of tokens; images need one")
    if num_deep_layers > len(model.layers):
        raise LoadError(f"images enter the first {num_deep_layers} layers, and the model has {len(model.layers)}")
    return [FeatureTap(found[0]), *(FeatureTap(layer, is_sum=True) for layer in model.layers[:num_deep_layers])]
