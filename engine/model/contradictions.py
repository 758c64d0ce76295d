"""Refuse a configuration whose values are impossible or contradict each other, before a model is made from it.

transformers' configuration classes check some of this for the types that they know (surveyed.py). The checks here name
key and value for every type. An absent setting, or null, has the type's default and is not checked.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any, TypeGuard

from scorepool.engine.errors import LoadError

Config = dict[str, Any]

_LARGEST = 2**31 - 1  # MLX's sizes are 32-bit integers
_AT_LEAST_1 = {
    *("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "moe_layer_freq", "n_ctx", "n_embd"),
    *("n_head", "n_layer", "n_positions", "n_shared_experts", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "num_layers", "vocab_size"),
}
_WHOLE = {*_AT_LEAST_1, "sliding_window"}
_NOT_NEGATIVE = ("dim", "expert", "heads", "layers", "rank", "size", "window")  # parts of the keys of sizes and counts
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk")
_GROUPS = ("n_group", "num_expert_group")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads"))
_ABOVE_0 = {
    *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor", "query_pre_attn_scalar", "rope_theta"),
}
_TYPES = {  # null is a value that the libraries take for absent, or not
    **dict.fromkeys(("auto_map", "text_config"), (dict, "an object")),
    **dict.fromkeys(("quantization_config", "rope_parameters", "rope_scaling"), (dict | None, "an object")),
    **dict.fromkeys(("architectures", "layer_types"), (list | None, "a list")),
}
# Settings of architectures for which num_attention_heads, num_key_value_heads and head_dim do not decide alone.
_OTHER_HEADS = {"kv_lora_rank", "multi_query", "num_attention_heads_per_layer", "state_size"}
_LEAST_VOCABULARY = {"phi3small": 100_352}  # mlx-lm excludes ids up to 100,351 by a constant: a write out of bounds
_QUANT_METHODS = {"awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8"}
# Weights that compressed-tensors packed. mlx-lm unpacks them with the zero point of 4 bits, whatever the settings are.
_PACKED_SETTINGS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def refuse_contradictions(config: Config) -> None:
    """Raise LoadError for the first value that no model can have, or that contradicts another."""
    if not isinstance(config.get("model_type"), str):
        raise _refusal("model_type", config.get("model_type"), "the name of an architecture")
    if config.get("model_file") is not None:
        raise _refusal("model_file", config["model_file"], "no such key: code of a checkpoint never runs")
    for prefix, section in (("", config), ("text_config.", config.get("text_config", {}))):
        _check_types(section, prefix)
        _check_sizes(section, prefix)
        _check_numbers(section, prefix)
        _check_pairs(section, prefix)
    least = _LEAST_VOCABULARY.get(config["model_type"], 0)
    vocab_size = config.get("vocab_size")
    if _is_int(vocab_size) and vocab_size < least:
        raise _refusal("vocab_size", vocab_size, f"at least {least} for {config['model_type']} in mlx-lm")
    _check_quantization(config)


def refuse_more_layers_than_tensors(config: Config, num_tensors: int) -> None:
    """Raise LoadError if there are fewer tensors than layers: mlx-lm would make all layers first."""
    for prefix, section in (("", config), ("text_config.", config.get("text_config") or {})):
        for key in _LAYERS:
            if _is_int(section.get(key)) and section[key] > num_tensors:
                expected = f"at most {num_tensors}, the number of tensors in the checkpoint"
                raise _refusal(prefix + key, section[key], expected)


def refuse_small_vocabulary(vocab_size: int, token_ids: Iterable[int]) -> None:
    """Raise LoadError if the tokenizer has ids for which the model computes no logits."""
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise _refusal("vocab_size", vocab_size, f"at least {highest + 1}: the tokenizer has ids up to {highest}")


def _check_types(section: Config, prefix: str) -> None:
    for key, (kind, expected) in _TYPES.items():
        if key in section and not isinstance(section[key], kind):
            raise _refusal(prefix + key, section[key], expected)


def _check_sizes(section: Config, prefix: str) -> None:
    has_other_heads = bool(_OTHER_HEADS & section.keys())
    for key, value in section.items():
        if key in _WHOLE and (isinstance(value, bool) or not isinstance(value, int | list | None)):
            raise _refusal(prefix + key, value, "a whole number")
        if not _is_int(value):
            continue
        if key in _AT_LEAST_1 and value < 1 and not (key in ("head_dim", "num_key_value_heads") and has_other_heads):
            raise _refusal(prefix + key, value, "at least 1")
        if value < 0 and any(part in key for part in _NOT_NEGATIVE):
            raise _refusal(prefix + key, value, "at least 0")
        if value > _LARGEST and any(part in key for part in _NOT_NEGATIVE):
            raise _refusal(prefix + key, value, f"at most {_LARGEST}")


def _check_numbers(section: Config, prefix: str) -> None:
    for name, value in _leaves(section, prefix):
        key, is_number = name.rpartition(".")[2], isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not (is_number or key in _ABOVE_0):
            continue
        if value != value:
            raise _refusal(name, value, "a number")
        if key in _ABOVE_0 and not (is_number and value > 0 and isfinite(value)):
            raise _refusal(name, value, "a finite number above 0")
        if key == "partial_rotary_factor" and value > 1:
            raise _refusal(name, value, "at most 1")
        if key.endswith(("eps", "epsilon")) and not (value >= 0 and isfinite(value)):
            raise _refusal(name, value, "a finite number of at least 0")


def _leaves(section: Config, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section and of its rotary parameters, by dotted name."""
    for key, value in section.items():
        if isinstance(value, dict) and (prefix.endswith("rope_parameters.") or key.startswith("rope_")):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key == "rope_theta" and isinstance(value, list):  # one a layer, as Step 3.5 has them
            yield from ((prefix + key, each) for each in value)
        else:
            yield prefix + key, value


