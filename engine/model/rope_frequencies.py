"""Compute the periods of rotary positions that a configuration asks for, as transformers' modeling_rope_utils does."""

from dataclasses import dataclass
from math import ceil, floor, inf, isclose, log, pi, sqrt
from typing import Any

Config = dict[str, Any]

_READ_SHORT_MSCALE = ("phi3small", "phimoe")  # longrope's attention factor; others compute it


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """A rotary embedding: dimensions 2i and 2i + 1 (or i and i + dims/2) turn once in 2 pi periods[i] tokens.

    `attention_factor` then scales all of them.
    """

    periods: list[float]  # [dims / 2]; infinite for dimensions that do not turn
    attention_factor: float

    def equals(self, other: "RopeFrequencies") -> bool:
        return (
            len(self.periods) == len(other.periods)
            and all(isclose(one, two, rel_tol=1e-4) for one, two in zip(self.periods, other.periods, strict=True))
            and abs(self.attention_factor - other.attention_factor) < 1e-4
        )


def compute(scaling: Config, config: Config, dims: int) -> RopeFrequencies:
    """Return the frequencies of `dims` rotated dimensions; an odd number is rounded up to the next even one.

    `scaling` has a `rope_type` of ROPE_TYPES and `rope_theta`. For proportional scaling `dims` is the whole head.
    Raises many kinds if a parameter is missing or impossible.
    """
    return ROPE_TYPES[scaling["rope_type"]](base_periods(scaling["rope_theta"], dims), scaling, config)


def base_periods(base: float, dims: int) -> list[float]:
    return [float(base) ** (dim / dims) for dim in range(0, dims, 2)]


def ntk_alpha(scaling: Config, config: Config) -> float | None:
    """Return Hunyuan's constant stretch of the base, which its checkpoints call dynamic; None for other models."""
    is_hunyuan = str(config["model_type"]).startswith("hunyuan")
    return scaling.get("alpha") if is_hunyuan and scaling.get("alpha") else None


# Each scaling takes the unscaled periods.


def _default(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    return RopeFrequencies(periods, 1.0)


def _dynamic(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    """Compute the unscaled periods, which apply to rows that end within max_position_embeddings."""
    alpha, dims = ntk_alpha(scaling, config), 2 * len(periods)
    if alpha is None:
        return RopeFrequencies(periods, 1.0)
    return RopeFrequencies(base_periods(scaling["rope_theta"] * alpha ** (dims / (dims - 2)), dims), 1.0)


def _linear(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    return RopeFrequencies([period * scaling["factor"] for period in periods], 1.0)


def _llama3(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))

    def scale(period: float) -> float:
        turns = float(scaling["original_max_position_embeddings"]) / (2 * pi * period)
        unscaled_share = _clip((turns - low) / (high - low)) if high > low else float(turns >= low)
        return period / ((1 - unscaled_share) / factor + unscaled_share)

    return RopeFrequencies([scale(period) for period in periods], 1.0)


def _proportional(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    """Stretch the periods of a share of the head's dimensions. The others do not turn."""
    share, factor = scaling.get("partial_rotary_factor", 1.0), scaling.get("factor", 1.0)
    num_turning = int(share * 2 * len(periods) // 2)
    turning = [period * factor for period in periods[:num_turning]]
    return RopeFrequencies([*turning, *[inf] * (len(periods) - num_turning)], 1.0)


def _yarn(periods: list[float], scaling: Config, config: Config) -> RopeFrequencies:
    dims, base = 2 * len(periods), scaling["rope_theta"]
    length = scaling["original_max_position_embeddings"]
    factor = _factor(scaling, config)

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
    factor = _factor(scaling, config)
    configured = scaling.get("short_mscale" if config["model_type"] in _READ_SHORT_MSCALE else "attention_factor")
    length = scaling["original_max_position_embeddings"]
    default = sqrt(1 + log(factor) / log(length)) if factor > 1 else 1.0
    scaled = [period * stretch for period, stretch in zip(periods, scaling["short_factor"], strict=True)]
    return RopeFrequencies(scaled, default if configured is None else configured)


def _factor(scaling: Config, config: Config) -> float:
    factor = scaling.get("factor")
    if factor is None:
        factor = config["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    return float(factor)


def _clip(share: float) -> float:
    return min(max(share, 0.0), 1.0)


ROPE_TYPES = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
