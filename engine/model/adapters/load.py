"""Load an adapter's folder: find its format, read and check it, and describe it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.adapter import describe_excess
from scorepool.engine.errors import AdapterError, describe
from scorepool.engine.model.adapters import mlx_format, mlx_settings, peft_format
from scorepool.engine.model.adapters.weights import AdapterWeights

CONFIG = "adapter_config.json"
HEADER_BYTES = 2**20  # of a file, about


def read_adapter(folder: str, base: dict[str, mx.array], model: Any, max_bytes: int) -> AdapterWeights:
    """Read an adapter of peft or mlx-lm, for the loaded model of the checkpoint with the tensors `base`.

    A larger file than `max_bytes` is not read. Raises AdapterError.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise AdapterError(f"there is no folder {folder!r} on this machine, expected one with {CONFIG}")
    config = _read_config(path)
    if mlx_settings.is_of_mlx_lm(config):
        settings = mlx_settings.read_settings(config)
        tensors = _read_tensors(path, mlx_format.TENSORS, max_bytes)
        layers = mlx_format.read_mlx(settings, tensors, model)
        fingerprint = _fingerprint(path / CONFIG, path / mlx_format.TENSORS)
        return AdapterWeights(fingerprint, layers, mlx_format.PARTS, names_checkpoint=False)
    tensors = _read_tensors(path, peft_format.TENSORS, max_bytes)
    layers = peft_format.read_peft(config, tensors, base)
    return AdapterWeights(_fingerprint(path / CONFIG, path / peft_format.TENSORS), layers)


def _read_config(path: Path) -> Any:
    try:
        return json.loads((path / CONFIG).read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"{path} has no {CONFIG}, expected the folder of an adapter") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path / CONFIG} cannot be read: {describe(error)}") from error


def _read_tensors(folder: Path, name: str, max_bytes: int) -> dict[str, mx.array]:
    file = folder / name
    if not file.is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
        raise AdapterError(f"{folder}: expected {name} beside {CONFIG}, found {found}")
    if (num_bytes := file.stat().st_size) > max_bytes + HEADER_BYTES:
        raise AdapterError(describe_excess(num_bytes, max_bytes))
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
