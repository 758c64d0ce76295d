"""Load weights that were pushed as the checkpoint that they belong to: with its configuration and tokenizer.

    the model's folder      config.json, tokenizer ──┐
    the weights' folder     model*.safetensors ──────┴──► a folder of links, loaded as any checkpoint is

So pushed weights pass every check of a checkpoint, and get its mends. The fingerprint is that of a folder with these
files. The model's own tensors say which are expected: all of them, with the same shapes. Tensors may have another
floating-point dtype, and are cast; packed ones of a quantised model may not.
"""

import json
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.local_folder import WEIGHTS
from scorepool.engine.model import memory_budget, mtp_layouts
from scorepool.engine.model.checkpoint import POOLING_SETTINGS
from scorepool.engine.model.config import load_raw_config
from scorepool.engine.settings import EngineSettings

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MAX_NAMED = 3  # tensors in a message
# Buffers that follow from the configuration, and a head that is the embeddings: some writers store them, others do not.
_OPTIONAL = ("lm_head.weight", "inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".masked_bias")
_SAME_SETTINGS = (  # of a config.json beside the weights
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "quantization",
)

Headers = dict[str, dict[str, Any]]


@contextmanager
def overlay(base: Path, settings: EngineSettings) -> Iterator[tuple[Path, Any]]:
    """Yield a folder with the model's files and the pushed weights, and the dtype to load it in. Raises LoadError."""
    weights = Path(settings.weights_folder or "").expanduser()
    files = _find_files(weights)
    before = _stat(files)
    _refuse_other_config(base, weights)
    pushed, own = _read_headers(files), _read_headers(sorted(base.glob(WEIGHTS)))
    unused = () if settings.speculation == "mtp" else mtp_layouts.head_tensors(load_raw_config(base), own)
    _refuse_other_tensors(pushed, {name: own[name] for name in own if name in pushed or name not in unused})
    dtype = _choose_dtype(pushed, own, settings.dtype)
    memory_budget.refuse_second_copy(_num_bytes(pushed, dtype))
    with tempfile.TemporaryDirectory(prefix="scorepool-weights-") as name:
        folder = Path(name)
        for file in (*base.iterdir(), base / POOLING_SETTINGS):
            if file.is_file() and file.suffix not in (".safetensors", ".json.index"):
                link = folder / file.relative_to(base)
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(file.resolve())
        for file in files:
            (folder / file.name).symlink_to(file.resolve())
        try:
            yield folder, dtype
        except LoadError as error:
            raise LoadError(error.message.replace(name, str(weights))) from error
    if _stat(files) != before:
        raise LoadError(f"the weights in {weights} changed while they were read; write each version to its own folder")


def _find_files(weights: Path) -> list[Path]:
    if not weights.is_absolute():
        raise LoadError(f"path is {str(weights)!r}, expected an absolute path of a folder on the workers' machines")
    if not weights.is_dir():
        raise LoadError(f"there is no folder {str(weights)!r} on this machine")
    files = sorted(weights.glob(WEIGHTS))
    if not files:
        raise LoadError(f"{weights} has no {WEIGHTS}, as transformers' save_pretrained writes")
    return files


def _stat(files: list[Path]) -> list[tuple[str, int, int, int]]:
    stats = [(file.name, file.stat()) for file in files if file.exists()]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _refuse_other_config(base: Path, weights: Path) -> None:
    """Refuse weights beside a config.json of another architecture. The model's own is the one that counts."""
    path = weights / "config.json"
    if not path.is_file():
        return
    try:
        pushed, own = json.loads(path.read_bytes()), json.loads((base / "config.json").read_bytes())
    except ValueError as error:
        raise LoadError(f"{path} is no JSON: {error}") from error
    for name in _SAME_SETTINGS:
        if isinstance(pushed, dict) and name in pushed and name in own and pushed[name] != own[name]:
            raise LoadError(
                f"{path}: {name} is {pushed[name]!r}, expected {own[name]!r}: weights of another architecture need a "
                "worker of their own"
            )


def _read_headers(files: list[Path]) -> Headers:
    """Return dtype and shape of every tensor. Refuses files that end too soon, at which MLX would crash."""
    headers: Headers = {}
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES
            try:
                if length >= min(_MAX_HEADER_BYTES, size):
                    raise ValueError("it ends within its header")
                header = json.loads(stream.read(length))
                header.pop("__metadata__", None)
                end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
                if 8 + length + end != size:
                    raise ValueError(f"it has {size} bytes, and its header says {8 + length + end}")
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise LoadError(f"{file} is no complete safetensors file: {error}") from error
            headers |= header
    return headers


def _refuse_other_tensors(pushed: Headers, own: Headers) -> None:
    """Raise LoadError unless both have the same tensors, with the same shapes and dtypes that fit."""
    for says, names in (
        ("lack", own.keys() - pushed.keys()),
        ("have, beyond those of the model,", pushed.keys() - own),
    ):
        named = sorted(name for name in names if not name.endswith(_OPTIONAL))
        if named:
            more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
            raise LoadError(
                f"the weights {says} {', '.join(named[:_MAX_NAMED])}{more}; expected all {len(own)} tensors of the "
                "model, under its names"
            )
    for name in pushed.keys() & own:
        if pushed[name]["shape"] != own[name]["shape"]:
            raise LoadError(f"{name} has the shape {pushed[name]['shape']}, expected {own[name]['shape']}")
        dtype, expected = pushed[name]["dtype"], own[name]["dtype"]
        if dtype != expected and not (_is_float(dtype) and _is_float(expected)):
            raise LoadError(f"{name} has the dtype {dtype}, expected {expected}")


def _is_float(dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16")


def _choose_dtype(pushed: Headers, own: Headers, dtype: str) -> str:
    """Return the setting, or the dtype of the model's own weights where that decides and the pushed have another."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored, expected = _main_dtype(pushed), _main_dtype(own)
    if dtype != "auto" or mx.default_device() != mx.gpu or stored == expected:
        return dtype
    return names.get(expected, dtype)


def _num_bytes(pushed: Headers, dtype: str) -> int:
    """Return about what the weights take in memory."""
    num_bytes: int = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in pushed.values())
    is_float32 = dtype == "float32" or (dtype == "auto" and mx.default_device() != mx.gpu)
    return num_bytes * 2 if is_float32 and _main_dtype(pushed) in ("F16", "BF16") else num_bytes


def _main_dtype(headers: Headers) -> str:
    """Return the dtype of most of the floating-point numbers."""
    count: Counter[str] = Counter()
    for entry in headers.values():
        if _is_float(entry["dtype"]):
            count[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
    return max(count, key=lambda name: count[name], default="")
