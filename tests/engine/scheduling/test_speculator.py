"""Proposals stay within the step's tokens, the row's length and what the model can verify."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine.scheduling.proposals import ChosenSource, DraftSource, NgramSource, Proposal
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult
from scorepool.engine.scheduling.speculator import Speculator
from scorepool.engine.sequence import Sampling, Sequence
from tests.engine.test_late_constraints import LateConstraint


def repeating(num_left: int, *, constrained: bool = False) -> Sequence:
    """Make a decoding row whose text has a period of three, and that may generate so many more tokens."""
    sequence = Sequence(token_ids=[5, 6, 7] * 3, sampling=Sampling(max_tokens=6 + num_left))
    sequence.constraint = LateConstraint(0, 1) if constrained else None
    return sequence


def speculator_of(sequences: list[Sequence], max_width: int = 8, able: int = 10**9) -> Speculator:
    """Make a speculator that has seen each row repeat itself, on a machine where tokens cost nothing."""
    speculator = Speculator(NgramSource(), max_width, lambda position: able)
    for _ in range(50):
        speculator.cost.record(1, 1.0, verifies=False)
        speculator.cost.record(4, 1.0, verifies=True)
        speculator.cost.record(40, 1.0, verifies=True)
    for length in range(10, 16):
        for sequence in sequences:
            sequence.token_ids = ([5, 6, 7] * 6)[:length]
            sequence.num_computed = length - 1
        speculator.observe([SliceResult(Slice.decode(sequence), 1) for sequence in sequences])
    return speculator


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 20), st.integers(1, 100)
)
def test_no_limit_is_exceeded(num_left: list[int], max_width: int, able: int, max_tokens: int):
    sequences = [repeating(number) for number in num_left]
    speculator = speculator_of(sequences, max_width, able)

    proposed = speculator.propose(sequences, max_tokens)

    for sequence, (ids, logprobs) in zip(sequences, proposed, strict=True):
        assert logprobs == ()
        assert len(ids) <= min(max_width, able)
        assert len(sequence.token_ids) + len(ids) + 1 <= sequence.max_length
        assert list(ids) == ([5, 6, 7] * 20)[15 : 15 + len(ids)]
    width = max(len(ids) for ids, _ in proposed)
    assert width == 0 or len(sequences) * (width + 1) <= max_tokens
    assert width or not speculator.may_propose(sequences, max_tokens) or min(num_left) < 4 or able < 2


def test_rows_that_repeat_are_proposed_for_and_those_that_only_score_are_not():
    free, bound, scored = repeating(20), repeating(20, constrained=True), repeating(20)
    scored.sampling = None
    speculator = speculator_of([free, bound, scored])

    assert speculator.may_propose([free, bound, scored], 100)
    proposed = speculator.propose([free, bound, scored], 100)

    assert len(proposed[0].token_ids) > 2
    assert proposed[1] == proposed[0]
    assert proposed[2] == Proposal()


@pytest.mark.parametrize("num_forgotten", [0, 1])
def test_a_row_that_ended_is_forgotten(num_forgotten: int):
    sequence = repeating(20)
    speculator = speculator_of([sequence])
    speculator.forget([sequence] * num_forgotten)
    assert bool(speculator.propose([sequence], 100)[0].token_ids) is not bool(num_forgotten)


def test_a_row_has_as_many_proposals_as_it_allows_and_none_if_it_is_off():
    sequences = [repeating(20) for _ in range(4)]
    sequences[1].speculation_tokens = 2
    sequences[2].speculation = "off"
    sequences[3].speculation = "ngram"
    speculator = speculator_of(sequences)
    sizes = [len(ids) for ids, _ in speculator.propose(sequences, 100)]
    assert sizes[0] == sizes[3] > 2
    assert sizes[1:3] == [2, 0]
    assert not speculator.may_propose([sequences[2]], 100)


class FixedSource:
    """Proposes one token, which says who proposed it."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.has_prefilled = False
        self.seen: list[Sequence] = []

    def num_worthwhile(self, sequence: Sequence, num_unread: int) -> int:
        return 4

    def rate(self, sequence: Sequence) -> float:
        return 1.0

    def is_trial(self, sequence: Sequence) -> bool:
        return self.token_id == 1

    def propose(self, decoding: list[Sequence], lengths: list[int]) -> list[Proposal]:
        assert any(lengths)
        self.has_prefilled = True
        return [Proposal((self.token_id,) * length) for length in lengths]

    def observe(self, result: SliceResult) -> None:
        self.seen.append(result.slice.sequence)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        self.seen = [one for one in self.seen if one not in list(sequences)]


