"""Make embeddings: pool the hidden states of a sequence, by its last token or by the mean of all.

The hidden states are those that the model's head gets. They are transformers' `last_hidden_state` for the bodies whose
classifiers are compared with transformers (classifier.py); other models make no embeddings.
"""

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError, NonFiniteLogits
from scorepool.engine.model.backbone import BackboneAndHead, FullLogits
from scorepool.engine.model.classifier import COMPARED_BODIES
from scorepool.engine.model_info import Pooling
from scorepool.engine.scheduling.slice import Slice, SliceResult

_SETTINGS = "1_Pooling/config.json"  # of sentence-transformers
_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class PooledStep:
    """Sums of the hidden states of slices, launched and not read yet."""

    slices: list[Slice]
    sums: mx.array | None  # [slices, width] float32; None if there are none


def default_pooling(folder: Path, config: dict[str, Any], split: BackboneAndHead) -> Pooling | None:
    """Return how the model pools unless a job says otherwise; None if it makes no embeddings. Raises LoadError."""
    if config.get("model_type") not in COMPARED_BODIES or isinstance(split, FullLogits):
        return None
    path = folder / _SETTINGS
    if not path.is_file():
        return "last"
    try:
        settings = json.loads(path.read_text())
        chosen = [name for name, value in settings.items() if name.startswith(_PREFIX) and value is True]
    except (OSError, ValueError, AttributeError) as error:
        raise LoadError(f"{_SETTINGS} cannot be read: {error}") from None
    return _MODES.get(chosen[0]) if len(chosen) == 1 else None


def pool(slices: list[tuple[Slice, int]], rows: mx.array) -> tuple[PooledStep, mx.array]:
    """Sum the rows of slices, each given with its first row, and return the other rows.

    The rows of a slice are those of its predictors.
    """
    if not slices:
        return PooledStep([], None), rows
    pooled: set[int] = set()
    sums = []
    for slice_, first in slices:
        stop = first + len(slice_.predictors)
        pooled.update(range(first, stop))
        sums.append(rows[first:stop].astype(mx.float32).sum(axis=0))
    others = [row for row in range(rows.shape[0]) if row not in pooled]
    stacked = mx.stack(sums)
    mx.async_eval(stacked)
    return PooledStep([slice_ for slice_, _ in slices], stacked), rows[mx.array(others)] if others else rows[:0]


def read(step: PooledStep) -> list[SliceResult]:
    """Wait for a step and add its sums to the sequences. An error marks one whose hidden states are not finite."""
    rows: list[list[float]] = [] if step.sums is None else step.sums.tolist()  # type: ignore[assignment]
    return [_add(slice_, sums) for slice_, sums in zip(step.slices, rows, strict=True)]


def _add(slice_: Slice, sums: Items[float]) -> SliceResult:
    if not all(map(isfinite, sums)):
        error = NonFiniteLogits(
            "the model's hidden states are not finite, so the text has no embedding; another dtype may help"
        )
        return SliceResult(slice_, slice_.num_tokens, error)
    sequence = slice_.sequence
    before = sequence.pooled_sum or [0.0] * len(sums)
    sequence.pooled_sum = [one + other for one, other in zip(before, sums, strict=True)]
    if slice_.completes_prefill:
        count = sequence.num_input_tokens if sequence.pooling == "mean" else 1
        sequence.embedding = [value / count for value in sequence.pooled_sum]
    return SliceResult(slice_, slice_.num_tokens)
