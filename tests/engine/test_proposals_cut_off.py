"""Accepted tokens that a stop string cuts off are not part of the completion, and nothing says that they are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scorepool.engine import Engine, Sampling, Sequence
from tests.tiny_tokenizer import BOS


@pytest.mark.parametrize("width", [1, 5])  # the stop string ends some steps after the one in which it began, or in it
def test_tokens_that_a_stop_string_cuts_off_are_not_accepted(
    width: int,
    folder_of: Callable[[str], Path],
    open_engine: Callable[..., Engine],
    always_propose: Callable[[Callable[[int], int]], None],
):
    always_propose(lambda max_width: width)
    engine = open_engine(folder_of("llama"), speculation="draft", draft=str(folder_of("llama")))

    def run(stop: tuple[bytes, ...]) -> Sequence:
        sampling = Sampling(max_tokens=24, temperature=0, ignore_eos=True, stop=stop)
        sequence = Sequence(token_ids=[BOS, 7, 8], sampling=sampling, reports_proposals=True)
        engine.add([sequence]).result(60)
        return sequence

    whole = run(())
    last = b"".join(map(engine.tokenizer.token_bytes, whole.token_ids[-5:]))
    cut = run((last,))

    assert cut.finish_reason == "stop"
    assert cut.num_generated < 24
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    accepted = [proposed.position for proposed in cut.proposals if proposed.accepted]
    assert accepted == sorted({*accepted} & {*range(cut.num_generated)})
    assert len(accepted) == cut.num_accepted < whole.num_accepted
    assert len(cut.proposals) == cut.num_proposed
