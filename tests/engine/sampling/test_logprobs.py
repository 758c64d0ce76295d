"""A step computes what is asked for, on the rows that ask, in chunks that fit into memory."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from scorepool.engine import Sampling, Sequence, TokenColumns
from scorepool.engine.model import runner
from scorepool.engine.model.backbone import BackboneAndHead, split_model
from scorepool.engine.model.padded_batch import PaddedBatch
from scorepool.engine.model.runner import EXACT_ROWS, ModelRunner, rows_at_once
from scorepool.engine.sampling import scoring
from scorepool.engine.sampling.logprobs import TokenLogprobs, compute_logprobs, split_rows
from scorepool.engine.sampling.query import LogprobQuery
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice
from tests.engine.test_engine import MODEL_INFO
from tests.tiny_models import VOCAB_SIZE, TinyModels


class CountingHead:
    """Counts the rows that each call of the head gets."""

    def __init__(self, backbone_and_head: BackboneAndHead) -> None:
        self._model = backbone_and_head
        self.num_rows: list[int] = []

    def forward_hidden(
        self, token_ids: mx.array, cache: Any = None, sequences: Any = None, starts: Any = None
    ) -> mx.array:
        return self._model.forward_hidden(token_ids, cache, sequences, starts)

    def compute_logits(self, rows: mx.array) -> mx.array:
        self.num_rows.append(rows.shape[0])
        return self._model.compute_logits(rows)


def run(model: Any, sequences: list[Sequence], mode: str = "default") -> list[int]:
    """Prefill sequences in one step; return the number of rows of each head."""
    head = CountingHead(split_model(model))
    runner = ModelRunner(PaddedBatch(model, head), head, replace(MODEL_INFO, mode=mode), tokenizer=None, chat=None)
    slices = [Slice(sequence, 0, sequence.num_prefill) for sequence in sequences]
    step, _ = runner.launch(SchedulerOutput([slices], []))
    results = runner.read(step)
    assert {result.slice: result.error for result in results} == dict.fromkeys(slices)
    return head.num_rows


@pytest.fixture
def model(tiny_models: TinyModels) -> Any:
    return load_model(tiny_models("llama"))[0]


def test_the_head_runs_on_the_rows_that_are_asked_for(model: Any):
    rows = [Sequence(token_ids=list(range(40)), score_from=37), Sequence(token_ids=[1, 2, 3], score_from=1)]

    assert sum(run(model, rows)) == 3 + 2


def test_chunks_of_logits_are_bounded_by_bytes_and_change_no_number(model: Any, monkeypatch: pytest.MonkeyPatch):
    def rows() -> list[Sequence]:
        return [Sequence(token_ids=list(range(3, 14)), score_from=1, top_logprobs=3, rank=True) for _ in range(2)]

    whole, chunked = rows(), rows()
    assert len(run(model, whole)) == 1
    monkeypatch.setattr(runner, "LOGITS_BYTES", 3 * MODEL_INFO.vocab_size * 8)

    assert run(model, chunked) == [3] * 6 + [2]

    for one, other in zip(whole, chunked, strict=True):
        assert one.columns.logprobs == pytest.approx(other.columns.logprobs, abs=1e-5)
        assert (one.columns.top_ids, one.columns.ranks) == (other.columns.top_ids, other.columns.ranks)


def test_at_least_one_row_of_any_vocabulary_goes_through():
    assert rows_at_once(10**9, 4) == 1
    assert rows_at_once(151_936, 2) * 151_936 * 6 <= runner.LOGITS_BYTES


def test_the_heads_of_exact_mode_give_every_token_its_own_values(model: Any):
    def sequences() -> list[Sequence]:
        lengths = [(40, 3), (25, 20), (9, 1)]
        return [
            Sequence(token_ids=list(range(3, 3 + length)), score_from=first, top_logprobs=2, entropy=length == 25)
            for length, first in lengths
        ]

    plain, exact = sequences(), sequences()
    run(model, plain)

    assert set(run(model, exact, mode="exact")) == {EXACT_ROWS}

    for one, other in zip(plain, exact, strict=True):
        assert one.columns.logprobs == pytest.approx(other.columns.logprobs, abs=1e-5)
        assert one.columns.entropies == pytest.approx(other.columns.entropies, abs=1e-5)
        assert one.columns.top_ids == other.columns.top_ids


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), max_rows=st.integers(1, 8))
def test_queries_are_cut_into_groups_of_rows_without_loss(lengths: list[int], max_rows: int):
    sequences = [Sequence(token_ids=[1] * 20, score_from=1) for _ in lengths]
    queries = [LogprobQuery(one, range(5, 5 + length)) for one, length in zip(sequences, lengths, strict=True)]

    groups = list(split_rows(queries, max_rows))

    sizes = [sum(len(query.positions) for query in group) for group in groups]
    assert all(size == max_rows for size in sizes[:-1])
    assert 0 < sizes[-1] <= max_rows
    rows = [(query.sequence, position) for group in groups for query in group for position in query.positions]
    assert rows == [(query.sequence, position) for query in queries for position in query.positions]


def compute(queries: list[LogprobQuery], logits: mx.array) -> list[TokenLogprobs]:
    return compute_logprobs(queries, logits).read()


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> mx.array:
        raise AssertionError("computed, and nobody asked")

    for name in ("top_k", "logprobs_of_many", "ranks", "entropies"):
        monkeypatch.setattr(scoring, name, fail)
    monkeypatch.setattr("scorepool.engine.sampling.sample.sample", fail)
    query = LogprobQuery(Sequence(token_ids=[1, 2], score_from=1), range(1, 2))

    (found,) = compute([query], mx.zeros((1, VOCAB_SIZE)))

    assert found.columns == TokenColumns(logprobs=found.columns.logprobs)
    assert found.sampled_ids == []


def test_a_token_that_the_model_excludes_has_minus_infinity():
    sequence = Sequence(token_ids=[0, 1], score_from=1, top_logprobs=3, rank=True, entropy=True)

    (found,) = compute([LogprobQuery(sequence, range(1, 2))], mx.array([[0.0, -inf, 1.0]]))

    assert found.columns.logprobs == [-inf]
    assert (found.columns.ranks, [*map(list, found.columns.top_ids)]) == ([3], [[2, 0, 1]])
    assert found.columns.entropies == pytest.approx([0.5822], abs=1e-4)
    assert found.non_finite_position is None


def test_the_first_position_without_a_distribution_is_named():
    sequence = Sequence(token_ids=[0, 1, 1, 1], score_from=1)
    logits = mx.array([[0.0, 1.0], [0.0, nan], [-inf, -inf]])

    (found,) = compute([LogprobQuery(sequence, range(1, 4))], logits)

    assert found.non_finite_position == 2


def test_rows_of_one_chunk_keep_their_own_options():
    plain = Sequence(token_ids=[0, 1], score_from=1)
    hot = Sequence(token_ids=[0, 1, 2], score_from=1, temperature=2.0, rank=True)
    greedy = Sequence(token_ids=[0], sampling=Sampling(max_tokens=1, temperature=0), top_logprobs=1)
    logits = mx.broadcast_to(mx.array([0.0, 2.0, 4.0]), (4, 3))
    queries = [LogprobQuery(plain, range(1, 2)), LogprobQuery(hot, range(1, 3)), LogprobQuery(greedy, range(1, 2))]

    of_plain, of_hot, of_greedy = compute(queries, logits)

    assert of_plain.columns.logprobs == pytest.approx([-2.1429], abs=1e-4)
    assert of_hot.columns.logprobs == pytest.approx([-1.4076, -0.4076], abs=1e-4)
    assert of_greedy.columns.logprobs == pytest.approx([-0.1429], abs=1e-4)
    assert [one.columns.ranks for one in (of_plain, of_hot, of_greedy)] == [[], [2, 1], []]
    assert [[*map(list, one.columns.top_ids)] for one in (of_plain, of_hot, of_greedy)] == [[], [], [[2]]]
    assert [one.sampled_ids for one in (of_plain, of_hot, of_greedy)] == [[], [], [2]]
    assert of_greedy.columns.sampled_logprobs == [0.0]
