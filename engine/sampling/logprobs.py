"""From rows of logits to the numbers that were asked of each row: launched first, read as Python numbers later.

Every row has a token (given, or sampled here) and its logprob. Rank, entropy and the likeliest tokens are
computed for the rows that ask for them and for no others.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from scorepool.engine.sampling import logits_processors, sample, scoring
from scorepool.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """One row of logits: what is reported about the token at `position`, which is given, or sampled now."""

    sequence: Sequence
    position: int
    last_id: mx.array | None = None  # [1]: of a row whose logits are moved, the token before, which may not be read yet
    banned_ids: AbstractSet[int] = frozenset()  # are not sampled now

    @property
    def is_sampled(self) -> bool:
        return self.position >= self.sequence.num_input_tokens

    @property
    def temperature(self) -> float:
        """Of the reported logprobs: a sampled token's are the model's own."""
        return 1.0 if self.is_sampled else self.sequence.temperature


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What is known about one token. None where it was not asked for."""

    token_id: int
    normalizer: float  # not finite, or logprob NaN: the logits are no distribution
    logprob: float
    sampled_logprob: float | None
    rank: int | None
    entropy: float | None
    top_ids: list[int] | None  # with their values: at least as many as asked for, likeliest first
    top_values: list[float] | None


@dataclass(frozen=True, slots=True)
class Column:
    """values[i] belongs to row rows[i]. On its way; `read` waits for it."""

    rows: list[int]
    values: mx.array | None  # None: of no rows

    def read(self, num_rows: int) -> list[Any]:
        """One a row: None where there is no value."""
        found: list[Any] = [None] * num_rows
        if self.values is not None:
            values: list[Any] = self.values.tolist()  # type: ignore[assignment]
            for row, value in zip(self.rows, values, strict=True):
                found[row] = value
        return found


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Of one chunk of logits: `asks`, one a row, and their columns in the order of Entry's fields."""

    asks: list[LogprobQuery]
    token_ids: mx.array  # [rows], sampled ones included
    columns: list[Column]

    @property
    def arrays(self) -> list[mx.array]:
        return [column.values for column in self.columns if column.values is not None]

    def read(self) -> list[TokenLogprobs]:
        """One an ask. Waits for the device."""
        columns = [column.read(len(self.asks)) for column in self.columns]
        return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]


def compute_logprobs(asks: list[LogprobQuery], logits: mx.array) -> PendingLogprobs:
    """Launch the computation. logits [rows, vocab] float32 of the model; there may be more rows than asks."""
    logits = logits[: len(asks)]
    sampled_rows = [row for row, ask in enumerate(asks) if ask.is_sampled]
    token_ids, sampled = _tokens(asks, sampled_rows, logits)
    if any(ask.temperature != 1 for ask in asks):
        logits = logits / mx.array([ask.temperature for ask in asks])[:, None]
    normalizers = scoring.log_normalizer(logits)
    all_rows = list(range(len(asks)))
    columns = [
        Column(all_rows, token_ids),
        Column(all_rows, normalizers),
        Column(all_rows, scoring.logprobs(logits, normalizers, token_ids)),
        Column(sampled_rows, sampled),
        _column(asks, lambda s: s.rank, scoring.ranks, logits, token_ids),
        _column(asks, lambda s: s.entropy, scoring.entropies, logits, normalizers),
        *_likeliest(asks, logits, normalizers),
    ]
    measured = PendingLogprobs(asks, token_ids, columns)
    mx.async_eval(measured.arrays)
    return measured


def _column(
    asks: list[LogprobQuery], wanted: Callable[[Sequence], object], compute: Callable[..., mx.array], *arrays: mx.array
) -> Column:
    """Computed from `arrays` [all rows, ...] for the rows whose sequence wants it."""
    rows = [row for row, ask in enumerate(asks) if wanted(ask.sequence)]
    return Column(rows, compute(*(_only(rows, array) for array in arrays)) if rows else None)


def _likeliest(asks: list[LogprobQuery], logits: mx.array, normalizers: mx.array) -> tuple[Column, Column]:
    """Columns of their ids and of their logprobs."""
    rows = [row for row, ask in enumerate(asks) if ask.sequence.top_logprobs]
    if not rows:
        return Column([], None), Column([], None)
    logits, normalizers = _only(rows, logits), _only(rows, normalizers)
    ids = scoring.top_k(logits, max(ask.sequence.top_logprobs for ask in asks))
    return Column(rows, ids), Column(rows, scoring.logprobs_of_many(logits, normalizers, ids))


def _only(rows: list[int], array: mx.array) -> mx.array:
    """These of its rows; the very array where they are all: an index copies, and logits are large."""
    return array if len(rows) == array.shape[0] else array[mx.array(rows)]


def _tokens(asks: list[LogprobQuery], sampled_rows: list[int], logits: mx.array) -> tuple[mx.array, mx.array | None]:
    """The token of every row, and the sampled ones' logprobs under the distribution sampled from."""
    samplings, keys = [], []
    for row in sampled_rows:
        sequence = asks[row].sequence
        if sequence.sampling is None:
            raise ValueError("a row is asked for a token that it does not generate")
        samplings.append(sequence.sampling)
        keys.append(sample.noise_key(sequence.noise_seed, asks[row].position - sequence.num_input_tokens))
    if len(sampled_rows) == len(asks):  # a step that only decodes
        return sample.sample(_moved(logits, asks), samplings, keys)
    given = [0 if ask.is_sampled else ask.sequence.token_ids[ask.position] for ask in asks]
    token_ids = mx.array(given, dtype=mx.int32)
    if not sampled_rows:
        return token_ids, None
    rows = mx.array(sampled_rows)
    wanted = _moved(logits[rows], [asks[row] for row in sampled_rows])
    token_ids[rows], logprobs = sample.sample(wanted, samplings, keys)
    return token_ids, logprobs


def _moved(logits: mx.array, asks: list[LogprobQuery]) -> mx.array:
    """[rows, vocab]: what is sampled from; the very `logits` where no row asks for another."""
    if any(ask.sequence.needs_logits_processing for ask in asks):
        logits = mx.stack([_steered(row, ask) for row, ask in zip(logits, asks, strict=True)])
    return logits_processors.mask_banned(logits, [ask.banned_ids for ask in asks])


def _steered(row: mx.array, ask: LogprobQuery) -> mx.array:
    sequence = ask.sequence
    if sequence.sampling is not None and sequence.sampling.needs_logits_processing:
        row = logits_processors.apply_penalties(
            row, sequence.sampling, sequence.token_ids[: sequence.num_input_tokens], _generated(ask)
        )
    if sequence.constraint is not None:
        row = logits_processors.apply_grammar_bitmask(row, sequence.constraint.token_bitmask(_known(ask)))
    return row


def _generated(ask: LogprobQuery) -> mx.array:
    """[n]: the row's generated tokens before the one that is sampled now."""
    read = mx.array(_read(ask), dtype=mx.int32)
    return read if ask.last_id is None else mx.concatenate([read, ask.last_id])


def _known(ask: LogprobQuery) -> list[int]:
    """The same, on the host: waits for the device."""
    return _read(ask) if ask.last_id is None else [*_read(ask), int(ask.last_id.item())]  # type: ignore[arg-type]


def _read(ask: LogprobQuery) -> list[int]:
    sequence = ask.sequence
    return sequence.token_ids[sequence.num_input_tokens : ask.position - 1]
