"""Tiny models of texts and images in Hugging Face form, with seeded random weights. See also vision_oracles.py."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from survey import reference
from survey.families import FAMILIES
from tests.quantised_weights import GROUP_SIZE, round_weights, store_quantised
from tests.tiny_tokenizer import build_tokenizer
from tests.vision_oracles import (
    GEMMA4_TOKENS,
    GEMMA_TOKENS,
    IDEFICS_TOKENS,
    IMAGE_TOKENS,
    QWEN_TOKENS,
    Gemma4Oracle,
    GemmaOracle,
    IdeficsOracle,
    QwenOracle,
    VisionOracle,
)

QWEN_VIDEO = "<|video_pad|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}[IMG]"
    "{% elif part.type == 'video' %}[VIDEO]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 4,
    "hidden_act": "silu",
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e3, "mrope_section": [2, 3, 3]}}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 64,
}
_QWEN3_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
    "out_hidden_size": 64,
}
_QWEN3_5_VISION = {name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
_QWEN3_TEXT: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 3e3,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
}
_GEMMA4_TEXT: dict[str, Any] = _TEXT | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 8.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50_000.0},
    },
}
_GEMMA_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    },
}


def build_mistral3(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Mistral 3 into a folder. Return transformers with the same weights."""
    tokenizer = _tokenizer(IMAGE_TOKENS, "[IMG]")
    settings = {
        "model_type": "mistral3",
        "text_config": _TEXT,
        "vision_config": _VISION,
        "spatial_merge_size": 2,
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "tie_word_embeddings": False,
    }
    images = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
    return VisionOracle(_write(folder, settings, seed, changes, "[IMG]", tokenizer, images), images, tokenizer)


