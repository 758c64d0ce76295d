"""The settings of a peft adapter: adapter_config.json, and which layers it changes with which rank and scale.

Every key is known here. What changes the numbers is followed, what does not is ignored, and everything else must be
neutral: a setting that would be ignored refuses the adapter.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scorepool.engine.errors import AdapterError

_WITHOUT_EFFECT = {  # on a forward pass after training
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
# Ways to initialise A and B that leave the base model as it is. Others replace its weights by a residual.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")
_NEUTRAL: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """The settings that decide about the numbers."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None
    layers_to_transform: list[int] | int | None
    layers_pattern: list[str] | str | None

    def rank_of(self, path: str) -> int:
        """Return the rank of the layer at a path."""
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, path), self.rank)

    def scale_of(self, path: str) -> float:
        """Return what B(A x) is multiplied by."""
        alpha, rank = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, path), self.alpha), self.rank_of(path)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def changes(self, path: str) -> bool:
        """True if the layer at a path is one that peft adapts."""
        if self.exclude_modules and _names(self.exclude_modules, path):
            return False
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, path) is not None
        return _names(self.target_modules, path) and self._is_in_layers(path)

    def _is_in_layers(self, path: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        expressions = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns or ()] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for expression in expressions if (match := re.match(expression, path))), None)
        return found is not None and int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)


def read_settings(config: Any) -> PeftSettings:
    """Check adapter_config.json. Raises AdapterError."""
    if not isinstance(config, dict):
        raise AdapterError(f"adapter_config.json is {config!r:.100}, expected a JSON object")
    _expect(config, "peft_type", config.get("peft_type") == "LORA", '"LORA"')
    for key, value in config.items():
        if key not in _WITHOUT_EFFECT and not any(value == neutral for neutral in _NEUTRAL):
            _expect(config, key, False, "it to be unset: it would be ignored, and the logprobs would be others")
    _expect(config, "bias", config.get("bias", "none") == "none", '"none": biases are not loaded')
    init = config.get("init_lora_weights")
    _expect(config, "init_lora_weights", init in _PLAIN_INITS, "an init that does not change the base model's weights")
    targets = config.get("target_modules")
    is_all = targets in ("all-linear", "all_linear")
    is_names = isinstance(targets, str) or (_is_list(targets, str) and bool(targets))
    _expect(config, "target_modules", is_names and not is_all, "a pattern, or a list of the names of layers")
    for key in ("use_rslora", "use_dora"):
        _expect(config, key, isinstance(config.get(key, False), bool), "true or false")
    _expect(config, "r", _is_rank(config.get("r")), "a whole number from 1 on")
    _expect(config, "lora_alpha", _is_number(config.get("lora_alpha", 8)), "a number")
    for key, check, expected in (("rank_pattern", _is_rank, "ranks"), ("alpha_pattern", _is_number, "numbers")):
        patterns = config.get(key) or {}
        is_right = isinstance(patterns, dict) and all(map(check, patterns.values())) and all(map(_is_regex, patterns))
        _expect(config, key, is_right, f"an object with {expected} by pattern")
    _check_choice_of_layers(config)
    return PeftSettings(
        rank=config["r"],
        alpha=config.get("lora_alpha", 8),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
        use_rslora=config.get("use_rslora", False),
        use_dora=config.get("use_dora", False),
        target_modules=config["target_modules"],
        exclude_modules=config.get("exclude_modules"),
        layers_to_transform=config.get("layers_to_transform"),
        layers_pattern=config.get("layers_pattern"),
    )


def _check_choice_of_layers(config: dict[str, Any]) -> None:
    for key in ("target_modules", "exclude_modules"):
        value = config.get(key)
        is_right = value is None or _is_list(value, str) or (isinstance(value, str) and _is_regex(value))
        _expect(config, key, is_right, "a pattern, or a list of the names of layers")
    pattern = config.get("layers_pattern")
    patterns = [pattern] if isinstance(pattern, str) else pattern
    is_right = patterns is None or (_is_list(patterns, str) and all(map(_is_regex, patterns)))
    _expect(config, "layers_pattern", is_right, "a pattern or a list of patterns")
    layers = config.get("layers_to_transform")
    _expect(config, "layers_to_transform", layers is None or _is_rank(layers, 0) or _is_list(layers, int), "indices")


def _expect(config: dict[str, Any], key: str, is_right: bool, expected: str) -> None:
    if not is_right:
        raise AdapterError(f"adapter_config.json: {key} is {config.get(key)!r:.100}, expected {expected}")


def _names(names: list[str] | str, path: str) -> bool:
    """True if the path is one of the names, or ends with one; of a pattern, if it matches."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _pattern_of(patterns: Mapping[str, object], path: str) -> str:
    """Return the first pattern that matches the end of the path, as peft looks for it."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), path)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _is_rank(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_regex(value: object) -> bool:
    try:
        re.compile(str(value))
    except re.error:
        return False
    return True
