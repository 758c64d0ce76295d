"""Mends of architectures with state-space layers: Mamba 2 and its hybrids."""

from functools import partial
from math import inf
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module

from scorepool.engine.model.mends.wrap import transform_input

Config = dict[str, Any]


def scale_keys(model: Any, config: Config) -> None:
    """Apply falcon_h1's key multiplier, which mlx-lm misses because it looks for the keys' weights by a wrong name."""
    for layer in model.layers:
        layer.self_attn.scale *= model.args.key_multiplier


def scale_values_and_biases(model: Any, config: Config) -> None:
    """Apply falcon_h1's multipliers to values and biases. mlx-lm multiplies the other weights alone when it loads them.

    A bias is multiplied where the multiplier comes after the projection: those of queries, keys and values are not.
    """
    args = model.args
    if args.attention_in_multiplier != 1:
        projections = [layer.self_attn.v_proj for layer in model.layers]
        transform_input(projections, lambda hidden: hidden * args.attention_in_multiplier)
    for layer in model.layers:
        attention, mlp, mamba = layer.self_attn, layer.feed_forward, layer.mamba
        for projection, multiplier in (
            (attention.o_proj, args.attention_out_multiplier),
            (mlp.gate_proj, args.mlp_multipliers[0]),
            (mlp.down_proj, args.mlp_multipliers[1]),
            (mamba.in_proj, model.model._mup_vector),
            (mamba.out_proj, args.ssm_out_multiplier),
        ):
            if "bias" in projection:
                projection.bias = (projection.bias * multiplier).astype(projection.bias.dtype)


def limit_time_steps(model: Any, config: Config) -> None:
    """Clamp the time steps to the configured limits: mlx-lm ignores falcon_h1's, and takes others for nemotron_h.

    transformers ignores nemotron_h's time_step_limit, and clamps at time_step_min, which is not 0 by default.
    """
    is_nemotron = config["model_type"] == "nemotron_h"
    low, high = (config["time_step_min"], inf) if is_nemotron else config["time_step_limit"]
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (low, high)


class _GroupedNorm(Module):
    """A gated RMS norm of each group of channels alone."""

    def __init__(self, weight: mx.array, eps: float, num_groups: int, *, gates_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = weight
        self._eps = eps
        self._num_groups = num_groups
        self._gates_first = gates_first

    def __call__(self, hidden: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None and self._gates_first:
            hidden = silu(gate) * hidden
        grouped = hidden.reshape(*hidden.shape[:-1], self._num_groups, -1)
        hidden = mx.fast.rms_norm(grouped, None, self._eps).reshape(hidden.shape) * self.weight
        return hidden if gate is None or self._gates_first else silu(gate) * hidden


def group_norms(model: Any, config: Config) -> None:
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


def end_states_at_lengths(model: Any, config: Config) -> None:
    """Make nemotron_h's recurrent states end where each row of a padded batch does. mlx-lm loses them there."""
    mixers = [module for module in model.modules() if type(module).__name__ == "NemotronHMamba2Mixer"]
    if not mixers:
        return
    kind: Any = type(mixers[0])
    code, globals_ = kind._ssm.__code__, kind._ssm.__globals__

    class Mixer(kind):  # type: ignore[misc]
        def _ssm(self, *args: Any) -> mx.array:
            lengths = None if args[4] is None else args[4].lengths  # of the cache
            update = partial(globals_["ssm_update"], lengths=lengths)
            states: mx.array = FunctionType(code, {**globals_, "ssm_update": update})(self, *args)
            return states

    for mixer in mixers:
        mixer.__class__ = Mixer
