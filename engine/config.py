"""A checkpoint's config.json, in the words that mlx-lm's architectures read.

transformers 5 renamed some keys when it saves a model. An architecture that looks for the old name alone finds
nothing and takes its default, so that a model with another rotary base is off by nats and nothing says so. Here
each renamed key also gets its old name. A key that the checkpoint has is never changed.
"""

from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = load_config(folder)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _add_old_names(part)
    return config


def _add_old_names(config: dict[str, Any]) -> None:
    old: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:  # one rope a kind of layer
        old["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope.get("full_attention") or {}
    old["rope_theta"] = rope.get("rope_theta")
    old["partial_rotary_factor"] = rope.get("partial_rotary_factor")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        old["rope_scaling"] = {**rope, "type": kind}
    for name, value in old.items():
        if value is not None and config.get(name) is None:
            config[name] = value
