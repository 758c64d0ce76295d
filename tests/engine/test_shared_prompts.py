"""Sequences that begin alike share the computation of their prefix, and their numbers do not change."""

import gc
from collections.abc import Callable
from random import Random

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.core import EngineCore
from scorepool.engine.model import runner
from scorepool.engine.model.backbone import split_model
from scorepool.engine.model.config import read_config
from scorepool.engine.model.padded_batch import PaddedBatch
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice
from tests.engine.between_steps import add, cancel, drive
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import SLIDING_WINDOW, VOCAB_SIZE, TinyModels
from tests.tiny_tokenizer import BOS

_draw = Random(7)


def tokens(length: int) -> list[int]:
    return [_draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


SYSTEM = [BOS, *tokens(3 * SLIDING_WINDOW)]
PROMPTS = [SYSTEM + tokens(length) for length in (40, 21, 70)]


def make_sequences() -> list[Sequence]:
    """Make completions of one token and of many after each prompt, and sequences that generate."""
    found = []
    for prompt in PROMPTS:
        found += [
            Sequence(token_ids=prompt + tokens(length), score_from=len(prompt), top_logprobs=3, rank=True)
            for length in (1, 2, 20, 33)
        ]
        found += [
            Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=length, seed=1), top_logprobs=2)
            for length in (1, 5, SLIDING_WINDOW + 3)
        ]
    return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the prompt tokens of every step."""
    counted: list[int] = []
    launch = runner.ModelRunner.launch

    def count(self: runner.ModelRunner, output: SchedulerOutput) -> runner.LaunchedStep:
        counted.append(sum(slice_.num_tokens for slice_ in output.slices if not slice_.is_decode))
        return launch(self, output)

    monkeypatch.setattr(runner.ModelRunner, "launch", count)
    return counted


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "granitehybrid", "lfm2"])
@pytest.mark.parametrize(
    ("budget", "mode"),
    [(64, "default"), (64, "exact"), (2048, "default"), pytest.param(2048, "exact", marks=pytest.mark.soak)],
)
def test_sequences_on_shared_prompts_agree_with_transformers(
    name: str,
    mode: str,
    budget: int,
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    computed: list[int],
):
    engine, oracle = engine_of(name, mode=mode, max_batch_tokens=budget), oracle_of(name)
    given = make_sequences()

    engine.add(given).result(60)

    for sequence in given:
        assert_agrees(sequence, oracle)
    assert "whole prompt" not in engine.model_info.self_test
    assert sum(computed) < 0.5 * sum(sequence.num_prefill for sequence in given)


def test_completions_that_arrive_one_by_one_hit_the_prefix_cache(engine: Engine, computed: list[int]):
    prompt = [BOS, *tokens(200)]
    completions = [tokens(4) for _ in range(5)]

    first, *_ = [
        engine.add([Sequence(token_ids=prompt + completion, score_from=len(prompt))]).result(60)[0].columns.logprobs
        for completion in completions
    ]
    again = engine.add([Sequence(token_ids=prompt + completions[0], score_from=len(prompt))]).result(60)[0]

    assert [count for count in computed if count] == [204, 204, 3, 3, 3, 3]
    assert again.columns.logprobs == pytest.approx(first, abs=5e-5)


def test_a_cleared_prefix_cache_is_computed_again_and_changes_no_number(engine: Engine, computed: list[int]):
    prompt = [BOS, *tokens(200)]

    def score() -> list[float | None]:
        sequence = Sequence(token_ids=[*prompt, 7, 8], score_from=len(prompt))
        engine.add([sequence]).result(60)
        return sequence.columns.logprobs

    engine.clear_prefix_cache().result(60)
    before = [score() for _ in range(3)]
    num_bytes = engine.clear_prefix_cache().result(60)
    after = [score() for _ in range(2)]

    assert num_bytes > 0
    assert engine.clear_prefix_cache().result(60) > 0
    assert [count for count in computed if count] == [202, 202, 1, 202, 1]
    for values in [*before, *after]:
        assert values == pytest.approx(before[0], abs=5e-5)


def test_n_completions_are_sampled_from_one_prefill(engine: Engine, computed: list[int]):
    prompt = [BOS, *tokens(100)]

    engine.add([Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=3, seed=i)) for i in range(8)]).result(60)

    assert sum(computed) == 101


def test_a_canceled_prompt_of_several_rows_leaves_no_cache_and_no_work(engine_of: Callable[..., Engine]):
    prompt = [3 + 5 * number % 389 for number in range(480)]

    def begin_and_cancel(core: EngineCore) -> int:
        before = core.stats.prompt_tokens
        group = add(core, *(Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=4)) for _ in range(2)))
        for _ in range(3):
            core.step()
        assert core.scheduler.chunked_prefill is not None
        cancel(core, group)
        core.drain()
        assert not core.is_busy
        assert not core.runner.batch._chunked
        return core.stats.prompt_tokens - before

    assert drive(engine_of("llama", max_batch_tokens=16), begin_and_cancel) == 3 * 16


@pytest.mark.parametrize("name", ["gemma3", "granitehybrid", "lfm2", "qwen3_next"])
def test_num_bytes_counts_all_memory_of_a_cached_prefix(tiny_models: TinyModels, name: str):
    folder = tiny_models(name)
    model = load_model(folder, model_config=read_config(folder))[0]
    batch = PaddedBatch(model, split_model(model))

    def uncounted() -> int:
        prefix = Prefix(Prefix(None, []), tokens(250))
        before = mx.get_active_memory()
        batch.prefill([Slice(Sequence(token_ids=prefix.token_ids), 0, prefix.length, fills_prefix=prefix)])
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory() - before - prefix.num_bytes

    uncounted()  # the first run loads the model's weights

    assert uncounted() < 32_000  # the slice's hidden states take 64,000; buffers are somewhat larger than requested


@pytest.mark.soak
def test_exact_mode_is_the_same_to_the_bit_alone_together_and_on_a_cached_prompt(engine_of: Callable[..., Engine]):
    alone = engine_of("llama", mode="exact", prefix_cache_bytes=0)
    together = engine_of("llama", mode="exact", max_batch_tokens=100)
    assert together.model_info.mode == "exact"
    for number, sequence in enumerate(make_sequences()):
        same = [
            Sequence(token_ids=list(sequence.token_ids), score_from=sequence.score_from, sampling=sequence.sampling)
            for _ in "ab"
        ]
        alone.add([same[0]]).result(60)
        together.add([*make_sequences()[number:], same[1]]).result(60)
        assert same[0].columns.logprobs == same[1].columns.logprobs
        assert same[0].token_ids == same[1].token_ids
        if sequence.sampling:
            scored = Sequence(token_ids=list(same[0].token_ids), score_from=sequence.num_input_tokens)
            together.add([scored]).result(60)
            assert scored.columns.logprobs == same[0].columns.logprobs


def test_a_sequence_counts_the_tokens_that_were_not_computed_for_it(engine_of: Callable[..., Engine]):
    engine = engine_of("llama")
    prompt = [7 * number % 90 + 5 for number in range(100)]

    def run(*ends: int) -> list[int]:
        before = engine.stats
        sequences = [Sequence(token_ids=[*prompt, end, end], score_from=100) for end in ends]
        engine.add(sequences).result(60)
        num_given = sum(sequence.num_input_tokens - 1 for sequence in sequences)
        computed = engine.stats.prompt_tokens - before.prompt_tokens
        assert computed == num_given - sum(sequence.num_cached for sequence in sequences)
        return [sequence.num_cached for sequence in sequences]

    assert run(11, 12, 13) == [0, 100, 100]  # the first has the prefix computed
    assert run(14) == [100]
