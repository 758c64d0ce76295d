"""The shapes of published models, as in their config.json, and checkpoints of random weights with them."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from bench import models

GROUP_SIZE = 64  # weights that share a scale, of the 4-bit checkpoints
Config = dict[str, Any]


def _qwen3(hidden: int, inner: int, layers: int, heads: int = 16, *, tied: bool = True) -> Config:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
    }


def _qwen2(hidden: int, inner: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }


def _llama(hidden: int, inner: int, layers: int, factor: float, head_dim: int, *, tied: bool) -> Config:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, Config] = {
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14),
    "qwen3-0.6b": _qwen3(1024, 3072, 28),
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262_144,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "llama3.2-1b": _llama(2048, 8192, 16, 32.0, 64, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12),
    "smollm2-1.7b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 130_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": _qwen3(2048, 6144, 28),
    # For Macs: these have more weights than a small machine has memory.
    "llama3.2-3b": {**_llama(3072, 8192, 28, 32.0, 128, tied=True), "num_attention_heads": 24},
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "llama3.1-8b": _llama(4096, 14_336, 32, 8.0, 128, tied=False),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-30b-a3b": {
        **_qwen3(2048, 6144, 48, 32, tied=False),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # For quick runs.
    "tiny": {**_qwen3(64, 128, 2, 4), "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096},
}


def checkpoint(name: str, bits: int | None) -> Path:
    """Return a folder with random weights of a shape, in bfloat16 or `bits` bits; make it if it does not exist yet."""
    folder = models.CACHE / "shapes" / f"{name}-{'bf16' if bits is None else f'{bits}bit'}"
    if not folder.exists():
        last_id = SHAPES[name]["vocab_size"] - 1
        config = SHAPES[name] | {"eos_token_id": last_id, "pad_token_id": 0, "bos_token_id": None}
        mx.random.seed(0)
        model = _build(config)
        model.set_dtype(mx.bfloat16)
        if bits is not None:
            model, config = quantize_model(model, dict(config), GROUP_SIZE, bits)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        save_model(unfinished, model, donate_model=True)
        save_config(config, unfinished / "config.json")
        models.copy_tokenizer(unfinished)
        unfinished.rename(folder)
    return folder


def num_parameters(name: str) -> int:
    """Count the parameters of a shape."""
    found: Any = tree_flatten(_build(SHAPES[name]).parameters())  # lazy: shapes are enough
    return sum(array.size for _, array in found)


def _build(config: Config) -> Any:
    """Build a model with random weights. gemma3 drops a head that it need not have when it reads its weights."""
    architecture = import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"]:
        model.sanitize({})
    return model


def vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def remove(folder: Path) -> None:
    """Delete a checkpoint that was made here."""
    shutil.rmtree(folder)
