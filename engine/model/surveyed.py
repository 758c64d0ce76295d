"""Refuse settings that mlx-lm does not follow. `python -m survey --write` finds them, family by family.

A survey changes each setting of a family's tiny models alone and compares with transformers. Its result is a file of
surveyed_settings/: the settings that the engine follows at any value (or that change nothing), and those that it
follows only at some values. At load every setting of the checkpoint must be one of them. transformers' configuration
classes give the settings that config.json leaves out.
"""

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from scorepool.engine.errors import LoadError, first_cause
from scorepool.engine.versions import installed_version

Config = dict[str, Any]
Flat = dict[str, Any]  # settings by dotted name

_FOLDER = Path(__file__).parent / "surveyed_settings"
# Settings that no forward pass depends on: names, token ids, training, quantisation (the loader's), what is returned.
NOT_COMPUTED = {
    *("_attn_implementation", "_name_or_path", "architectures", "audio_config", "auto_map", "bos_token_id"),
    *("chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder"),
    *("label2id", "model_type", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id"),
    *("problem_type", "quantization", "quantization_config", "return_dict", "tokenizer_class", "torch_dtype"),
    *("transformers_version", "use_cache", "vision_config"),
}
SECTIONS = ("attn_config", "ffn_config", "text_config")  # whose settings are checked one by one
_ROPES = ("rope_parameters", "rope_scaling")
_OLD_ROPES = {"partial_rotary_factor", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct"}
_COMPARED = {"audio_config", "bos_token_id", "eos_token_id", "pad_token_id", "vision_config"}  # with other settings
_SAME_TYPES = {  # model types that mlx-lm knows, by what transformers calls the same architecture
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "xverse": "llama",
    "youtu_llm": "youtu",
}
# The architecture that transformers means by a type, if others have the type too: Ling 3.0, not 2.5.
_ARCHITECTURES = {"bailing_hybrid": "BailingMoeV3ForCausalLM"}


def transformers_type(config: Config) -> str:
    """Return the model type under which transformers knows the architecture; "" if it means another one by it."""
    model_type = str(config.get("model_type"))
    architecture = _ARCHITECTURES.get(model_type)
    if architecture is not None and architecture not in (config.get("architectures") or ()):
        return ""
    return _SAME_TYPES.get(model_type, model_type)


def is_known(config: Config) -> bool:
    """Return whether transformers knows the architecture."""
    return _known(transformers_type(config)) is not None


def default_settings(config: Config) -> Config:
    """Return the defaults of the settings that transformers has for the architecture, also for the text model."""
    known = _known(transformers_type(config))
    settings: Config = {} if known is None else known.to_dict()
    return settings | (settings.get("text_config") or {})


def canonical_config(config: Config) -> Config | None:
    """Return the configuration as transformers reads it, with its defaults; None if it does not know the model type.

    Raises LoadError if transformers refuses a value.
    """
    model_type = transformers_type(config)
    known = _known(model_type)
    if known is None:
        return None
    checked = {key: value for key, value in config.items() if key not in NOT_COMPUTED - _COMPARED}
    checked = _with_floats(checked, known.to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old names are read, too
        try:
            canonical: Config = type(known).from_dict({**checked, "model_type": model_type}).to_dict()
        except Exception as error:  # any: each class checks in its own way
            raise LoadError(f"config.json: {_name_culprit(type(known), checked, first_cause(error)[1])}") from error
    return canonical


def _with_floats(config: Config, defaults: Config) -> Config:
    """Return the configuration with 1.0 where it has 1 for a float. Some of transformers' classes refuse 1."""
    floats = dict(config)
    for key, value in config.items():
        default = defaults.get(key)
        if isinstance(default, float) and type(value) is int:
            floats[key] = float(value)
        elif isinstance(default, dict) and isinstance(value, dict):
            floats[key] = _with_floats(value, default)
    return floats


def _name_culprit(config_class: type[PreTrainedConfig], config: Config, text: str) -> str:
    """Put the setting without which transformers takes the configuration before the text of its error."""
    if any(key in text for key in config):
        return text
    for key, value in config.items():
        try:
            config_class.from_dict({name: other for name, other in config.items() if name != key})
        except Exception:  # noqa: S112 - any, as above
            continue
        return f"{key} is {value!r:.200}: {text}"
    return text


def check(config: Config) -> bool:
    """Return whether all settings were surveyed, with the installed mlx-lm. Raises LoadError for a wrong one.

    A model type that was not surveyed is not checked.
    """
    canonical, model_type = canonical_config(config), transformers_type(config)
    known_type = _known(model_type)
    if canonical is None or known_type is None or not _file(model_type).exists():
        return False
    table = json.loads(_file(model_type).read_text())
    defaults = flatten(known_type.to_dict())
    known = defaults.keys() | table["only"].keys() | table["excepted"].keys()
    for name, value in flatten(canonical).items():
        if name not in known and "text_config" not in config:  # Qwen2-VL's first releases have no section
            name = f"text_config.{name}"
        if name not in known or _is_followed(table, name, value):
            continue
        expected = table["only"].get(name, [])
        if name in defaults and name not in table["not_by_default"]:
            expected = [default_of(config, name), *expected]
        if value not in expected:
            raise LoadError(
                f"config.json: {name} is {value!r}, with which mlx-lm's {config['model_type']} computes something else "
                f"than transformers: its logprobs would be wrong{_among(expected)}"
            )
    return bool(table["versions"]["mlx-lm"] == installed_version("mlx-lm"))


def _is_followed(table: Config, name: str, value: object) -> bool:
    if name in table["excepted"]:
        return value not in table["excepted"][name]
    return name in table["followed"] or value in table["only"].get(name, [])


def flatten(config: Config) -> Flat:
    """Return the settings by dotted name. Those of a rotary scaling carry its type: rope_parameters.yarn.factor."""
    flat: Flat = {}
    for key, value in config.items():
        if key in NOT_COMPUTED or key.startswith("_"):
            continue
        if key in SECTIONS and isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        elif key in _ROPES and isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in _flatten_rope(value).items()}
        else:
            flat[key] = value
    return flat


def _flatten_rope(rope: Config) -> Flat:
    flat: Flat = {}
    rope_type = rope.get("rope_type") or "default"
    for key, value in rope.items():
        if isinstance(value, dict):  # the parameters of one type of layer
            flat |= {f"{key}.{name}": inner for name, inner in _flatten_rope(value).items()}
        else:
            flat[rope_name(rope_type, key)] = value
    return flat


def rope_name(rope_type: str, parameter: str) -> str:
    """Return the name of a rotary parameter: it has another meaning, or none, in another type."""
    if rope_type == "default" or parameter in ("rope_type", "rope_theta"):
        return parameter
    return f"{rope_type}.{parameter}"


def default_of(config: Config, name: str) -> object:
    """Return the value that a setting has if config.json leaves it out; it may depend on other settings."""
    section, _, rest = name.partition(".")
    key = rest.partition(".")[0]
    if section in SECTIONS and isinstance(config.get(section), dict):
        without = config | {section: _leave_out(config[section], key, {})}
    elif section in SECTIONS:
        without = _leave_out(config, key, {})
    else:
        known = _known(transformers_type(config))
        without = _leave_out(config, section, {} if known is None else type(known).attribute_map)
    try:
        canonical = canonical_config(without)
    except LoadError:
        return None
    return flatten(canonical or {}).get(name)


def _leave_out(config: Config, key: str, other_names: dict[str, str]) -> Config:
    left_out = {key} | {other for other, name in other_names.items() if name == key}
    if key in _ROPES:
        left_out |= _OLD_ROPES
    return {name: value for name, value in config.items() if name not in left_out}


def _among(values: list[object]) -> str:
    return f"; expected {', '.join(dict.fromkeys(map(repr, values)))}" if values else ""


def _file(model_type: str) -> Path:
    return _FOLDER / f"{model_type}.json"


@cache
def _known(model_type: str) -> PreTrainedConfig | None:
    """Return transformers' configuration with its defaults; None if it does not know the model type."""
    try:
        known: PreTrainedConfig = AutoConfig.for_model(model_type)
    except (KeyError, ValueError):
        return None
    return known
