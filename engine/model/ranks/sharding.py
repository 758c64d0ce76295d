"""Keep one rank's share of a model's layers: a part of the attention heads, and of the width of each MLP."""

from typing import Any

from scorepool.engine.errors import LoadError
from scorepool.engine.model.config import Config
from scorepool.engine.model.ranks.group import RankGroup

_HEADS = ("num_attention_heads", "num_key_value_heads")


def shard(model: Any, config: Config, ranks: RankGroup) -> None:
    """Keep this rank's share of a model whose weights are not read yet. Raises LoadError if it cannot be divided."""
    if not hasattr(model, "shard"):
        raise LoadError(f"ranks is {ranks.size}, and mlx-lm cannot divide a {config['model_type']!r}: expected 1")
    for settings in (config, config.get("text_config") or {}):
        for name in _HEADS:  # mlx-lm rounds down what is left of them, without an error
            if (settings.get(name) or 0) % ranks.size:
                raise LoadError(
                    f"ranks is {ranks.size}, and config.json: {name} is {settings[name]}: expected a number of ranks "
                    "that divides it"
                )
    model.shard(ranks.group)
