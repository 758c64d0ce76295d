"""Compute what is reported per token from rows of logits: launched first, read as Python numbers later.

Every row has a token, given or sampled here, and its logprob. Rank, entropy, the most likely tokens and those that the
caller names are computed for the rows of sequences that ask for them, and for no others.

To add a value per token, add a field to TokenColumns, a column in `_more_columns`, and its flag to `reports_rarer`.
"""

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import isfinite, isnan
from typing import Any, NamedTuple

import mlx.core as mx

from scorepool.engine.sampling import sample, scoring
from scorepool.engine.sampling.next_token import sampled_rows, tokens_of_rows
from scorepool.engine.sampling.query import LogprobQuery
from scorepool.engine.sequence import Sequence, TokenColumns


@dataclass(slots=True)
class TokenLogprobs:
    """The values that were computed for one query."""

    query: LogprobQuery
    columns: TokenColumns
    sampled_ids: list[int] = field(default_factory=list)
    proposed_logprobs: list[float] = field(
        default_factory=list
    )  # of the proposed tokens, if their sequence reports them
    non_finite_position: int | None = None  # the first token whose logits are no distribution

    def split(self) -> list["TokenLogprobs"]:
        """Return the values of one sampled token each, if there are several; else all together."""
        if len(self.sampled_ids) < 2:
            return [self]
        return [
            replace(
                self,
                columns=self.columns[entry : entry + 1],
                sampled_ids=[token_id],
                non_finite_position=position if position == self.non_finite_position else None,
            )
            for entry, (position, token_id) in enumerate(zip(self.query.positions, self.sampled_ids, strict=True))
        ]


@dataclass(slots=True)
class PendingColumn:
    """A column of values that may still be computed: `counts[i]` of them for query number `indices[i]`."""

    name: str  # a field of TokenColumns
    indices: list[int]
    counts: list[int]
    values: mx.array


MIN_NORMALIZED = 2**11  # logits; fewer, of tests' tiny models, are the device's, whose way is so tested on x86 too


class OnHost(NamedTuple):
    """What the host computes where it is faster than the device. Both wait for the device."""

    # The normalizer of each row of logits, and the logprob of its token.
    normalize: Callable[[mx.array, mx.array], tuple[list[float], list[float]]]
    # Of logits, normalizers, rows (None: all) and k: an array of ids for each row, and one of logprobs.
    top_k: Callable[[mx.array, list[float], list[int] | None, int], tuple[list[Any], list[Any]]]


