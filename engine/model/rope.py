"""Make the model treat positions as its checkpoint says, or refuse it.

mlx-lm's architectures read only some of the settings for positions. One that ignores a rotary scaling is silently wrong
by nats, on published checkpoints too. A rotary module with other periods, another attention factor or other pairs of
dimensions than the configuration implies is replaced.

Some periods depend on the length of the whole row (dynamic, longrope): the first token's keys change when a later token
comes, so no cache, batch or chunk can hold them. Up to the length that the checkpoint was trained with they are
constant; the context ends there.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.errors import LoadError, describe
from scorepool.engine.model.rope_frequencies import ROPE_TYPES, RopeFrequencies, base_periods, compute, ntk_alpha
from scorepool.engine.model.surveyed import is_known

logger = logging.getLogger(__name__)

Config = dict[str, Any]

_OTHER_NAMES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn"}
# Architectures whose modules may have lost which dimensions they pair: these pair neighbours, the others halves.
_PAIR_NEIGHBOURS = {
    *("bailing_hybrid", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "gptj", "llama4", "llama4_text"),
    *("longcat_flash", "longcat_flash_ngram"),
}
# Architectures whose configuration decides about it; mlx-lm reads it in some.
_READ_ROPE_INTERLEAVE = {"deepseek_v3", "glm4_moe_lite", "kimi_k2", "mistral4", "youtu", "youtu_llm"}
# Architectures that rotate a part of each head; mlx-lm rotates all of it, or reads another setting.
_ROTATE_PART = {"glm", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "recurrent_gemma"}
# Names of the base. transformers brings them into one form for the types that it knows.
_BASES = ("rope_theta", "rotary_emb_base", "rope_embedding_base")
# The bases that a config.json may leave out of types that transformers does not know. mlx-lm has another default.
_DEFAULT_BASES = {"minicpm": 10_000.0}


def check_types(config: Config) -> None:
    """Raise LoadError for a type of rotary scaling that nobody knows."""
    _configured_scalings(_text_config(config))


def check_or_patch(model: Any, config: Config) -> int | None:
    """Make the model rotate as configured and return the context up to which its positions are right (None: any).

    Raise LoadError if the model cannot be made right.
    """
    text_config = _text_config(config)
    limits = [
        _check_or_patch_rope(model, text_config),
        _trained_length(text_config),
        _dense_length(text_config),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _text_config(config: Config) -> Config:
    return {**config, **(config.get("text_config") or {})}


def _trained_length(config: Config) -> int | None:
    """Return the length beyond which Qwen's first release scales periods and attention; mlx-lm scales neither."""
    scales = config.get("use_dynamic_ntk") or config.get("use_logn_attn")
    return int(config["seq_length"]) if scales and config.get("seq_length") else None


def _dense_length(config: Config) -> int | None:
    """Return the length up to which Phi-3-small and MiniCPM 4.1 attend to all tokens.

    Beyond it mlx-lm cuts the blocks of Phi-3-small's sparse attention at other tokens, depending on the length of a
    forward pass. It has none of MiniCPM's, which begins when a row reaches dense_len.
    """
    if (config.get("sparse_config") or {}).get("dense_len"):
        return int(config["sparse_config"]["dense_len"]) - 1
    if config["model_type"] != "phi3small":
        return None
    return int(config.get("blocksparse_block_size") or 64) * int(config.get("blocksparse_num_local_blocks") or 16)


