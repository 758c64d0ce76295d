"""Tiny models in Hugging Face form. Their seeded random weights give peaked distributions.

`TinyModels(folder)("llama")` builds a model on first use; the fixture `tiny_models` is in conftest.py.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_tokenizer import BOS, EOS, PAD, build_tokenizer

VOCAB_SIZE = 512
CONTEXT_LENGTH = 512
SLIDING_WINDOW = 16
ORACLE_FOLDER = "transformers"  # in a model's folder if transformers reads another layout of the weights

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "max_position_embeddings": 100},
    "phi": {
        "model_type": "phi",
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_28_layers": {"model_type": "qwen3", "tie_word_embeddings": True, "num_hidden_layers": 28},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "starcoder2": {"model_type": "starcoder2", "use_bias": True, "sliding_window": None, "tie_word_embeddings": True},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "intermediate_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.25},
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "phi3_longrope": {
        "model_type": "phi3",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        },
        "original_max_position_embeddings": 128,
        "sliding_window": None,
    },
    "phimoe": {
        "model_type": "phimoe",
        "attention_bias": True,
        "lm_head_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
            "short_mscale": 1.5,
            "long_mscale": 2.0,
            "original_max_position_embeddings": 256,
        },
        "sliding_window": None,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 128,
        },
    },
    "gemma2": {  # low softcaps, because the default 30 and 50 have little effect at this size
        "model_type": "gemma2",
        "sliding_window": 4096,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "mamba": {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "time_step_rank": 4, "expand": 2},
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 128,
        "n_positions": CONTEXT_LENGTH,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 16,
        "sliding_window": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 96,  # its square root is exact in no 16-bit dtype
        "num_hidden_layers": 3,
        "sliding_window": SLIDING_WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_dim": 64,  # required by mlx-lm, not by transformers
        "block_ff_dim": 128,
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": True,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "key_multiplier": 0.4,
        "attention_out_multiplier": 0.9,
        "tie_word_embeddings": False,
    },
    "granitehybrid": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 128,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
}
_EMBEDDING_SCALE = {"gemma2": 0.15, "gemma3": 0.15, "mamba": 0.15}


class TinyModels:
    """Folders of tiny models by name, built below `folder` on first use."""

    names = tuple(_KINDS)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            build(name, path)
        return path


def build(name: str, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(**(_SHAPE | _KINDS[name]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if any(key in path for key in ("embed", "lm_head", "wte", "wpe")):
                weight.normal_(0, _EMBEDDING_SCALE.get(name, 0.3))
            elif "norm" in path or "ln_" in path:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "sinks" in path:
                weight.normal_(0, 1)
            elif weight.ndim == 2 or "experts" in path:
                weight.normal_(0, 0.08)
    build_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    if name == "gpt_oss":
        _split_experts(folder)
    if name == "gpt2":
        _drop_prefix(folder / "model.safetensors")
    _restore_layer_types(folder / "config.json", _KINDS[name])


def _restore_layer_types(path: Path, kind: dict[str, Any]) -> None:
    """Write the published checkpoints' layer types, which mlx-lm expects. transformers 5 renames some on save."""
    config = json.loads(path.read_text())
    if "layer_types" in kind:
        config["layer_types"] = kind["layer_types"]
        path.write_text(json.dumps(config, indent=2))


def _drop_prefix(path: Path) -> None:
    """Name the weights as GPT-2's first release does, which mlx-lm expects."""
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def _split_experts(folder: Path) -> None:
    """Write gpt-oss in the layout of mlx-lm's converter, and keep transformers' layout in ORACLE_FOLDER for the oracle.

    transformers saves gate and up interleaved, and unquantised experts without `.weight`. mlx-lm reads OpenAI's mxfp4
    blocks and its own layout.
    """
    (folder / ORACLE_FOLDER).mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder / file, folder / ORACLE_FOLDER / file)
    weights: dict[str, torch.Tensor] = {}
    for path, weight in load_file(folder / "model.safetensors").items():
        experts, _, last = path.rpartition(".")
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            kind = "bias" if last.endswith("bias") else "weight"
            for start, projection in enumerate(("gate_proj", "up_proj")):
                half = weight[..., start::2]
                weights[f"{experts}.{projection}.{kind}"] = half if kind == "bias" else half.transpose(-1, -2)
        elif last in ("down_proj", "down_proj_bias") and experts.endswith("experts"):
            kind = "bias" if last.endswith("bias") else "weight"
            weights[f"{experts}.down_proj.{kind}"] = weight if kind == "bias" else weight.transpose(-1, -2)
        else:
            weights[path] = weight
    contiguous = {path: weight.contiguous() for path, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
