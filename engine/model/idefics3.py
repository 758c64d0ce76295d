"""The language model inside Idefics 3 and SmolVLM: mlx-lm's Llama, under the names of these checkpoints.

mlx-lm has no architecture for them. This one is in its form, as load_model takes it: `Model` and `ModelArgs`.
"""

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import llama
from mlx_lm.models.base import BaseModelArgs

MODEL_TYPES = ("idefics3", "smolvlm")
_NAMES = (  # as transformers saves them, or as mlx-vlm does; tensors of other names belong to the tower
    (re.compile(r"^(model\.)?text_model\."), "language_model.model."),
    (re.compile(r"^(language_model\.)?lm_head\."), "language_model.lm_head."),
    (re.compile(r"^language_model\.(?!model\.|lm_head\.)"), "language_model.model."),
    (re.compile(r"^language_model\."), "language_model."),
)


@dataclass
class ModelArgs(BaseModelArgs):
    """The settings of the language model."""

    model_type: str
    text_config: dict[str, Any]
    tie_word_embeddings: bool = False  # that of the section is not read

    def __post_init__(self) -> None:
        """Refuse another language model."""
        found = self.text_config.get("model_type", "llama")
        if found != "llama":
            raise ValueError(f"text_config.model_type is {found!r}, expected 'llama'")


class Model(Module):
    """The language model, without the tower."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx's
        self.args, self.model_type = args, args.model_type
        settings = {"model_type": "llama", **args.text_config, "tie_word_embeddings": args.tie_word_embeddings}
        self.language_model: Any = llama.Model(llama.ModelArgs.from_dict(settings))

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        logits: mx.array = self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)
        return logits

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of the language model, by its names."""
        named: dict[str, mx.array] = {}
        for name, weight in weights.items():
            for pattern, replacement in _NAMES:
                renamed, is_named = pattern.subn(replacement, name)
                if is_named:
                    named[renamed] = weight
                    break
        if self.args.tie_word_embeddings:
            named.pop("language_model.lm_head.weight", None)
        return named

    @property
    def layers(self) -> Any:
        return self.language_model.model.layers
