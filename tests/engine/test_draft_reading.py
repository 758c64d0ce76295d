"""A draft model reads a long prompt in several steps, so that no step of the others waits for all of it."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import draft
from scorepool.engine.model.backbone import split_model
from scorepool.engine.model.draft import DraftModel
from scorepool.engine.model.load import load_checked
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_tokenizer import BOS


def row(length: int, max_tokens: int = 40) -> Sequence:
    draw = Random(length)
    token_ids = [BOS, *(draw.randrange(3, 500) for _ in range(length - 1))]
    return Sequence(token_ids=token_ids, sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True))


def test_a_prompt_that_is_not_read_yet_has_no_proposals_and_short_ones_do_not_wait_for_it(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    model, _, _ = load_checked(folder_of("llama"), "float32")
    split = split_model(model)
    whole, long, short = DraftModel(model, split, 512, 512), row(260), row(9)
    expected = whole.propose([long, short], 3)

    monkeypatch.setattr(draft, "MAX_READ", 100)
    parted = DraftModel(model, split, 512, 512)
    found = [parted.propose([long, short], 3) for _ in range(3)]

    assert [len(one.token_ids) for one, _ in found] == [0, 0, 3]
    assert [one.token_ids for one in found[2]] == [one.token_ids for one in expected]
    assert found[0][1].token_ids == expected[1].token_ids
    assert found[2][0].logprobs == pytest.approx(expected[0].logprobs, abs=1e-4)
    assert not parted._begun


def test_rows_go_on_join_and_leave_while_the_draft_reads(
    folder_of: Callable[[str], Path],
    open_engine: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
    always_propose: Callable[[Callable[[int], int]], None],
):
    monkeypatch.setattr(draft, "MAX_READ", 30)
    widths = Random(0)
    always_propose(lambda max_width: min(widths.randrange(4), max_width))
    engine = open_engine(folder_of("llama"), speculation="draft", draft=str(folder_of("llama")))
    canceled = row(200)
    leaves = engine.add([canceled], on_step=lambda _: engine.cancel(leaves) if canceled.num_generated > 3 else None)
    rows = [row(length) for length in (3, 90, 5, 60, 130)]
    for future in [engine.add([one]) for one in rows]:
        future.result(60)
    for one in rows:
        assert_agrees(one, oracle_of("llama"))
    assert rows[0].num_accepted > 10
    assert rows[1].num_accepted
