"""Gemma 3, 3n and 4."""

from dataclasses import replace

from survey.families import a_to_h_layouts as layouts
from survey.families.family import VOCAB_SIZE, Family
from survey.mutations import Config

_WINDOW = 16
_VISION: Config = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
_AUDIO: Config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
_VOCABULARY: Config = {"vocab_size": VOCAB_SIZE}  # mlx-lm's multimodal classes read it outside of text_config
_PER_KIND: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
}
_GEMMA3 = Family(
    "gemma3_text",
    {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            **_PER_KIND,
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        },
    },
    {"plain_rope": {"rope_parameters": _PER_KIND}},
)
_GEMMA3N = Family(
    "gemma3n",
    {
        "num_hidden_layers": 6,
        "intermediate_size": [128] * 6,
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.8, 0.7, 0.0, 0.0, 0.0, 0.0],
        "final_logit_softcapping": 8.0,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "rope_parameters": _PER_KIND,
    },
    outer={"model_type": "gemma3n_text"},  # the other parts of gemma3n need timm
    prefix="text_config.",
    publish=layouts.nest_gemma3n,
)
_NO_LAYER_INPUTS: Config = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA4 = Family(
    "gemma4_text",
    {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 8.0,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "rope_parameters": {
            **_PER_KIND,
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50_000.0},
        },
    },
    {
        "dense": _NO_LAYER_INPUTS,
        "experts": {
            **_NO_LAYER_INPUTS,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    },
    publish=layouts.name_global_heads,
)
_UNIFIED: Config = {  # it has no per-layer inputs and no experts
    **{name: value for name, value in _GEMMA4.settings.items() if "per_layer_input" not in name},
    "hidden_size_per_layer_input": 0,  # known to mlx-lm alone
}

FAMILIES = (
    _GEMMA3,
    replace(
        _GEMMA3,
        model_type="gemma3",
        section="text_config",
        outer={"vision_config": _VISION, "mm_tokens_per_image": 4, **_VOCABULARY},
    ),
    _GEMMA3N,
    _GEMMA4,
    replace(
        _GEMMA4,
        model_type="gemma4",
        section="text_config",
        outer={"vision_config": _VISION, "audio_config": _AUDIO, **_VOCABULARY},
    ),
    replace(
        _GEMMA4,
        model_type="gemma4_unified",
        settings=_UNIFIED,
        others={"equal": {"attention_k_eq_v": True, "num_global_key_value_heads": 1}},
        section="text_config",
        outer={"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}, **_VOCABULARY},
    ),
)
