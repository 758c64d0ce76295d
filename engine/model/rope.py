"""Check that the architecture treats positions as its checkpoint says, and patch or refuse it otherwise.

mlx-lm's architectures read only some of the settings for positions. One that ignores a rotary scaling is silently wrong
by nats, on published checkpoints too. The periods of its rotary modules must be those that the configuration implies.

Some periods depend on the length of the whole row (dynamic, longrope): the first token's keys change when a later token
comes, so no cache, batch or chunk can hold them. Up to the length that the checkpoint was trained with they are
constant; the context ends there.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, isclose, log, pi, sqrt
from typing import Any

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.errors import LoadError

logger = logging.getLogger(__name__)

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """A rotary embedding: dimensions 2i and 2i + 1 (or i and i + dims/2) turn once in 2 pi periods[i] tokens.

    `attention_factor` then scales all of them.
    """

    periods: list[float]  # [dims / 2]
    attention_factor: float

    def equals(self, other: "RopeFrequencies") -> bool:
        return (
            len(self.periods) == len(other.periods)
            and all(isclose(one, two, rel_tol=1e-4) for one, two in zip(self.periods, other.periods, strict=True))
            and abs(self.attention_factor - other.attention_factor) < 1e-4
        )


def check_or_patch(model: Any, config: Config) -> int | None:
    """Make the model rotate as configured and return the context up to which its positions are right (None: any).

    Raise LoadError if the model cannot be made right.
    """
    text_config = {**config, **(config.get("text_config") or {})}
    _make_periods_constant(model)
    limits = [
        _check_or_patch_rope(model, text_config),
        _trained_length(text_config),
        _dense_length(text_config),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _make_periods_constant(model: Any) -> None:
    """Give modules of dynamic scaling their unscaled periods. mlx-lm scales by the padded length of a forward pass."""
    for module in model.modules():
        for name, child in module.children().items():
            if type(child).__name__ == "DynamicNTKScalingRoPE":
                setattr(module, name, RoPE(child.dims, traditional=child.traditional, base=child.base))


def _trained_length(config: Config) -> int | None:
    """Return the length beyond which Qwen's first release scales periods and attention; mlx-lm scales neither."""
    scales = config.get("use_dynamic_ntk") or config.get("use_logn_attn")
    return int(config["seq_length"]) if scales and config.get("seq_length") else None


def _dense_length(config: Config) -> int | None:
    """Return the length up to which Phi-3-small attends to all tokens.

    Beyond it mlx-lm cuts the blocks of its sparse attention at other tokens, depending on the length of a forward pass.
    """
    if config["model_type"] != "phi3small":
        return None
    return int(config.get("blocksparse_block_size") or 64) * int(config.get("blocksparse_num_local_blocks") or 16)


def _check_or_patch_rope(model: Any, config: Config) -> int | None:
    scalings = list(_configured_scalings(config))
    if not scalings:
        return None
    modules = [module for _, module in model.named_modules() if _rotary_dims(module) is not None]
    if not modules and all(scaling["rope_type"] == "default" for scaling in scalings):
        return None  # the hybrids of granite 4 and nemotron configure a rotary base but have no rotary layers
    for scaling in scalings:
        if not any(_matches(module, scaling, config) for module in modules) and not _patch(modules, scaling, config):
            raise LoadError(
                f"the configuration asks for rotary positions {scaling}, but mlx-lm's {config['model_type']} "
                "computes different ones: its logprobs would be wrong"
            )
    limits = [_constant_length(scaling, config) for scaling in scalings]
    return min((limit for limit in limits if limit is not None), default=None)


def _constant_length(scaling: Config, config: Config) -> int | None:
    """Return the length of the longest row whose periods do not depend on its length; None if none do."""
    if scaling["rope_type"] == "longrope":
        return int(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "dynamic" and _ntk_alpha(scaling, config) is None:
        return int(config["max_position_embeddings"])
    return None


def _configured_scalings(config: Config) -> Iterator[Config]:
    """Yield the configured rotary scalings that can be checked, each with `rope_type` and `rope_theta`."""
    new = config.get("rope_parameters") or {}
    old = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    candidates = [scaling for scaling in new.values() if isinstance(scaling, dict)] or [{**old, **new}]
    for scaling in candidates:
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        rope_type = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}.get(rope_type, rope_type)
        if rope_type in _FREQUENCIES and scaling.get("rope_theta"):
            inherited = {"original_max_position_embeddings": _original_length(scaling, config)}
            yield {**inherited, **scaling, "rope_type": rope_type}


def _original_length(scaling: Config, config: Config) -> int:
    length = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(length or config.get("max_position_embeddings") or 0)