@dataclass(slots=True)
class PendingLogprobs:
    """The values of one chunk of logits, launched and not read yet."""

    queries: list[LogprobQuery]
    token_ids: mx.array  # [rows], sampled ones included
    columns: list[PendingColumn]
    normalizers: mx.array | None = None  # [rows]; not finite for a row that has no distribution
    logits: mx.array | None = None  # those that the host normalizes, until it has
    on_host: OnHost | None = None
    tops: list["_Selection"] = field(default_factory=list)  # rows whose top-k the host computes
    normalized: tuple[list[float], list[float]] = ([], [])  # by the host
    top_values: list[tuple[list[Any], list[Any]]] = field(default_factory=list)  # by the host
    proposed: PendingColumn | None = None  # the logprobs of proposed tokens, which are no column of the sequence

    @property
    def arrays(self) -> list[mx.array]:
        """List the arrays to evaluate."""
        proposed = [self.proposed.values] if self.proposed else []
        normalized = [array for array in (self.normalizers, self.logits) if array is not None]
        return [self.token_ids, *normalized, *(column.values for column in self.columns), *proposed]

    def wait(self) -> None:
        """Wait for the device, and let the host normalize what it is to. Logits are not kept after that."""
        mx.eval(self.arrays)
        if self.on_host is not None and self.logits is not None:
            self.normalized = self.on_host.normalize(self.logits, self.token_ids)
            for top in self.tops:
                k = self.queries[top.indices[0]].sequence.top_logprobs
                self.top_values.append(self.on_host.top_k(self.logits, self.normalized[0], top.rows, k))
            self.logits = None

    def read(self) -> list[TokenLogprobs]:
        """Wait for the device and return the values of each query."""
        self.wait()
        found = [TokenLogprobs(query, TokenColumns()) for query in self.queries]
        for column in self.columns:
            typecode = _PACKED.get(column.name)
            values = _packed_rows(column.values, typecode) if typecode else _python_values(column.values)
            start = 0
            for index, count in zip(column.indices, column.counts, strict=True):
                setattr(found[index].columns, column.name, values[start : start + count])
                start += count
        for top, (top_ids, top_logprobs) in zip(self.tops, self.top_values, strict=True):
            start = 0
            for index, count in zip(top.indices, top.counts, strict=True):
                columns, rows = found[index].columns, slice(start, start + count)
                columns.top_ids, columns.top_logprobs = top_ids[rows], top_logprobs[rows]
                start += count
        if self.proposed is not None:
            values, start = _python_values(self.proposed.values), 0
            for index, count in zip(self.proposed.indices, self.proposed.counts, strict=True):
                found[index].proposed_logprobs = values[start : start + count]
                start += count
        token_ids: list[int] = self.token_ids.tolist()  # type: ignore[assignment]
        normalizers, logprobs = self.normalized
        if self.normalizers is not None:
            normalizers = _python_values(self.normalizers)
        start = 0
        for one in found:
            stop = start + len(one.query.positions)
            if self.normalizers is None:
                one.columns.logprobs = [*logprobs[start:stop]]
            one.sampled_ids = token_ids[stop - len(one.query.sampled_positions) : stop]
            one.non_finite_position = _first_non_finite(one, normalizers[start:stop])
            if one.columns.target_logprobs:
                _cut_targets(one)
            start = stop
        return found


def split_rows(queries: list[LogprobQuery], max_rows: int) -> Iterator[list[LogprobQuery]]:
    """Cut queries into groups of at most `max_rows` rows of logits, in their order."""
    group: list[LogprobQuery] = []
    room = max_rows
    for query in queries:
        positions = query.positions
        while len(positions) > room:
            if room:
                group.append(replace(query, positions=positions[:room]))
            yield group
            group, positions, room = [], positions[room:], max_rows
        group.append(query if positions == query.positions else replace(query, positions=positions))
        room -= len(positions)
    if group:
        yield group


def compute_logprobs(queries: list[LogprobQuery], logits: mx.array, on_host: OnHost | None = None) -> PendingLogprobs:
    """Launch the computation. logits [rows, vocab] float32 of the model, one row per position of the queries.

    `on_host` is what the host does where it is faster than the device, for MIN_NORMALIZED logits or more, if only the
    logprobs of tokens and the most likely ones are asked for.
    """
    token_ids, sampled = tokens_of_rows(queries, logits)
    logits = _reported_logits(queries, logits, sampled)
    pending = PendingLogprobs(queries, token_ids, [])
    if sampled is not None:
        indices = [index for index, query in enumerate(queries) if query.samples]
        counts = [len(queries[index].sampled_positions) for index in indices]
        pending.columns.append(PendingColumn("sampled_logprobs", indices, counts, sampled.logprobs))
    is_large = logits.size >= MIN_NORMALIZED
    if is_large and on_host is not None and not any(query.sequence.reports_rarer for query in queries):
        pending.logits, pending.on_host, pending.tops = logits, on_host, _select_tops(queries)
    else:
        _add_columns(pending, logits)
    mx.async_eval(pending.arrays)
    return pending


