"""Correct what mlx-lm's architectures compute in another way than the model does. The survey finds it and checks it.

A mend changes a loaded model, after its weights have their dtype. It is for settings that published checkpoints use;
the others are refused (surveyed.py). Rotary positions and activations, which many architectures share, have modules
of their own: rope.py, activations.py.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from scorepool.engine.model.patch_globals import patch_globals

Config = dict[str, Any]
Mend = Callable[[Any, Config], None]


def apply(model: Any, config: Config) -> None:
    """Apply the mends of the model's type."""
    for mend in _MENDS.get(config["model_type"], ()):
        mend(model, config)


def _scale_keys(model: Any, config: Config) -> None:
    """Apply falcon_h1's key multiplier, which mlx-lm misses because it looks for the keys' weights by a wrong name."""
    for layer in model.layers:
        layer.self_attn.scale *= model.args.key_multiplier


def _scale_embeddings(model: Any, config: Config) -> None:
    """Make gemma3 scale its embeddings in the model's dtype. mlx-lm rounds the scale to bfloat16 in every dtype."""
    backbone = next(module for module in model.modules() if type(module).__name__ == "Gemma3Model")
    patch_globals(model, type(backbone), "mx", bfloat16=backbone.norm.weight.dtype)


class _GroupedNorm(nn.Module):
    """A gated RMS norm of each group of channels alone."""

    def __init__(self, weight: mx.array, eps: float, num_groups: int, *, gates_first: bool) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._num_groups = num_groups
        self._gates_first = gates_first

    def __call__(self, hidden: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None and self._gates_first:
            hidden = nn.silu(gate) * hidden
        grouped = hidden.reshape(*hidden.shape[:-1], self._num_groups, -1)
        hidden = mx.fast.rms_norm(grouped, None, self._eps).reshape(hidden.shape) * self.weight
        return hidden if gate is None or self._gates_first else nn.silu(gate) * hidden


def _group_norms(model: Any, config: Config) -> None:
    """Normalise each group of a Mamba layer's channels alone. mlx-lm normalises them all together."""
    num_groups = config.get("mamba_n_groups") or config.get("n_groups") or 1
    if num_groups == 1:
        return
    for module in model.modules():
        for name, norm in module.children().items():
            if type(norm).__name__ in ("MambaRMSNormGated", "FalconH1RMSNormGated", "GraniteMoeHybridRMSNormGated"):
                eps = getattr(norm, "eps", None) or norm.variance_epsilon
                gates_first = not getattr(norm, "norm_before_gate", False)
                setattr(module, name, _GroupedNorm(norm.weight, eps, num_groups, gates_first=gates_first))


_MENDS: dict[str, tuple[Mend, ...]] = {
    "falcon_h1": (_scale_keys, _group_norms),
    "gemma3": (_scale_embeddings,),
    "gemma3_text": (_scale_embeddings,),
    "granitemoehybrid": (_group_norms,),
    "mamba2": (_group_norms,),
}