class ConfiguredRoPE(Module):
    """Rotate by given periods. Takes [batch, heads, length, head_dim]; further dimensions of a head stay."""

    def __init__(self, frequencies: RopeFrequencies, *, traditional: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dims = 2 * len(frequencies.periods)
        self.traditional = traditional
        self.attention_factor = frequencies.attention_factor
        self._freqs = mx.array(frequencies.periods, dtype=mx.float32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self.attention_factor != 1.0:
            x = x.at[..., : self.dims].multiply(self.attention_factor)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


@dataclass(frozen=True, slots=True)
class _Rotary:
    """A rotary module of the model, and where it is."""

    path: str
    parent: Any
    module: Any

    @property
    def dims(self) -> int:
        return int(self.module.dims) if hasattr(self.module, "dims") else 2 * int(self.module._freqs.size)

    @property
    def frequencies(self) -> RopeFrequencies:
        module = self.module
        if isinstance(module, RoPE):
            return RopeFrequencies([period / module.scale for period in base_periods(module.base, self.dims)], 1.0)
        factors = (getattr(module, name, None) for name in ("attention_factor", "mscale", "_scale"))
        factor = next((float(factor) for factor in factors if factor is not None), 1.0)
        return RopeFrequencies(module._freqs.astype(mx.float32).tolist(), factor)

    @property
    def layer(self) -> int | None:
        found = re.search(r"\blayers\.(\d+)\.", self.path)
        return int(found[1]) if found else None

    def pairs_neighbours(self, config: Config) -> bool:
        """Return whether the model rotates dimensions 2i and 2i + 1 together, rather than i and i + dims/2."""
        model_type = config["model_type"]
        if model_type in _READ_ROPE_INTERLEAVE:
            return bool(config.get("rope_interleave", True))
        if model_type == "glm_moe_dsa":  # mlx-lm reads indexer_rope_interleave
            return True
        if model_type == "deepseek_v32":
            return "indexer" not in self.path
        return bool(getattr(self.module, "traditional", model_type in _PAIR_NEIGHBOURS))

    def matches(self, frequencies: RopeFrequencies, config: Config) -> bool:
        is_traditional = type(self.module).__name__ == "DeepseekV2YarnRotaryEmbedding"
        pairs_neighbours = bool(getattr(self.module, "traditional", is_traditional))
        return (
            self.dims == 2 * len(frequencies.periods) > 0
            and pairs_neighbours == self.pairs_neighbours(config)
            and self.frequencies.equals(frequencies)
        )

    def head_dim(self, config: Config) -> int:
        if hasattr(self.parent, "head_dim"):
            return int(self.parent.head_dim)
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def replace(self, module: Any) -> None:
        setattr(self.parent, self.path.rpartition(".")[2], module)


def _rotary_modules(model: Any) -> list[_Rotary]:
    """Return the rotary modules. Those of dynamic scaling get unscaled periods: mlx-lm scales by a padded length."""
    found = []
    for path, parent in model.named_modules():
        for name, child in parent.children().items():
            if type(child).__name__ == "DynamicNTKScalingRoPE":
                child = RoPE(child.dims, traditional=child.traditional, base=child.base)
                setattr(parent, name, child)
            if isinstance(child, RoPE) or hasattr(child, "_freqs"):
                found.append(_Rotary(f"{path}.{name}", parent, child))
    return found


def _check_or_patch_rope(model: Any, config: Config) -> int | None:
    scalings = _configured_scalings(config)
    if not scalings:
        _refuse_unknown_base(model, config)
        return None
    modules = _rotary_modules(model)
    if not modules and config["model_type"] == "granitemoehybrid":
        return None  # mends/positions.py removed them, and no rotary setting matters
    for layer_type, scaling in scalings.items():
        followers = [
            module for module in modules if _layer_type(module, config) in (layer_type, None) or not layer_type
        ]
        _check_or_replace(followers, scaling, config)
    limits = [_constant_length(scaling, config) for scaling in scalings.values()]
    return min((limit for limit in limits if limit is not None), default=None)


def _refuse_unknown_base(model: Any, config: Config) -> None:
    """Raise LoadError for a scaling whose base only code outside of transformers knows: mlx-lm may have another."""
    scaling = config.get("rope_scaling")
    if scaling and not is_known(config) and _rotary_modules(model):
        raise LoadError(f"config.json: rope_scaling is {scaling!r:.200}, and there is no rope_theta, expected both")


def _layer_type(module: _Rotary, config: Config) -> str | None:
    layer_types: list[str] = config.get("layer_types") or []
    return layer_types[module.layer] if module.layer is not None and module.layer < len(layer_types) else None


def _check_or_replace(modules: list[_Rotary], scaling: Config, config: Config) -> None:
    """Replace the modules that do not follow the scaling. Raise LoadError if that would not be right.

    If modules differ in their periods, one that follows the scaling is enough: the others follow settings beside it.
    """
    if not modules and scaling["rope_type"] == "default":
        return  # the hybrids of granite 4 and nemotron configure a rotary base but have no rotary layers
    configured = [_frequencies(module, scaling, config) for module in modules]
    matches = [module.matches(right, config) for module, right in zip(modules, configured, strict=True)]
    is_one_kind = all(module.frequencies.equals(modules[0].frequencies) for module in modules)
    if modules and (all(matches) or (any(matches) and not is_one_kind)):
        return
    _refuse_contradiction(scaling, config)
    if not modules or not is_one_kind or not all(_can_replace(module, scaling, config) for module in modules):
        raise LoadError(
            f"the configuration asks for rotary positions {scaling}, but mlx-lm's {config['model_type']} "
            "computes different ones: its logprobs would be wrong"
        )
    for module, right in zip(modules, configured, strict=True):
        module.replace(ConfiguredRoPE(right, traditional=module.pairs_neighbours(config)))
    logger.info("the rotary positions of %s were set to the configuration's", config["model_type"])


def _refuse_contradiction(scaling: Config, config: Config) -> None:
    """Raise LoadError if the base is given twice, and differently."""
    is_layered = any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values())
    theta = (config.get("attn_config") or config).get("rope_theta")
    if theta not in (None, scaling["rope_theta"]) and not is_layered:
        raise LoadError(
            f"config.json: rope_theta is {theta}, but that of the rotary positions {scaling} is {scaling['rope_theta']}"
        )


def _frequencies(module: _Rotary, scaling: Config, config: Config) -> RopeFrequencies:
    dims = _configured_dims(module, scaling, config)
    if dims < 2:
        raise LoadError(f"config.json: the rotary positions {scaling} are for {dims} dimensions, expected at least 2")
    try:
        return compute(scaling, config, dims)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"config.json: the rotary positions {scaling} cannot be computed: {describe(error)}") from error