class EchoDraft:
    """Proposes a token for each that is asked for."""

    has_prefilled = False

    def propose(self, sequences: list[Sequence], num_tokens: int) -> list[Proposal]:
        return [Proposal((3,) * num_tokens, (0.0,) * num_tokens)] * len(sequences)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        pass


def drafting(max_width: int) -> Speculator:
    """Make a speculator with a draft model, on a machine where tokens cost nothing."""
    draft = EchoDraft()
    speculator = Speculator(DraftSource(lambda: draft, max_width), max_width, lambda position: 10**9, "draft")
    for _ in range(50):
        speculator.cost.record(1, 1.0, verifies=False)
        speculator.cost.record(4, 1.0, verifies=True)
        speculator.cost.record(40, 1.0, verifies=True)
    return speculator


def verify(speculator: Speculator, sequence: Sequence, *, is_right: bool) -> int:
    """Propose tokens of a row, verify them, and return how many there were."""
    sequence.num_computed = len(sequence.token_ids) - 1
    assert speculator.may_propose([sequence], 100)
    ids = speculator.propose([sequence], 100)[0].token_ids
    result = SliceResult(Slice.decode(sequence, ids), 1 + len(ids))
    result.num_accepted = 1 + len(ids) * is_right
    speculator.observe([result])
    return len(ids)


@pytest.mark.parametrize(("max_width", "sizes"), [(1, [1, 1, 1]), (2, [1, 2, 2]), (8, [1, 2, 4])])
def test_a_draft_model_proposes_one_token_and_more_once_it_was_right(max_width: int, sizes: list[int]):
    sequence, speculator = repeating(20), drafting(max_width)
    assert [verify(speculator, sequence, is_right=True) for _ in sizes] == sizes


def test_a_row_begins_with_what_is_known_of_those_before():
    speculator = drafting(8)
    assert [verify(speculator, repeating(20), is_right=True) for _ in range(3)] == [1, 2, 4]
    assert verify(drafting(8), sequence := repeating(20), is_right=False) == 1
    assert speculator.propose([sequence], 100)[0].token_ids


def test_trials_take_a_small_share_of_the_time():
    speculator, sequence = drafting(8), repeating(400)
    seconds = {"plain": 0.0, "lost": 0.0}
    for _ in range(1000):
        sequence.num_computed = len(sequence.token_ids) - 1
        ids = speculator.propose([sequence], 100)[0].token_ids
        slice_ = Slice.decode(sequence, ids)
        lost = 5.0 if ids else 0.0  # the draft has read the prompt
        speculator.record_cost(SchedulerOutput([[slice_]], []), 1.0 + lost)
        speculator.observe([SliceResult(slice_, 1)])
        seconds["plain"] += 1.0
        seconds["lost"] += lost
    assert 10.0 <= seconds["lost"] <= 5.0 + 0.02 * seconds["plain"]


def test_each_row_is_proposed_for_by_what_it_chooses():
    sequences = [repeating(20) for _ in range(3)]
    sequences[0].speculation = "ngram"
    sequences[1].speculation = "draft"  # as the third does, which does not say
    sources = {"ngram": FixedSource(1), "draft": FixedSource(2)}
    chosen = ChosenSource(sources, "draft")
    assert [chosen.is_trial(sequence) for sequence in sequences] == [True, False, False]
    assert [ids for ids, _ in chosen.propose(sequences, [2, 1, 3])] == [(1, 1), (2,), (2, 2, 2)]
    assert [ids for ids, _ in chosen.propose(sequences, [0, 0, 1])] == [(), (), (2,)]
    for sequence in sequences:
        chosen.observe(SliceResult(Slice.decode(sequence), 1))
    assert sources["ngram"].seen == sequences[:1]
    assert sources["draft"].seen == sequences[1:]
    chosen.forget(iter(sequences))
    assert sources["ngram"].seen == sources["draft"].seen == []
