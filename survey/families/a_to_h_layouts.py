"""Published layouts of checkpoints from afmoe to hunyuan_v1_dense, where transformers saves another."""

from survey.families.family import Config, Weights


def without_prefix(config: Config, weights: Weights) -> None:
    """Name GPT-2's weights as its first release does. mlx-lm refuses those that begin with `transformer.`."""
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)


def split_interleaved_experts(config: Config, weights: Weights) -> None:
    """Write gpt-oss's experts as mlx-lm's converter does.

    transformers interleaves gate and up, and names unquantised experts without `.weight`. OpenAI's files are mxfp4.
    """
    for name in list(weights):
        experts, _, last = name.rpartition(".")
        if not experts.endswith("experts"):
            continue
        weight, kind = weights.pop(name), "bias" if last.endswith("bias") else "weight"
        weight = weight if kind == "bias" else weight.transpose(-1, -2)
        if last.startswith("down"):
            weights[f"{experts}.down_proj.{kind}"] = weight
            continue
        halves = (weight[:, start::2] for start in (0, 1))
        for projection, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            weights[f"{experts}.{projection}.{kind}"] = half


def rename_to_ling(config: Config, weights: Weights) -> None:
    """Write the names of Ling's settings. transformers saves other names, and the rotary size as head_dim."""
    names = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "linear_head_dim": "head_dim",
    }
    config |= {new: config.pop(old) for old, new in names.items() if old in config}
    config |= {"architectures": ["BailingMoeV3ForCausalLM"], "q_lora_rank": None}


def rename_granite_layers(config: Config, weights: Weights) -> None:
    """Write Granite's names for the kinds of layers, and leave out the default of a setting that is newer than it."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
    if config["time_step_limit"] == [0.0, float("inf")]:
        del config["time_step_limit"]
