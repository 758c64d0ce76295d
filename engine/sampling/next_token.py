"""Find the token of every row of logits: given, or sampled now after the sequence's logits processors."""

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import mlx.core as mx

from scorepool.engine.sampling import logits_processors, sample
from scorepool.engine.sampling.query import LogprobQuery
from scorepool.engine.sampling.stop import min_tokens_banned_ids
from scorepool.engine.sequence import Constraint, Sampling, Sequence

PATIENCE_S = 0.02  # for which a step waits for constraints after the device has computed the logits
FREE_S = 0.001  # for which it waits before it asks whether the device has
HELD_UP_S = 0.1
HELD_UP_PER_TOKEN_S = 0.001


def ask_constraints(queries: list[LogprobQuery]) -> list[tuple[Sequence, Constraint]]:
    """Have the constraints of all rows that are sampled now find what may follow. Return them with their sequences.

    Waits for the launch before, which samples their last tokens.
    """
    asked: list[tuple[Sequence, Constraint]] = []
    for query in queries:
        if query.samples and query.sequence.constraint is not None:
            query.sequence.constraint.prepare(_generated_on_host(query), query.proposed)
            asked.append((query.sequence, query.sequence.constraint))
    return asked


def find_late(asked: list[tuple[Sequence, Constraint]], wait_for_device: Callable[[], None]) -> list[Sequence]:
    """Wait for constraints that were asked what may follow. Return the sequences that must wait longer.

    While the device computes the logits, waiting holds up nobody. After that it waits no longer than PATIENCE_S for all
    constraints together, and for a sequence that has held up the steps for HELD_UP_S, beside HELD_UP_PER_TOKEN_S for
    each token, no longer than that.
    """
    missing = _wait_for_all(asked, time.monotonic() + FREE_S)
    if missing:
        wait_for_device()
    late: list[Sequence] = []
    now = time.monotonic()
    deadline = now + PATIENCE_S
    for sequence, constraint in missing:
        earned_s = HELD_UP_S + HELD_UP_PER_TOKEN_S * sequence.num_generated - sequence.held_up_s
        if not constraint.wait(max(0.0, min(deadline - now, max(earned_s, HELD_UP_PER_TOKEN_S)))):
            late.append(sequence)
        began, now = now, time.monotonic()
        sequence.held_up_s += now - began
    return late


def _wait_for_all(constrained: list[tuple[Sequence, Constraint]], deadline: float) -> list[tuple[Sequence, Constraint]]:
    """Wait until a time.monotonic(), and return those that do not know by then what may follow."""
    return [
        (sequence, constraint)
        for sequence, constraint in constrained
        if not constraint.wait(max(0.0, deadline - time.monotonic()))
    ]


def tokens_of_rows(queries: list[LogprobQuery], logits: mx.array) -> tuple[mx.array, sample.Sampled | None]:
    """Return the token of every row, and those that are sampled now, in the order of the queries."""
    given: list[int] = []
    for query in queries:
        sampled_positions = query.sampled_positions
        given += query.sequence.token_ids[query.positions.start : query.positions.stop - len(sampled_positions)]
        given += [0] * len(sampled_positions)
    sampling = [(query, position) for query in queries for position in query.sampled_positions]
    if not sampling:
        return mx.array(given, dtype=mx.int32), None
    if len(sampling) == len(given):  # a step that only decodes
        sampled = _sample(sampling, logits)
        return sampled.token_ids, sampled
    token_ids, index = (
        mx.array(given, dtype=mx.int32),
        mx.array([row for _, rows in sampled_rows(queries) for row in rows]),
    )
    sampled = _sample(sampling, logits[index])
    token_ids[index] = sampled.token_ids
    return token_ids, sampled


def sampled_rows(queries: list[LogprobQuery]) -> Iterator[tuple[LogprobQuery, range]]:
    """Yield each query with its rows of logits whose tokens are sampled now."""
    stops = accumulate(len(query.positions) for query in queries)
    for query, stop in zip(queries, stops, strict=True):
        yield query, range(stop - len(query.sampled_positions), stop)


def _sample(sampling: list[tuple[LogprobQuery, int]], logits: mx.array) -> sample.Sampled:
    """Sample the token at a position of a query from each row of logits."""
    samplings, keys, banned_ids = [], [], []
    for query, position in sampling:
        sequence = query.sequence
        if sequence.sampling is None:
            raise ValueError("the query samples a token of a sequence that does not generate")
        samplings.append(sequence.sampling)
        is_greedy = not sequence.sampling.temperature
        index = position - sequence.num_input_tokens
        keys.append(0 if is_greedy else sample.noise_key(sequence.noise_seed, index))
        banned_ids.append(min_tokens_banned_ids(sequence, position, query.eos_ids))
    rows = [row for row, (query, _) in enumerate(sampling) if query.sequence.needs_logits_processing]
    if rows:
        processed = mx.stack([_process(logits[row], *sampling[row]) for row in rows])
        is_all = len(rows) == len(sampling)
        logits = processed if is_all else sample.replace_rows(logits, mx.array(rows), processed)
    return sample.sample(logits_processors.mask_banned(logits, banned_ids), samplings, keys)


def _process(row: mx.array, query: LogprobQuery, position: int) -> mx.array:
    """Apply a sequence's logits processors to the row of logits [vocab] of a position."""
    sequence = query.sequence
    if sequence.sampling is not None and sequence.sampling.needs_logits_processing:
        prompt_ids = sequence.token_ids[: sequence.num_input_tokens]
        row = logits_processors.apply_penalties(row, sequence.sampling, prompt_ids, _generated(query, position))
        row = _exclude(row, sequence.sampling, query, position)
    if sequence.constraint is not None:
        bitmask = sequence.constraint.token_bitmask(_generated_on_host(query), len(query.proposed_before(position)))
        row = logits_processors.apply_token_bitmask(row, bitmask)
    return row


def _exclude(row: mx.array, sampling: Sampling, query: LogprobQuery, position: int) -> mx.array:
    """Set to -inf what the caller has excluded at a position."""
    if sampling.allowed_bitmask:
        row = logits_processors.apply_token_bitmask(row, sampling.allowed_bitmask)
    if sampling.bad_words:
        read = [*_read_ids(query), *query.proposed_before(position)]
        last_id = None if query.unread is None else query.unread.on_device
        row = logits_processors.mask_bad_words(row, sampling.bad_words, read, last_id)
    return row


def _generated(query: LogprobQuery, position: int) -> mx.array:
    """Return [n]: the generated tokens before a position, and proposed ones. Does not wait for the device."""
    read = mx.array([*_read_ids(query), *query.proposed_before(position)], dtype=mx.int32)
    return read if query.unread is None else mx.concatenate([read, query.unread.on_device])


def _generated_on_host(query: LogprobQuery) -> list[int]:
    """Return the generated tokens as Python numbers, without proposed ones. Waits for the launch that samples them."""
    read_ids = _read_ids(query)
    return read_ids if query.unread is None else [*read_ids, query.unread.read()]


def _read_ids(query: LogprobQuery) -> list[int]:
    """Return the generated tokens that the host has read, without proposed ones."""
    sequence = query.sequence
    stop = query.proposed_from if query.proposed else query.positions[-1] - (query.unread is not None)
    return sequence.token_ids[sequence.num_input_tokens : stop]
