"""Load an adapter's folder: find its format, read and check it, and describe it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import AdapterError, describe
from scorepool.engine.model.adapters import peft_format
from scorepool.engine.model.adapters.weights import AdapterWeights

CONFIG = "adapter_config.json"


def read_adapter(folder: str, base: dict[str, mx.array]) -> AdapterWeights:
    """Read an adapter for the base checkpoint with these tensors. Raises AdapterError."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise AdapterError(f"there is no folder {folder!r} on this machine, expected one with {CONFIG}")
    config = _read_config(path)
    if not (path / peft_format.TENSORS).is_file():
        found = ", ".join(sorted(file.name for file in path.iterdir())[:8])
        raise AdapterError(f"{folder}: expected {peft_format.TENSORS} beside {CONFIG}, found {found}")
    tensors = _read_tensors(path / peft_format.TENSORS)
    layers = peft_format.read_peft(config, tensors, base)
    return AdapterWeights(_fingerprint(path / CONFIG, path / peft_format.TENSORS), layers)


def _read_config(path: Path) -> Any:
    try:
        return json.loads((path / CONFIG).read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"{path} has no {CONFIG}, expected the folder of an adapter") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path / CONFIG} cannot be read: {describe(error)}") from error


def _read_tensors(file: Path) -> dict[str, mx.array]:
    try:
        tensors: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        mx.eval(list(tensors.values()))
    except Exception as error:  # any: what mlx raises for a broken file
        raise AdapterError(f"{file} cannot be read: {describe(error)}") from error
    for name, tensor in tensors.items():
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise AdapterError(f"{file}: {name:.200} has dtype {tensor.dtype}, expected a floating-point one")
    return tensors


def _fingerprint(*files: Path) -> str:
    """Return the sha256 over name and content of the files."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
