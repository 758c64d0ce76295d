"""Does the architecture treat positions as its checkpoint says? Where it does not, it is mended or refused.

mlx-lm's architectures read the settings that their authors thought of. One that overlooks a rotary scaling or a
sliding window is off by nats, silently, on published checkpoints too. Both can be checked on the loaded model:

rotation   the periods that its rotary modules use are those that the configuration implies
windows    layers that the configuration calls sliding have a cache that rotates
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, isclose, log, pi, sqrt
from typing import Any

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.errors import LoadError
from scorepool.engine.model import kv_cache as caches

logger = logging.getLogger(__name__)

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """Dimensions 2i and 2i + 1 (or i and i + dims/2) turn once in 2 pi periods[i] tokens; then all are scaled."""

    periods: list[float]  # [dims / 2]
    magnitude: float

    def equals(self, other: "RopeFrequencies") -> bool:
        return (
            len(self.periods) == len(other.periods)
            and all(isclose(one, two, rel_tol=1e-4) for one, two in zip(self.periods, other.periods, strict=True))
            and abs(self.magnitude - other.magnitude) < 1e-4
        )


def settle(model: Any, config: Config) -> int | None:
    """The longest context in which positions are the checkpoint's; None: no limit. Raises LoadError."""
    text = {**config, **(config.get("text_config") or {})}
    limits = [_settle_rotation(model, text), _window_limit(model, text)]
    return min((limit for limit in limits if limit is not None), default=None)


def _settle_rotation(model: Any, config: Config) -> int | None:
    stated = list(_stated(config))
    if not stated:
        return None
    modules = [module for _, module in model.named_modules() if _dims(module) is not None]
    if not modules and all(scaling["rope_type"] == "default" for scaling in stated):
        return None  # granite 4's and nemotron's hybrids state a rotary base, and do not rotate
    for scaling in stated:
        if not any(_agrees(module, scaling, config) for module in modules) and not _mend(modules, scaling, config):
            raise LoadError(
                f"the configuration asks for rotary positions {scaling}, and mlx-lm's {config['model_type']} "
                "computes others: its logprobs would be wrong"
            )
    limits = [scaling["original_max_position_embeddings"] for scaling in stated if scaling["rope_type"] == "longrope"]
    return min(limits, default=None)  # beyond it other periods hold, for the tokens before it too


def _stated(config: Config) -> Iterator[Config]:
    """The rotations that the configuration names, each with `rope_type` and `rope_theta`; those we can check."""
    new = config.get("rope_parameters") or {}
    old = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    candidates = [part for part in new.values() if isinstance(part, dict)] or [{**old, **new}]
    for scaling in candidates:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        kind = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}.get(kind, kind)
        if kind in _PERIODS and scaling.get("rope_theta"):
            inherited = {"original_max_position_embeddings": _original_length(scaling, config)}
            yield {**inherited, **scaling, "rope_type": kind}


def _original_length(scaling: Config, config: Config) -> int:
    found = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(found or config.get("max_position_embeddings") or 0)


def _agrees(module: Any, scaling: Config, config: Config) -> bool:
    dims = _dims(module)
    return dims == _stated_dims(scaling, config, dims) and _rotation_of(module).equals(_expected(scaling, config, dims))


def _mend(modules: list[Any], scaling: Config, config: Config) -> bool:
    """Give modules of scaled rotations, where there is one kind alone, the periods that are right."""
    mendable = [module for module in modules if hasattr(module, "_freqs")]
    if len({type(module) for module in mendable}) != 1:
        return False
    for module in mendable:
        dims = _dims(module)
        if dims != _stated_dims(scaling, config, dims):
            return False
        right = _expected(scaling, config, dims)
        module._freqs = mx.array(right.periods, dtype=mx.float32)
        setattr(module, "mscale" if hasattr(module, "mscale") else "_scale", right.magnitude)
    logger.info("rotary periods of %s were set to the configuration's", config["model_type"])
    return all(_agrees(module, scaling, config) for module in mendable)