def _matches(module: Any, scaling: Config, config: Config) -> bool:
    dims = _rotary_dims(module)
    if dims is None or dims != _configured_dims(scaling, config, dims):
        return False
    return _module_frequencies(module).equals(_configured_frequencies(scaling, config, dims))


def _patch(modules: list[Any], scaling: Config, config: Config) -> bool:
    """Set the configured periods on modules that hold periods, if all such modules are of one class."""
    patchable = [module for module in modules if hasattr(module, "_freqs")]
    if len({type(module) for module in patchable}) != 1:
        return False
    for module in patchable:
        dims = _rotary_dims(module)
        if dims is None or dims != _configured_dims(scaling, config, dims):
            return False
        configured = _configured_frequencies(scaling, config, dims)
        module._freqs = mx.array(configured.periods, dtype=mx.float32)
        setattr(module, "mscale" if hasattr(module, "mscale") else "_scale", configured.attention_factor)
    logger.info("the rotary periods of %s were set to the configuration's", config["model_type"])
    return all(_matches(module, scaling, config) for module in patchable)


def _rotary_dims(module: Any) -> int | None:
    """Return how many dimensions of a head the module rotates, or None if it is no rotary module."""
    if isinstance(module, RoPE):
        return int(module.dims)
    return 2 * int(module._freqs.size) if hasattr(module, "_freqs") else None


def _configured_dims(scaling: Config, config: Config, default: int) -> int:
    factor = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if factor is None or config.get("qk_rope_head_dim"):
        return default
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * factor)


def _module_frequencies(module: Any) -> RopeFrequencies:
    if isinstance(module, RoPE):
        return RopeFrequencies([period / module.scale for period in _base_periods(module.base, module.dims)], 1.0)
    periods: list[float] = module._freqs.astype(mx.float32).tolist()
    return RopeFrequencies(periods, float(getattr(module, "mscale", getattr(module, "_scale", 1.0))))


def _configured_frequencies(scaling: Config, config: Config, dims: int) -> RopeFrequencies:
    return _FREQUENCIES[scaling["rope_type"]](_base_periods(scaling["rope_theta"], dims), scaling, config)


def _base_periods(base: float, dims: int) -> list[float]:
    return [float(base) ** (dim / dims) for dim in range(0, dims, 2)]


# The scalings, computed as in transformers' modeling_rope_utils. Each takes the unscaled periods.


def _default(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    return RopeFrequencies(periods, 1.0)


def _dynamic(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    """Compute the unscaled periods, which apply to rows that end within max_position_embeddings."""
    alpha, dims = _ntk_alpha(scaling, config), 2 * len(periods)
    stretched = scaling["rope_theta"] * (alpha or 1.0) ** (dims / (dims - 2))
    return RopeFrequencies(_base_periods(stretched, dims), 1.0)


def _ntk_alpha(scaling: Config, config: Config) -> float | None:
    """Return Hunyuan's constant stretch of the base, which its checkpoints call dynamic; None for other models."""
    is_hunyuan = str(config["model_type"]).startswith("hunyuan")
    return scaling.get("alpha") if is_hunyuan and scaling.get("alpha") else None


def _linear(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    return RopeFrequencies([period * scaling["factor"] for period in periods], 1.0)


def _llama3(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))

    def scale(period: float) -> float:
        turns = float(scaling["original_max_position_embeddings"]) / (2 * pi * period)
        unscaled_share = _clip((turns - low) / (high - low)) if high > low else float(turns > high)
        return period / ((1 - unscaled_share) / factor + unscaled_share)

    return RopeFrequencies([scale(period) for period in periods], 1.0)


def _yarn(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    dims, base = 2 * len(periods), scaling["rope_theta"]
    length = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / length

    def dimension(turns: float) -> float:
        return dims * log(length / (turns * 2 * pi)) / (2 * log(base))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    scaled_shares = [_clip((index - low) / ((high - low) or 0.001)) for index in range(len(periods))]
    scaled = [period / (share / factor + (1 - share)) for period, share in zip(periods, scaled_shares, strict=True)]

    def mscale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1 if factor > 1 else 1.0

    weight, weight_all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    configured = scaling.get("attention_factor")
    default = mscale(weight) / mscale(weight_all_dims) if weight and weight_all_dims else mscale(1)
    return RopeFrequencies(scaled, default if configured is None else configured)


def _longrope(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    """Compute the short factors, which apply to rows that end within the original length."""
    length = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / length
    configured = scaling.get("attention_factor", scaling.get("short_mscale"))  # phimoe uses the second name
    default = sqrt(1 + log(factor) / log(length)) if factor > 1 else 1.0
    scaled = [period * stretch for period, stretch in zip(periods, scaling["short_factor"], strict=True)]
    return RopeFrequencies(scaled, default if configured is None else configured)


def _clip(share: float) -> float:
    return min(max(share, 0.0), 1.0)


_FREQUENCIES = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
