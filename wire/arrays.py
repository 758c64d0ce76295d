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
        arrays[name] = flat.reshape(-1, packed.width(name)) if is_matrix else flat
    return arrays


def _unpacked_arrays(sequences: Sequence[StreamedColumns]) -> dict[str, Array]:
    """Return what `_packed_arrays` returns, of sequences that have their columns."""
    arrays: dict[str, Array] = {"lengths": np.array([len(each.token_ids) for each in sequences], np.int64)}
    by_sequence = [numpy_columns(each) for each in sequences]
    names = [name for name in (*_VECTORS, *_MATRICES) if name != "recomputed_logprobs"]
    for name in names:
        columns = [each[name] for each in by_sequence if name in each]
        if len(columns) < len(sequences) or not columns:
            continue
        if name == "sampled_logprobs":  # of generated tokens only
            columns = [
                _from_start(column, len(each.token_ids)) for column, each in zip(columns, sequences, strict=True)
            ]
        joined = _join(columns)
        if name in INT_COLUMNS:
            joined = np.nan_to_num(joined, nan=NO_RANK).astype(np.int32)
        arrays[name] = joined
    return arrays


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
