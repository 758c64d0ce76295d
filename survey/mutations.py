"""The values that the survey tries for each setting of a configuration."""

from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

from scorepool.engine.model.surveyed import NOT_COMPUTED, SECTIONS, rope_name

Config = dict[str, Any]

ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "hardswish"),
    *("laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish"),
    *("tanh", "gelu_python_tanh"),
)
SIZES = {  # whose defaults are too large for a tiny model
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "layer_types",
        "mlp_layer_types",
        *("n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads", "ffn_hidden_size"),
    ),
}
STRINGS: dict[str, tuple[str, ...]] = {
    "position_embedding_type": ("rope", "nope", "absolute"),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}
_LENGTH = 32  # original_max_position_embeddings: shorter than the rows
ROPES: dict[str, Config] = {  # the parameters of each type, all of which are changed in turn
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": _LENGTH},
    "llama3": {
        "factor": 3.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": _LENGTH,
    },
    "longrope": {"factor": 3.0, "original_max_position_embeddings": _LENGTH},
    "proportional": {"partial_rotary_factor": 0.5},
    "unheard_of": {},
}
RARER: dict[str, Config] = {  # parameters that a type may have
    "yarn": {
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
        "truncate": False,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
    "longrope": {"attention_factor": 1.3, "short_mscale": 1.2, "long_mscale": 1.3},
}
_KEPT = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")  # rotary parameters of any type
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_DICTIONARIES: dict[str, tuple[Config, ...]] = {"ffn_act_fn": ({"name": "gelu"}, {"name": "unheard_of"})}
_LISTS: dict[str, list[object]] = {"time_step_limit": [0.01, 0.1]}  # those that cannot be scaled or reversed
_THRESHOLDS = ("window", "length", "position", "chunk", "floor_scale", "max_seq_len")  # in names of numbers of tokens
_UNSET: dict[str, tuple[object, ...]] = {  # what to try where the setting is null
    "sliding_window": (16,),
    "attention_chunk_size": (16,),
    "clip_qkv": (0.3,),
    "attn_logit_softcapping": (2.0,),
    "final_logit_softcapping": (2.0,),
    "logits_soft_cap": (2.0,),
    "swiglu_limit": (0.5,),
    "swiglu_alpha": (1.1,),
    "q_lora_rank": (24,),
    "head_dim": (24,),
    "rope_scaling": (),
    "layer_types": (),
    "use_bidirectional_attention": ("vision", "all", True),
}


Changed = tuple[str, object, Config]


class Mutator:
    """Changes every setting of a configuration in turn.

    `defaults` is the configuration of the class without any settings: what an absent setting means. `own` are settings
    that mlx-lm's architecture has beside transformers', with its defaults; `section` is where it looks for them.
    Seed 0 tries fixed numbers, others draw them.
    """

    def __init__(self, seed: int, defaults: Config, own: Config, section: str) -> None:
        self._draw = Random(seed) if seed else None  # noqa: S311
        self._defaults = defaults
        self._own = own
        self._section = section

    def mutations(self, config: Config) -> Iterator[Changed]:
        """Yield (name, value, configuration) for every value to try. `name` is dotted in a nested section."""
        yield from self._section_mutations(config, self._defaults, "")

    def _section_mutations(self, config: Config, defaults: Config, prefix: str) -> Iterator[Changed]:
        for key, value in config.items():
            name = prefix + key
            if key in NOT_COMPUTED or key.startswith("_"):
                continue
            if key in SECTIONS and isinstance(value, dict):
                for inner, tried, section in self._section_mutations(value, defaults.get(key) or {}, f"{key}."):
                    yield inner, tried, config | {key: section}
            elif key == "rope_parameters" and isinstance(value, dict):
                for inner, tried, section in self._rope_mutations(value, name + ".", config):
                    yield inner, tried, config | {key: section}
                if "max_position_embeddings" in config:  # the rows are longer than this: then the factor matters
                    dynamic = {**value, "rope_type": "dynamic", "factor": 3.0}
                    yield f"{name}.rope_type", "dynamic", config | {key: dynamic, "max_position_embeddings": 32}
            else:
                tried_values = list(self._values(key, value))
                if key in defaults and defaults[key] not in [value, *tried_values] and key not in SIZES:
                    tried_values.append(defaults[key])
                for tried in tried_values:
                    yield name, tried, config | {key: deepcopy(tried)}
        if prefix.rstrip(".") == self._section:
            for key, value in self._own.items():
                for tried in () if key in config else (value, *self._values(key, value)):
                    yield prefix + key, tried, config | {key: deepcopy(tried)}

    def _values(self, key: str, value: object) -> Iterator[object]:
        """Yield the values to try in place of one that the base configuration has."""
        if isinstance(value, bool):
            yield not value
        elif value is None:
            yield from _UNSET.get(key, (True, 2, 0.5))
        elif isinstance(value, int):
            yield from self._integers(key, value)
        elif isinstance(value, float):
            yield from self._floats(key, value)
        elif isinstance(value, str):
            known = ACTIVATIONS if "act" in key else STRINGS.get(key, ("unheard_of",))
            yield from (other for other in known if other != value)
            if known is not STRINGS.get(key):
                yield "unheard_of"
        elif isinstance(value, dict):
            yield from _DICTIONARIES.get(key, ())
        elif key in _LISTS:
            yield _LISTS[key]
        elif isinstance(value, list) and value and value != value[::-1]:
            yield value[::-1] if self._draw is None else self._draw.sample(value, len(value))
        elif isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            yield [item * self._factor(1.5) for item in value]

    def _floats(self, key: str, value: float) -> Iterator[float]:
        if "eps" in key:
            yield 10 ** self._draw.uniform(-4, 0) if self._draw else 0.5
        else:
            yield self._factor(1.7) * value + (0.3 if value == 0 else 0)
            if value not in (0.0, 1.0):
                yield 1.0

    def _factor(self, fixed: float) -> float:
        return fixed if self._draw is None else self._draw.uniform(0.4, 2.5)

    def _integers(self, key: str, value: int) -> Iterator[int]:
        if any(word in key for word in _THRESHOLDS):  # the longer row must cross it
            yield max(8, min(32, value // 4)) if self._draw is None else self._draw.randrange(8, 70)
        yield value * (2 if self._draw is None else self._draw.randrange(2, 5)) if value else 1
        if value > 1:
            yield value // 2
        if value == 1:
            yield 0
        if 1 < value < 8:
            yield value - 1

    def _rope_mutations(self, rope: Config, prefix: str, config: Config) -> Iterator[Changed]:
        if any(isinstance(part, dict) for part in rope.values()):  # one section per layer type
            for kind, section in rope.items():
                if isinstance(section, dict):
                    for name, tried, changed in self._rope_mutations(section, f"{prefix}{kind}.", config):
                        yield name, tried, rope | {kind: changed}
            return
        kept: Config = {key: rope[key] for key in _KEPT if key in rope}
        for rope_type, parameters in ROPES.items():
            plain: Config = {"rope_type": rope_type, **kept, **parameters}
            if rope_type == "longrope":
                plain |= longrope_factors(plain, config)
            if rope_type != rope.get("rope_type"):
                yield f"{prefix}rope_type", rope_type, plain
            for key, value in plain.items():
                if key not in ("rope_type", "rope_theta"):
                    yield prefix + rope_name(rope_type, key), value, plain
                    for tried in self._values(key, value):
                        yield prefix + rope_name(rope_type, key), tried, plain | {key: tried}
            for key, value in RARER.get(rope_type, {}).items():
                yield prefix + rope_name(rope_type, key), value, plain | {key: value}
        if "rope_theta" in rope:
            for tried in self._values("rope_theta", rope["rope_theta"]):
                yield f"{prefix}rope_theta", tried, rope | {"rope_theta": tried}


def longrope_factors(rope: Config, config: Config) -> Config:
    """Return factors for as many periods as the configuration's heads have."""
    head_dim = config.get("qk_rope_head_dim") or config.get("head_dim")
    width, heads = (next(config[key] for key in keys if key in config) for keys in (_WIDTHS, _HEADS))
    head_dim = head_dim or width // heads
    dims = int(head_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) // 2
    return {
        "short_factor": [1 + 0.1 * place for place in range(dims)],
        "long_factor": [1.0 + place for place in range(dims)],
    }
