"""Convert the numeric columns of a sequence to numpy. Imports numpy, so `SequenceResult` imports it on first use."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from scorepool.wire.columns import StreamedColumns

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_VECTORS = {
    "token_ids": np.int64,
    "logprobs": np.float32,
    "sampled_logprobs": np.float32,
    "recomputed_logprobs": np.float32,
    "ranks": np.float32,  # which can be NaN, and is exact for any vocabulary
    "entropies": np.float32,
}
_MATRICES = {  # and what fills short rows
    "top_ids": (np.int64, -1),
    "top_logprobs": (np.float32, np.nan),
    "target_logprobs": (np.float32, np.nan),
}


def numpy_columns(sequence: StreamedColumns) -> dict[str, Array]:
    """Return the numeric columns that a sequence has, by name: [tokens], and [tokens, most] for the top ones."""
    columns: dict[str, Array] = {}
    for name, dtype in _VECTORS.items():
        if (vector := getattr(sequence, name)) is not None:
            columns[name] = np.array(vector, dtype)
    for name, (dtype, missing) in _MATRICES.items():
        if (rows := getattr(sequence, name)) is not None:
            columns[name] = _padded(rows, dtype, missing)
    return columns


def _padded(rows: Sequence[Sequence[float]], dtype: type, missing: float) -> Array:
    """Return [rows, length of the longest], filled up with `missing`."""
    padded: Array = np.full((len(rows), max(map(len, rows), default=0)), missing, dtype)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = values
    return padded
