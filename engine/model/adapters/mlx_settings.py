"""The settings of an adapter that mlx-lm trained: adapter_config.json, and which layers it changes.

mlx-lm saves all options of the training. Three decide about the numbers: fine_tune_type, num_layers and
lora_parameters. A setting that only peft's adapters have refuses the adapter, because mlx-lm would ignore it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.base import Module

from scorepool.engine.errors import AdapterError

_KNOWN_PARAMETERS = {"rank", "scale", "dropout", "keys"}
_OF_PEFT = ("alpha_pattern", "bias", "lora_alpha", "modules_to_save", "rank_pattern", "target_modules", "use_rslora")
_NEUTRAL: tuple[object, ...] = (None, False, "", "none", [], {})
_TRAINABLE = {f"{packed}{kind}" for packed in ("", "Quantized") for kind in ("Linear", "SwitchLinear", "Embedding")}


@dataclass(frozen=True, slots=True)
class MlxSettings:
    """The settings that decide about the numbers."""

    rank: int
    scale: float
    num_layers: int  # the last ones; all if it is not positive
    keys: frozenset[str] | None  # paths of layers in a block, or in the model; None: all that can be trained
    use_dora: bool

    def changed_paths(self, model: Any) -> list[str]:
        """Return the paths in the model of the layers that mlx-lm adapts. Raises AdapterError."""
        blocks: list[Module] = list(model.layers)
        if self.num_layers > len(blocks):
            raise AdapterError(
                f"adapter_config.json: num_layers is {self.num_layers}, expected at most {len(blocks)}, the base "
                "model's layers: the adapter is of another model"
            )
        paths = {id(module): path for path, module in model.named_modules() if path}
        prefixes = [f"{paths[id(block)]}." for block in blocks]
        in_blocks = [list(block.named_modules()) for block in blocks]
        keys = self.keys
        if keys is None:
            keys = frozenset(key for each in in_blocks for key, module in each if _is_trainable(module))
        by_full_path = keys & set(paths.values())
        if outside := sorted(path for path in by_full_path if not path.startswith(tuple(prefixes))):
            raise AdapterError(
                f"adapter_config.json: lora_parameters.keys name {outside[0]}, expected layers of the model's "
                "blocks only: the head and the embeddings must be the base model's"
            )
        last = list(zip(prefixes, in_blocks, strict=True))[-max(self.num_layers, 0) :]
        return sorted(by_full_path | {prefix + key for prefix, each in last for key, _ in each if key in keys})


def _is_trainable(module: Module) -> bool:
    return any(kind.__name__ in _TRAINABLE for kind in type(module).__mro__)


def is_of_mlx_lm(config: Any) -> bool:
    """True if adapter_config.json is one that mlx-lm writes, and not peft's."""
    return (
        isinstance(config, dict)
        and "peft_type" not in config
        and bool({"fine_tune_type", "lora_parameters"} & config.keys())
    )


def read_settings(config: dict[str, Any]) -> MlxSettings:
    """Check adapter_config.json. Raises AdapterError."""
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterError(
            'adapter_config.json: fine_tune_type is \'full\', expected "lora" or "dora": whole layers cannot be served '
            "beside the base model; fuse them into it (mlx_lm.fuse), and serve the result as a model or as new weights "
            "of this one"
        )
    _expect(config, "fine_tune_type", kind in ("lora", "dora"), '"lora" or "dora"')
    for key in _OF_PEFT:
        is_neutral = any(config.get(key) == neutral for neutral in _NEUTRAL)
        _expect(config, key, is_neutral, "it to be unset: mlx-lm ignores it, so the logprobs would be others")
    num_layers = config.get("num_layers")
    _expect(config, "num_layers", type(num_layers) is int, "a whole number: how many of the last layers are changed")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(
            f"adapter_config.json: lora_parameters is {parameters!r:.100}, expected an object with rank and scale"
        )
    return _read_parameters(parameters, num_layers, use_dora=kind == "dora")


def _read_parameters(parameters: dict[str, Any], num_layers: Any, *, use_dora: bool) -> MlxSettings:
    name = "lora_parameters."
    for key in sorted(parameters.keys() - _KNOWN_PARAMETERS):
        hint = "; mlx-lm's factor is scale, which is alpha / rank" if key == "alpha" else ""
        _expect(parameters, key, False, f"only {', '.join(sorted(_KNOWN_PARAMETERS))}: it would be ignored{hint}", name)
    rank, scale, keys = parameters.get("rank"), parameters.get("scale"), parameters.get("keys")
    _expect(parameters, "rank", type(rank) is int and rank >= 1, "a whole number from 1 on", name)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale)
    _expect(parameters, "scale", is_number, "a number", name)
    is_keys = keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys))
    _expect(parameters, "keys", is_keys, "a list of the paths of layers", name)
    return MlxSettings(
        rank=int(rank or 0),
        scale=float(scale or 0),
        num_layers=int(num_layers),
        keys=None if keys is None else frozenset(keys),
        use_dora=use_dora,
    )


def _expect(config: Mapping[str, Any], key: str, is_right: bool, expected: str, prefix: str = "") -> None:
    if not is_right:
        raise AdapterError(f"adapter_config.json: {prefix}{key} is {config.get(key)!r:.100}, expected {expected}")