def _add_columns(pending: PendingLogprobs, logits: mx.array) -> None:
    """Add what the device computes of the reported logits."""
    queries, token_ids = pending.queries, pending.token_ids
    pending.normalizers = normalizers = scoring.log_normalizer(logits)
    counts = [len(query.positions) for query in queries]
    values = scoring.logprobs(logits, normalizers, token_ids)
    pending.columns.append(PendingColumn("logprobs", list(range(len(queries))), counts, values))
    if any(query.sequence.reports_more for query in queries):
        pending.columns += _more_columns(queries, logits, normalizers, token_ids)
        pending.proposed = _proposed_column(queries, logits, normalizers)


def _more_columns(
    queries: list[LogprobQuery], logits: mx.array, normalizers: mx.array, token_ids: mx.array
) -> list[PendingColumn]:
    """Compute what sequences ask for beside the logprobs of their tokens."""
    columns: list[PendingColumn] = []
    if rows := _select(queries, lambda sequence: sequence.rank):
        columns.append(rows.column("ranks", scoring.ranks(rows.take(logits), rows.take(token_ids))))
    if rows := _select(queries, lambda sequence: sequence.entropy):
        columns.append(rows.column("entropies", scoring.entropies(rows.take(logits), rows.take(normalizers))))
    if rows := _select(queries, lambda sequence: sequence.min_logprob):
        columns.append(rows.column("min_logprobs", rows.take(logits).min(axis=-1) - rows.take(normalizers)))
    for rows in _select_tops(queries):
        top_logits = rows.take(logits)
        top_ids = scoring.top_k(top_logits, queries[rows.indices[0]].sequence.top_logprobs)
        values = scoring.logprobs_of_many(top_logits, rows.take(normalizers), top_ids)
        top_ids, values = scoring.by_logprob(top_ids, values)
        columns += [rows.column("top_ids", top_ids), rows.column("top_logprobs", values)]
    if rows := _select(queries, lambda sequence: sequence.targets is not None):
        targets = _target_ids([queries[index] for index in rows.indices])
        values = scoring.logprobs_of_many(rows.take(logits), rows.take(normalizers), targets)
        columns.append(rows.column("target_logprobs", values))
    return columns


def _reported_logits(queries: list[LogprobQuery], logits: mx.array, sampled: sample.Sampled | None) -> mx.array:
    """Return [rows, vocab]: the logits of the distributions whose logprobs are reported."""
    if any(query.sequence.temperature != 1 for query in queries):
        temperatures = [temperature for query in queries for temperature in query.temperatures]
        logits = logits / mx.array(temperatures)[:, None]
    if sampled is None:
        return logits
    sampling = [(query, row) for query, rows in sampled_rows(queries) for row in rows]
    processed = [(row, drawn) for drawn, (query, row) in enumerate(sampling) if query.sequence.processed]
    if not processed:
        return logits
    if len(processed) == logits.shape[0]:  # a step that only decodes
        return sampled.logits
    rows, drawn_rows = zip(*processed, strict=True)
    return sample.replace_rows(logits, mx.array(rows), sampled.logits[mx.array(drawn_rows)])


@dataclass(slots=True)
class _Selection:
    """The rows of the queries whose sequences ask for one value."""

    indices: list[int]  # of these queries
    counts: list[int]  # rows of each
    rows: list[int] | None  # None: all rows

    def take(self, array: mx.array) -> mx.array:
        """Index the rows; return the array itself if they are all, because an index copies and logits are large."""
        return array if self.rows is None else array[mx.array(self.rows)]

    def column(self, name: str, values: mx.array) -> PendingColumn:
        return PendingColumn(name, self.indices, self.counts, values)


def _select(queries: list[LogprobQuery], wants: Callable[[Sequence], object]) -> _Selection | None:
    """Find the queries whose sequence wants a value; None if there are none."""
    indices = [index for index, query in enumerate(queries) if wants(query.sequence)]
    if not indices:
        return None
    counts = [len(queries[index].positions) for index in indices]
    if len(indices) == len(queries):
        return _Selection(indices, counts, None)
    starts = list(accumulate((len(query.positions) for query in queries), initial=0))
    rows = [row for index in indices for row in range(starts[index], starts[index + 1])]
    return _Selection(indices, counts, rows)


