"""Read a checkpoint's config.json with every setting that mlx-lm's architectures look for.

A setting that config.json leaves out, or sets to null, has transformers' default, which is not always mlx-lm's. And
transformers 5 renamed some keys when it saves a model: an architecture that looks only for the old name takes its own
default instead. Either makes a model silently wrong by nats. This module adds transformers' defaults, and the old name
of every renamed key. It never changes a value that the checkpoint has, but for rope_parameters, and a number that
exaone4 has where mlx-lm expects letters.
"""

from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config

from scorepool.engine.errors import LoadError, as_load_error
from scorepool.engine.model.surveyed import NOT_COMPUTED, canonical_config

Config = dict[str, Any]

# Settings that change the numbers, each with the values that change nothing.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "norm_topk_prob": (False,),
    "residual_multiplier": (1.0,),
    "routed_scaling_factor": (1.0,),
}
_CONSTANTS: dict[str, dict[str, tuple[object, ...]]] = {  # values that are in the code of an architecture
    "bailing_hybrid": {"norm_topk_prob": (True,)},
    "nanochat": {"final_logit_softcapping": (15.0,)},
}
# Values with which a token attends to later ones too: then it has no probability given the tokens before it.
_NOT_CAUSAL: dict[str, tuple[object, ...]] = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}


def load_raw_config(folder: Path) -> Config:
    """Read config.json as it is, with the end tokens of generation_config.json."""
    with as_load_error(f"config.json or generation_config.json of {folder} cannot be read"):
        config: Config = load_config(folder)
    if not isinstance(config, dict):
        raise LoadError(f"config.json of {folder} is {config!r:.100}, expected a JSON object")
    return config


def read_config(folder: Path) -> Config:
    """Read config.json, and add transformers' defaults and the old names of renamed keys, also to text_config."""
    config = load_raw_config(folder)
    _add_defaults(config, canonical_config(config) or {})
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            if section.get("model_type") == "exaone4" and isinstance(section.get("sliding_window_pattern"), int):
                del section["sliding_window_pattern"]  # transformers' default, which mlx-lm spells as in "LLLG"
            for name, value in _old_names(section).items():
                if section.get(name) is None:
                    section[name] = value
    return config


def _add_defaults(config: Config, canonical: Config) -> None:
    """Add transformers' settings that the configuration leaves out or sets to null, in place.

    A section is completed but never made: of Qwen2-VL, mlx-lm would look nowhere else. What mlx-lm looks for in the
    text model's section transformers may have outside of it.
    """
    section, canonical_section = config.get("text_config"), canonical.get("text_config")
    if isinstance(section, dict) and isinstance(canonical_section, dict):
        if canonical.get("tie_word_embeddings") is not None:
            section.setdefault("tie_word_embeddings", canonical["tie_word_embeddings"])
        _add_defaults(section, canonical_section)
    for name, value in canonical.items():
        if value is not None and name == "rope_parameters":
            config[name] = value  # transformers brings all of their spellings into one form
        elif value is not None and name not in NOT_COMPUTED and name != "text_config" and config.get(name) is None:
            config[name] = value


def refuse_ignored_settings(config: Config, known: set[str]) -> None:
    """Raise LoadError if a setting changes the numbers but is not in `known`, the settings the architecture reads."""
    if config["model_type"] == "bitnet":
        raise LoadError(
            "config.json: model_type is 'bitnet': mlx-lm does not round the activations to 8 bits as the model does, "
            "and its logprobs would be wrong"
        )
    _refuse_attention_to_later_tokens(config)
    for name, neutral_values in (_NEUTRAL_VALUES | _CONSTANTS.get(config["model_type"], {})).items():
        value = config.get(name)
        if name not in known and value is not None and value not in neutral_values:
            raise LoadError(
                f"the configuration has {name} {value}, which mlx-lm's {config['model_type']} does not read: "
                "its logprobs would be wrong"
            )


def _refuse_attention_to_later_tokens(config: Config) -> None:
    for section in (config, config.get("text_config") or {}):
        for name, values in _NOT_CAUSAL.items():
            if section.get(name) in values:
                raise LoadError(f"the configuration has {name} {section[name]!r}: scoring needs causal attention")


def _old_names(config: Config) -> Config:
    """Map the old name of each renamed setting to its value in this configuration."""
    rope = config.get("rope_parameters") or {}
    old: Config = {}
    if "sliding_attention" in rope:  # one set of parameters per layer type
        old["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope.get("full_attention") or {}
    else:
        old["partial_rotary_factor"] = old["rotary_pct"] = rope.get("partial_rotary_factor")
    old["rope_theta"] = old["rotary_emb_base"] = rope.get("rope_theta")
    old["n_ctx"] = config.get("n_positions")
    old["num_experts"] = config.get("num_local_experts")
    old["sliding_window_pattern"] = period = _sliding_window_pattern(config.get("layer_types") or [])
    if config.get("model_type") == "exaone4":  # it spells the period, and has no word for one without a window
        old["sliding_window_pattern"] = "L" * (period - 1) + "G" if period and period > 1 else None
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    is_gemma = str(config.get("model_type")).startswith("gemma")  # its head_dim is not hidden_size / heads
    if isinstance(heads, int) and isinstance(width, int) and not is_gemma:
        old["head_dim"] = width // heads
    if width and config.get("expand"):  # mamba2 requires this setting and does not use it
        old["intermediate_size"] = width * config["expand"]
    old = {name: value for name, value in old.items() if value is not None}
    rope_type = rope.get("rope_type", "default")
    if rope:
        old["rope_scaling"] = None if rope_type == "default" else {**rope, "type": rope_type}
    return old


def _sliding_window_pattern(layer_types: list[str]) -> int | None:
    """Return n if every n-th layer has full attention and the others slide; 1 if the layers have no such period.

    With 1 no layer of mlx-lm's slides: windows.py makes those slide that should, or ends the context. None if all
    layers slide, or some are of another kind.
    """
    if "full_attention" not in layer_types or not {"full_attention", "sliding_attention"}.issuperset(layer_types):
        return None
    period = layer_types.index("full_attention") + 1
    is_periodic = all(
        (kind == "full_attention") == (place % period == 0) for place, kind in enumerate(layer_types, start=1)
    )
    return period if is_periodic else 1
