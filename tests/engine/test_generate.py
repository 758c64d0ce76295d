"""Generation: seeds, ends, cancellation, and sequences that fail beside others that do not."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, NonFiniteLogits, Sampling, Sequence
from scorepool.engine.model import checkpoint
from tests.engine.oracle import Oracle, assert_agrees, filter_as_transformers
from tests.tiny_models import CONTEXT_LENGTH, TinyModels
from tests.tiny_tokenizer import EOS

PROMPT = [0, 50, 60, 70]


def generating(max_tokens: int = 12, prompt: list[int] = PROMPT, **options: object) -> Sequence:
    return Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=max_tokens, **options))


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_input_tokens :]


def run(engine: Engine, *sequences: Sequence) -> None:
    engine.add(list(sequences)).result(60)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: Engine):
    alone = generating(seed=3, temperature=0.8, top_p=0.9)
    run(engine, alone)
    beside = generating(seed=3, temperature=0.8, top_p=0.9)
    others = [generating(seed=seed, prompt=PROMPT[: 1 + seed % 4]) for seed in range(7)]

    run(engine, *others, beside, Sequence(token_ids=list(range(90)), score_from=4))

    assert generated(beside) == generated(alone)


def test_sequences_of_one_prompt_differ_by_their_seeds(engine: Engine):
    sequences = [generating(seed=seed) for seed in range(8)]

    run(engine, *sequences)

    assert len({tuple(generated(sequence)) for sequence in sequences}) == 8


def test_sequences_without_a_seed_differ(engine: Engine):
    sequences = [generating(), generating()]

    run(engine, *sequences)

    assert generated(sequences[0]) != generated(sequences[1])


def test_the_sampled_logprobs_of_a_greedy_sequence_are_0(engine: Engine, oracle: Oracle):
    sequence = generating(temperature=0)

    run(engine, sequence)

    assert sequence.columns.sampled_logprobs == [0.0] * sequence.num_generated
    assert_agrees(sequence, oracle)  # and logprobs stay the model's own


@pytest.mark.parametrize("options", [{"top_k": 20, "top_p": 0.6}, {"top_k": 8, "top_p": 0.9, "min_p": 0.1}])
def test_sampled_logprobs_are_those_of_the_distribution_that_transformers_samples_from(
    engine: Engine, oracle: Oracle, options: dict[str, float]
):
    sequences = [generating(seed=seed, temperature=1.5, max_tokens=20, **options) for seed in range(5)]

    run(engine, *sequences)

    for sequence in sequences:
        rows = oracle.logprobs(sequence.token_ids)[len(PROMPT) - 1 :]
        right = [filter_as_transformers(row, sequence.sampling) for row in rows]
        tokens = zip(right, generated(sequence), strict=False)
        assert sequence.columns.sampled_logprobs == pytest.approx([row[token] for row, token in tokens], abs=1e-4)


def test_the_eos_token_is_in_the_columns_and_not_in_the_text(
    engine: Engine, oracle: Oracle, tiny_models: TinyModels, tmp_path: Path
):
    first = generating(temperature=0, max_tokens=2)
    run(engine, first)
    folder = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [EOS, generated(first)[1]]}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    engine = Engine(EngineSettings(model=str(folder)))

    sequence = generating(temperature=0)
    sequence.top_logprobs = 1
    run(engine, sequence)
    engine.close()

    assert (generated(sequence), sequence.finish_reason) == (generated(first), "stop")
    assert (
        len(sequence.columns.logprobs) == len(sequence.columns.top_ids) == len(sequence.columns.sampled_logprobs) == 2
    )
    assert sequence.text_bytes == engine.tokenizer.token_bytes(generated(first)[0])
    assert_agrees(sequence, oracle)


def test_a_stop_string_across_tokens_cuts_the_text_and_the_columns(engine: Engine):
    free = generating(seed=2, max_tokens=12)
    run(engine, free)
    pieces = [engine.tokenizer.token_bytes(token_id) for token_id in generated(free)]
    text = b"".join(pieces)
    border = len(b"".join(pieces[:6]))
    stop = text[border - 1 : border + 1]  # the last byte of one token, the first of the next
    cut = text.index(stop)

    sequence = generating(seed=2, max_tokens=12, stop=(b"never there", stop))
    sequence.top_logprobs = 2
    run(engine, sequence)

    assert (sequence.text_bytes, sequence.finish_reason) == (text[:cut], "stop")
    kept = generated(sequence)
    assert kept == generated(free)[: len(kept)]
    assert len(kept) < 12
    assert (
        len(sequence.columns.logprobs)
        == len(sequence.columns.sampled_logprobs)
        == len(sequence.columns.top_ids)
        == len(sequence.columns.top_logprobs)
        == len(kept)
    )


def test_a_sequence_that_uses_its_max_tokens_ends_with_length(engine: Engine):
    sequence = generating(max_tokens=CONTEXT_LENGTH - len(PROMPT), temperature=0)

    run(engine, sequence)

    assert sequence.finish_reason in ("length", "stop")
    assert sequence.finish_reason == "stop" or sequence.num_generated == CONTEXT_LENGTH - len(PROMPT)


def test_a_canceled_group_leaves_the_batch_and_others_continue(engine_of: Callable[..., Engine], oracle: Oracle):
    engine = engine_of("llama")
    long_group = engine.add([generating(max_tokens=500, seed=seed) for seed in range(4)])
    kept = generating(seed=9, max_tokens=30)
    kept_group = engine.add([kept])

    engine.cancel(long_group)

    with pytest.raises(CancelledError):
        long_group.result(60)
    kept_group.result(60)
    assert_agrees(kept, oracle)


def test_a_sequence_with_nan_fails_only_its_own_group(
    tiny_models: TinyModels, tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint, "refuse_degenerate_weights", lambda model: None)  # as if a computation made the NaN
    poison = 333
    folder = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(EngineSettings(model=str(folder)))
    good = generating(seed=1, prompt=[0, 9, 8])
    companion = Sequence(token_ids=[0, 5, 6], score_from=1)
    bad = Sequence(token_ids=[0, poison, 7, 8], score_from=1)

    good_group = engine.add([good])
    bad_group = engine.add([companion, bad])
    bad_prompt = engine.add([generating(prompt=[0, poison])])

    with pytest.raises(NonFiniteLogits, match="not finite"):
        bad_group.result(60)
    with pytest.raises(NonFiniteLogits):
        bad_prompt.result(60)
    good_group.result(60)
    after = Sequence(token_ids=[0, 5, 6], score_from=0)
    run(engine, after)
    engine.close()
    assert_agrees(good, oracle)
    assert_agrees(after, oracle)


def test_groups_may_be_added_from_several_threads(engine: Engine, oracle: Oracle):
    def score(number: int) -> Sequence:
        sequence = Sequence(token_ids=[0, 10 + number, 20, 30 + number], score_from=1)
        generation = generating(seed=number, max_tokens=5)
        engine.add([sequence, generation]).result(60)
        return sequence

    with ThreadPoolExecutor(2) as threads:
        sequences = list(threads.map(score, range(24)))

    for sequence in sequences:
        assert_agrees(sequence, oracle)
