"""Mends of architectures that look positions up in a table, or that have none."""

from typing import Any

import mlx.core as mx

from scorepool.engine.model import kv_cache

Config = dict[str, Any]


def place_rows(model: Any, config: Config) -> None:
    """Give each row of a batch positions of its own, and padding those of the table.

    mlx-lm's gpt_bigcode has one position for all rows, and padding after a long shared prompt ends beyond the table,
    whose memory may hold NaN.
    """
    backbone = model.transformer if config["model_type"] == "gpt_bigcode" else model.model
    kind: Any = type(backbone)

    class Backbone(kind):  # type: ignore[misc]
        def __call__(self, token_ids: mx.array, cache: list[Any] | None = None) -> mx.array:
            length = token_ids.shape[1]
            caches = cache or [None] * len(self.h)
            offset = mx.array(0 if caches[0] is None else caches[0].offset)
            positions = mx.minimum(offset.reshape(-1, 1) + mx.arange(length), self.wpe.weight.shape[0] - 1)
            hidden = self.wte(token_ids) + self.wpe(positions)
            mask = kv_cache.causal_mask(caches[0], length)
            for layer, layer_cache in zip(self.h, caches, strict=True):
                hidden = layer(hidden, mask, layer_cache)
            normed: mx.array = self.ln_f(hidden)
            return normed

    backbone.__class__ = Backbone


def remove_unconfigured_rope(model: Any, config: Config) -> None:
    """Make granitemoehybrid rotate only if its configuration says "rope". mlx-lm rotates unless it says "nope"."""
    if config.get("position_embedding_type") == "rope":
        return
    for module in model.modules():
        if "rope" in module:
            module.rope = None
