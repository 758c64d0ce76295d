"""Which rows run: budgets hold, nobody starves, every token goes through the model once and in order."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import Chunk, Plan, Scheduler
from engine.sequence import Sampling, Sequence


def scored(length: int, score_from: int = 1) -> Sequence:
    return Sequence(token_ids=[0] * length, score_from=score_from)


def generating(length: int, max_tokens: int = 3) -> Sequence:
    return Sequence(token_ids=[0] * length, sampling=Sampling(max_tokens=max_tokens))


def pretend(plan: Plan) -> None:
    """What a runner does to rows, without a model."""
    sampled = [*plan.decode, *(chunk.sequence for chunk in chunks_of(plan) if chunk.is_last)]
    for sequence in sampled:
        if sequence.sampling:
            sequence.token_ids.append(0)
            if sequence.num_generated == sequence.sampling.max_tokens:
                sequence.finish_reason = "length"


def chunks_of(plan: Plan) -> list[Chunk]:
    return [chunk for forward in plan.prefill for chunk in forward]


def step(scheduler: Scheduler) -> tuple[Plan, list[Sequence]]:
    plan = scheduler.plan()
    pretend(plan)
    return plan, scheduler.advance(plan)


row_lists = st.lists(
    st.builds(scored, st.integers(2, 60)) | st.builds(generating, st.integers(1, 60), st.integers(1, 9)),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, derandomize=True)
@given(rows=row_lists, budget=st.integers(1, 80), places=st.integers(1, 6))
def test_every_row_ends_once_and_every_given_token_is_computed_once(rows: list[Sequence], budget: int, places: int):
    scheduler = Scheduler(budget, places)
    scheduler.add(rows)
    ended: list[Sequence] = []
    covered: dict[Sequence, int] = dict.fromkeys(rows, 0)
    while scheduler.has_work:
        plan, done = step(scheduler)
        ended += done
        assert plan.decode or plan.prefill
        for chunk in chunks_of(plan):
            assert chunk.start == covered[chunk.sequence]
            covered[chunk.sequence] = chunk.end
    assert sorted(map(id, ended)) == sorted(map(id, rows))
    assert all(covered[row] == row.num_prefill for row in rows)


@settings(deadline=None, derandomize=True)
@given(rows=row_lists, budget=st.integers(1, 80), places=st.integers(1, 6))
def test_a_step_stays_within_its_budgets(rows: list[Sequence], budget: int, places: int):
    scheduler = Scheduler(budget, places)
    scheduler.add(rows)
    while scheduler.has_work:
        plan, _ = step(scheduler)
        padded = sum(len(chunks) * max(chunk.end - chunk.start for chunk in chunks) for chunks in plan.prefill)
        assert padded <= max(1, budget - len(plan.decode))
        assert len(scheduler.decoding) + (scheduler.long_row is not None) <= places


@settings(deadline=None, derandomize=True)
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
    scheduler = Scheduler(max_batch_tokens=10, max_running_rows=4)
    short, long = generating(3, max_tokens=50), generating(45)
    scheduler.add([short])
    step(scheduler)
    scheduler.add([long])

    for _ in range(5):
        plan, _ = step(scheduler)
        assert plan.decode == [short]
        assert [chunk.sequence for chunk in chunks_of(plan)] == [long]


def test_short_rows_pass_while_a_long_prompt_is_prefilled():
    scheduler = Scheduler(max_batch_tokens=10, max_running_rows=4)
    long, short = scored(100), scored(4)
    scheduler.add([long])
    step(scheduler)
    scheduler.add([short])

    _, done = step(scheduler)

    assert done == [short]


def test_score_rows_pass_generating_rows_that_wait_for_a_place():
    scheduler = Scheduler(max_batch_tokens=100, max_running_rows=1)
    scheduler.add([generating(3, max_tokens=50), generating(3), scored(5)])

    _, done = step(scheduler)

    assert [row.sampling for row in done] == [None]


def test_a_row_that_needs_the_whole_budget_is_not_passed_for_good():
    scheduler = Scheduler(max_batch_tokens=20, max_running_rows=4)
    large = scored(21)
    scheduler.add([scored(5) for _ in range(3)] + [large])
    for _ in range(4):
        scheduler.add([scored(5) for _ in range(3)])
        if large in step(scheduler)[1]:
            return
    raise AssertionError("rows that came later went first, again and again")


def test_removed_rows_are_planned_no_more():
    scheduler = Scheduler(max_batch_tokens=10, max_running_rows=4)
    decoding, half_way, waiting = generating(3, max_tokens=50), scored(90), generating(2)
    scheduler.add([decoding, half_way, waiting])
    for _ in range(3):
        step(scheduler)

    scheduler.remove([decoding, half_way, waiting])

    assert not scheduler.has_work
