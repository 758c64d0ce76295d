"""A checkpoint's config.json, in the words that mlx-lm's architectures read.

transformers 5 renamed some keys when it saves a model. An architecture that looks for the old name alone finds
nothing and takes its default, so that a model with another rotary base is off by nats and nothing says so. Here
each renamed key also gets its old name. A key that the checkpoint has is never changed.
"""

from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config

from scorepool.engine.errors import LoadError

Config = dict[str, Any]

# Settings that change the numbers, and the values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (15.0,),  # nanochat's, which is in its code
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "norm_topk_prob": (False,),
    "residual_multiplier": (1.0,),
    "routed_scaling_factor": (1.0,),
}


def read_config(folder: Path) -> Config:
    config: Config = load_config(folder)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for name, value in _old_names(part).items():
                if part.get(name) is None:
                    part[name] = value
    return config


def refuse_overlooked(config: Config, known: set[str]) -> None:
    """Raise LoadError if a setting that changes the numbers is none of those that the architecture knows."""
    if config["model_type"] == "jamba" and config.get("num_experts", 1) > 1:
        raise LoadError(
            "mlx-lm's jamba weighs experts by a softmax over the chosen ones, and the model by one over all: "
            "its logprobs would be wrong"
        )
    for name, neutral in _NEUTRAL.items():
        value = config.get(name)
        if name not in known and value is not None and value not in neutral:
            raise LoadError(
                f"the configuration has {name} {value}, which mlx-lm's {config['model_type']} does not read: "
                "its logprobs would be wrong"
            )


def _old_names(config: Config) -> Config:
    """What the configuration says under another name, by the name that mlx-lm asks for."""
    rope = config.get("rope_parameters") or {}
    old: Config = {}
    if "sliding_attention" in rope:  # one rope a kind of layer
        old["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope.get("full_attention") or {}
    old["rope_theta"] = old["rotary_emb_base"] = rope.get("rope_theta")
    old["partial_rotary_factor"] = old["rotary_pct"] = rope.get("partial_rotary_factor")
    old["n_ctx"] = config.get("n_positions")
    old["num_experts"] = config.get("num_local_experts")
    old["sliding_window_pattern"] = _pattern(config.get("layer_types") or [])
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    is_gemma = str(config.get("model_type")).startswith("gemma")  # whose heads are not as wide as their share
    if isinstance(heads, int) and isinstance(width, int) and not is_gemma:
        old["head_dim"] = width // heads
    if width and config.get("expand"):  # of mamba2, which reads it and does not use it
        old["intermediate_size"] = width * config["expand"]
    old = {name: value for name, value in old.items() if value is not None}
    kind = rope.get("rope_type", "default")
    if rope:
        old["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    return old


def _pattern(layer_types: list[str]) -> int | None:
    """Every how many layers one has full attention, where the others' slides."""
    if "full_attention" not in layer_types or "sliding_attention" not in layer_types:
        return None
    return layer_types.index("full_attention") + 1
