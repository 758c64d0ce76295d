"""Mends of gpt-oss."""

from typing import Any

Config = dict[str, Any]


def limit_swiglu(model: Any, config: Config) -> None:
    """Set the configured slope and limit of the experts' activation, which are constants in mlx-lm."""
    for layer in model.layers:
        activation = layer.mlp.experts.activation
        activation._alpha, activation._limit = config["swiglu_alpha"], config["swiglu_limit"]
