"""Families from internlm3 to starcoder2: dense layers of attention."""

from survey.families.family import Family, Weights, rename
from survey.mutations import Config

_SMALL_HEADS: Config = {"head_dim": 16}
_LONGROPE: Config = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
_SLIDING: Config = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


def _publish_internlm3(config: Config, weights: Weights) -> None:
    config["qkv_bias"], config["bias"] = config.pop("attention_bias"), config.pop("mlp_bias")


def _publish_nanochat(config: Config, weights: Weights) -> None:
    """Use the names of nanochat's own code, which mlx-lm reads."""
    names = {"embed_tokens": "wte", "layers": "h", "self_attn": "attn", "model": "transformer", "o_proj": "c_proj"}
    rename(weights, names | {r"([qkv])_proj": r"c_\1", "fc1": "c_fc", "fc2": "c_proj"})


def _publish_youtu(config: Config, weights: Weights) -> None:
    config["model_type"] = "youtu_llm"  # of the release


FAMILIES: tuple[Family, ...] = (
    Family(
        "internlm3",
        _SMALL_HEADS,
        others={"biased": {"attention_bias": True, "mlp_bias": True}},
        publish=_publish_internlm3,
    ),
    Family("iquestcoder", _SMALL_HEADS),
    Family("llama", _SMALL_HEADS),
    Family(
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "scale_emb": 3,
            "dim_model_base": 128,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.3, 1.6, 1.9],
                "long_factor": [1.0, 1.3, 1.6, 1.9],
                "original_max_position_embeddings": 512,
            },
        },
        others={"tied": {"tie_word_embeddings": True}},
    ),
    Family(
        "ministral3",
        {
            **_SMALL_HEADS,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    Family("mistral", {**_SMALL_HEADS, "sliding_window": None}),
    Family("nanochat", publish=_publish_nanochat),
    Family("nemotron", {"head_dim": 16}),
    Family("olmo"),
    Family("olmo2"),
    Family(
        "olmo3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    Family("phi"),
    Family(
        "phi3",
        {"sliding_window": None},
        others={"longrope": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}},
    ),
    Family("qwen2", others={"sliding": _SLIDING}),
    Family("qwen3", {**_SMALL_HEADS, "tie_word_embeddings": True}, others={"sliding": _SLIDING}),
    Family("seed_oss", _SMALL_HEADS),
    Family("smollm3", {"no_rope_layer_interval": 2}),
    Family("stablelm", others={"parallel": {"use_parallel_residual": True}, "normed": {"qk_layernorm": True}}),
    Family("starcoder2"),
    Family(
        "youtu",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
        others={"untied": {"tie_word_embeddings": False}},
        publish=_publish_youtu,
    ),
)