def _check_pairs(section: Config, prefix: str) -> None:
    for many, few in () if _OTHER_HEADS & section.keys() else _HEADS:
        heads, shared = section.get(many), section.get(few)
        if _is_int(heads) and _is_int(shared) and shared > 0 and heads % shared:
            raise _refusal(prefix + few, shared, f"a divisor of {many}, which is {heads}")
    window = section.get("sliding_window", 1)
    if not window and "sliding_attention" in (section.get("layer_types") or ()):
        raise _refusal(f"{prefix}sliding_window", window, "at least 1, because layer_types has sliding_attention")
    local, chosen = section.get("index_local_blocks"), section.get("index_topk_blocks")
    if _is_int(local) and _is_int(chosen) and local > chosen:
        raise _refusal(f"{prefix}index_local_blocks", local, f"at most index_topk_blocks, which is {chosen}")
    _check_experts(section, prefix)


def _check_experts(section: Config, prefix: str) -> None:
    all_key = next((key for key in _EXPERTS if _is_int(section.get(key))), None)
    chosen_key = next((key for key in _EXPERTS_PER_TOKEN if _is_int(section.get(key))), None)
    if all_key is None or chosen_key is None or section[all_key] <= 1 or "zero_expert_num" in section:
        return  # a dense model, or one with more experts than it counts there
    if section[chosen_key] > section[all_key]:
        expected = f"at most {all_key}, which is {section[all_key]}"
        raise _refusal(prefix + chosen_key, section[chosen_key], expected)
    if section[chosen_key] < 1:
        raise _refusal(prefix + chosen_key, section[chosen_key], "at least 1")
    _check_groups(section, prefix, all_key, chosen_key)


def _check_groups(section: Config, prefix: str, all_key: str, chosen_key: str) -> None:
    """Check the groups of experts, of which a router keeps `topk_group`."""
    groups_key = next((key for key in _GROUPS if _is_int(section.get(key))), None)
    num_kept = section.get("topk_group")
    if groups_key is None or not _is_int(num_kept):
        return
    num_groups, num_experts = section[groups_key], section[all_key]
    if num_groups < 1 or num_experts % num_groups:
        raise _refusal(prefix + groups_key, num_groups, f"a divisor of {all_key}, which is {num_experts}")
    if not 1 <= num_kept <= num_groups:
        raise _refusal(f"{prefix}topk_group", num_kept, f"1 to {groups_key}, which is {num_groups}")
    num_candidates = num_experts // num_groups * num_kept
    if section[chosen_key] > num_candidates:
        expected = f"at most {num_candidates}, the number of experts in topk_group groups"
        raise _refusal(prefix + chosen_key, section[chosen_key], expected)


def _check_quantization(config: Config) -> None:
    settings = config.get("quantization")
    if settings is not None and not (isinstance(settings, dict) and {"bits", "group_size"} <= settings.keys()):
        raise _refusal("quantization", settings, "an object with bits and group_size")
    prefix = "" if "quantization_config" in config else "text_config."  # Kimi K2.5 has it there
    name, section = f"{prefix}quantization_config", config.get("text_config", {}) if prefix else config
    method = section.get("quantization_config")
    if settings is not None or not method:
        return
    if method.get("quant_method") not in _QUANT_METHODS:
        found = method.get("quant_method")
        raise _refusal(f"{name}.quant_method", found, ", ".join(sorted(_QUANT_METHODS)))
    if method.get("format") == "pack-quantized":
        _check_packed(method.get("config_groups"), f"{name}.config_groups")


def _check_packed(groups: object, name: str) -> None:
    """Check the layers that are packed alike, group by group."""
    if not isinstance(groups, dict) or not groups:
        raise _refusal(name, groups, "an object of groups")
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _refusal(f"{name}.{key}", group, "an object with weights")
        for setting, expected in _PACKED_SETTINGS.items():
            if weights.get(setting) != expected:
                raise _refusal(f"{name}.{key}.weights.{setting}", weights.get(setting), repr(expected))
        if group.get("input_activations") is not None:  # which mlx-lm would not round
            raise _refusal(f"{name}.{key}.input_activations", group["input_activations"], "null")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _refusal(name: str, value: object, expected: str) -> LoadError:
    return LoadError(f"config.json: {name} is {value!r:.200}, expected {expected}")
