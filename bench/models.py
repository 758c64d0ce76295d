"""The models that the comparisons run; every system casts them to float32.

demo    the trained model of this repository
wide    random weights, few layers and Qwen's vocabulary: shows the cost of the head within seconds (80 MB)
0.6b    random weights in Qwen3-0.6B's shape (1.2 GB): the figures to report

Models with random weights are made on first use, in `build/bench`.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
_DEMO = ROOT / "scorepool" / "models" / "demo"
_CACHE = ROOT / "build" / "bench"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": None,
    "eos_token_id": 151_935,
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
    folder = _DEMO if name == "demo" else _make_random(name, _CACHE / name)
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


def _make_random(name: str, folder: Path) -> Path:
    """Make a random model whose logits are a few nats wide, with the demo model's tokenizer: other ids have no text."""
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**_QWEN3, **_SHAPES[name])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.get_input_embeddings().weight.data.normal_(0, 0.1)
        unfinished = folder.with_name(f"{name}.{os.getpid()}")
        model.save_pretrained(unfinished)
        for file in _TOKENIZER:
            shutil.copy(_DEMO / file, unfinished)
        unfinished.rename(folder)
    return folder
