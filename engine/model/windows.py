"""Check that the layers slide that the checkpoint says, and make them slide or limit the context otherwise.

Some of mlx-lm's architectures ignore a sliding window, and are silently wrong by nats beyond it. Those whose attention
takes a mask and a cache get masks with the window. Their caches keep all tokens.
"""

from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.model import kv_cache
from scorepool.engine.model.surveyed import default_settings

Config = dict[str, Any]

# Architectures whose attention is `self_attn(hidden, mask, cache)`, and whose numbers were compared with transformers.
_PATCHABLE = {"cohere2", "dots1", "gemma2", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen3", "starcoder2"}


def check_or_patch(model: Any, config: Config) -> int | None:
    """Make the model slide as configured and return the context up to which it is right (None: any).

    Raise LoadError if other layers slide than the configured ones.
    """
    config = {**config, **(config.get("text_config") or {})}
    window, layer_types = _window(config), config.get("layer_types")
    if not window or _is_switched_off(config):
        return None
    is_rotating = [size == window for size in kv_cache.windows(kv_cache.new(model))]
    kinds = ["sliding_attention"] * len(is_rotating) if layer_types is None else layer_types
    is_sliding = [kind == "sliding_attention" for kind in kinds]
    if not any(is_rotating):
        return _patch(model, config, is_sliding) if any(is_sliding) else None
    if layer_types is not None and len(kinds) == len(is_rotating) and is_sliding != is_rotating:
        raise LoadError(
            f"the configuration's layer_types do not name the sliding layers that mlx-lm's {config['model_type']} "
            "has: its logprobs would be wrong"
        )
    return None


def _is_switched_off(config: Config) -> bool:
    """True if the model has a switch for its windows, and it is off. Some types of transformers' have none."""
    if config.get("use_sliding_window") is not False:
        return False
    known = default_settings(config)
    return "sliding_window" not in known or "use_sliding_window" in known


def smallest_window(model: Any) -> int | None:
    """Return the shortest sliding window of all layers, in tokens; None if every layer attends to all tokens."""
    patched = [module.window for module in model.modules() if isinstance(module, _Sliding)]
    own = kv_cache.smallest_window(kv_cache.new(model))
    return min(patched if own is None else [own, *patched], default=None)


def _window(config: Config) -> int | None:
    """Return the tokens that a sliding layer attends to, with the token itself. MiMo's setting counts those before."""
    before = config.get("sliding_window_size")
    window: int | None = config.get("sliding_window", config.get("attention_window_size"))
    return window if before is None else before + 1


def _patch(model: Any, config: Config, is_sliding: list[bool]) -> int | None:
    """Make layers slide, or return the window if the architecture cannot: within its length nothing slides."""
    window = _window(config)
    if window is None or config["model_type"] not in _PATCHABLE or len(is_sliding) != len(model.layers):
        return window
    kinds = {type(layer.self_attn) for layer in model.layers}
    sliding = {kind: type(kind.__name__, (_Sliding, kind), {}) for kind in kinds}
    for layer, slides in zip(model.layers, is_sliding, strict=True):
        if slides:
            layer.self_attn.__class__ = sliding[type(layer.self_attn)]
            layer.self_attn.window = window
    return None


class _Sliding:
    """An attention whose tokens attend to themselves and the `window - 1` tokens before."""

    window: int

    def __call__(self, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        mask = kv_cache.slide(mask, cache, hidden.shape[1], self.window)
        attended: mx.array = super().__call__(hidden, mask, cache)  # type: ignore[misc] # of mlx-lm's attention
        return attended
