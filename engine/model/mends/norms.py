"""Give norms the epsilon of transformers, where mlx-lm has another one or another setting in its code."""

from typing import Any

Config = dict[str, Any]

# By file of mlx_lm.models, and name of the norm in its layer: the epsilon, or the setting that gives it.
_EPSILONS: dict[str, dict[str, float | str]] = {
    "bailing_moe_v3": {"kv_a_layernorm": 1e-6},
    "deepseek_v32": {"k_norm": 1e-6},
    "glm4_moe_lite": {"q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6},
    "kimi_linear": {"kv_a_layernorm": 1e-6},
    "longcat_flash": {"q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6},
    "mamba": {"norm": "layer_norm_epsilon", "norm_f": "layer_norm_epsilon"},
    "mamba2": {"norm": "layer_norm_epsilon"},
    "minicpm3": {"q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6},
    "recurrent_gemma": {"temporal_pre_norm": "rms_norm_eps", "channel_pre_norm": "rms_norm_eps"},
    "youtu_llm": {"q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6},
}


def set_epsilons(model: Any, config: Config) -> None:
    """Set the epsilons of the model's norms."""
    for module in model.modules():
        epsilons = _EPSILONS.get(type(module).__module__.rpartition(".")[2], {})
        for name, norm in module.children().items():
            epsilon = epsilons.get(name)
            if epsilon is not None:
                norm.eps = config[epsilon] if isinstance(epsilon, str) else epsilon
