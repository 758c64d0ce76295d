"""Compute rows with the engine, and compare values."""

from dataclasses import dataclass
from math import isfinite

import numpy as np

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.worker.certify.rows import NUM_GENERATED, Rows

NUM_TOP = 20  # most likely tokens that are compared at each position


@dataclass(frozen=True, slots=True)
class Computed:
    """The logprobs of one row.

    token_ids    [length]
    wanted_ids   [n, 1 + NUM_TOP]  the row's last n tokens, each followed by the most likely ones in its place
    logprobs     [n, 1 + NUM_TOP]  float64, natural log
    """

    token_ids: list[int]
    wanted_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Errors:
    """How far two computations are apart, in nats."""

    largest: float
    rms: float


def compute(engine: Engine, rows: Rows) -> list[Computed]:
    """Score and continue the rows, all in one batch, as jobs are."""
    num_top = min(NUM_TOP, engine.model_info.vocab_size)
    sequences = [Sequence(token_ids=list(row), score_from=1, top_logprobs=num_top) for row in rows.scored]
    greedy = Sampling(max_tokens=NUM_GENERATED, temperature=0, ignore_eos=True)
    sequences += [Sequence(token_ids=list(row), sampling=greedy, top_logprobs=num_top) for row in rows.prompts]
    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result()
    return [_computed(sequence) for sequence in sequences]


def _computed(sequence: Sequence) -> Computed:
    columns = sequence.columns
    tokens = np.array(sequence.token_ids[-len(columns) :])[:, None]
    logprobs = np.array(columns.logprobs, dtype=np.float64)[:, None]
    return Computed(
        sequence.token_ids,
        np.concatenate([tokens, np.array(columns.top_ids)], axis=1),
        np.concatenate([logprobs, np.array(columns.top_logprobs, dtype=np.float64)], axis=1),
    )


def errors(ones: list[np.ndarray], others: list[np.ndarray]) -> Errors:
    """Compare two computations of the same tokens. An excluded token's -inf equals -inf; NaN is an infinite error."""
    one, other = np.concatenate(ones), np.concatenate(others)
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = np.where(one == other, 0.0, np.abs(one - other))
    differences = np.nan_to_num(differences, nan=np.inf, posinf=np.inf)
    largest = float(differences.max())
    return Errors(largest, float(np.sqrt((differences**2).mean())) if isfinite(largest) else largest)
