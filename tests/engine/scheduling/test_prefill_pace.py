"""Prefill beside decoding rows takes a given time, whatever the machine's speed."""

import pytest

from scorepool.engine.scheduling.kv_budget import KVBudget
from scorepool.engine.scheduling.prefill_pace import MIN_TOKENS, PrefillPace
from scorepool.engine.scheduling.scheduler import Scheduler
from scorepool.engine.scheduling.slice import SliceResult
from scorepool.engine.sequence import Sampling, Sequence

FIRST_TOKENS = 256


def simulate(pace: PrefillPace, decode_s: float, token_s: float, num_steps: int, late: float = 0.0) -> list[int]:
    """Run steps that prefill as much as they may. A part of a step's cost is measured with the step before it."""
    launched = [pace.max_tokens]
    for _ in range(num_steps):
        launched.append(pace.max_tokens)
        num, num_next = launched[-2:]
        pace.record(num, decode_s + token_s * ((1 - late) * num + late * num_next), num_next)
    return launched


@pytest.mark.parametrize("late", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("decode_s", "token_s", "expected"),
    [(0.03, 0.0002, 1250), (0.02, 0.001, 250), (1.0, 0.002, 125), (0.6, 0.015, MIN_TOKENS)],
)
def test_the_tokens_of_a_step_follow_what_they_cost(decode_s: float, token_s: float, expected: int, late: float):
    found = simulate(PrefillPace(0.25, FIRST_TOKENS), decode_s, token_s, 600, late)[300:]
    steps = [num for num in found if num]
    assert expected * 0.7 <= sum(steps) / len(steps) <= expected * 1.3
    assert len(steps) > 0.9 * len(found)


@pytest.mark.parametrize(("token_s", "expected"), [(0.02, MIN_TOKENS), (0.002, 125), (0.0001, FIRST_TOKENS)])
def test_the_first_step_beside_decoding_rows_follows_what_prompts_alone_have_cost(token_s: float, expected: int):
    pace = PrefillPace(0.25, FIRST_TOKENS)
    assert pace.max_tokens == FIRST_TOKENS
    for num in (1000, 1, 2000):
        pace.record_prefill(num, token_s * num)
    assert pace.max_tokens == expected
    simulate(pace, 0.02, 0.001, 300)
    assert 175 <= max(simulate(pace, 0.02, 0.001, 5)) <= 325


def test_the_pace_follows_a_machine_that_becomes_slower():
    pace = PrefillPace(0.25, FIRST_TOKENS)
    simulate(pace, 0.02, 0.0005, 200)
    assert 350 <= pace.max_tokens <= 650
    simulate(pace, 0.04, 0.002, 200)
    assert 90 <= max(simulate(pace, 0.04, 0.002, 5)) <= 170


def test_steps_of_unknown_time_change_no_estimate_and_do_not_stop_prefill():
    pace = PrefillPace(0.25, FIRST_TOKENS)
    simulate(pace, 0.02, 0.001, 200)
    before = max(simulate(pace, 0.02, 0.001, 5))
    launched = [0]
    for _ in range(300):
        launched.append(pace.max_tokens)
        pace.record(launched[-2], None, launched[-1])
    assert {*launched} == {0, before}
    assert launched.count(0) < 20


def test_one_slow_step_changes_little():
    pace = PrefillPace(0.25, FIRST_TOKENS)
    simulate(pace, 0.02, 0.001, 200)
    before = pace.max_tokens or FIRST_TOKENS
    pace.record(before, 30.0, before)
    assert pace.max_tokens == 0 or pace.max_tokens > before / 2


def test_a_prompt_that_is_half_way_waits_for_steps_that_only_decode():
    pace = PrefillPace(0.1, 16)
    scheduler = Scheduler(64, KVBudget(8, 10_000), pace=pace)
    generating = Sequence(token_ids=[1, 2, 3], sampling=Sampling(max_tokens=2000))
    scheduler.add([generating])
    scheduler.schedule()
    generating.token_ids.append(5)
    long = Sequence(token_ids=[7] * 4000, score_from=1)
    scheduler.add([long])

    seen = []
    for _ in range(400):
        output = scheduler.schedule()
        seen.append(output.num_prefilled)
        pace.record(output.num_prefilled, 0.01 + 0.002 * output.num_prefilled, output.num_prefilled)
        scheduler.commit([SliceResult(slice_, slice_.num_tokens) for slice_ in output.slices if slice_.is_decode])

    assert sum(seen) == long.num_prefill == long.num_computed
    assert 0 in seen[: seen.index(max(seen[5:])) + 200]
    assert max(seen) <= 60


def test_the_last_token_of_a_stream_does_not_wait_for_a_whole_step_of_prompts():
    """On a CPU it is read when the step behind it has been computed."""
    pace = PrefillPace(0.25, FIRST_TOKENS)
    pace.record_prefill(1000, 2.0)
    scheduler = Scheduler(4096, KVBudget(8, 100_000), pace=pace)
    generating = Sequence(token_ids=[1, 2, 3], sampling=Sampling(max_tokens=2))
    scheduler.add([generating])
    first, last = scheduler.schedule(), scheduler.schedule()
    assert (first.num_prefilled, last.num_prefilled, last.decodes) == (3, 0, True)
    scheduler.add([Sequence(token_ids=[7] * 4000, score_from=1)])
    assert [scheduler.schedule().num_prefilled for _ in range(2)] == [125, 3874]  # nothing follows the last token
