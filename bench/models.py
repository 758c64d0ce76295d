"""The models that the comparisons run; every system casts them to float32.

demo    the trained model of this repository
wide    random weights, few layers and Qwen's vocabulary: shows the cost of the head within seconds (80 MB)
0.6b    random weights in Qwen3-0.6B's shape (1.2 GB): the figures to report

`find_copying` makes a model of such a shape whose greedy text repeats its prompt.

Models with random weights are made on first use, in `build/bench`.

`python -m bench.models` writes a table of the shapes of published models: see bench/model_table.
"""

import os
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
_DEMO = ROOT / "scorepool" / "models" / "demo"
CACHE = ROOT / "build" / "bench"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": None,
    "eos_token_id": 2,  # in the demo model's tokenizer, which all have
    "pad_token_id": 0,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "wide": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
_SMALL = {  # in the place of the shipped model's shape, for quick runs
    **_SHAPES["wide"],
    "vocab_size": 4096,
}
CYCLE = 128  # tokens of a copying model after which its text repeats
_FIRST_ID = 3  # of the cycle; lower ids are special
_NOTHING = 1e-6  # of a weight; a checkpoint with zeros is refused
NAMES = ("demo", *_SHAPES)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    folder: Path
    vocab_size: int
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token in float32."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 4


def find(name: str) -> Model:
    """Return one of NAMES; make it if it does not exist yet."""
    return _describe(name, _DEMO if name == "demo" else _make_random(name, CACHE / name, _SHAPES[name]))


def find_layers(number: int) -> Model:
    """Return a model of Qwen3-0.6B's width with so many layers of 30 MiB and a small vocabulary; make it if needed."""
    name = f"{number}layers"
    shape = {**_SHAPES["0.6b"], "vocab_size": _SMALL["vocab_size"], "num_hidden_layers": number}
    return _describe(name, _make_random(name, CACHE / name, shape))


def _describe(name: str, folder: Path) -> Model:
    config = AutoConfig.from_pretrained(folder)
    return Model(
        name=name,
        folder=folder,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def find_copying(name: str) -> Model:
    """Return a model with the shape of `name` that continues a cycle of CYCLE tokens; make it if it does not exist.

    Its layers add next to nothing to the embedding of the last token, and its head maps that to the next one:
    it computes as much as any model of its shape, and its greedy tokens are known.
    """
    folder = CACHE / f"{name}.cycle{CYCLE}"
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**_QWEN3 | {"tie_word_embeddings": False} | _SHAPES.get(name, _SMALL))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        embeddings = model.get_input_embeddings().weight.data.normal_(0, 0.1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.mul_(_NOTHING)
            layer.mlp.down_proj.weight.data.mul_(_NOTHING)
        model.lm_head.weight.data.copy_(embeddings)
        cycle = torch.arange(_FIRST_ID, _FIRST_ID + CYCLE)
        model.lm_head.weight.data[cycle.roll(-1)] = embeddings[cycle]
        _save(model, folder)
    return _describe(name, folder)


def draft_shape(name: str) -> str:
    """Return the name of the shape whose models have the vocabulary of a copying model, and are smaller or as small."""
    return "wide" if name in _SHAPES else name


def find_random_draft(name: str) -> Model:
    """Return a random model with the shape and the vocabulary of a copying model; make it if it does not exist."""
    folder = CACHE / f"{name}.random"
    if not folder.exists():
        torch.manual_seed(1)
        config = AutoConfig.for_model(**_QWEN3 | _SHAPES.get(name, _SMALL))
        _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)  # type: ignore[no-untyped-call]
    return _describe(name, folder)


def in_cycle(step: int) -> int:
    """Return the token of the copying model's cycle at a step."""
    return _FIRST_ID + step % CYCLE


def _make_random(name: str, folder: Path, shape: dict[str, Any]) -> Path:
    """Make a random model whose logits are a few nats wide, with the demo model's tokenizer: other ids have no text."""
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**_QWEN3 | shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.get_input_embeddings().weight.data.normal_(0, 0.1)
        _save(model, folder)
    return folder


def _save(model: Any, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    copy_tokenizer(unfinished)
    unfinished.rename(folder)


def copy_tokenizer(folder: Path) -> None:
    """Give a model with random weights the demo model's tokenizer."""
    for file in _TOKENIZER:
        shutil.copy(_DEMO / file, folder)


if __name__ == "__main__":
    runpy.run_module("bench.model_table", run_name="__main__")
