"""Convert columns of numbers, of a sequence or of a whole result, to numpy arrays. Imported on first use."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from scorepool.wire.columns import StreamedColumns
from scorepool.wire.packed import INT_COLUMNS, NO_RANK, NO_TOKEN, PackedColumns

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


def result_arrays(packed: PackedColumns | None, sequences: Sequence[StreamedColumns]) -> dict[str, Array]:
    """Return the columns of all sequences, [rows, tokens] or [rows, tokens, K], by name, and `lengths` [rows]."""
    flat = _unpacked_arrays(sequences) if packed is None else _packed_arrays(packed)
    lengths = flat.pop("lengths")
    num_rows, most = len(lengths), int(lengths.max(initial=0))
    is_token = None if (lengths == most).all() else np.arange(most) < lengths[:, None]
    arrays = {"lengths": lengths}
    for name, column in flat.items():
        shape = (num_rows, most, *column.shape[1:])
        if is_token is None:
            arrays[name] = column.reshape(shape)
        else:
            arrays[name] = np.full(shape, _FILL.get(name, np.nan), column.dtype)
            arrays[name][is_token] = column
    return arrays


_FILL = {"token_ids": NO_TOKEN, "top_ids": NO_TOKEN, "ranks": NO_RANK}


def _packed_arrays(packed: PackedColumns) -> dict[str, Array]:
    """Return the columns [tokens of all sequences] or [tokens, K] without a copy, and `lengths`."""
    arrays: dict[str, Array] = {"lengths": np.array(packed.lengths, np.int64)}
    for name, column in packed.columns():
        flat: Array = np.frombuffer(column, "<i4" if name in INT_COLUMNS else "<f4")
        is_matrix = name in _MATRICES
        arrays[name] = flat.reshape(sum(packed.lengths), packed.width(name)) if is_matrix else flat
    return arrays


def _unpacked_arrays(sequences: Sequence[StreamedColumns]) -> dict[str, Array]:
    """Return what `_packed_arrays` returns, of sequences that have their columns.

    The rows of a sequence that lacks a column of the others, such as an item that failed, are missing values.
    """
    lengths = [len(each.token_ids) for each in sequences]
    arrays: dict[str, Array] = {"lengths": np.array(lengths, np.int64)}
    by_sequence = [numpy_columns(each) for each in sequences]
    names = [name for name in (*_VECTORS, *_MATRICES) if name != "recomputed_logprobs"]
    for name in names:
        if not any(name in each for each in by_sequence):
            continue
        columns = [
            each[name] if name in each else _missing(name, length)
            for each, length in zip(by_sequence, lengths, strict=True)
        ]
        if name == "sampled_logprobs":  # of generated tokens only
            columns = [_from_start(column, length) for column, length in zip(columns, lengths, strict=True)]
        joined = _join(columns)
        if name in INT_COLUMNS:
            joined = np.nan_to_num(joined, nan=NO_RANK).astype(np.int32)
        arrays[name] = joined
    return arrays


def _missing(name: str, length: int) -> Array:
    """Return a column of missing values. `_join` fills up the rows of a matrix."""
    if name in _MATRICES:
        return np.empty((length, 0), _MATRICES[name][0])
    return np.full(length, np.nan, _VECTORS[name])


def _from_start(column: Array, length: int) -> Array:
    return np.concatenate([np.full(length - len(column), np.nan, column.dtype), column])


def _join(columns: Sequence[Array]) -> Array:
    """Join columns whose rows may have different lengths, filled up to the longest."""
    if columns[0].ndim == 1:
        return np.concatenate(columns)
    width = max(column.shape[1] for column in columns)
    missing = NO_TOKEN if columns[0].dtype == np.int64 else np.nan
    return np.concatenate(
        [np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=missing) for column in columns]
    )
