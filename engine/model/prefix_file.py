"""One file with a computed prefix: what sequences continue from.

A file is data from outside. It is used if it has the checksum of its name, if it says that it has the prefix that is
looked for, and if its arrays are those of the model, of as many tokens, and finite. Any other is an error.
"""

import math
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.model import kv_cache
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache

CHUNK_BYTES = 2**22  # of a file, read at a time


@dataclass(frozen=True, slots=True)
class Layout:
    """What the files of all prefixes of a model have in common."""

    arrays: list[object]  # of the layers' caches, and of the last hidden state
    tile: int = 1  # tokens: caches hold full tiles only


def layout_of(model: Any, split: BackboneAndHead, tile: int) -> Layout:
    """Return what the files of all prefixes of a model have in common."""
    cache = kv_cache.new(model)
    hidden = split.forward_hidden(mx.array([[0]]), cache=cache)  # lazy: shapes are enough
    return Layout(describe(cache, hidden[0]), tile)


def save(path: Path, cache: Cache, last_hidden: mx.array, says: dict[str, str]) -> None:
    """Write a prefix; `says` tells which. Raises OSError, RuntimeError."""
    kv_cache.save(path, cache, last_hidden, says)


def load(path: Path, length: int, layout: Layout, says: dict[str, str]) -> tuple[Cache, mx.array]:
    """Read a prefix of `length` tokens. Raises many errors for a file that is not what `save` has written of it."""
    cache, last_hidden, said = kv_cache.load(path)
    if said != says:
        raise ValueError("it has another prefix")
    if describe(cache, last_hidden) != layout.arrays:
        raise ValueError("its layers are not those of the model")
    if not kv_cache.has_tokens(cache, length // layout.tile * layout.tile):
        raise ValueError("it has another number of tokens")
    arrays = [*kv_cache.arrays(cache), last_hidden]
    if sum(array.nbytes for array in arrays) > path.stat().st_size:
        raise ValueError("it is shorter than its arrays")
    for array in arrays:  # read now, while the file is there
        if not math.isfinite(mx.sum(array.astype(mx.float32)).item()):  # type: ignore[arg-type]
            raise ValueError("it has numbers that are not finite")
    return cache, last_hidden


def checksum(path: Path, max_bytes: int) -> int:
    """Return the CRC-32 of a regular file. Raises OSError, and ValueError for anything else, such as a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"it is no file of at most {max_bytes} bytes")
        value = 0
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
        return value


def describe(cache: Cache, last_hidden: mx.array) -> list[object]:
    """Return what a prefix has in common with the others of its model."""
    return [*kv_cache.layout(cache), (last_hidden.dtype, last_hidden.shape)]
