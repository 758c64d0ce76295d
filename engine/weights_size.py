"""Tell what a model's weights take in memory from its files, without MLX: `python -m scorepool.engine.weights_size`.

The command takes folders and hub ids, and prints a JSON list with `num_bytes`, null for a hub id, or with `error`.
"""

import json
import struct
import sys
from math import prod
from pathlib import Path
from typing import Any

from scorepool.engine.errors import LoadError
from scorepool.engine.local_folder import WEIGHTS, find_local_folder

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
_SIZES = {"auto": None, "float32": 4, "bfloat16": 2, "float16": 2}


def weights_bytes(model: str, dtype: str = "auto") -> int | None:
    """Return about what the weights of a folder take, loaded in a dtype; None for a hub id. Raises LoadError."""
    folder = find_local_folder(model)
    if folder is None:
        return None
    size = _SIZES[dtype] or (None if sys.platform == "darwin" else 4)  # a CPU computes in float32
    return sum(_loaded_bytes(file, size) for file in folder.glob(WEIGHTS))


def _loaded_bytes(file: Path, size: int | None) -> int:
    """Return the bytes of a file's tensors, floating-point numbers with `size` bytes each."""
    num_bytes = 0
    for tensor in _read_header(file).values():
        begin, end = tensor["data_offsets"]
        is_float = size is not None and tensor["dtype"] in _FLOATS
        num_bytes += prod(tensor["shape"]) * size if is_float and size else end - begin
    return num_bytes


def _read_header(file: Path) -> dict[str, Any]:
    """Return what a safetensors file says of its tensors. Raises LoadError."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER_BYTES, file.stat().st_size):
                raise LoadError(f"{file} is no complete safetensors file: it ends within its header")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if end > file.stat().st_size:
            raise LoadError(f"{file} is no complete safetensors file: it ends within its tensors")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    return header


def main() -> None:
    """Run the command."""
    dtype, *models = sys.argv[1:]
    found: list[dict[str, Any]] = []
    for model in models:
        try:
            found.append({"num_bytes": weights_bytes(model, dtype)})
        except LoadError as error:
            found.append({"error": error.message})
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
