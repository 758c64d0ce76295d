"""The numbers are those of transformers on the same weights: alone, and in a batch of everything at once."""

from collections.abc import Callable
from random import Random

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import BOS, SLIDING_WINDOW, VOCAB_SIZE

BATCHED = [
    "demo",
    "llama",
    "llama3",
    "deepseek_v2",
    "falcon_h1",
    "phi",
    "phimoe",
    "qwen3",
    "qwen3_28_layers",
    "qwen3_moe",
    "qwen3_next",
    "gemma",
    "gemma3",
    "gpt_neox",
    "gpt_oss",
    "granitehybrid",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "starcoder2",
]
ALONE = ["gemma2", "gpt_bigcode", "mamba"]  # mlx-lm's batched decoding raises, or is off by nats
MODELS = [*BATCHED, *ALONE]


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tolerance(name: str) -> float:
    return 1e-3 if name == "qwen3_28_layers" else 1e-4


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = Random(seed)
    return [BOS] + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - 1)]


def test_scores_of_a_row_alone_are_transformers(
    name: str, tolerance: float, engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle]
):
    row = Sequence(token_ids=tokens(3 * SLIDING_WINDOW), score_from=0, top_logprobs=20, rank=True, entropy=True)

    engine_of(name).add([row]).result(60)

    assert_agrees(row, oracle_of(name), tolerance)


def test_scores_beside_generating_rows_are_transformers(
    name: str, tolerance: float, engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle]
):
    engine, oracle = engine_of(name, max_batch_tokens=200), oracle_of(name)
    rows = [
        Sequence(token_ids=tokens(5, 1), sampling=Sampling(max_tokens=40, temperature=0)),
        Sequence(token_ids=tokens(60, 2), score_from=30, top_logprobs=5),
        Sequence(token_ids=tokens(3, 3), score_from=1, temperature=0.7, rank=True),
        Sequence(token_ids=tokens(33, 4), sampling=Sampling(max_tokens=9, seed=1), top_logprobs=3, entropy=True),
        Sequence(token_ids=tokens(21, 5), score_from=0, sampling=Sampling(max_tokens=20, temperature=0)),
        Sequence(token_ids=tokens(250, 6), score_from=2),  # longer than the budget: in chunks
        Sequence(token_ids=tokens(230, 7), sampling=Sampling(max_tokens=12, temperature=0)),
        Sequence(token_ids=tokens(2, 8), sampling=Sampling(max_tokens=30, temperature=0.5, top_k=20, seed=2)),
    ]

    futures = [engine.add([row]) for row in rows]
    for future in futures:
        future.result(60)

    for row in rows:
        assert_agrees(row, oracle, tolerance)
        if row.sampling and row.sampling.temperature == 0:
            generated = row.token_ids[row.num_input_tokens :]
            assert generated == oracle.greedy(row.token_ids, row.num_input_tokens)
            assert len(generated) == row.sampling.max_tokens or generated[-1] in engine.tokenizer.eos_ids


def test_a_sampled_tokens_logprob_is_what_scoring_it_gives(
    name: str, tolerance: float, engine_of: Callable[..., Engine]
):
    engine = engine_of(name)
    prompt = tokens(11)
    row = Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=2 * SLIDING_WINDOW, seed=5))
    engine.add([row]).result(60)

    again = Sequence(token_ids=list(row.token_ids), score_from=len(prompt))
    engine.add([again]).result(60)

    assert row.columns.logprobs == pytest.approx(again.columns.logprobs, abs=tolerance)
    assert row.columns.sampled_logprobs == pytest.approx(row.columns.logprobs, abs=1e-5)  # temperature 1, no filters


@pytest.mark.parametrize("name", ALONE)
def test_a_model_that_mlx_lm_cannot_batch_is_served_one_row_at_a_time(name: str, engine_of: Callable[..., Engine]):
    model_info = engine_of(name).model_info

    assert model_info.mode == "one row at a time"
    assert "batch" in model_info.self_test


@pytest.mark.parametrize("name", BATCHED)
def test_a_model_that_can_be_batched_passes_its_self_test(name: str, engine_of: Callable[..., Engine]):
    assert (engine_of(name).model_info.mode, engine_of(name).model_info.self_test) == ("default", "passed")
