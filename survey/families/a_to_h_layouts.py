"""Published layouts of checkpoints from afmoe to hunyuan_v1_dense, where transformers saves another."""

from survey.families.family import Weights
from survey.mutations import Config


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
    """Write Ling's names. transformers saves some settings by others, and the rotary size as head_dim.

    It also names the output projections of all layers as those of softmax attention.
    """
    names = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "linear_head_dim": "head_dim",
    }
    config |= {new: config.pop(old) for old, new in names.items() if old in config}
    config |= {"architectures": ["BailingMoeV3ForCausalLM"], "q_lora_rank": None}
    for name in [name for name in weights if name.endswith("attention.A_log")]:
        layer = name.removesuffix("A_log")
        weights[f"{layer}o_proj.weight"] = weights.pop(f"{layer}dense.weight")


def rename_granite_layers(config: Config, weights: Weights) -> None:
    """Write Granite's names for the kinds of layers, and leave out the default of a setting that is newer than it."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
    if config["time_step_limit"] == [0.0, float("inf")]:
        del config["time_step_limit"]


def nest_gemma3n(config: Config, weights: Weights) -> None:
    """Put the text model where gemma3n has it. Its checkpoints have unused projections where keys are shared."""
    text = dict(config)
    config.clear()
    config |= {"model_type": "gemma3n", "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    for layer in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
        for part in ("k_norm", "k_proj", "v_proj"):
            unused = weights[f"model.layers.0.self_attn.{part}.weight"].clone()
            weights[f"model.layers.{layer}.self_attn.{part}.weight"] = unused
    for name in list(weights):
        weights[f"model.language_model.{name.removeprefix('model.')}"] = weights.pop(name)


def name_global_heads(config: Config, weights: Weights) -> None:
    """Write Gemma 4's settings of the layers with full attention, which transformers saves layer by layer."""
    text = config.get("text_config", config)
    by_layer = text.pop("per_layer_config", None) or {}
    if by_layer:
        changed = next(iter(by_layer.values()))
        text["global_head_dim"] = changed.get("head_dim", text["head_dim"])
        text["num_global_key_value_heads"] = changed.get("num_key_value_heads")
