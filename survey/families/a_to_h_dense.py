"""Dense models from apertus to hunyuan_v1_dense."""

from survey.families import a_to_h_layouts as layouts
from survey.families.family import SHAPE, VOCAB_SIZE, Family
from survey.mutations import Config

_WINDOW = 16
_LAYERS_SSSF = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GPT: Config = {  # GPT-2 and its descendants have their own names
    "vocab_size": VOCAB_SIZE,
    "n_positions": SHAPE["max_position_embeddings"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

FAMILIES = (
    Family(
        "apertus",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "mlp_bias": False,  # these are required by mlx-lm and unknown to transformers
            "post_norm": False,
            "qk_norm": True,
        },
    ),
    Family("bitnet", {"mlp_bias": False}),
    Family("cohere", {"logit_scale": 0.8}, {"qk_norm": {"use_qk_norm": True}}),
    Family(
        "cohere2",
        {
            "logit_scale": 0.8,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "layer_types": _LAYERS_SSSF,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        },
    ),
    Family("ernie4_5", {"head_dim": 16}, {"bias": {"use_bias": True}}),
    Family(
        "exaone4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "sliding_window_pattern": "LLLG",
            "layer_types": _LAYERS_SSSF,
        },
        {
            "full": {
                "num_hidden_layers": 2,
                "sliding_window": None,
                "sliding_window_pattern": None,
                "layer_types": ["full_attention", "full_attention"],
            }
        },
    ),
    Family("gemma", {"head_dim": 16}),
    Family(
        "gemma2",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
            "sliding_window": _WINDOW,
        },
        {"long_window": {"sliding_window": 4096}},
    ),
    Family(
        "glm",
        {"head_dim": 16},
        {"edge": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}},
    ),
    Family("glm4", {"head_dim": 16}, {"no_bias": {"attention_bias": False}}),
    Family("gpt2", shape=_GPT, publish=layouts.without_prefix),
    Family("gpt_bigcode", {"n_inner": 128}, shape=_GPT),
    Family(
        "gpt_neox",
        {
            "intermediate_size": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.25},
        },
        {"sequential": {"use_parallel_residual": False}},
    ),
    Family("gptj", {"rotary_dim": 8}, shape=_GPT),
    Family(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.8,
        },
        {"bias": {"attention_bias": True, "mlp_bias": True}},
    ),
    Family("helium", {"head_dim": 16}),
    Family(
        "hunyuan_v1_dense",
        {"head_dim": 16, "use_qk_norm": True},  # transformers always has the norms
        {
            "alpha": {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 10_000.0,
                    "alpha": 50.0,
                    "factor": 1.0,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                }
            }
        },
    ),
)
