"""Families from laguna to solar_open: layers of experts, with attention alone."""

import re

from survey.families.family import Family, Weights
from survey.mutations import Config

_EXPERTS: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
_SMALL_EXPERTS: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPES: Config = {
    "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_SLIDING: Config = {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}


def _publish_longcat_flash(config: Config, weights: Weights) -> None:
    config["attention_method"], config["zero_expert_type"] = "MLA", "identity"
    config["mla_scale_q_lora"] = config["mla_scale_kv_lora"] = True
    for name in list(weights):
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert and int(expert[1]) >= config["n_routed_experts"]:
            del weights[name]  # transformers saves unused weights for the experts that return their input


def _publish_mimo_v2_flash(config: Config, weights: Weights) -> None:
    ropes = config["rope_parameters"]
    config |= {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config["layer_types"]],
        "layernorm_epsilon": config["rms_norm_eps"],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "n_shared_experts": None,
        "partial_rotary_factor": ropes["full_attention"].get("partial_rotary_factor", 1.0),
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "scoring_func": "sigmoid",
        "sliding_window": config["sliding_window"] - 1,
        "sliding_window_size": config["sliding_window"] - 1,
        "swa_head_dim": config["head_dim"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "swa_v_head_dim": config["v_head_dim"],
        "topk_method": "noaux_tc",
    }


def _publish_minimax_m2(config: Config, weights: Weights) -> None:
    factor = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    config |= {
        "qk_norm_type": "per_layer",
        "rotary_dim": int(config["head_dim"] * factor),
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def _publish_solar_open(config: Config, weights: Weights) -> None:
    config["first_k_dense_replace"] = 0
    config["partial_rotary_factor"] = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    config["use_qk_norm"] = False


FAMILIES: tuple[Family, ...] = (
    Family(
        "laguna",
        {
            **_SMALL_EXPERTS,
            **_SLIDING,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_routed_scaling_factor": 1.5,
            "num_attention_heads_per_layer": [4, 6],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
            },
            "shared_expert_intermediate_size": 32,
        },
    ),
    Family(
        "longcat_flash",
        {
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 128,
            "head_dim": 8,
            "kv_lora_rank": 32,
            "moe_topk": 3,
            "n_routed_experts": 8,
            "num_key_value_heads": 4,
            "num_layers": 2,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "zero_expert_num": 4,
        },
        publish=_publish_longcat_flash,
    ),
    Family("mellum", {**_SMALL_EXPERTS, **_SLIDING, "head_dim": 16, "rope_parameters": _ROPES}),
    Family(
        "mimo_v2_flash",
        {
            "head_dim": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.334},
            },
            "sliding_window": 17,
            "v_head_dim": 16,
        },
        publish=_publish_mimo_v2_flash,
    ),
    Family(
        "minimax_m2",
        {
            **_EXPERTS,
            "head_dim": 16,
            "intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
        },
        publish=_publish_minimax_m2,
    ),
    Family("mixtral", {**_EXPERTS, "head_dim": 16, "intermediate_size": 32}),
    Family("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}),
    Family(
        "phimoe",
        {
            **_EXPERTS,
            "attention_bias": True,
            "intermediate_size": 32,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
                "short_mscale": 1.5,
                "long_mscale": 2.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    Family(
        "qwen2_moe",
        {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 32},
        others={"dense_layer": {"mlp_only_layers": [0]}},
    ),
    Family(
        "qwen3_moe",
        {**_SMALL_EXPERTS, "head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": True},
        others={
            "all_experts": {"mlp_only_layers": []},
            "sliding": {"use_sliding_window": True, "sliding_window": 16},
        },
    ),
    Family(
        "solar_open",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
        others={"grouped": {"n_group": 4, "topk_group": 2}},
        publish=_publish_solar_open,
    ),
)
