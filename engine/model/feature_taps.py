"""Let features of images stand in hidden states of a model of texts: for embeddings, or added to a layer's output."""

from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.errors import LoadError

EMBEDDINGS, LAYER_INPUTS = ".embed_tokens", ".embed_tokens_per_layer"


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
    embeddings = _find(model, EMBEDDINGS)
    if num_deep_layers > len(model.layers):
        raise LoadError(f"images enter the first {num_deep_layers} layers, and the model has {len(model.layers)}")
    return [FeatureTap(embeddings), *(FeatureTap(layer, is_sum=True) for layer in model.layers[:num_deep_layers])]


class LayerInputTap:
    """The inputs of each layer of a model, in which those of one token stand for those of others until `clear`."""

    def __init__(self, model: Any, token_id: int) -> None:
        """Tap the model's embeddings of these inputs. Raises LoadError."""
        self._embeddings, self._token_id = _find(model, LAYER_INPUTS), token_id
        self._tap = FeatureTap(self._embeddings)

    def place(self, rows: mx.array, columns: mx.array) -> None:
        """Let the token's inputs stand at these places until `clear`."""
        values: mx.array = self._embeddings(mx.array([self._token_id]))
        self._tap.place(Features(rows, columns, mx.repeat(values, rows.size, axis=0)))

    def clear(self) -> None:
        """Leave the inputs alone again."""
        self._tap.clear()


def _find(model: Any, suffix: str) -> Any:
    found = [module for name, module in model.named_modules() if name.endswith(suffix)]
    if len(found) != 1:
        raise LoadError(f"the model has {len(found)} embeddings {suffix}; images need one")
    return found[0]
