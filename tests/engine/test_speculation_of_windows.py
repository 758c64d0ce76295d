"""Layers with a sliding window: steps that verify proposals, between plain ones, beside rows of other lengths."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_tokenizer import BOS


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_short_row_beside_longer_ones_keeps_its_whole_window(
    name: str,
    folder_of: Callable[[str], Path],
    open_engine: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    always_propose: Callable[[Callable[[int], int]], None],
):
    draw = Random(1)
    always_propose(lambda max_width: draw.randrange(2))
    engine = open_engine(folder_of(name), speculation="draft", draft=str(folder_of("llama")))
    sampling = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    rows = [
        Sequence(token_ids=[BOS, *(draw.randrange(3, 500) for _ in range(length))], sampling=sampling)
        for length in (1, 5, 11, 30)
    ]
    engine.add(rows).result(60)
    for row in rows:
        assert row.num_proposed
        assert_agrees(row, oracle_of(name))
