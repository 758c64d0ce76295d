"""Convert the engine's TokenColumns to the per-token fields of wire.SequenceResult and wire.TokenDelta. Pure.

To add a per-token value, change four files: its field in TokenColumns (engine/sequence.py), its computation in
engine/sampling/logprobs.py, its field in SequenceResult (wire/result.py) or, if it is streamed too, in StreamedColumns
(wire/columns.py), and its entry in COLUMNS below.
"""

from collections.abc import Callable, Iterable, Sized
from collections.abc import Sequence as Values
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import TypeGuard

from scorepool import wire
from scorepool.engine import Sampling, Sequence, TokenColumns
from scorepool.wire import Floats
from scorepool.worker.rq.errors import JobError

MIN_LOGPROB = -9999.0  # replaces -inf: JSON has no infinity

Clamp = Callable[[float | None], float | None]
BytesOf = Callable[[Iterable[int]], list[bytes]]  # of tokens


@dataclass(frozen=True, slots=True)
class Column:
    """One per-token field: when it is reported, and its value for some tokens."""

    is_reported: Callable[[Sequence], bool]
    convert: Callable[[TokenColumns, BytesOf, Clamp], Sized]
    generated_only: bool = False  # it has no entries for the prompt's tokens


def _has_top(sequence: Sequence) -> bool:
    return sequence.top_logprobs > 0


def _samples_other_distribution(sequence: Sequence) -> bool:
    """True if tokens are sampled from another distribution than the model's own."""
    sampling = sequence.sampling
    return sampling is not None and (sequence.constraint is not None or _changes_distribution(sampling))


def _changes_distribution(sampling: Sampling) -> bool:
    has_filter = sampling.top_p != 1 or sampling.top_k != 0 or sampling.min_p != 0
    return sampling.temperature != 1 or has_filter or sampling.needs_logits_processing or sampling.min_tokens > 0


def clamped(values: Values[float | None], clamp: Clamp) -> Floats:
    """Return values as a column, each as `clamp` leaves it."""
    if _are_finite(values):  # and there is nothing to clamp
        return Floats.of_finite(values)
    return Floats(map(clamp, values))


def _are_finite(values: Values[float | None]) -> TypeGuard[Values[float]]:
    """Return whether every value is a finite number. Adds them, which takes a fifth of a look at each."""
    try:
        return isfinite(sum(values))  # type: ignore[arg-type]
    except TypeError:  # one is None
        return False


COLUMNS = {  # by the name of the field
    "logprobs": Column(lambda _: True, lambda columns, _, clamp: clamped(columns.logprobs, clamp)),
    "top_ids": Column(_has_top, lambda columns, *_: [*map(list, columns.top_ids)]),
    "top_bytes": Column(_has_top, lambda columns, bytes_of, _: [*map(bytes_of, columns.top_ids)]),
    "top_logprobs": Column(_has_top, lambda columns, _, clamp: [clamped(top, clamp) for top in columns.top_logprobs]),
    "target_logprobs": Column(
        lambda sequence: sequence.targets is not None,
        lambda columns, _, clamp: [clamped(values, clamp) for values in columns.target_logprobs],
    ),
    "ranks": Column(lambda sequence: sequence.rank, lambda columns, *_: columns.ranks),
    "entropies": Column(lambda sequence: sequence.entropy, lambda columns, _, clamp: clamped(columns.entropies, clamp)),
    "sampled_logprobs": Column(
        _samples_other_distribution, lambda columns, _, clamp: clamped(columns.sampled_logprobs, clamp), True
    ),
}
_STREAMED = {name: column for name, column in COLUMNS.items() if name in wire.StreamedColumns.__struct_fields__}


class CountingClamp:
    """Replace -inf by MIN_LOGPROB and count how often. Raises JobError (numeric) at a NaN."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: float | None) -> float | None:
        if value is None:
            return None
        if isnan(value):
            raise JobError(wire.Failure(code="numeric", message="the model computed NaN for a token of this job"))
        if value == -inf:
            self.count += 1
            return MIN_LOGPROB
        return value


def clamp_logprob(value: float | None) -> float | None:
    return MIN_LOGPROB if value == -inf else value


def result_columns(sequence: Sequence, num_tokens: int, bytes_of: BytesOf, clamp: Clamp) -> dict[str, object]:
    """Return the per-token fields of wire.SequenceResult for its `num_tokens` reported tokens.

    Raises ValueError if the engine's columns do not have one entry per token.
    """
    fields: dict[str, object] = {}
    for name, column in COLUMNS.items():
        if column.is_reported(sequence):
            values = column.convert(sequence.columns, bytes_of, clamp)
            expected = sequence.num_generated if column.generated_only else num_tokens
            if len(values) != expected:
                raise ValueError(f"{name} has {len(values)} entries for {expected} tokens")
            fields[name] = values
    return fields


def delta_columns(sequence: Sequence, columns: TokenColumns, bytes_of: BytesOf) -> dict[str, object]:
    """Return the per-token fields of wire.TokenDelta for the tokens of `columns`."""
    return {
        name: column.convert(columns, bytes_of, clamp_logprob)
        for name, column in _STREAMED.items()
        if column.is_reported(sequence)
    }
