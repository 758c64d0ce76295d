"""Families from jamba to recurrent_gemma: layers with a recurrent state."""

from survey.families.family import Family, Weights, rename
from survey.mutations import Config

_GATED_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_PARTIAL_ROPE: Config = {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5}


def _publish_kimi_linear(config: Config, weights: Weights) -> None:
    kinds = config.pop("layer_types")
    config |= {
        "first_k_dense_replace": config.pop("mlp_layer_types").count("dense"),
        "linear_attn_config": {
            "full_attn_layers": [place + 1 for place, kind in enumerate(kinds) if kind == "full_attention"],
            "head_dim": config.pop("linear_head_dim"),
            "kda_layers": [place + 1 for place, kind in enumerate(kinds) if kind == "linear_attention"],
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "use_grouped_topk": True,
    }
    rename(weights, {r"block_sparse_moe\.(gate_proj|up_proj|down_proj)": r"mlp.\1"})  # of dense layers


def _publish_lfm2(config: Config, weights: Weights) -> None:
    """Use the names of the first release; mlx-lm requires `block_dim`, which transformers does not have."""
    _publish_lfm2_moe(config, weights)
    config["block_dim"] = config["hidden_size"]
    config["block_ff_dim"] = config.pop("intermediate_size")


def _publish_lfm2_moe(config: Config, weights: Weights) -> None:
    names = {"linear_attention": "conv"}
    config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
    config["tie_embedding"] = config.pop("tie_word_embeddings")


def _publish_nemotron_h(config: Config, weights: Weights) -> None:
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    kinds = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)


def _publish_olmo_hybrid(config: Config, weights: Weights) -> None:
    rename(weights, {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"})


FAMILIES: tuple[Family, ...] = (
    Family(
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 3,
        },
        others={"experts": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    Family(
        "kimi_linear",
        {
            "kv_lora_rank": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
        others={"grouped": {"num_expert_group": 4, "topk_group": 2}},
        publish=_publish_kimi_linear,
    ),
    Family(
        "lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
        },
        others={"adjusted": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16}},
        publish=_publish_lfm2,
    ),
    Family(
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
        },
        publish=_publish_lfm2_moe,
    ),
    Family("mamba", {"state_size": 8, "time_step_rank": 8}),
    Family("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16}),
    Family(
        "minimax",
        {
            "block_size": 16,
            "head_dim": 16,
            "intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
    Family(
        "nemotron_h",
        {
            "chunk_size": 16,
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "moe", "mlp"],
            "mamba_head_dim": 16,
            "mamba_num_heads": 8,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "ssm_state_size": 16,
        },
        others={"grouped": {"n_group": 4, "topk_group": 2}, "latent": {"moe_latent_size": 24}},
        publish=_publish_nemotron_h,
    ),
    Family(
        "olmo_hybrid",
        {
            **_GATED_DELTA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "num_hidden_layers": 3,
        },
        publish=_publish_olmo_hybrid,
    ),
    Family(
        "qwen3_next",
        {
            **_GATED_DELTA,
            "decoder_sparse_step": 1,
            "full_attention_interval": 2,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": _PARTIAL_ROPE,
            "shared_expert_intermediate_size": 32,
        },
        others={"dense_layer": {"mlp_only_layers": [0]}},
    ),
    Family(
        "recurrent_gemma",
        {
            "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
            "logits_soft_cap": 12.0,
            "lru_width": 64,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
        },
    ),
)
