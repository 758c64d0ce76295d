"""Make embeddings: pool the hidden states of a sequence, by its last token or by the mean of all.

The hidden states are those that the model's head gets. They are transformers' `last_hidden_state` for the bodies whose
classifiers are compared with transformers (classifier.py); other models make no embeddings.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from scorepool.engine.errors import LoadError, NonFiniteLogits
from scorepool.engine.model.backbone import BackboneAndHead, FullLogits
from scorepool.engine.model.checkpoint import POOLING_SETTINGS
from scorepool.engine.model.classifier import COMPARED_BODIES
from scorepool.engine.model_info import Pooling
from scorepool.engine.scheduling.slice import Slice, SliceResult

_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_PREFIX = "pooling_mode_"

Rows = NDArray[np.float32]  # [n, width]


@dataclass(frozen=True, slots=True)
class PooledStep:
    """Hidden states of slices to sum, launched and not read yet."""

    slices: list[Slice]
    values: list[mx.array]  # [n, width] float32 of each slice: one row, their sum; in exact mode all rows


def default_pooling(folder: Path, config: dict[str, Any], split: BackboneAndHead) -> Pooling | None:
    """Return how the model pools unless a job says otherwise; None if it makes no embeddings. Raises LoadError."""
    if config.get("model_type") not in COMPARED_BODIES or isinstance(split, FullLogits):
        return None
    path = folder / POOLING_SETTINGS
    if not path.is_file():
        return "last"
    try:
        settings = json.loads(path.read_text())
        chosen = [name for name, value in settings.items() if name.startswith(_PREFIX) and value is True]
    except (OSError, ValueError, AttributeError) as error:
        raise LoadError(f"{POOLING_SETTINGS} cannot be read: {error}") from None
    return _MODES.get(chosen[0]) if len(chosen) == 1 else None


def pool(slices: list[tuple[Slice, int]], rows: mx.array, is_exact: bool = False) -> tuple[PooledStep, mx.array]:
    """Sum the rows of slices, each given with its first row, and return the other rows.

    The rows of a slice are those of its predictors. `is_exact`: the sum of a sequence does not depend, to the bit, on
    how it was cut into chunks. So the host adds one row after the other.
    """
    if not slices:
        return PooledStep([], []), rows
    pooled: set[int] = set()
    values: list[mx.array] = []
    for slice_, first in slices:
        stop = first + len(slice_.predictors)
        pooled.update(range(first, stop))
        of_slice = rows[first:stop].astype(mx.float32)
        values.append(of_slice if is_exact else of_slice.sum(axis=0, keepdims=True))
    others = [row for row in range(rows.shape[0]) if row not in pooled]
    mx.async_eval(values)
    return PooledStep([slice_ for slice_, _ in slices], values), rows[mx.array(others)] if others else rows[:0]


def read(step: PooledStep) -> list[SliceResult]:
    """Wait for a step and add its sums to the sequences. An error marks one whose hidden states are not finite."""
    return [_add(slice_, np.array(rows)) for slice_, rows in zip(step.slices, step.values, strict=True)]


def _add(slice_: Slice, rows: Rows) -> SliceResult:
    if not np.isfinite(rows).all():
        error = NonFiniteLogits(
            "the model's hidden states are not finite, so the text has no embedding; another dtype may help"
        )
        return SliceResult(slice_, slice_.num_tokens, error)
    sequence = slice_.sequence
    before = np.zeros(rows.shape[1]) if sequence.pooled_sum is None else np.array(sequence.pooled_sum)
    total = np.add.accumulate(np.concatenate([before[None], rows]))[-1]  # in the order of the tokens
    sequence.pooled_sum = total.tolist()
    if slice_.completes_prefill:
        count = sequence.num_input_tokens if sequence.pooling == "mean" else 1
        sequence.embedding = (total / count).tolist()
    return SliceResult(slice_, slice_.num_tokens)
