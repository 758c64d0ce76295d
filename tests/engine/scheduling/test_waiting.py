"""Shares that have waiting sequences get computing time in proportion to their weights."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine.scheduling.kv_budget import KVBudget
from scorepool.engine.scheduling.prefix_cache import PrefixCache
from scorepool.engine.scheduling.scheduler import Scheduler
from scorepool.engine.scheduling.waiting import WaitingSequences
from scorepool.engine.sequence import Sampling, Sequence, Share

ALICE, BOB = Share("alice"), Share("bob")
BUDGET = 100


def scored(share: Share, length: int) -> Sequence:
    return Sequence(token_ids=[0] * length, score_from=1, share=share)


def scheduler_of(*sequences: Sequence, max_running: int = 4) -> Scheduler:
    scheduler = Scheduler(BUDGET, KVBudget(max_running, 10**9), PrefixCache(max_bytes=0))
    scheduler.add(sequences)
    return scheduler


def steps_until(scheduler: Scheduler, last: Sequence) -> int:
    """Return the number of steps until the last token of a scored sequence is computed."""
    for num_steps in range(1, 10_000):
        scheduler.schedule()
        if last.num_computed == last.num_prefill:
            return num_steps
    raise AssertionError("it never ran")


def test_a_short_job_does_not_wait_for_a_thousand_long_sequences_of_another_share():
    scheduler = scheduler_of(*[scored(ALICE, BUDGET + 1) for _ in range(1000)])
    for _ in range(5):
        scheduler.schedule()
    short = scored(BOB, 20)
    scheduler.add([short])
    assert steps_until(scheduler, short) <= 2


def test_a_short_job_does_not_wait_for_a_prompt_of_many_chunks():
    scheduler = scheduler_of(scored(ALICE, 100 * BUDGET), scored(ALICE, 100 * BUDGET))
    scheduler.schedule()
    short = scored(BOB, BUDGET // 2)
    scheduler.add([short])
    assert steps_until(scheduler, short) <= 2


def test_a_generation_takes_the_next_free_place_beside_a_share_that_fills_all_places():
    endless = [
        Sequence(token_ids=[0] * 5, sampling=Sampling(max_tokens=max_tokens), share=ALICE)
        for max_tokens in (50, *[1000] * 20)
    ]
    scheduler = scheduler_of(*endless)
    for _ in range(10):
        scheduler.schedule()
    late = Sequence(token_ids=[0] * 5, sampling=Sampling(max_tokens=5), share=BOB)
    scheduler.add([late])
    for _ in range(50):
        scheduler.schedule()
    assert late.num_computed == late.max_length - 1


@pytest.mark.parametrize("max_cached_tokens", [10**9, 16 * 10**5])
@pytest.mark.parametrize("is_known", [True, False])
def test_rows_that_generate_for_hours_leave_room_to_another_share(max_cached_tokens: int, is_known: bool):
    """It may have come before, or be one of those that the API knows."""
    alice, bob = ALICE, BOB
    if not is_known:
        alice, bob = (replace(share, has_others=True) for share in (ALICE, BOB))

    def generating(share: Share) -> Sequence:
        return Sequence(token_ids=[0] * 5, sampling=Sampling(max_tokens=10**5 - 5), share=share)

    scheduler = Scheduler(BUDGET, KVBudget(16, max_cached_tokens), PrefixCache(max_bytes=0))
    if is_known:
        scheduler.add([scored(bob, 2)])
        scheduler.schedule()
    scheduler.add([generating(alice) for _ in range(100)])
    for _ in range(20):
        scheduler.schedule()
    assert len(scheduler.decoding) == 14
    scheduler.add([generating(bob) for _ in range(3)])
    for _ in range(20):
        scheduler.schedule()
    assert Counter(sequence.share for sequence in scheduler.decoding) == {alice: 14, bob: 2}


def test_jobs_that_do_not_say_whether_there_are_others_are_of_the_same_share():
    """An older API does not say it."""
    assert replace(ALICE, has_others=True) == ALICE
    scheduler = scheduler_of(scored(ALICE, 5))
    scheduler.add([scored(replace(ALICE, has_others=True), 5)])
    assert scheduler.waiting.has_several_shares


def test_a_share_that_is_alone_fills_all_rows():
    endless = [Sequence(token_ids=[0], sampling=Sampling(max_tokens=9999), share=ALICE) for _ in range(40)]
    scheduler = scheduler_of(*endless, max_running=32)
    for _ in range(5):
        scheduler.schedule()
    assert len(scheduler.decoding) == 32


def test_rows_that_wait_are_not_compared_with_those_that_run(monkeypatch: pytest.MonkeyPatch):
    scheduler = scheduler_of(
        *[
            Sequence(token_ids=[0] * 5, sampling=Sampling(max_tokens=1000), share=share)
            for _ in range(500)
            for share in (ALICE, BOB)
        ],
        max_running=16,
    )
    for _ in range(5):
        scheduler.schedule()
    assert Counter(sequence.share for sequence in scheduler.decoding) == {ALICE: 8, BOB: 8}  # no share has its most
    num_compared = 0
    equals = Share.__eq__

    def count(one: Share, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return equals(one, other)

    monkeypatch.setattr(Share, "__eq__", count)
    scheduler.schedule()
    assert num_compared < 984  # that wait


@pytest.mark.parametrize("weight", [1, 3])
def test_shares_that_always_wait_get_tokens_in_proportion_to_their_weights(weight: int):
    heavy = Share("heavy", weight)
    scheduler = scheduler_of(
        *[scored(heavy, 31) for _ in range(400)], *[scored(BOB, 61) for _ in range(400)], *[scored(BOB, 61)]
    )
    computed = Counter[str]()
    for _ in range(60):
        for slice_ in scheduler.schedule().slices:
            computed[slice_.sequence.share.name] += slice_.num_tokens
    assert computed["heavy"] / computed["bob"] == pytest.approx(weight, rel=0.1)


def test_a_share_that_did_not_wait_saves_up_no_turns():
    scheduler = scheduler_of(*[scored(ALICE, 51) for _ in range(400)])
    for _ in range(50):
        scheduler.schedule()
    scheduler.add([scored(BOB, 51) for _ in range(100)])
    shares = Counter(slice_.sequence.share for _ in range(20) for slice_ in scheduler.schedule().slices)
    assert abs(shares[ALICE] - shares[BOB]) <= 2


LENGTHS = st.lists(st.tuples(st.sampled_from([ALICE, BOB, Share("carol", 5)]), st.integers(1, 50)), max_size=40)


@given(LENGTHS)
def test_every_waiting_sequence_has_its_turn_once_and_each_share_keeps_its_order(given_):
    waiting = WaitingSequences()
    sequences = [scored(share, length) for share, length in given_]
    for sequence in sequences:
        waiting.add(sequence)
    order = list(waiting)
    for share in {sequence.share for sequence in sequences}:
        assert [s for s in order if s.share == share] == [s for s in sequences if s.share == share]
    assert len(order) == len(sequences)
    for sequence in order:
        waiting.remove(sequence)
        waiting.remove(sequence)  # again: it is ignored
    assert not waiting
    assert list(waiting) == []
