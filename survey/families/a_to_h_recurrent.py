"""Models with state-space and linear-attention layers from bailing_hybrid to granitemoehybrid."""

from survey.families import a_to_h_layouts as layouts
from survey.families.family import Family
from survey.mutations import Config

_MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

FAMILIES = (
    Family(
        "bailing_hybrid",
        {
            "architectures": ["BailingMoeV3ForCausalLM"],  # Ling 3.0; Ling 2.5 has the same model type
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,  # known to mlx-lm alone
            "num_local_experts": 16,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "head_dim": 16,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,  # transformers saves it as head_dim
            "v_head_dim": 12,
            "short_conv_kernel_size": 4,
            "num_mtp_layers": 0,
            "rope_interleave": True,  # these are known to mlx-lm alone
            "no_kda_lora": True,
        },
        publish=layouts.rename_to_ling,
    ),
    Family(
        "falcon_h1",
        {
            **_MAMBA,
            "head_dim": 16,
            "mamba_d_ssm": 128,
            "mamba_n_groups": 2,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "attention_out_multiplier": 0.9,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.4,
            "lm_head_multiplier": 0.8,
            "mlp_multipliers": [0.9, 0.6],
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.5, 0.7, 0.6, 0.8, 0.9],
            "ssm_out_multiplier": 0.7,
            "tie_word_embeddings": False,
        },
        {
            "norm": {"mamba_rms_norm": True},
            "gates_last": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    Family(
        "falcon_mamba",
        {"state_size": 16, "conv_kernel": 4, "time_step_rank": 4, "expand": 2, "tie_word_embeddings": False},
    ),
    Family(
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_groups": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.8,
            "position_embedding_type": "nope",
            "tie_word_embeddings": True,
        },
        {
            "groups": {"mamba_n_groups": 2},
            "dense": {"num_local_experts": 0, "intermediate_size": 64},
            "micro": {
                "num_local_experts": 0,
                "intermediate_size": 64,
                "position_embedding_type": "rope",
                "layer_types": ["attention", "attention", "attention"],
            },
        },
        publish=layouts.rename_granite_layers,
    ),
)
