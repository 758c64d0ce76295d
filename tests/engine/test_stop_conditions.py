"""Where a generation ends, and where it must not, as transformers' generate() finds it on the same weights."""

from collections.abc import Callable
from math import exp

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_against_transformers import tokens
from tests.tiny_models import EOS

NUM_TOKENS = 12
ENDS = {"demo": [2, 0], "llama": [EOS]}


def greedy(prompt: list[int], **options: object) -> Sequence:
    return Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=NUM_TOKENS, temperature=0, **options))


def generated(row: Sequence) -> list[int]:
    return row.token_ids[row.num_input_tokens :]


@pytest.mark.parametrize("name", ENDS)
def test_stop_token_ids_and_min_tokens_are_those_of_transformers(
    name: str, engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle]
):
    """Alone and beside rows with other ends: they are all in one batch."""
    engine, oracle = engine_of(name), oracle_of(name)
    assert engine.tokenizer.eos_ids == set(ENDS[name])
    prompts = [tokens(length, seed=length) for length in (3, 20)]
    free = [greedy(prompt, ignore_eos=True) for prompt in prompts]
    engine.add(free).result(60)
    asked: list[tuple[Sequence, dict[str, object]]] = []
    for prompt, whole in zip(prompts, free, strict=True):
        assert generated(whole) == oracle.continued(prompt, NUM_TOKENS, eos_token_id=-1)
        stops = sorted({generated(whole)[2], generated(whole)[7]})
        for min_tokens in (0, 5, NUM_TOKENS):
            row = greedy(prompt, stop_token_ids=tuple(stops), min_tokens=min_tokens)
            asked.append((row, {"eos_token_id": [*ENDS[name], *stops], "min_new_tokens": min_tokens or None}))
            if min_tokens:
                asked.append((greedy(prompt, min_tokens=min_tokens), asked[-1][1] | {"eos_token_id": ENDS[name]}))

    engine.add([row for row, _ in asked]).result(60)

    for row, options in asked:
        assert generated(row) == oracle.continued(row.token_ids[: row.num_input_tokens], NUM_TOKENS, **options), options
        assert_agrees(row, oracle)  # the model's own logprobs, whatever was barred
    assert {row.finish_reason for row, _ in asked} == {"stop", "length"}


@pytest.mark.parametrize("mode", ["default", "exact"])
def test_a_seed_gives_the_same_tokens_whatever_ends_its_neighbours(mode: str, engine_of: Callable[..., Engine]):
    """Also where a neighbour is barred, biased, or ends in the middle."""
    engine = engine_of("llama", mode=mode)
    prompt = tokens(12, seed=1)

    def sampled(seed: int, **options: object) -> Sequence:
        bias = ((EOS, 6.0),)  # it would end soon
        return Sequence(
            token_ids=list(prompt),
            sampling=Sampling(max_tokens=NUM_TOKENS, seed=seed, temperature=0.9, logit_bias=bias, **options),
        )

    alone = sampled(5, min_tokens=8, stop_token_ids=(60, 61, 62))
    engine.add([alone]).result(60)
    beside = sampled(5, min_tokens=8, stop_token_ids=(60, 61, 62))
    others = [sampled(seed, min_tokens=seed % 3 * 4, frequency_penalty=seed % 2) for seed in range(8)]

    engine.add([*others, beside, Sequence(token_ids=prompt * 3, score_from=1)]).result(60)

    assert generated(beside) == generated(alone)
    assert alone.num_generated > 8
    assert not {EOS, 60, 61, 62} & set(generated(alone)[:8])
    for row, seed in zip(others, range(8), strict=True):
        assert row.num_generated > seed % 3 * 4
        assert EOS not in generated(row)[: seed % 3 * 4]


def test_what_is_barred_has_no_part_in_the_distribution_that_is_sampled_from(engine: Engine, oracle: Oracle):
    prompt = tokens(6, seed=2)
    own = oracle.logprobs(prompt)[-1]
    ranked = own.argsort()[::-1].tolist()
    stops = tuple(ranked[:20])
    kept = [token_id for token_id in ranked[20:] if token_id != EOS][:3]
    samplings = [Sampling(max_tokens=1, min_tokens=1, stop_token_ids=stops, top_k=3, seed=seed) for seed in range(12)]
    rows = [Sequence(token_ids=list(prompt), sampling=sampling) for sampling in samplings]

    engine.add(rows).result(60)

    assert len({generated(row)[0] for row in rows}) > 1
    total = sum(exp(own[token_id]) for token_id in kept)
    for row in rows:
        (token_id,) = generated(row)
        assert token_id in kept
        assert exp(row.columns.sampled_logprobs[0]) == pytest.approx(exp(own[token_id]) / total, abs=1e-4)
        assert row.columns.logprobs[0] == pytest.approx(own[token_id], abs=1e-4)
