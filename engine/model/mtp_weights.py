"""Load a checkpoint's head for multi-token prediction, beside the model that is loaded."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import as_load_error
from scorepool.engine.model import activations, checkpoint, mends, mtp_layouts, rope
from scorepool.engine.model.config import Config
from scorepool.engine.model.mtp import Head
from scorepool.engine.model.mtp_layouts import Layout


def load_head(folder: Path, config: Config, dtype: str, model: Any) -> tuple[Any, Head]:
    """Return the first head of the checkpoint, as a model of one layer and as a Head. Raises LoadError.

    config  of the loaded model, which lends the head its embeddings and its output layer where they are the same
    """
    stored = checkpoint.stored_tensors(folder)
    layout = mtp_layouts.find_layout(config, stored)
    with as_load_error("the head for multi-token prediction cannot be loaded"):
        prefix = mtp_layouts.prefix_of(layout, config)
        one_layer = config | {"num_hidden_layers": 1} | dict(layout.config)
        loaded = checkpoint.load_as(folder, one_layer, dtype, lambda config: _classes(config, layout, prefix))
        mends.apply(loaded, one_layer, mtp_layouts.rename(stored, layout, prefix))
        rope.check_or_patch(loaded, one_layer)
        activations.patch(loaded, one_layer)
        _share(loaded, model)
        mx.eval(loaded.parameters())
        return loaded, Head(loaded, layout)


def _classes(config: Config, layout: Layout, prefix: str) -> tuple[Any, Any]:
    model_class, args_class = checkpoint.import_architecture(config)
    return mtp_layouts.head_class(model_class, layout, prefix), args_class


def _share(loaded: Any, model: Any) -> None:
    """Use the model's own embeddings and output layer, unless the head has others."""
    if _is_same(loaded.model.embed_tokens, model.model.embed_tokens):
        loaded.model.embed_tokens = model.model.embed_tokens
    if "lm_head" in model and "lm_head" in loaded and _is_same(loaded.lm_head, model.lm_head):
        loaded.lm_head = model.lm_head


def _is_same(one: Any, other: Any) -> bool:
    a, b = one.weight, other.weight
    return type(one) is type(other) and a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all().item())
