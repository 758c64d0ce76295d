"""Read an adapter that peft saved: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Collection
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import AdapterError
from scorepool.engine.model.adapters.peft_settings import PeftSettings, read_settings
from scorepool.engine.model.adapters.weights import LowRank

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")
_CHANGED = re.compile(r"(?P<path>.+)\.(lora_\w+|base_layer|original_module|modules_to_save)(\..+)?")
_HEADS = ("lm_head", "embed_out", "output", "score")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "embeddings", "wpe")


def read_peft(config: Any, tensors: dict[str, mx.array], base: Collection[str]) -> dict[str, LowRank]:
    """Return the changes of layers by path. `base` are the names of the base checkpoint's tensors.

    Raises AdapterError.
    """
    settings = read_settings(config)
    _refuse_head_and_embeddings(tensors)
    parts = _parts_by_path(tensors)
    _refuse_missing(settings, parts, base)
    return {path: _low_rank(path, found, settings) for path, found in sorted(parts.items())}


def _refuse_head_and_embeddings(names: Collection[str]) -> None:
    for name in sorted(names):
        match = _CHANGED.fullmatch(name.removeprefix(_PREFIX))
        leaf = match["path"].rpartition(".")[2] if match else ""
        if match and leaf in (*_HEADS, *_EMBEDDINGS):
            what = "the head" if leaf in _HEADS else "the embeddings"
            raise AdapterError(
                f"{match['path']} is changed, expected layers of the backbone only: {what} must be the base model's, "
                f"so train without {leaf} in target_modules, or merge the adapter into the weights"
            )


def _parts_by_path(tensors: dict[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _NAME.fullmatch(name)
        if match is None or not name.startswith(_PREFIX):
            raise AdapterError(
                f"{TENSORS} has a tensor {name!r:.200}, expected only {_PREFIX}<layer>.lora_A.weight, .lora_B.weight "
                "and lora_magnitude_vector: saved biases, embeddings and whole modules are not loaded"
            )
        found.setdefault(match["path"].removeprefix(_PREFIX), {})[match["part"]] = tensor
    if not found:
        raise AdapterError(f"{TENSORS} has no tensors")
    return found


def _refuse_missing(settings: PeftSettings, parts: dict[str, dict[str, mx.array]], base: Collection[str]) -> None:
    """Refuse an adapter whose tensors are not those of the layers that its settings name."""
    layers = {name.rpartition(".")[0] for name in base if name.endswith((".weight", ".qweight"))}
    for path, found in parts.items():
        if not settings.changes(path):
            raise AdapterError(f"{TENSORS} changes {path}, which adapter_config.json does not name: peft ignores it")
        wanted = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if settings.use_dora else set())
        if missing := sorted(wanted - found.keys()):
            raise AdapterError(f"{TENSORS} has no {missing[0]} for {path}, expected {', '.join(sorted(wanted))}")
        if extra := sorted(found.keys() - wanted):
            raise AdapterError(f"{TENSORS} has {extra[0]} for {path}, but adapter_config.json: use_dora is false")
    for path in sorted(layers):
        if path not in parts and settings.changes(path):
            raise AdapterError(f"{TENSORS} has no tensors for {path}, which adapter_config.json: target_modules names")


def _low_rank(path: str, found: dict[str, mx.array], settings: PeftSettings) -> LowRank:
    a, b, rank = found["lora_A"], found["lora_B"], settings.rank_of(path)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(
            f"{path}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, expected [{rank}, in] and [out, {rank}] "
            "for the rank of adapter_config.json"
        )
    magnitude = found.get("lora_magnitude_vector")
    scaled = b.astype(mx.float32).T * settings.scale_of(path)
    return LowRank(
        a.astype(mx.float32), scaled, None if magnitude is None else magnitude.reshape(-1).astype(mx.float32)
    )
