"""Mends of what attention does before and after it weighs the keys: clipping, scales, layouts, rotation by layer."""

from math import log
from typing import Any

import mlx.core as mx

from scorepool.engine.model.mends.wrap import transform_output

Config = dict[str, Any]


def clip_projections(model: Any, config: Config) -> None:
    """Clip olmoe's queries, keys and values to clip_qkv, which mlx-lm ignores. Norms come before the clipping."""
    limit = config.get("clip_qkv")
    if limit is None:
        return
    attentions = [layer.self_attn for layer in model.layers]
    modules = [module for attention in attentions for module in (attention.q_norm, attention.k_norm, attention.v_proj)]
    transform_output(modules, lambda hidden: mx.clip(hidden, -limit, limit))


def scale_scores(model: Any, config: Config) -> None:
    """Scale the scores of GPT-2 and its kin as configured. mlx-lm always divides them by the root of the head size.

    gpt_bigcode has no scale by layer: transformers ignores the setting in its configurations.
    """
    scales_by_layer = config["model_type"] == "gpt2" and config.get("scale_attn_by_inverse_layer_idx")
    for index, layer in enumerate(model.layers):
        if config.get("scale_attn_weights") is False:
            layer.attn.scale = 1.0
        if scales_by_layer:
            layer.attn.scale /= index + 1


def scale_scores_by_context(model: Any, config: Config) -> None:
    """Scale the scores of minicpm3 and youtu_llm by YaRN's mscale_all_dim, which mlx-lm ignores there."""
    rope = config["rope_parameters"]
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not weight or factor <= 1:
        return
    name = "softmax_scale" if config["model_type"] == "minicpm3" else "scale"
    for layer in model.layers:
        setattr(layer.self_attn, name, getattr(layer.self_attn, name) * (0.1 * weight * log(factor) + 1) ** 2)


def group_rows_by_kind(model: Any, config: Config) -> None:
    """Sort gpt_bigcode's multi-head rows into queries | keys | values for mlx-lm. They are stored head by head."""
    if config.get("multi_query", True):
        return
    num_heads = config["n_head"]
    for layer in model.layers:
        projection = layer.attn.c_attn
        for name, rows in projection.parameters().items():  # [heads * 3 * head_dim, ...]
            by_head = rows.reshape(num_heads, 3, -1, *rows.shape[1:])
            projection[name] = by_head.swapaxes(0, 1).reshape(rows.shape)


def rotate_sliding_layers(model: Any, config: Config) -> None:
    """Let cohere2 and exaone4 rotate in the layers that layer_types says slide, whatever mlx-lm's period of layers is.

    exaone4 without a window rotates in all layers.
    """
    rotates_all = config["model_type"] == "exaone4" and config.get("sliding_window") is None
    switch = "use_rope" if config["model_type"] == "exaone4" else "use_sliding_window"
    for layer, kind in zip(model.layers, config["layer_types"], strict=True):
        setattr(layer.self_attn, switch, rotates_all or kind == "sliding_attention")


def widen_window(model: Any, config: Config) -> None:
    """Let MiMo's sliding layers attend to sliding_window_size tokens before each token. mlx-lm counts the token too."""
    model.args.sliding_window_size += 1
    model.model.sliding_window_size += 1