def _select_tops(queries: list[LogprobQuery]) -> list[_Selection]:
    """Find the queries that ask for the most likely tokens, those for as many together."""
    sizes = {query.sequence.top_logprobs for query in queries} - {0}
    return [rows for k in sizes if (rows := _select(queries, partial(_has_top, k)))]


def _proposed_column(queries: list[LogprobQuery], logits: mx.array, normalizers: mx.array) -> PendingColumn | None:
    """Compute the logprobs of the proposed tokens of sequences that report them; None if there are none."""
    starts = accumulate((len(query.positions) for query in queries), initial=0)
    reporting = [
        (index, start, query)
        for index, (start, query) in enumerate(zip(starts, queries, strict=False))  # one start more: the end
        if query.sequence.reports_proposals and query.proposed_positions
    ]
    if not reporting:
        return None
    asked = [
        (start + position - query.positions.start, query.proposed[position - query.proposed_from])
        for _, start, query in reporting
        for position in query.proposed_positions
    ]
    rows, token_ids = (mx.array(values) for values in zip(*asked, strict=True))
    values = scoring.logprobs(logits[rows], normalizers[rows], token_ids)
    counts = [len(query.proposed_positions) for _, _, query in reporting]
    return PendingColumn("proposed_logprobs", [index for index, _, _ in reporting], counts, values)


def _targets_of(query: LogprobQuery) -> Iterator[Ids[int]]:
    """Yield the target ids of each of its positions."""
    sequence = query.sequence
    assert sequence.targets is not None
    for position in query.positions:
        yield sequence.targets.at(position - sequence.first_reported)


def _target_ids(queries: list[LogprobQuery]) -> mx.array:
    """Return [rows, most of a row] int: the target ids of every row, filled up with token 0."""
    lists = [ids for query in queries for ids in _targets_of(query)]
    most = max(1, max(map(len, lists), default=0))
    flat = array("i")
    for ids in lists:
        flat.extend(ids)
        flat.extend(_ZERO * (most - len(ids)))
    return mx.array(memoryview(flat)).reshape(len(lists), most)  # type: ignore[arg-type]


_ZERO = array("i", [0])


def _python_values(values: mx.array) -> list[Any]:
    return values.tolist()  # type: ignore[return-value]


_PACKED = {"top_ids": "I", "top_logprobs": "f", "target_logprobs": "f"}  # columns of matrices, of 4 bytes an item


def _packed_rows(values: mx.array, typecode: str) -> list[Any]:
    """Return the rows of a matrix as arrays: lists would take eight times their memory, and more time."""
    num_bytes = values.shape[1] * values.itemsize
    data = memoryview(values).cast("B")  # type: ignore[arg-type]
    return [array(typecode, data[start : start + num_bytes].tobytes()) for start in range(0, len(data), num_bytes)]


def _cut_targets(found: TokenLogprobs) -> None:
    """Keep as many logprobs of each row as it has targets."""
    column = found.columns.target_logprobs
    for entry, ids in enumerate(_targets_of(found.query)):
        if len(ids) < len(column[entry]):
            column[entry] = column[entry][: len(ids)]


def _first_non_finite(found: TokenLogprobs, normalizers: list[float]) -> int | None:
    """Find the first position whose row has no distribution, or no logprob; None if there is none."""
    logprobs: list[float] = found.columns.logprobs  # type: ignore[assignment] # all were computed
    if all(map(isfinite, normalizers)) and not any(map(isnan, logprobs)):
        return None
    rows = zip(found.query.positions, normalizers, logprobs, strict=True)
    return next(position for position, normalizer, value in rows if not isfinite(normalizer) or isnan(value))


def _has_top(k: int, sequence: Sequence) -> bool:
    return sequence.top_logprobs == k
