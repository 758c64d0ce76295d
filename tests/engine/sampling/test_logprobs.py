"""What a step computes: what is asked for, on the rows that ask, in chunks that fit into memory."""

from math import inf
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from scorepool.engine import Sampling, Sequence
from scorepool.engine.model import runner
from scorepool.engine.model.backbone import BackboneAndHead, split_model
from scorepool.engine.model.batch import PaddedBatch
from scorepool.engine.model.runner import ModelRunner, rows_at_once
from scorepool.engine.sampling import scoring
from scorepool.engine.sampling.logprobs import LogprobQuery, compute_logprobs
from scorepool.engine.scheduling.scheduler import Chunk, Plan
from tests.engine.test_engine import FACTS
from tests.tiny_models import VOCAB_SIZE, TinyModels


class CountingHalves:
    """Notes how many rows each call of the head gets."""

    def __init__(self, halves: BackboneAndHead) -> None:
        self._halves = halves
        self.num_rows: list[int] = []

    def forward_hidden(self, token_ids: mx.array, cache: Any = None) -> mx.array:
        return self._halves.forward_hidden(token_ids, cache)

    def compute_logits(self, rows: mx.array) -> mx.array:
        self.num_rows.append(rows.shape[0])
        return self._halves.compute_logits(rows)


def run(model: Any, rows: list[Sequence]) -> list[int]:
    halves = CountingHalves(split_model(model))
    step = ModelRunner(PaddedBatch(model, halves), halves, FACTS, tokenizer=None, chat=None)
    assert set(step.read(step.launch(Plan([], [[Chunk(row, 0, row.num_prefill) for row in rows]]))).values()) == {None}
    return halves.num_rows


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
    monkeypatch.setattr(runner, "LOGITS_BYTES", 3 * FACTS.vocab_size * 8)

    assert run(model, chunked) == [3] * 6 + [2]

    for one, other in zip(whole, chunked, strict=True):
        assert one.columns.logprobs == pytest.approx(other.columns.logprobs, abs=1e-5)
        assert (one.columns.top_ids, one.columns.ranks) == (other.columns.top_ids, other.columns.ranks)


def test_at_least_one_row_of_any_vocabulary_goes_through():
    assert rows_at_once(10**9, 4) == 1
    assert rows_at_once(151_936, 2) * 151_936 * 6 <= runner.LOGITS_BYTES


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> mx.array:
        raise AssertionError("computed, and nobody asked")

    for name in ("top_k", "logprobs_of_many", "ranks", "entropies"):
        monkeypatch.setattr(scoring, name, fail)
    monkeypatch.setattr("scorepool.engine.sampling.sample.sample", fail)

    (entry,) = compute_logprobs(
        [LogprobQuery(Sequence(token_ids=[1, 2], score_from=1), 1)], mx.zeros((1, VOCAB_SIZE))
    ).read()

    assert (entry.top_ids, entry.top_values, entry.rank, entry.entropy, entry.sampled_logprob) == (None,) * 5


def test_a_token_that_the_model_excludes_has_minus_infinity():
    logits = mx.array([[0.0, -inf, 1.0]])
    row = Sequence(token_ids=[0, 1], score_from=1, top_logprobs=3, rank=True, entropy=True)

    (entry,) = compute_logprobs([LogprobQuery(row, 1)], logits).read()

    assert entry.logprob == -inf
    assert (entry.rank, entry.top_ids) == (3, [2, 0, 1])
    assert entry.entropy == pytest.approx(0.5822, abs=1e-4)


def test_rows_of_one_chunk_keep_their_own_options():
    plain = Sequence(token_ids=[0, 1], score_from=1)
    hot = Sequence(token_ids=[0, 1], score_from=1, temperature=2.0, rank=True)
    greedy = Sequence(token_ids=[0], sampling=Sampling(max_tokens=1, temperature=0), top_logprobs=1)
    logits = mx.broadcast_to(mx.array([0.0, 2.0, 4.0]), (3, 3))

    entries = compute_logprobs([LogprobQuery(plain, 1), LogprobQuery(hot, 1), LogprobQuery(greedy, 1)], logits).read()

    assert [entry.logprob for entry in entries] == pytest.approx([-2.1429, -1.4076, -0.1429], abs=1e-4)
    assert [entry.rank for entry in entries] == [None, 2, None]
    assert [entry.top_ids for entry in entries] == [None, None, [2]]
    assert [entry.token_id for entry in entries] == [1, 1, 2]
