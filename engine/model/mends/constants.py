"""Mends of architectures of mlx-lm that have a constant, or another factor, where the model has a setting."""

from typing import Any

import mlx.core as mx

from scorepool.engine.model.patch_globals import replace_globals

Config = dict[str, Any]


def set_epsilon_of_nanochat(model: Any, config: Config) -> None:
    """Give nanochat's norms, which have no weights, the configured epsilon. mlx-lm has 1e-5 in its code."""
    epsilon = config["rms_norm_eps"]

    def rms_norm(hidden: mx.array) -> mx.array:
        return mx.fast.rms_norm(hidden, None, epsilon)

    layer = model.layers[0]
    for kind in (type(model.transformer), type(layer), type(layer.attn)):
        replace_globals(model, kind, rms_norm=rms_norm)


def scale_tied_head(model: Any, config: Config) -> None:
    """Divide what enters minicpm3's head as configured also if the embeddings are its head. mlx-lm does not."""
    if not config["tie_word_embeddings"]:
        return
    embeddings = model.model.embed_tokens
    divisor = model.args.hidden_size / model.args.dim_model_base
    kind: Any = type(embeddings)

    class Embedding(kind):  # type: ignore[misc]
        def as_linear(self, hidden: mx.array) -> mx.array:
            logits: mx.array = kind.as_linear(self, hidden / divisor)
            return logits

    embeddings.__class__ = Embedding