def _configured_dims(module: _Rotary, scaling: Config, config: Config) -> int:
    """Return how many dimensions of a head, or of the part of it that has positions, the scaling is for."""
    if config.get("qk_rope_head_dim"):
        return module.dims
    if scaling["rope_type"] == "proportional":
        return module.head_dim(config)
    share = scaling.get("partial_rotary_factor")
    return module.dims if share is None else int(module.head_dim(config) * share)


def _can_replace(module: _Rotary, scaling: Config, config: Config) -> bool:
    """Return whether the model may rotate as many dimensions as configured."""
    dims = _configured_dims(module, scaling, config)
    if dims == module.dims and dims % 2 == 0:
        return dims > 0
    may_differ = scaling["rope_type"] == "proportional" or config["model_type"] in _ROTATE_PART
    return (dims == module.dims or may_differ) and 0 < dims + dims % 2 <= module.head_dim(config)


def _constant_length(scaling: Config, config: Config) -> int | None:
    """Return the length of the longest row whose periods do not depend on its length; None if none do."""
    if scaling["rope_type"] == "longrope":
        return int(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "dynamic" and ntk_alpha(scaling, config) is None:
        return int(config["max_position_embeddings"])
    return None


def _configured_scalings(config: Config) -> dict[str, Config]:
    """Return the rotary scalings that can be checked, by type of layer, or by "" for all layers.

    Each has `rope_type`, `rope_theta` and `original_max_position_embeddings`. Raises LoadError for an unknown type.
    """
    new = config.get("rope_parameters") or {}
    old_keys = {"rope_theta": _base(config), "partial_rotary_factor": config.get("partial_rotary_factor")}
    layer_types = config.get("layer_types") or [key for key, value in new.items() if isinstance(value, dict)]
    layered = {key: value for key, value in new.items() if isinstance(value, dict) and key in layer_types}
    sections = layered or {"": {**old_keys, **(config.get("rope_scaling") or {}), **new}}
    scalings = {}
    for layer_type, section in sections.items():
        named = section.get("rope_type") or section.get("type") or "default"
        rope_type = _OTHER_NAMES.get(named, named)
        if rope_type not in ROPE_TYPES:
            raise LoadError(f"config.json: rope_type is {named!r}, expected one of {', '.join(ROPE_TYPES)}")
        given = {key: value for key, value in section.items() if value is not None}
        given["rope_type"] = rope_type
        position_scale = config.get("rope_position_scale") or 1  # Phi-3-small's
        if rope_type == "default" and position_scale != 1:
            given |= {"rope_type": "linear", "factor": 1 / position_scale}
        if layered:  # transformers reads `truncate` only outside of the sections
            given["truncate"] = new.get("truncate", True)
        if given.get("rope_theta"):
            scalings[layer_type] = {"original_max_position_embeddings": _original_length(config), **given}
    return scalings


def _base(config: Config) -> float | None:
    return next((config[name] for name in _BASES if config.get(name)), _DEFAULT_BASES.get(config["model_type"]))


def _original_length(config: Config) -> int:
    return int(config.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
