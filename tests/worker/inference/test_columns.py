"""The per-token values of the engine are the per-token fields of results and deltas."""

from array import array
from collections.abc import Iterable
from dataclasses import fields
from math import inf

from scorepool import wire
from scorepool.engine import Sampling, Sequence, Targets, TokenColumns
from scorepool.worker.inference.columns import COLUMNS, MIN_LOGPROB, clamp_logprob, delta_columns, result_columns


def bytes_of(token_ids: Iterable[int]) -> list[bytes]:
    return [bytes([token_id]) for token_id in token_ids]


def filled_sequence() -> Sequence:
    """Return a sequence of two generated tokens for which every per-token value was requested."""
    sampling = Sampling(max_tokens=2, temperature=0.5)
    targets = Targets([[4, 5]], is_shared=True)
    sequence = Sequence(token_ids=[1], top_logprobs=1, rank=True, entropy=True, sampling=sampling, targets=targets)
    sequence.token_ids += [2, 3]
    sequence.columns = TokenColumns(
        logprobs=[-1.0, -2.0],
        top_ids=[[2], [9]],
        top_logprobs=[[-1.0], [-0.5]],
        target_logprobs=[array("f", [-3.0, -4.0]), array("f", [-inf, -0.5])],
        ranks=[1, 2],
        entropies=[0.5, 0.25],
        sampled_logprobs=[-0.125, -3.0],
    )
    return sequence


def test_every_column_of_the_engine_is_reported_in_a_field_of_the_result():
    of_compare_jobs = {"min_logprobs"}  # read by comparison_run.py, and in no result
    assert {column.name for column in fields(TokenColumns)} <= COLUMNS.keys() | of_compare_jobs
    assert COLUMNS.keys() <= set(wire.SequenceResult.__struct_fields__)
    assert set(wire.StreamedColumns.__struct_fields__) - {"token_ids", "token_bytes"} <= COLUMNS.keys()
    assert result_columns(filled_sequence(), 2, bytes_of, clamp_logprob).keys() == COLUMNS.keys()


def test_columns_that_were_not_requested_are_not_reported():
    sequence = Sequence(token_ids=[1, 2], score_from=1)
    sequence.columns = TokenColumns(logprobs=[-1.0])

    assert result_columns(sequence, 1, bytes_of, clamp_logprob).keys() == {"logprobs"}


def test_a_delta_has_the_values_of_the_result():
    sequence = filled_sequence()

    whole = result_columns(sequence, 2, bytes_of, clamp_logprob)
    delta = delta_columns(sequence, sequence.columns, bytes_of)

    assert whole["target_logprobs"] == [wire.Floats([-3.0, -4.0]), wire.Floats([MIN_LOGPROB, -0.5])]
    assert delta.keys() == {"logprobs", "top_ids", "top_bytes", "top_logprobs", "target_logprobs"}
    assert delta == {name: whole[name] for name in delta}
