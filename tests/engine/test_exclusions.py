"""Greedy generations without bad words, or with allowed tokens only, are those of transformers."""

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees

PROMPT = [0, 50, 61, 72]


def generate(engine: Engine, **options: object) -> Sequence:
    sampling = Sampling(max_tokens=12, temperature=0, ignore_eos=True, **options)
    sequence = Sequence(token_ids=list(PROMPT), sampling=sampling, top_logprobs=1)
    engine.add([sequence]).result(60)
    return sequence


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words_are_not_generated(engine: Engine, oracle: Oracle, length: int):
    """The words are what is generated without them, so each of them would be generated."""
    words: set[tuple[int, ...]] = set()
    for _ in range(3):
        tail = generate(engine, bad_words=tuple(words)).token_ids[len(PROMPT) :]
        words |= {tuple(tail[start : start + length]) for start in range(0, 12 - length, 2)}

    found = generate(engine, bad_words=tuple(words))

    expected = oracle.generate(PROMPT, 12, bad_words_ids=[list(word) for word in words], eos_token_id=None)
    assert found.token_ids[len(PROMPT) :] == expected
    assert_agrees(found, oracle)


def test_allowed_tokens_alone_are_generated(engine: Engine, oracle: Oracle):
    allowed = [7, 31, 32, 64, 200]
    bits = sum(1 << token_id for token_id in allowed)

    found = generate(engine, allowed_bitmask=bits.to_bytes(28, "little"))

    rows = oracle.logprobs(found.token_ids)[len(PROMPT) - 1 : -1, allowed]
    assert found.token_ids[len(PROMPT) :] == [allowed[place] for place in rows.argmax(axis=-1)]
    assert_agrees(found, oracle)
