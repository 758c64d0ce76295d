"""Tiny checkpoints with a head for multi-token prediction, and the head on torch in float64.

The head's decoder layer is that of transformers' model of the family with one layer, so its attention, rotation and
experts are transformers' own. What is around it follows the published descriptions: norms of the embedding and of the
hidden state, a projection of both, the layer, a norm, and the output layer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from survey import reference
from survey.families import FAMILIES
from tests.tiny_tokenizer import build_tokenizer

# By architecture: where the head is, its parts there, what makes a family's settings those of one layer, whether the
# projection is given the hidden state first, and whether the next hidden state is taken after the last norm.
DEEPSEEK_PARTS = {"embedding": "enorm", "hidden": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
SHAPES: dict[str, tuple[str, dict[str, str], dict[str, Any], bool, bool]] = {
    "deepseek_v3": ("model.layers.{layers}.", DEEPSEEK_PARTS, {"first_k_dense_replace": 0}, False, False),
    "glm4_moe": ("model.layers.{layers}.", DEEPSEEK_PARTS, {"first_k_dense_replace": 0}, False, False),
    "qwen3_next": (
        "mtp.",
        {"embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "projection": "fc", "norm": "norm"},
        {"layer_types": ["full_attention"]},
        False,
        True,
    ),
    "mimo": (
        "model.mtp_layers.0.",
        {
            "embedding": "token_layernorm",
            "hidden": "hidden_layernorm",
            "projection": "input_proj",
            "norm": "final_layernorm",
        },
        {},
        True,
        True,
    ),
}
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass
class TorchHead:
    """The head in float64: the model's body, one layer of transformers', and what is around it."""

    body: Any
    layer: Any
    embedding_norm: Callable[[torch.Tensor], torch.Tensor]
    hidden_norm: Callable[[torch.Tensor], torch.Tensor]
    projection: torch.Tensor
    head: torch.Tensor
    hidden_first: bool
    passes_normed: bool

    def logprobs(self, token_ids: list[int], first: int, proposed: list[int]) -> list[torch.Tensor]:
        """Return the distribution of each proposed token after a row that the head has seen since position `first`."""
        taken: list[torch.Tensor] = []
        hook = self.layer.model.norm.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
        with torch.no_grad():
            states = self.body(input_ids=torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state[0, first:]
            following, found = token_ids[first + 1 :], []
            for token_id in proposed:
                normed = self.layer.model(inputs_embeds=self._fuse(following, states), use_cache=False)
                normed = normed.last_hidden_state[0]
                passed = normed if self.passes_normed else taken[-1][0]
                found.append(torch.log_softmax(normed[-1] @ self.head.T, dim=-1))
                following, states = [*following, token_id], torch.cat([states, passed[-1:]])
        hook.remove()
        return found

    def _fuse(self, token_ids: list[int], states: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding_norm(self.body.embed_tokens(torch.tensor(token_ids)))
        pair = [embedded, self.hidden_norm(states)]
        return (torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1) @ self.projection.T)[None]


def settings_of(kind: str) -> dict[str, Any]:
    return dict(QWEN2) if kind == "mimo" else dict(FAMILIES[kind].bases()["base"])


def build(kind: str, folder: Path, *, agrees: bool = False, has_copies: bool = False) -> TorchHead:
    """Write a checkpoint with a head.

    agrees      both the model and its head look at the last token alone, so that they say the same
    has_copies  the head has embeddings and an output layer of its own, which are those of the model, as DeepSeek's
    """
    prefix, parts, one_layer, hidden_first, passes_normed = SHAPES[kind]
    settings = settings_of(kind)
    model = reference.build_model(reference.build_config(settings), seed=0)
    layer = reference.build_model(reference.build_config(settings | {"num_hidden_layers": 1} | one_layer), seed=7)
    if agrees:
        silence(model)
        silence(layer)
    tensors = saved(kind, layer, folder)
    weights = saved(kind, model, folder)
    prefix = prefix.format(layers=settings["num_hidden_layers"])
    inner = "layers.0." if kind == "qwen3_next" else ""
    head = {
        prefix + inner + name.removeprefix("model.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    width = settings["hidden_size"]
    own = fusing_weights(width, kind, agrees, hidden_first)
    own["norm"] = (weights if agrees else tensors)["model.norm.weight"].clone()
    head |= {f"{prefix}{parts[part]}.weight": tensor for part, tensor in own.items()}
    if has_copies:
        head[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        head[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if kind == "mimo":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with torch.no_grad():
        layer.model.norm.weight.copy_(own["norm"])
    for one in (model, layer):
        one.config._experts_implementation = "eager"  # torch has no grouped products in float64
    return TorchHead(
        body=model.double().model,
        layer=layer.double(),
        embedding_norm=norm_of(own["embedding"], model, kind),
        hidden_norm=norm_of(own["hidden"], model, kind),
        projection=own["projection"].double(),
        head=model.lm_head.weight,
        hidden_first=hidden_first,
        passes_normed=passes_normed,
    )


def fusing_weights(width: int, kind: str, agrees: bool, hidden_first: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    one = 0.0 if kind == "qwen3_next" else 1.0
    if agrees:
        keeps_embedding = [torch.eye(width), torch.zeros(width, width)]
        projection = torch.cat(keeps_embedding[::-1] if hidden_first else keeps_embedding, dim=1)
        return {"embedding": torch.full((width,), one), "hidden": torch.full((width,), one), "projection": projection}
    return {
        "embedding": one + 0.1 * torch.randn(width, generator=generator),
        "hidden": one + 0.1 * torch.randn(width, generator=generator),
        "projection": 0.2 * torch.randn(width, 2 * width, generator=generator),
    }


def silence(model: Any) -> None:
    """Let every layer add next to nothing to its input."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "down_proj" in name or name.endswith(("o_proj.weight", "out_proj.weight")):
                weight.mul_(1e-6)  # zeros are refused: no trained model has them


def norm_of(weight: torch.Tensor, model: Any, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    scale = weight.double() + (1 if kind == "qwen3_next" else 0)
    eps = model.config.rms_norm_eps
    return lambda given: given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + eps) * scale


def saved(kind: str, model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model as its family's checkpoints are, and return the tensors."""
    model.save_pretrained(folder)
    if kind != "mimo":
        FAMILIES[kind].convert(folder)
    build_tokenizer().save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    return tensors


def oracle_model(kind: str) -> Any:
    """Return transformers' model of the checkpoint, in float32."""
    return reference.build_model(reference.build_config(settings_of(kind)), seed=0)
