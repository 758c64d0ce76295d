"""Stop tokens, min_tokens and end tokens give the same text as transformers' generate() with the same weights."""

from collections.abc import Callable
from math import exp

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_against_transformers import tokens
from tests.tiny_tokenizer import EOS

NUM_TOKENS = 12
EOS_IDS = {"demo": [2, 0], "llama": [EOS]}


def greedy(prompt: list[int], **options: object) -> Sequence:
    return Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=NUM_TOKENS, temperature=0, **options))


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_input_tokens :]


@pytest.mark.parametrize("name", EOS_IDS)
def test_stop_token_ids_and_min_tokens_equal_transformers(
    name: str, engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle]
):
    """All sequences, with different stop conditions, run in one batch."""
    engine, oracle = engine_of(name), oracle_of(name)
    assert engine.tokenizer.eos_ids == set(EOS_IDS[name])
    prompts = [tokens(length, seed=length) for length in (3, 20)]
    unstopped = [greedy(prompt, ignore_eos=True) for prompt in prompts]
    engine.add(unstopped).result(60)
    cases: list[tuple[Sequence, dict[str, object]]] = []
    for prompt, full in zip(prompts, unstopped, strict=True):
        assert generated(full) == oracle.generate(prompt, NUM_TOKENS, eos_token_id=-1)
        stops = sorted({generated(full)[2], generated(full)[7]})
        for min_tokens in (0, 5, NUM_TOKENS):
            sequence = greedy(prompt, stop_token_ids=tuple(stops), min_tokens=min_tokens)
            cases.append((sequence, {"eos_token_id": [*EOS_IDS[name], *stops], "min_new_tokens": min_tokens or None}))
            if min_tokens:
                cases.append((greedy(prompt, min_tokens=min_tokens), cases[-1][1] | {"eos_token_id": EOS_IDS[name]}))

    engine.add([sequence for sequence, _ in cases]).result(60)

    for sequence, options in cases:
        assert generated(sequence) == oracle.generate(
            sequence.token_ids[: sequence.num_input_tokens], NUM_TOKENS, **options
        ), options
        assert_agrees(sequence, oracle)  # the model's own logprobs, whatever was banned
    assert {sequence.finish_reason for sequence, _ in cases} == {"stop", "length"}


@pytest.mark.parametrize("mode", ["default", "exact"])
def test_a_seed_gives_the_same_tokens_beside_any_other_sequences(mode: str, engine_of: Callable[..., Engine]):
    """The others have banned tokens and biases, and end at different steps."""
    engine = engine_of("llama", mode=mode)
    prompt = tokens(12, seed=1)

    def sampled(seed: int, **options: object) -> Sequence:
        bias = ((EOS, 6.0),)  # without min_tokens it would end soon
        return Sequence(
            token_ids=list(prompt),
            sampling=Sampling(max_tokens=NUM_TOKENS, seed=seed, temperature=0.9, logit_bias=bias, **options),
        )

    alone = sampled(5, min_tokens=8, stop_token_ids=(60, 61, 62))
    engine.add([alone]).result(60)
    batched = sampled(5, min_tokens=8, stop_token_ids=(60, 61, 62))
    others = [sampled(seed, min_tokens=seed % 3 * 4, frequency_penalty=seed % 2) for seed in range(8)]

    engine.add([*others, batched, Sequence(token_ids=prompt * 3, score_from=1)]).result(60)

    assert generated(batched) == generated(alone)
    assert alone.num_generated > 8
    assert not {EOS, 60, 61, 62} & set(generated(alone)[:8])
    for sequence, seed in zip(others, range(8), strict=True):
        assert sequence.num_generated > seed % 3 * 4
        assert EOS not in generated(sequence)[: seed % 3 * 4]


def test_banned_tokens_are_excluded_from_the_sampled_distribution(engine: Engine, oracle: Oracle):
    prompt = tokens(6, seed=2)
    own = oracle.logprobs(prompt)[-1]
    ranked = own.argsort()[::-1].tolist()
    stops = tuple(ranked[:20])
    kept = [token_id for token_id in ranked[20:] if token_id != EOS][:3]
    samplings = [Sampling(max_tokens=1, min_tokens=1, stop_token_ids=stops, top_k=3, seed=seed) for seed in range(12)]
    sequences = [Sequence(token_ids=list(prompt), sampling=sampling) for sampling in samplings]

    engine.add(sequences).result(60)

    assert len({generated(sequence)[0] for sequence in sequences}) > 1
    total = sum(exp(own[token_id]) for token_id in kept)
    for sequence in sequences:
        (token_id,) = generated(sequence)
        assert token_id in kept
        assert exp(sequence.columns.sampled_logprobs[0]) == pytest.approx(exp(own[token_id]) / total, abs=1e-4)
        assert sequence.columns.logprobs[0] == pytest.approx(own[token_id], abs=1e-4)