def _dims(module: Any) -> int | None:
    """How many of a head's dimensions a rotary module turns; None for other modules."""
    if isinstance(module, RoPE):
        return int(module.dims)
    return 2 * int(module._freqs.size) if hasattr(module, "_freqs") else None


def _stated_dims(scaling: Config, config: Config, otherwise: int | None) -> int | None:
    factor = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if factor is None or config.get("qk_rope_head_dim"):
        return otherwise
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * factor)


def _rotation_of(module: Any) -> RopeFrequencies:
    if isinstance(module, RoPE):
        return RopeFrequencies([period / module.scale for period in _plain(module.base, module.dims)], 1.0)
    periods: list[float] = module._freqs.astype(mx.float32).tolist()
    return RopeFrequencies(periods, float(getattr(module, "mscale", getattr(module, "_scale", 1.0))))


def _expected(scaling: Config, config: Config, dims: int | None) -> RopeFrequencies:
    if dims is None:
        raise ValueError("the module does not rotate")
    return _PERIODS[scaling["rope_type"]](_plain(scaling["rope_theta"], dims), scaling, config)


def _plain(base: float, dims: int) -> list[float]:
    return [float(base) ** (dim / dims) for dim in range(0, dims, 2)]


# As transformers' modeling_rope_utils computes them.


def _default(plain: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    return RopeFrequencies(plain, 1.0)


def _linear(plain: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    return RopeFrequencies([period * scaling["factor"] for period in plain], 1.0)


def _llama3(plain: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))

    def stretched(period: float) -> float:
        turns = float(scaling["original_max_position_embeddings"]) / (2 * pi * period)
        kept = _clipped((turns - low) / (high - low)) if high > low else float(turns > high)
        return period / ((1 - kept) / factor + kept)

    return RopeFrequencies([stretched(period) for period in plain], 1.0)


def _yarn(plain: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    dims, base = 2 * len(plain), scaling["rope_theta"]
    length = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / length

    def dimension(turns: float) -> float:
        return dims * log(length / (turns * 2 * pi)) / (2 * log(base))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = [_clipped((place - low) / ((high - low) or 0.001)) for place in range(len(plain))]
    periods = [period / (part / factor + (1 - part)) for period, part in zip(plain, ramp, strict=True)]

    def magnitude(of: float) -> float:
        return 0.1 * of * log(factor) + 1 if factor > 1 else 1.0

    whole, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    stated = scaling.get("attention_factor")
    found = magnitude(whole) / magnitude(of_all) if whole and of_all else magnitude(1)
    return RopeFrequencies(periods, found if stated is None else stated)


def _longrope(plain: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    """Of rows that end within the original length."""
    length = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / length
    stated = scaling.get("attention_factor", scaling.get("short_mscale"))  # the latter is phimoe's
    found = sqrt(1 + log(factor) / log(length)) if factor > 1 else 1.0
    periods = [period * stretch for period, stretch in zip(plain, scaling["short_factor"], strict=True)]
    return RopeFrequencies(periods, found if stated is None else stated)


def _clipped(part: float) -> float:
    return min(max(part, 0.0), 1.0)


_PERIODS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def _window_limit(model: Any, config: Config) -> int | None:
    """The window, where the configuration has one and the architecture does not: up to it, nothing slides."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return None
    cache = caches.new(model)
    is_rotating = [getattr(layer, "max_size", None) == window for layer in cache]
    if not any(is_rotating):
        return int(window) if kinds is None or "sliding_attention" in kinds else None
    if kinds is not None and len(kinds) == len(cache):
        is_sliding = [kind == "sliding_attention" for kind in kinds]
        if is_sliding != is_rotating:
            raise LoadError(
                f"the configuration's layer_types name other sliding layers than mlx-lm's {config['model_type']} "
                "has: its logprobs would be wrong"
            )
    return None
