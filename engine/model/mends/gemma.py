"""Mends of Gemma 2, 3 and 3n."""

from typing import Any

import mlx.core as mx

from scorepool.engine.model.patch_globals import patch_globals

Config = dict[str, Any]


def scale_embeddings(model: Any, config: Config) -> None:
    """Make gemma3 scale its embeddings in the model's dtype. mlx-lm rounds the scale to bfloat16 in every dtype."""
    backbone = next(module for module in model.modules() if type(module).__name__ == "Gemma3Model")
    patch_globals(model, type(backbone), "mx", bfloat16=backbone.norm.weight.dtype)


def add_axis_to_masks(model: Any, config: Config) -> None:
    """Let gemma2's attention take the masks of a batch: mlx-lm gives its scores an axis for the key heads."""
    kind: Any = type(model.layers[0].self_attn)

    class Attention(kind):  # type: ignore[misc]
        def __call__(self, hidden: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
            if mask is not None and mask.ndim == 4 and self.repeats > 1:
                mask = mask[:, :, None]
            attended: mx.array = kind.__call__(self, hidden, mask, cache)
            return attended

    for layer in model.layers:
        layer.self_attn.__class__ = Attention


def give_gemma3n_caches(model: Any, config: Config) -> None:
    """Let gemma3n's later layers attend to the keys of earlier ones. mlx-lm reads them from a cache, or not at all."""
    backbone = model.model.language_model
    kind: Any = type(backbone)

    class LanguageModel(kind):  # type: ignore[misc]
        def __call__(self, inputs: Any = None, cache: Any = None, input_embeddings: Any = None) -> mx.array:
            hidden: mx.array = kind.__call__(self, inputs, cache or self.make_cache(), input_embeddings)
            return hidden

    backbone.__class__ = LanguageModel


def part_head_of_gemma3n(model: Any, config: Config) -> None:
    """Move gemma3n's head out of its backbone, so that logits are computed for the rows that are asked for only."""
    backbone, whole = model.model.language_model, model.model
    compute_logits, softcap = backbone.embed_tokens.as_linear, backbone.final_logit_softcapping
    embedding_kind: Any = type(backbone.embed_tokens)
    kind: Any = type(whole)

    class Embedding(embedding_kind):  # type: ignore[misc]
        def as_linear(self, hidden: mx.array) -> mx.array:
            return hidden

    class Gemma3n(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            logits: mx.array = compute_logits(kind.__call__(self, *args, **kwargs))
            return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    backbone.embed_tokens.__class__, backbone.final_logit_softcapping = Embedding, None
    whole.__class__ = Gemma3n
