"""Mixtures of experts from afmoe to granitemoe."""

from survey.families import a_to_h_layouts as layouts
from survey.families.family import VOCAB_SIZE, Family
from survey.mutations import Config

_WINDOW = 16
_THREE_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
_YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
_PLAIN: Config = {"rope_type": "default", "rope_theta": 10_000.0}
_EXPERTS: Config = {  # DeepSeek's names: one dense layer, then experts in groups
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "moe_layer_freq": 1,  # this and the next are known to mlx-lm alone
    "scoring_func": "sigmoid",
}
_MLA: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_NOAUX: Config = {**_EXPERTS, **_MLA, "topk_method": "noaux_tc"}
# With few heads many keys have a score of exactly 0, and which of them are chosen is arbitrary.
_INDEXER: Config = {"index_topk": _WINDOW, "index_n_heads": 16, "index_head_dim": 16}

FAMILIES = (
    Family(
        "afmoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": [*_THREE_LAYERS, "sliding_attention"],
            "sliding_window": _WINDOW,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "mup_enabled": True,
            "score_func": "sigmoid",  # these are known to mlx-lm alone
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Family(
        "dbrx",
        {
            "ffn_config": {
                "ffn_act_fn": {"name": "silu"},
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": 1.0,
            },
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10_000.0},
        },
        shape={"vocab_size": VOCAB_SIZE, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    ),
    Family(
        "deepseek_v2",
        {
            **_EXPERTS,
            **_MLA,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "rope_parameters": _YARN,
        },
        {"lite": {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}},
    ),
    Family(
        "deepseek_v3",
        {**_NOAUX, "rope_parameters": _YARN},
        {"lite": {"q_lora_rank": None, "rope_parameters": _PLAIN, "n_group": 1, "topk_group": 1}},
    ),
    Family(
        "deepseek_v32",
        {**_NOAUX, **_INDEXER, "rope_parameters": _YARN},
        {"plain_rope": {"rope_parameters": _PLAIN, "n_group": 1, "topk_group": 1}},
    ),
    Family(
        "dots1",
        {**_EXPERTS, "head_dim": 16, "n_group": 1, "topk_group": 1, "scoring_func": "noaux_tc"},
        {
            "groups": {"n_group": 4, "topk_group": 2},
            "sliding": {"layer_types": _THREE_LAYERS, "sliding_window": _WINDOW},
        },
    ),
    Family(
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
            "moe_use_aux_free": True,  # this and the next are known to mlx-lm alone
            "moe_gate_act": "softmax",
        },
    ),
    Family(
        "exaone_moe",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["sliding_attention", *_THREE_LAYERS],
            "sliding_window": _WINDOW,
            "first_k_dense_replace": 1,
            "is_moe_layer": [False, True, True, True],  # mlx-lm's name for it
            "moe_intermediate_size": 32,
            "num_experts": 16,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        {"one_group": {"n_group": 1, "topk_group": 1}},
    ),
    Family(
        "glm4_moe",
        {
            **_EXPERTS,
            "head_dim": 16,
            "topk_method": "noaux_tc",
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5},
        },
        {"air": {"use_qk_norm": False, "n_group": 1, "topk_group": 1}},
    ),
    Family("glm4_moe_lite", _NOAUX, {"one_group": {"n_group": 1, "topk_group": 1}, "yarn": {"rope_parameters": _YARN}}),
    Family(
        "glm_moe_dsa",
        {**_NOAUX, **_INDEXER, "indexer_rope_interleave": True},
        {"one_group": {"n_group": 1, "topk_group": 1}},
    ),
    Family(
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": _WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        publish=layouts.split_interleaved_experts,
    ),
    Family(
        "granitemoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.8,
        },
    ),
)
