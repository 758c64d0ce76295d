"""Write a checkpoint as a GGUF file, which llama.cpp reads: Llama, Qwen2, Qwen3 and Gemma 3, without a vocabulary.

All systems of a comparison work on token ids, so the file holds no tokenizer. bench/llama_cpp.py says what to install.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def write(folder: Path, bits: int = 32) -> Path:
    """Write the weights of a checkpoint in bfloat16 beside it, in float32 or as Q4_0; return the file.

    Q4_0 is 4.5 bits a weight, as MLX's 4 bits in groups of 64: one float16 scale for 32 weights there, scale and
    offset for 64 here.
    """
    import gguf  # type: ignore[import-not-found] # here: it is installed for this peer only

    path = folder.with_name(f"{folder.name}.{'f32' if bits == 32 else 'q4_0'}.gguf")
    if path.exists():
        return path
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in _ARCHITECTURES:
        raise ValueError(f"{folder}: no GGUF is written for {config.model_type}, only for {', '.join(_ARCHITECTURES)}")
    unfinished = path.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(unfinished, _ARCHITECTURES[config.model_type])
    _describe(writer, config)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[_ARCHITECTURES[config.model_type]], config.num_hidden_layers)
    for name, values in _tensors(folder, config):
        is_small = bits == 32 or values.ndim == 1  # norms and biases stay as they are
        kind = gguf.GGMLQuantizationType.F32 if is_small else gguf.GGMLQuantizationType.Q4_0
        tensor_name = names.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(tensor_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _describe(writer: Any, config: Any) -> None:
    head_dim = _head_dim(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors as llama.cpp computes with them, in float32."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            projection = name.split(".")[-2]
            if config.model_type == "gemma3_text" and "norm" in name:
                values = values + 1.0  # its norms multiply by 1 + weight
            if config.model_type == "llama" and projection in heads:
                values = _interleaved(values, heads[projection])
            yield name, values
    if config.rope_parameters.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
        head_dim = _head_dim(config)
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        yield "rope_freqs.weight", (plain / scaled.double().numpy()).astype(np.float32)


def _interleaved(weights: Any, num_heads: int) -> Any:
    """Order the outputs of each head as llama.cpp rotates them for Llama: in pairs of neighbours, not of halves."""
    return weights.reshape(num_heads, 2, -1, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