def build_qwen2_5_vl(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Qwen2.5-VL into a folder, as it was published. Return transformers with the same weights."""
    return _build_qwen(folder, seed, changes, "qwen2_5_vl", _QWEN_VISION, _MROPE)


def build_qwen2_vl(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Qwen2-VL into a folder, as it was published. Return transformers with the same weights."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    return _build_qwen(folder, seed, changes, "qwen2_vl", vision, _MROPE)


def build_qwen3_vl(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Qwen3-VL into a folder, as it was published. Return transformers with the same weights."""
    return _build_qwen(folder, seed, changes, "qwen3_vl", _QWEN3_VISION, _QWEN3_TEXT)


def build_qwen3_vl_moe(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Qwen3-VL with experts into a folder, as it was published. Return transformers with its weights."""
    return _build_qwen(folder, seed, changes, "qwen3_vl_moe", _QWEN3_VISION, _QWEN3_TEXT | _EXPERTS)


def build_qwen3_5(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Qwen3.5 into a folder, as it was published. Return transformers with the same weights."""
    return _build_qwen(folder, seed, changes, "qwen3_5", _QWEN3_5_VISION, FAMILIES["qwen3_5"].settings)


def build_qwen3_5_moe(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Qwen3.5 with experts into a folder, as it was published. Return transformers with its weights."""
    return _build_qwen(folder, seed, changes, "qwen3_5_moe", _QWEN3_5_VISION, FAMILIES["qwen3_5_moe"].settings)


def _build_qwen(
    folder: Path, seed: int, changes: dict[str, Any], model_type: str, vision: dict[str, Any], text: dict[str, Any]
) -> VisionOracle:
    tokenizer = _tokenizer([*QWEN_TOKENS, QWEN_VIDEO], "".join(QWEN_TOKENS))
    tokenizer.chat_template = tokenizer.chat_template.replace("[VIDEO]", QWEN_TOKENS[0] + QWEN_VIDEO + QWEN_TOKENS[2])
    common = {name: value for name, value in _TEXT.items() if name not in ("model_type", "head_dim", "sliding_window")}
    settings = {
        "model_type": model_type,
        "text_config": common | text,
        "vision_config": vision,
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids(QWEN_VIDEO),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 1024}, patch_size=4, temporal_patch_size=2, merge_size=2
    )
    return QwenOracle(_write(folder, settings, seed, changes, "<|image_pad|>", tokenizer, images), images, tokenizer)


def build_gemma3(folder: Path, seed: int = 0, is_saved: bool = False, **changes: Any) -> VisionOracle:
    """Write a tiny Gemma 3 into a folder, as it was published, or as transformers saves it. Return transformers."""
    tokenizer = _tokenizer(GEMMA_TOKENS, GEMMA_TOKENS[0])
    tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token = GEMMA_TOKENS
    ids = tokenizer.convert_tokens_to_ids(GEMMA_TOKENS)
    tokenizer.boi_token_id, tokenizer.image_token_id, tokenizer.eoi_token_id = ids
    settings = {
        "model_type": "gemma3",
        "text_config": _TEXT | _GEMMA_TEXT,
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 16,
        "vocab_size": _TEXT["vocab_size"],
        **dict(zip(("boi_token_index", "image_token_index", "eoi_token_index"), ids, strict=True)),
    }
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    model = _write(folder, settings, seed, changes, GEMMA_TOKENS[1], tokenizer, images)
    if not is_saved:
        weights = mx.load(str(folder / "model.safetensors"))
        published = {name.replace("vision_tower.", "vision_tower.vision_model."): weights[name] for name in weights}
        mx.save_safetensors(str(folder / "model.safetensors"), published, {"format": "pt"})
    return GemmaOracle(model, Gemma3Processor(images, tokenizer, image_seq_length=16), tokenizer)


def build_gemma4(folder: Path, seed: int = 0, has_experts: bool = False, **changes: Any) -> VisionOracle:
    """Write a tiny Gemma 4 into a folder, in the form of the large ones. Return transformers with the same weights."""
    text = _GEMMA4_TEXT | {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
    }
    if has_experts:
        text |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
    return _build_gemma4(folder, seed, changes, text, {"standardize": True})


def build_small_gemma4(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Gemma 4 into a folder, in the form of E2B and E4B. Return transformers with the same weights."""
    text = _GEMMA4_TEXT | {
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }
    return _build_gemma4(folder, seed, changes, text, {"use_clipped_linears": True})


def _build_gemma4(
    folder: Path, seed: int, changes: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]
) -> VisionOracle:
    tokenizer = _tokenizer(GEMMA4_TOKENS, GEMMA4_TOKENS[1])
    ids = tokenizer.convert_tokens_to_ids(GEMMA4_TOKENS)
    settings = {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": _GEMMA4_VISION | vision,
        "vocab_size": _TEXT["vocab_size"],
        **dict(zip(("boi_token_id", "image_token_id", "eoi_token_id"), ids, strict=True)),
    }
    images = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4, pooling_kernel_size=2)
    return Gemma4Oracle(_write(folder, settings, seed, changes, GEMMA4_TOKENS[1], tokenizer, images), images, tokenizer)


def build_idefics3(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny Idefics 3 into a folder, as it was published. Return transformers with the same weights."""
    return _build_idefics(folder, seed, changes, "idefics3", Idefics3ImageProcessorPil, IDEFICS_TOKENS[:2])


def build_smolvlm(folder: Path, seed: int = 0, **changes: Any) -> VisionOracle:
    """Write a tiny SmolVLM2 into a folder, as it was published. Return transformers with the same weights."""
    return _build_idefics(folder, seed, changes, "smolvlm", SmolVLMImageProcessorPil, IDEFICS_TOKENS)


def _build_idefics(
    folder: Path, seed: int, changes: dict[str, Any], model_type: str, processor: Any, tokens: list[str]
) -> VisionOracle:
    tokenizer = _tokenizer(tokens, "<image>")
    common = {name: value for name, value in _TEXT.items() if name != "sliding_window"}
    settings = {
        "model_type": model_type,
        "text_config": common | {"model_type": "llama"},
        "vision_config": _SIGLIP | {"model_type": f"{model_type}_vision"},
        "scale_factor": 4,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "tie_word_embeddings": changes.pop("is_tied", False),
    }
    images = processor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    model = _write(folder, settings, seed, changes, "<image>", tokenizer, images)
    return IdeficsOracle(model, images, tokenizer)


def _tokenizer(tokens: list[str], marker: str) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE.replace("[IMG]", marker)
    return tokenizer


def _write(
    folder: Path,
    settings: dict[str, Any],
    seed: int,
    changes: dict[str, Any],
    image_token: str,
    tokenizer: Any,
    images: Any,
) -> Any:
    """Write a model, its tokenizer and its processor of images as they are published. Return the model.

    It never writes the token of images, which transformers would take for one.
    """
    model = reference.build_model(reference.build_config(settings), seed)
    bits = changes.pop("bits", None)
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids(image_token)] = 0
    quantised = round_weights(model, bits) if bits else {}
    model.save_pretrained(folder)
    if settings["model_type"] in FAMILIES:
        FAMILIES[settings["model_type"]].convert(folder)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    if bits:
        store_quantised(folder / "model.safetensors", quantised)
        changes["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
    if changes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return model


BUILD = {
    "mistral3": build_mistral3,
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen2_vl": build_qwen2_vl,
    "qwen3_vl": build_qwen3_vl,
    "qwen3_vl_moe": build_qwen3_vl_moe,
    "qwen3_5": build_qwen3_5,
    "qwen3_5_moe": build_qwen3_5_moe,
    "gemma3": build_gemma3,
    "gemma4": build_gemma4,
    "small gemma4": build_small_gemma4,
    "idefics3": build_idefics3,
    "smolvlm": build_smolvlm,
}
