"""Make Llama 4 right in batches. mlx-lm's masks of chunks are for one row.

Attention within chunks gets a mask by the position of each key in its row, and caches that keep all tokens. mlx-lm's
code for its text model alone ignores chunks, the scale by position, and that layers without positions have no norms.
Each layer attends within chunks, and rotates, as configured: in mlx-lm all but every fourth do both.
"""

from typing import Any

import mlx.core as mx

from scorepool.engine.model import kv_cache

Config = dict[str, Any]
_UNLIMITED = 2**30  # tokens of a chunk


def mask_chunks(model: Any, config: Config) -> None:
    """Make Llama 4 attend within chunks in batches too."""
    if config["model_type"] == "llama4":
        _patch(model.language_model.model, config["text_config"])
    else:
        _patch(model.model, config)


def _patch(backbone: Any, config: Config) -> None:
    """Replace the code of a backbone and of its attention. `config` is that of the text model."""
    backbone.__class__ = type("LlamaModel", (_Backbone, type(backbone)), {})
    backbone.attention_chunk_size = config["attention_chunk_size"] or _UNLIMITED
    rope = next((layer.self_attn.rope for layer in backbone.layers if layer.self_attn.use_rope), None)
    attention = type("Attention", (_Attention, type(backbone.layers[0].self_attn)), {})
    for layer, uses_rope, kind in zip(backbone.layers, _rotating_layers(config), config["layer_types"], strict=True):
        layer.self_attn.__class__ = attention
        layer.self_attn.use_rope = uses_rope
        if uses_rope:
            layer.self_attn.rope = rope
        layer.self_attn.is_chunked = kind == "chunked_attention"
        layer.self_attn.epsilon = config["rms_norm_eps"]
        for name in ("attn_temperature_tuning", "attn_scale", "floor_scale", "use_qk_norm"):
            setattr(layer.self_attn, name, config[name])


def _rotating_layers(config: Config) -> list[bool]:
    """Return of each layer whether it rotates. Despite its name, no_rope_layers has 1 for a layer that does."""
    rotates: list[int] | None = config["no_rope_layers"]
    if rotates:
        return [bool(layer) for layer in rotates]
    interval = config["no_rope_layer_interval"]
    return [place % interval != 0 for place in range(1, config["num_hidden_layers"] + 1)]


class _Backbone:
    embed_tokens: Any
    layers: list[Any]
    norm: Any
    attention_chunk_size: int

    def __call__(self, token_ids: mx.array, cache: list[Any] | None = None) -> mx.array:
        hidden = self.embed_tokens(token_ids)
        caches = cache or [None] * len(self.layers)
        length = token_ids.shape[1]
        chunks = kv_cache.key_positions(caches[0], length) // self.attention_chunk_size
        is_same = chunks[:, None, -length:, None] == chunks[:, None, None, :]
        chunk_mask = kv_cache.causal_mask(caches[0], length) & is_same
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            mask = chunk_mask if layer.self_attn.is_chunked else kv_cache.causal_mask(layer_cache, length)
            hidden = layer(hidden, mask, layer_cache)
        normed: mx.array = self.norm(hidden)
        return normed


class _Attention:
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    rope: Any
    n_heads: int
    n_kv_heads: int
    scale: float
    use_rope: bool
    is_chunked: bool
    use_qk_norm: bool
    attn_temperature_tuning: bool
    attn_scale: float
    floor_scale: float
    epsilon: float

    def __call__(self, hidden: mx.array, mask: mx.array, cache: Any = None) -> mx.array:
        rows, length, _ = hidden.shape
        queries, keys, values = (
            project(hidden).reshape(rows, length, heads, -1).swapaxes(1, 2)
            for project, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        if self.use_rope:
            offset = 0 if cache is None else cache.offset
            queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
            if self.use_qk_norm:
                queries, keys = (mx.fast.rms_norm(part, None, self.epsilon) for part in (queries, keys))
        elif self.attn_temperature_tuning:
            positions = kv_cache.key_positions(cache, length)[:, None, -length:, None]
            growth = mx.log1p(mx.floor((positions + 1) / self.floor_scale))
            queries = (queries * (growth * self.attn_scale + 1)).astype(queries.dtype)
        keys, values = kv_cache.update(cache, keys, values)
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        output: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(rows, length, -1))
        return output
