"""Where checkpoints keep their heads for multi-token prediction (MTP), and what such a head is made of.

    embedding of token t + 1 ──norm──┐
                                     ├── projection ──► one decoder layer ──► norm ──► the model's head: token t + 2
    hidden state of token t ───norm──┘

A head is loaded as a model of its architecture with one layer, whose tensors are renamed. To add an architecture, add
its layout to LAYOUTS.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from scorepool.engine.errors import LoadError

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of the first MTP head of an architecture."""

    prefix: str  # of the head's tensors; {layers} stands for the number of the model's own layers
    parts: Mapping[str, str]  # name after the prefix to that of Head; what is not named is the decoder layer's
    config: Mapping[str, Any] = field(default_factory=dict)  # settings that give a model with the layer alone
    hidden_first: bool = False  # in what the projection is given
    passes_normed: bool = True  # the next token's hidden state is the one after the last norm
    counts_norms_from_one: bool = False  # the stored weights of the norms are without their 1


_DEEPSEEK = Layout(
    prefix="model.layers.{layers}.",
    parts={
        "enorm": "embedding_norm",
        "hnorm": "hidden_norm",
        "eh_proj": "projection",
        "shared_head.norm": "model.norm",
        "shared_head.head": "lm_head",
        "embed_tokens": "model.embed_tokens",
    },
    config={"first_k_dense_replace": 0},
    passes_normed=False,
)
LAYOUTS = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_next": Layout(
        prefix="mtp.",
        parts={
            "pre_fc_norm_embedding": "embedding_norm",
            "pre_fc_norm_hidden": "hidden_norm",
            "fc": "projection",
            "norm": "model.norm",
            "layers.0": "model.layers.0",
        },
        config={"full_attention_interval": 1, "layer_types": ["full_attention"]},
        counts_norms_from_one=True,
    ),
    "mimo": Layout(
        prefix="model.mtp_layers.0.",
        parts={
            "token_layernorm": "embedding_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "projection",
            "final_layernorm": "model.norm",
        },
        hidden_first=True,
    ),
}
_SHARED = ("model.embed_tokens.", "lm_head.")  # of the model's own, unless the head has copies


def find_layout(config: Config, names: Mapping[str, Any]) -> Layout:
    """Return the layout of a checkpoint's MTP head. Raises LoadError if there is none among its tensors' names."""
    kind = config["model_type"]
    if (layout := LAYOUTS.get(kind)) is None:
        raise LoadError(
            f"speculation is 'mtp', and {kind!r} has no head for multi-token prediction that is known here; expected "
            f"one of {', '.join(LAYOUTS)}, or speculation 'ngram' or a draft model"
        )
    prefix = prefix_of(layout, config)
    if not any(name.startswith(prefix) for name in names):
        raise LoadError(
            f"speculation is 'mtp', and the checkpoint has no tensors {prefix}*, its head for multi-token prediction; "
            "expected a checkpoint with them: conversions often drop them"
        )
    return layout


def prefix_of(layout: Layout, config: Config) -> str:
    """Return what the names of the head's tensors begin with."""
    return layout.prefix.format(layers=config["num_hidden_layers"])


def head_tensors(config: Config, names: Iterable[str]) -> list[str]:
    """Return the names of the tensors of a checkpoint's MTP heads, which are read for speculation 'mtp' alone."""
    if (layout := LAYOUTS.get(config["model_type"])) is None:
        return []
    return [name for name in names if name.startswith(prefix_of(layout, config))]


def rename(weights: Mapping[str, mx.array], layout: Layout, prefix: str) -> dict[str, mx.array]:
    """Return the head's tensors by the names of a model with one layer, and those that it shares with the model."""
    renamed = {name: weight for name, weight in weights.items() if name.startswith(_SHARED)}
    for name, weight in weights.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        part = next((part for part in layout.parts if rest.startswith(f"{part}.")), None)
        renamed[f"{layout.parts[part]}{rest.removeprefix(part)}" if part else f"model.layers.0.{rest}"] = weight
    return renamed


def head_class(model_class: Any, layout: Layout, prefix: str) -> Any:
    """Return a class of models with one layer that loads the head, with the norms and the projection before it."""

    class Head(model_class):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            width = args.hidden_size
            self.embedding_norm = RMSNorm(width, eps=args.rms_norm_eps)
            self.hidden_norm = RMSNorm(width, eps=args.rms_norm_eps)
            self.projection = Linear(2 * width, width, bias=False)
            if hasattr(self.model, "ssm_idx"):
                self.model.ssm_idx = None  # the layer that keeps a state: there is none

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            own = rename(weights, layout, prefix)
            loaded: dict[str, mx.array] = super().sanitize(dict(own))
            for name in ("embedding_norm.weight", "hidden_norm.weight") if layout.counts_norms_from_one else ():
                is_stored_so = any(".mlp.experts.0." in one for one in own)  # mlx-lm's conversions have added the 1
                loaded[name] = loaded[name] + 1 if is_stored_so else loaded[name]
            return loaded

    Head.__module__ = model_class.__module__  # which tells the architecture
    return Head


def without_heads(model_class: Any, config: Config) -> Any:
    """Return the class of a model, which ignores the tensors of MTP heads: mlx-lm drops those of the layer 61 only."""
    if config["model_type"] != "deepseek_v3":
        return model_class
    num_layers, num_heads = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    prefixes = tuple(f"model.layers.{number}." for number in range(num_layers, num_layers + num_heads))

    class Headless(model_class):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> Any:
            return super().sanitize({name: one for name, one in weights.items() if not name.startswith(prefixes)})

    Headless.__module__ = model_class.__module__
    return Headless
