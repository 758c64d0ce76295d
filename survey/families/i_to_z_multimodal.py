"""Families from idefics3 to smolvlm: text models of texts and images. The parts of images are tiny and unused."""

import torch

from survey.families.family import Family, Weights, rename
from survey.mutations import Config

_EXPERTS: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
_SMALL_EXPERTS: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GATED_DELTA: Config = {
    "full_attention_interval": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 3000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
_MROPE: Config = {"rope_type": "default", "rope_theta": 3000.0, "mrope_section": [2, 3, 3]}
_MROPE_INTERLEAVED: Config = {**_MROPE, "mrope_interleaved": True}
_YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LATENT: Config = {
    "kv_lora_rank": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_ROUTED: Config = {
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
}
_VISION: Config = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
_MUSE_IMAGES: Config = {
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
    "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
}
_QWEN_VISION: Config = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
}
_QWEN3_VISION: Config = {**_QWEN_VISION, "deepstack_visual_indexes": [0]}
_SLIDING: Config = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


def _publish_kimi_k25(config: Config, weights: Weights) -> None:
    config["text_config"]["model_type"] = "kimi_k2"
    rename(weights, {r"(language_model\.model\.)blocks": r"\1layers", r"model\.mm_projector": "mm_projector"})


def _publish_muse_glimmer(config: Config, weights: Weights) -> None:
    """Use the names of mlx-community's checkpoints: mlx-lm refuses the images' weights under those of the release."""
    rename(weights, {r"^model\.vision": "vision"})


def _publish_flat(config: Config, weights: Weights) -> None:
    """Write the text model's settings at the top level."""
    text = config.pop("text_config")
    config |= {key: value for key, value in text.items() if key not in ("model_type", "tie_word_embeddings")}


def _publish_qwen3_5_moe(config: Config, weights: Weights) -> None:
    for experts in {name.partition("experts.")[0] + "experts" for name in weights if "experts.0." in name}:
        count = config["text_config"]["num_experts"]
        gate, up, down = (
            torch.stack([weights.pop(f"{experts}.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        weights[f"{experts}.gate_up_proj"], weights[f"{experts}.down_proj"] = torch.cat([gate, up], dim=1), down


def _publish_qwen3_vl(config: Config, weights: Weights) -> None:
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"]


def _publish_qwen3_vl_moe(config: Config, weights: Weights) -> None:
    _publish_qwen3_vl(config, weights)
    config["text_config"]["norm_topk_prob"] = True
    for name in weights:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weights[name] = weights[name].transpose(1, 2)


_IDEFICS: Config = {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}, "tie_word_embeddings": False}

FAMILIES: tuple[Family, ...] = (
    Family("idefics3", {"model_type": "llama"}, section="text_config", outer=_IDEFICS),
    Family(
        "kimi_k25",
        {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "model_type": "deepseek_v3", "rope_parameters": _YARN},
        section="text_config",
        outer={
            "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
        publish=_publish_kimi_k25,
    ),
    Family(
        "llama4",
        {
            "attention_chunk_size": 16,
            "floor_scale": 16,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
        },
        section="text_config",
        outer={"vision_config": {**_VISION, "image_size": 28, "projector_output_dim": 64, "vision_output_dim": 64}},
    ),
    Family(
        "llama4_text",
        {
            "attention_chunk_size": 128,
            "attn_temperature_tuning": False,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "moe_layers": [],
            "no_rope_layers": [1, 1],
            "tie_word_embeddings": True,
        },
        others={"no_rope": {"no_rope_layers": [1, 0]}},
    ),
    Family(
        "llava",
        {"head_dim": 16, "model_type": "llama"},
        section="text_config",
        outer={"vision_config": {"model_type": "clip_vision_model", **_VISION, "image_size": 28, "patch_size": 14}},
    ),
    Family(
        "minimax_m3_vl",
        {
            **_EXPERTS,
            "dense_intermediate_size": 128,
            "head_dim": 16,
            "index_block_size": 8,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk_blocks": 2,
            "intermediate_size": 32,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
            "rotary_dim": 8,
            "shared_intermediate_size": 32,
            "swiglu_limit": 0.5,
        },
        section="text_config",
        outer={"vision_config": {**_VISION, "image_size": 28}, "projector_hidden_size": 64},
    ),
    Family(
        "mistral3",
        {"head_dim": 16, "model_type": "mistral", "sliding_window": None},
        others={
            "ministral3": {
                "model_type": "ministral3",
                "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512},
            },
            "mistral4": {
                **_LATENT,
                **_ROUTED,
                "head_dim": 24,
                "model_type": "mistral4",
                "rope_parameters": {
                    **_YARN,
                    "llama_4_scaling_beta": 0.1,
                    "max_position_embeddings": 512,
                    "partial_rotary_factor": 8 / 24,
                },
            },
        },
        section="text_config",
        outer={
            "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 28, "patch_size": 14},
            "tie_word_embeddings": False,
        },
    ),
    Family(
        "muse_glimmer",
        {
            "final_logit_softcapping": 10.0,
            "head_dim": 16,
            "output_multiplier": 3.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
        section="text_config",
        outer={**_MUSE_IMAGES},
        publish=_publish_muse_glimmer,
    ),
    Family(
        "muse_spark",
        {
            **_EXPERTS,
            "final_logit_softcapping": 10.0,
            "head_dim": 16,
            "output_multiplier": 3.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "moe_hidden_size": 64,
            "moe_intermediate_size": 32,
            "sliding_window": 16,
        },
        section="text_config",
        outer={
            "audio_config": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 8, 8], "out_hidden_size": 64},
            **_MUSE_IMAGES,
        },
    ),
    Family(
        "qwen2_5_vl",
        {"rope_parameters": _MROPE},
        others={"sliding": _SLIDING},
        section="text_config",
        outer={"vision_config": _QWEN_VISION},
        publish=_publish_flat,
    ),
    Family(
        "qwen2_vl",
        {"rope_parameters": _MROPE},
        others={"sliding": _SLIDING},
        section="text_config",
        outer={"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}},
        publish=_publish_flat,
    ),
    Family("qwen3_5", _GATED_DELTA, section="text_config", outer={"vision_config": _QWEN_VISION}),
    Family(
        "qwen3_5_moe",
        {**_GATED_DELTA, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 32},
        section="text_config",
        outer={"vision_config": _QWEN_VISION},
        publish=_publish_qwen3_5_moe,
    ),
    Family(
        "qwen3_vl",
        {"head_dim": 16, "rope_parameters": _MROPE_INTERLEAVED},
        section="text_config",
        outer={"vision_config": _QWEN3_VISION},
        publish=_publish_qwen3_vl,
    ),
    Family(
        "qwen3_vl_moe",
        {**_SMALL_EXPERTS, "head_dim": 16, "rope_parameters": _MROPE_INTERLEAVED},
        section="text_config",
        outer={"vision_config": _QWEN3_VISION},
        publish=_publish_qwen3_vl_moe,
    ),
    Family("smolvlm", {"model_type": "llama"}, section="text_config", outer=_IDEFICS),
)
