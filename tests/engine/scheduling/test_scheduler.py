"""Which rows run: budgets hold, nobody starves, every token goes through the model once and in order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine.scheduling.prefix_cache import Prefix, PrefixCache
from scorepool.engine.scheduling.scheduler import LEAST_FORWARD_TOKENS, MOST_PADDING, Chunk, Plan, Scheduler
from scorepool.engine.sequence import Sampling, Sequence

ENDLESS = 10**9


def scored(length: int, score_from: int = 1) -> Sequence:
    return Sequence(token_ids=[0] * length, score_from=score_from)


def generating(length: int, max_tokens: int = 3) -> Sequence:
    return Sequence(token_ids=[0] * length, sampling=Sampling(max_tokens=max_tokens))


def asking(prompt: list[int], completion: list[int]) -> Sequence:
    """A completion to score after a prompt."""
    return Sequence(token_ids=prompt + completion, score_from=len(prompt))


def scheduler_of(rows: list[Sequence], budget: int = 100, places: int = 4, cached: int = ENDLESS) -> Scheduler:
    scheduler = Scheduler(budget, places, cached, PrefixCache(max_bytes=0))
    scheduler.add(rows)
    return scheduler


def chunks_of(plan: Plan) -> list[Chunk]:
    return [chunk for forward in plan.prefill for chunk in forward]


def step(scheduler: Scheduler) -> tuple[Plan, list[Sequence]]:
    """A step, and the rows whose last it was."""
    plan = scheduler.plan()
    scored = [chunk.sequence for chunk in chunks_of(plan) if chunk.is_last and not chunk.leaves_cache]
    return plan, scored + scheduler.advance(plan)


row_lists = st.lists(
    st.builds(scored, st.integers(2, 60), st.integers(1, 70))
    | st.builds(generating, st.integers(1, 60), st.integers(1, 9))
    | st.builds(asking, st.sampled_from([[1] * 40, [1] * 20 + [2] * 20, [3] * 30]), st.lists(st.just(5), min_size=1)),
    min_size=1,
    max_size=20,
)
batches = {"rows": row_lists, "budget": st.integers(1, 80), "places": st.integers(1, 6)}


@given(**batches)
def test_every_row_ends_once_and_every_token_that_it_needs_is_computed_once(
    rows: list[Sequence], budget: int, places: int
):
    rows = [row for row in rows if row.score_from is None or row.score_from < row.num_input_tokens]
    scheduler = scheduler_of(rows, budget, places)
    ended: list[Sequence] = []
    covered: dict[Sequence, int] = dict.fromkeys(rows, 0)
    asked: dict[Sequence, list[int]] = {}
    prefixes: set[Prefix] = set()
    while scheduler.has_work:
        plan, done = step(scheduler)
        ended += done
        assert not plan.is_empty
        for chunk in chunks_of(plan):
            start = covered.get(chunk.sequence, 0)
            if chunk.base is not None:
                assert start == 0
                assert chunk.base in prefixes
                assert chunk.base.token_ids == chunk.sequence.token_ids[: chunk.base.length]
                assert chunk.base.length <= chunk.sequence.first_predictor + 1
                start = chunk.base.length
            assert chunk.start == start
            assert start < chunk.end or chunk.is_predicted_by_base
            covered[chunk.sequence] = chunk.end
            asked.setdefault(chunk.sequence, []).extend(chunk.predictors)
            if chunk.into and chunk.is_last:
                assert chunk.sequence.token_ids == chunk.into.token_ids
                prefixes.add(chunk.into)
    assert sorted(map(id, ended)) == sorted(map(id, rows))
    assert all(covered[row] == row.num_prefill for row in rows)
    assert all(asked[row] == list(range(row.first_predictor, row.num_prefill)) for row in rows)


@given(**batches, cached=st.integers(70, 300))
def test_a_step_stays_within_its_budgets(rows: list[Sequence], budget: int, places: int, cached: int):
    scheduler = scheduler_of(rows, budget, places, cached)
    while scheduler.has_work:
        plan, _ = step(scheduler)
        num_tokens = sum(chunk.num_tokens for chunk in chunks_of(plan))
        assert num_tokens <= max(1, budget - len(plan.decode))
        assert len(scheduler.decoding) + (scheduler.long is not None) <= places
        longest = max((row.max_length for row in scheduler.decoding), default=0)
        assert len(scheduler.decoding) == 1 or longest * len(scheduler.decoding) <= cached


@given(**batches)
def test_a_forward_is_of_one_kind_and_wastes_little(rows: list[Sequence], budget: int, places: int):
    scheduler = scheduler_of(rows, budget * 50, places)
    while scheduler.has_work:
        for chunks in step(scheduler)[0].prefill:
            assert len({chunk.leaves_cache for chunk in chunks}) == 1
            assert len(chunks) == 1 or not any(chunk.is_part for chunk in chunks)
            assert len({chunk.base is None for chunk in chunks}) == 1 or chunks[0].leaves_cache
            assert len({chunk.num_tokens == 0 for chunk in chunks}) == 1
            longest = max(chunk.num_tokens for chunk in chunks)
            padding = sum(longest - chunk.num_tokens for chunk in chunks)
            assert padding <= LEAST_FORWARD_TOKENS + MOST_PADDING * longest * len(chunks)


def test_one_prompt_of_many_rows_is_computed_once_and_in_the_same_step():
    prompt = list(range(100))
    rows = [asking(prompt, [7] * length) for length in (3, 5, 8)]

    plan, done = step(scheduler_of(rows, budget=1000))

    prefix, *others = chunks_of(plan)
    assert prefix.into is not None
    assert (prefix.start, prefix.end) == (0, 100)
    assert {(chunk.start, chunk.end) for chunk in others} == {(100, 102), (100, 104), (100, 107)}
    assert {chunk.predictors.start for chunk in others} == {99}  # the prompt's last token predicts for every row
    assert {chunk.base for chunk in others} == {prefix.into}
    assert set(done) == set(rows)


def test_a_prompt_that_is_asked_again_later_is_computed_once_more_and_then_kept():
    prompt = list(range(100))
    scheduler = Scheduler(1000, 4, ENDLESS, PrefixCache(max_bytes=1000))
    computed = []
    for _ in range(4):
        scheduler.add([asking(prompt, [7])])
        computed.append(sum(chunk.num_tokens for chunk in chunks_of(step(scheduler)[0])))

    assert computed == [100, 100, 0, 0]


def test_a_prompt_longer_than_a_step_is_shared_too():
    prompt = list(range(95))
    rows = [asking(prompt, [7]), asking(prompt, [8])]
    scheduler = scheduler_of(rows, budget=40)
    plans = []
    while scheduler.has_work:
        plans.append(chunks_of(step(scheduler)[0]))

    assert sum(chunk.num_tokens for plan in plans for chunk in plan) == 95


def test_what_is_reported_is_never_shared():
    document = list(range(100))
    rows = [Sequence(token_ids=[*document, last], score_from=0) for last in range(3)]

    plan, _ = step(scheduler_of(rows, budget=1000))

    assert [chunk.base or chunk.into for chunk in chunks_of(plan)] == [None] * 3


@given(
    length=st.integers(2, 50),
    score_from=st.integers(0, 50),
    cuts=st.lists(st.integers(1, 49)),
    generates=st.booleans(),
)
def test_chunks_of_any_size_ask_for_the_same_predictors(length: int, score_from: int, cuts: list[int], generates: bool):
    sampling = Sampling(max_tokens=1) if generates else None
    row = Sequence(token_ids=[0] * length, score_from=min(score_from, length), sampling=sampling)
    borders = sorted({0, row.num_prefill, *(cut for cut in cuts if cut < row.num_prefill)})

    asked = [p for start, end in pairwise(borders) for p in Chunk(row, start, end).predictors]

    # Token t is predicted at t - 1; the last given token predicts the first generated one.
    assert [p + 1 for p in asked] == list(range(max(1, row.score_from), length + generates))


def test_decoding_goes_on_while_a_long_prompt_is_prefilled():
    short, long = generating(3, max_tokens=50), generating(45)
    scheduler = scheduler_of([short], budget=10)
    step(scheduler)
    scheduler.add([long])

    for _ in range(5):
        plan, _ = step(scheduler)
        assert plan.decode == [short]
        assert [chunk.sequence for chunk in chunks_of(plan)] == [long]


def test_short_rows_pass_while_a_long_prompt_is_prefilled():
    long, short = scored(100), scored(4)
    scheduler = scheduler_of([long], budget=10)
    step(scheduler)
    scheduler.add([short])

    _, done = step(scheduler)

    assert done == [short]


def test_score_rows_pass_generating_rows_that_wait_for_a_place():
    scheduler = scheduler_of([generating(3, max_tokens=50), generating(3), scored(5)], places=1)

    _, done = step(scheduler)

    assert [row.sampling for row in done] == [None]


def test_a_row_that_needs_the_whole_budget_is_not_passed_for_good():
    large = scored(21)
    scheduler = scheduler_of([scored(5) for _ in range(3)] + [large], budget=20)
    for _ in range(4):
        scheduler.add([scored(5) for _ in range(3)])
        if large in step(scheduler)[1]:
            return
    raise AssertionError("rows that came later went first, again and again")


def test_a_row_that_needs_room_for_its_cache_is_not_passed_for_good():
    large = generating(60, max_tokens=20)
    scheduler = scheduler_of([generating(3, max_tokens=9), generating(3, max_tokens=9), large], cached=100)
    for _ in range(20):
        scheduler.add([generating(3, max_tokens=9)])
        if large in [chunk.sequence for chunk in chunks_of(step(scheduler)[0])]:
            return
    raise AssertionError("rows that came later went first, again and again")


def test_rows_that_wait_for_a_place_are_not_weighed_one_by_one(monkeypatch: pytest.MonkeyPatch):
    scheduler = scheduler_of([generating(3, max_tokens=50) for _ in range(1000)], places=4)
    step(scheduler)
    weighed: list[list[Sequence]] = []
    has_place = Scheduler._has_place

    def weigh(self: Scheduler, rows: list[Sequence]) -> bool:
        weighed.append(rows)
        return has_place(self, rows)

    monkeypatch.setattr(Scheduler, "_has_place", weigh)

    step(scheduler)

    assert len(weighed) == 1


def test_removed_rows_are_planned_no_more():
    decoding, half_way, waiting = generating(3, max_tokens=50), scored(90), generating(2)
    scheduler = scheduler_of([decoding, half_way, waiting], budget=10)
    for _ in range(3):
        step(scheduler)

    scheduler.remove([decoding, half_way, waiting])

    assert not scheduler.has_work
