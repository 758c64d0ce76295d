"""The scheduler keeps its budgets, starves no sequence, and runs every token through the model once and in order."""

from itertools import chain, cycle, pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine.adapter import Adapter
from scorepool.engine.scheduling.kv_budget import KVBudget, KVUsage
from scorepool.engine.scheduling.packing import MAX_PADDING, MIN_FORWARD_TOKENS
from scorepool.engine.scheduling.prefix_cache import Prefix, PrefixCache
from scorepool.engine.scheduling.scheduler import SHARE_IN_BACKGROUND, Background, Scheduler
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult
from scorepool.engine.sequence import Sampling, Sequence

ENDLESS = 10**9


def scored(length: int, score_from: int = 1) -> Sequence:
    return Sequence(token_ids=[0] * length, score_from=score_from)


def generating(length: int, max_tokens: int = 3) -> Sequence:
    return Sequence(token_ids=[0] * length, sampling=Sampling(max_tokens=max_tokens))


def asking(prompt: list[int], completion: list[int]) -> Sequence:
    """Make a completion to score after a prompt."""
    return Sequence(token_ids=prompt + completion, score_from=len(prompt))


def scheduler_of(
    sequences: list[Sequence], budget: int = 100, max_running: int = 4, max_cached_tokens: int = ENDLESS
) -> Scheduler:
    scheduler = Scheduler(budget, KVBudget(max_running, max_cached_tokens), PrefixCache(max_bytes=0))
    scheduler.add(sequences)
    return scheduler


def prefills(output: SchedulerOutput) -> list[Slice]:
    return [slice_ for slice_ in chain(output.slices, *output.background) if not slice_.is_decode]


def decoded(output: SchedulerOutput) -> list[Sequence]:
    return [slice_.sequence for slice_ in output.slices if slice_.is_decode]


def step(scheduler: Scheduler, background: Background = "none") -> tuple[SchedulerOutput, list[Sequence]]:
    """Schedule a step; return it with the sequences whose last step it is."""
    output = scheduler.schedule(background=background)
    scored = [slice_.sequence for slice_ in prefills(output) if slice_.completes_prefill and not slice_.keeps_cache]
    return output, scored + output.leaving


sequence_lists = st.lists(
    st.builds(scored, st.integers(2, 60), st.integers(1, 70))
    | st.builds(generating, st.integers(1, 60), st.integers(1, 9))
    | st.builds(asking, st.sampled_from([[1] * 40, [1] * 20 + [2] * 20, [3] * 30]), st.lists(st.just(5), min_size=1)),
    min_size=1,
    max_size=20,
)
batches = {"sequences": sequence_lists, "budget": st.integers(1, 80), "max_running": st.integers(1, 6)}


@given(**batches, backgrounds=st.lists(st.sampled_from(get_args(Background)), min_size=1))
def test_every_sequence_ends_once_and_every_token_it_needs_is_computed_once(
    sequences: list[Sequence], budget: int, max_running: int, backgrounds: list[Background]
):
    sequences = [
        sequence
        for sequence in sequences
        if sequence.score_from is None or sequence.score_from < sequence.num_input_tokens
    ]
    scheduler = scheduler_of(sequences, budget, max_running)
    ended: list[Sequence] = []
    covered: dict[Sequence, int] = dict.fromkeys(sequences, 0)
    asked: dict[Sequence, list[int]] = {}
    prefixes: set[Prefix] = set()
    states = cycle([*backgrounds, "none"])
    while scheduler.has_work:
        output, done = step(scheduler, next(states))
        ended += done
        assert not output.is_empty
        for slice_ in prefills(output):
            start = covered.get(slice_.sequence, 0)
            if slice_.cached_prefix is not None:
                assert start == 0
                assert slice_.cached_prefix in prefixes
                assert slice_.cached_prefix.token_ids == slice_.sequence.token_ids[: slice_.cached_prefix.length]
                assert slice_.cached_prefix.length <= slice_.sequence.first_predictor + 1
                start = slice_.cached_prefix.length
            assert slice_.start == start
            assert start < slice_.end or slice_.is_predicted_by_prefix
            covered[slice_.sequence] = slice_.end
            asked.setdefault(slice_.sequence, []).extend(slice_.predictors)
            if slice_.fills_prefix and slice_.completes_prefill:
                assert slice_.sequence.token_ids == slice_.fills_prefix.token_ids
                prefixes.add(slice_.fills_prefix)
    assert sorted(map(id, ended)) == sorted(map(id, sequences))
    assert all(covered[sequence] == sequence.num_prefill for sequence in sequences)
    assert all(asked[sequence] == list(range(sequence.first_predictor, sequence.num_prefill)) for sequence in sequences)


@given(**batches, max_cached_tokens=st.integers(70, 300))
def test_a_step_stays_within_its_budgets(
    sequences: list[Sequence], budget: int, max_running: int, max_cached_tokens: int
):
    scheduler = scheduler_of(sequences, budget, max_running, max_cached_tokens)
    while scheduler.has_work:
        output, _ = step(scheduler)
        num_tokens = sum(slice_.num_tokens for slice_ in prefills(output))
        assert num_tokens <= max(1, budget - len(decoded(output)))
        rows = [sequence.max_length for sequence in scheduler.running if sequence.sampling is not None]
        beside = [sequence.max_length for sequence in scheduler.running if sequence.sampling is None]
        assert len(rows) <= max_running
        assert len(beside) <= 1
        assert len(rows + beside) == 1 or max(rows, default=0) * len(rows) + sum(beside) <= max_cached_tokens


@given(**batches)
def test_a_forward_pass_holds_slices_of_one_kind_and_little_padding(
    sequences: list[Sequence], budget: int, max_running: int
):
    scheduler = scheduler_of(sequences, budget * 50, max_running)
    while scheduler.has_work:
        for forward in step(scheduler)[0].forwards:
            if forward[0].is_decode:
                continue
            assert len({slice_.keeps_cache for slice_ in forward}) == 1
            assert len(forward) == 1 or not any(slice_.runs_alone for slice_ in forward)
            assert len({slice_.cached_prefix is None for slice_ in forward}) == 1 or forward[0].keeps_cache
            assert len({slice_.num_tokens == 0 for slice_ in forward}) == 1
            longest = max(slice_.num_tokens for slice_ in forward)
            padding = sum(longest - slice_.num_tokens for slice_ in forward)
            assert padding <= MIN_FORWARD_TOKENS + MAX_PADDING * longest * len(forward)


def test_a_prompt_of_many_sequences_is_computed_once_and_in_the_same_step():
    prompt = list(range(100))
    sequences = [asking(prompt, [7] * length) for length in (3, 5, 8)]

    output, done = step(scheduler_of(sequences, budget=1000))

    prefix, *others = prefills(output)
    assert prefix.fills_prefix is not None
    assert (prefix.start, prefix.end) == (0, 100)
    assert {(slice_.start, slice_.end) for slice_ in others} == {(100, 102), (100, 104), (100, 107)}
    assert {slice_.predictors.start for slice_ in others} == {99}  # the prompt's last token predicts for every sequence
    assert {slice_.cached_prefix for slice_ in others} == {prefix.fills_prefix}
    assert set(done) == set(sequences)


def test_a_prompt_that_comes_again_later_is_computed_once_more_and_then_cached():
    prompt = list(range(100))
    scheduler = Scheduler(1000, KVBudget(4, ENDLESS), PrefixCache(max_bytes=1000))
    computed = []
    for _ in range(4):
        scheduler.add([asking(prompt, [7])])
        computed.append(sum(slice_.num_tokens for slice_ in prefills(step(scheduler)[0])))

    assert computed == [100, 100, 0, 0]


def test_a_prompt_longer_than_a_step_is_shared_too():
    prompt = list(range(95))
    sequences = [asking(prompt, [7]), asking(prompt, [8])]
    scheduler = scheduler_of(sequences, budget=40)
    steps = []
    while scheduler.has_work:
        steps.append(prefills(step(scheduler)[0]))

    assert sum(slice_.num_tokens for slices in steps for slice_ in slices) == 95


def test_a_sequence_has_begun_when_the_prompt_that_it_shares_has():
    prompt = list(range(95))
    sequences = [asking(prompt, [7]), asking(prompt, [8])]
    scheduler = scheduler_of(sequences, budget=40)
    assert not any(sequence.has_begun for sequence in sequences)

    [chunk] = prefills(step(scheduler)[0])

    assert chunk.sequence not in sequences
    assert [sequence.has_begun for sequence in sequences] == [True, False]  # it is computed for the first


class ManyFiles:
    """A store of prompts, which counts what it loads."""

    num_bytes = num_evicted = 0

    def __init__(self, prompts: list[list[int]], readable: bool = True) -> None:
        self._prompts = prompts
        self._is_readable = readable
        self.num_loaded = 0

    def longest(self, token_ids: list[int]) -> int:
        return next((len(prompt) for prompt in self._prompts if token_ids[: len(prompt)] == prompt), 0)

    def load(self, prefix: Prefix) -> bool:
        self.num_loaded += 1
        prefix.cache, prefix.num_bytes = "loaded", prefix.length
        return self._is_readable

    def save(self, prefix: Prefix) -> bool:
        return False


@given(
    num_prompts=st.integers(1, 30),
    length=st.integers(16, 250),
    completion=st.lists(st.just(5), min_size=1, max_size=9),
    readable=st.booleans(),
)
def test_a_step_loads_no_more_stored_prompts_than_it_could_compute(
    num_prompts: int, length: int, completion: list[int], readable: bool
):
    budget = 200
    prompts = [[1000 + number] * length for number in range(num_prompts)]
    store = ManyFiles(prompts, readable)
    prefix_cache = PrefixCache(max_bytes=0, store=store)
    scheduler = Scheduler(budget, KVBudget(4, ENDLESS), prefix_cache)
    scheduler.add([asking(prompt, completion) for prompt in prompts])

    done: list[Sequence] = []
    while scheduler.has_work:
        before = store.num_loaded
        done += step(scheduler)[1]
        assert store.num_loaded - before <= max(1, budget // length)
        num_kept = sum(prefix.num_bytes > 0 for prefix in prefix_cache._computed)
        assert num_kept <= max(1, budget // length)

    assert store.num_loaded == num_prompts
    assert len([sequence for sequence in done if sequence.score_from is not None]) >= num_prompts


def test_no_stored_prompt_is_loaded_for_a_sequence_that_cannot_begin():
    """While a long prompt is half way, a step has no room for what follows these, and would load one more each time."""
    budget, prompts = 200, [[1000 + number] * 100 for number in range(20)]
    store = ManyFiles(prompts)
    prefix_cache = PrefixCache(max_bytes=0, store=store)
    scheduler = Scheduler(budget, KVBudget(4, ENDLESS), prefix_cache)
    scheduler.add([scored(1000)])
    step(scheduler)
    scheduler.add([asking(prompt, [5] * 150) for prompt in prompts])
    while scheduler.chunked_prefill is not None:
        step(scheduler)
        assert store.num_loaded <= 1  # in the step that ends the long prompt, one may begin
    while scheduler.has_work:
        step(scheduler)
        assert sum(prefix.num_bytes > 0 for prefix in prefix_cache._computed) <= 2
    assert store.num_loaded == len(prompts)


def test_reported_tokens_are_never_shared():
    document = list(range(100))
    sequences = [Sequence(token_ids=[*document, last], score_from=0) for last in range(3)]

    output, _ = step(scheduler_of(sequences, budget=1000))

    assert [slice_.cached_prefix or slice_.fills_prefix for slice_ in prefills(output)] == [None] * 3


@given(
    length=st.integers(2, 50),
    score_from=st.integers(0, 50),
    cuts=st.lists(st.integers(1, 49)),
    generates=st.booleans(),
)
def test_chunks_of_any_size_ask_for_the_same_predictors(length: int, score_from: int, cuts: list[int], generates: bool):
    sampling = Sampling(max_tokens=1) if generates else None
    sequence = Sequence(token_ids=[0] * length, score_from=min(score_from, length), sampling=sampling)
    borders = sorted({0, sequence.num_prefill, *(cut for cut in cuts if cut < sequence.num_prefill)})

    asked = [p for start, end in pairwise(borders) for p in Slice(sequence, start, end).predictors]

    # Token t is predicted at t - 1; the last given token predicts the first generated one.
    assert [p + 1 for p in asked] == list(range(max(1, sequence.score_from), length + generates))


def test_decoding_goes_on_while_a_long_prompt_is_prefilled():
    short, long = generating(3, max_tokens=50), generating(45)
    scheduler = scheduler_of([short], budget=10)
    step(scheduler)
    scheduler.add([long])

    for _ in range(5):
        output, _ = step(scheduler)
        assert decoded(output) == [short]
        assert [slice_.sequence for slice_ in prefills(output)] == [long]


def test_short_sequences_pass_while_a_long_prompt_is_prefilled():
    long, short = scored(100), scored(4)
    scheduler = scheduler_of([long], budget=10)
    step(scheduler)
    scheduler.add([short])

    _, done = step(scheduler)

    assert done == [short]


def test_scores_pass_generating_sequences_that_wait_for_room():
    scheduler = scheduler_of([generating(3, max_tokens=50), generating(3), scored(5)], max_running=1)

    _, done = step(scheduler)

    assert [sequence.sampling for sequence in done] == [None]


def test_a_sequence_that_needs_the_whole_budget_is_not_passed_for_good():
    large = scored(21)
    scheduler = scheduler_of([scored(5) for _ in range(3)] + [large], budget=20)
    done: list[Sequence] = []
    for _ in range(4):
        scheduler.add([scored(5) for _ in range(3)])
        done += step(scheduler)[1]

    assert large in done


def test_a_sequence_that_needs_room_for_its_cache_is_not_passed_for_good():
    large = generating(60, max_tokens=20)
    scheduler = scheduler_of([generating(3, max_tokens=9), generating(3, max_tokens=9), large], max_cached_tokens=100)
    started: list[Sequence] = []
    for _ in range(20):
        scheduler.add([generating(3, max_tokens=9)])
        started += [slice_.sequence for slice_ in prefills(step(scheduler)[0])]

    assert large in started


def test_a_long_prompt_to_score_does_not_wait_for_a_row_of_those_that_generate():
    rows, waiting, long = [generating(3, max_tokens=50) for _ in range(4)], generating(3), scored(250)
    scheduler = scheduler_of([*rows, waiting, long], max_running=4)

    ended = [sequence for _ in range(40) for sequence in step(scheduler)[1]]

    assert ended == [long]
    assert scheduler.decoding == rows


def test_a_long_prompt_to_score_does_not_take_the_memory_that_an_earlier_sequence_waits_for():
    row, large, long = generating(3, max_tokens=7), generating(40, max_tokens=20), scored(95)
    scheduler = scheduler_of([row, large, long], budget=50, max_cached_tokens=110)
    started = [slice_.sequence for slice_ in prefills(step(scheduler)[0])]

    while large not in started:
        assert long not in started
        started += [slice_.sequence for slice_ in prefills(step(scheduler)[0])]


def test_sequences_that_wait_for_room_are_not_checked_one_by_one(monkeypatch: pytest.MonkeyPatch):
    scheduler = scheduler_of([generating(3, max_tokens=50) for _ in range(1000)], max_running=4)
    step(scheduler)
    checked: list[KVUsage] = []
    has_memory = KVBudget.has_memory

    def check(self: KVBudget, usage: KVUsage) -> bool:
        checked.append(usage)
        return has_memory(self, usage)

    monkeypatch.setattr(KVBudget, "has_memory", check)

    step(scheduler)

    assert len(checked) == 1


def test_removed_sequences_are_scheduled_no_more():
    decoding, half_way, waiting = generating(3, max_tokens=50), scored(90), generating(2)
    scheduler = scheduler_of([decoding, half_way, waiting], budget=10)
    for _ in range(3):
        step(scheduler)

    scheduler.remove([decoding, half_way, waiting])

    assert not scheduler.has_work


def test_a_shared_prompt_is_computed_no_further_when_all_that_wait_for_it_are_removed():
    prompt = list(range(95))
    first, second, long = asking(prompt, [7]), asking(prompt, [8]), scored(50)
    scheduler = scheduler_of([first, second, long], budget=40)
    [chunk] = prefills(step(scheduler)[0])

    assert scheduler.remove([first]) == [first]
    assert scheduler.chunked_prefill is not None  # the second waits for it
    assert scheduler.remove([second]) == [second, chunk.sequence]

    assert [slice_.sequence for slice_ in prefills(step(scheduler)[0])] == [long]


def test_proposed_tokens_that_are_rejected_are_computed_again():
    sequence = generating(3, max_tokens=50)
    scheduler = scheduler_of([sequence])
    step(scheduler)
    speculated = Slice(sequence, 3, 7, proposed_ids=(11, 12, 13))  # the last sampled token and three proposals
    sequence.num_computed = speculated.end

    done = scheduler.commit([SliceResult(speculated, num_accepted=2)])

    assert (done, sequence.num_computed) == ([], 5)
    ((decode,),) = step(scheduler)[0].forwards
    assert (decode.sequence, decode.start, decode.end) == (sequence, 5, 6)


def test_a_sequence_that_a_stop_string_ended_is_scheduled_no_more():
    sequence, other = generating(3, max_tokens=50), generating(3, max_tokens=50)
    scheduler = scheduler_of([sequence, other])
    output, _ = step(scheduler)
    sequence.finish_reason = "stop"

    done = scheduler.commit([SliceResult(slice_, slice_.num_tokens) for slice_ in output.slices])

    assert done == [sequence]
    assert decoded(step(scheduler)[0]) == [other]


def test_a_slice_is_cut_into_its_first_tokens_and_the_rest():
    prompt = Prefix(Prefix(None, []), [0] * 4)
    whole = Slice(scored(21), 4, 20, cached_prefix=prompt)

    first = whole.first(6)
    rest = first.rest

    assert (first.start, first.end, first.cached_prefix) == (4, 10, prompt)
    assert rest is not None
    assert (rest.start, rest.end, rest.cached_prefix) == (10, 20, None)
    assert whole.first(16) is whole
    assert whole.rest is None


def beside_decoding(*sequences: Sequence, budget: int = 400) -> Scheduler:
    """Return a scheduler with a decoding sequence, and others that wait."""
    scheduler = scheduler_of([generating(3, max_tokens=50)], budget)
    scheduler.schedule()
    scheduler.add(sequences)
    return scheduler


def in_background(output: SchedulerOutput) -> list[Sequence]:
    return [slice_.sequence for slice_ in chain(*output.background)]


def test_prompts_that_are_only_scored_go_to_the_background_beside_decoding_sequences():
    first, prompt, last = scored(60), generating(20), scored(50)
    scheduler = beside_decoding(first, prompt, last, budget=400)
    output = scheduler.schedule(background="free")
    assert in_background(output) == [first]  # the other one does not fit into a quarter of the budget
    assert [slice_.sequence for slice_ in output.slices if not slice_.is_decode] == [prompt]
    assert output.num_prefilled == 20
    assert first.num_computed == first.num_prefill
    output = scheduler.schedule(background="busy")
    assert not output.background
    assert output.num_prefilled == 0  # it waits for the background
    assert in_background(scheduler.schedule(background="free")) == [last]


def test_without_a_background_or_decoding_sequences_steps_compute_all_prompts():
    sequence = scored(40)
    assert beside_decoding(sequence).schedule().num_prefilled == 39
    alone = scheduler_of([scored(40)], budget=400).schedule(background="free")
    assert (alone.num_prefilled, alone.background) == (39, [])


@pytest.mark.parametrize("length", [102, 300])
def test_a_prompt_that_is_too_long_for_the_background_is_computed_in_steps(length: int):
    scheduler = beside_decoding(scored(length), budget=400)
    output = scheduler.schedule(background="free")
    assert length > 400 // SHARE_IN_BACKGROUND
    assert not output.background
    assert output.num_prefilled


def test_sequences_that_share_a_prompt_are_computed_in_steps():
    prompt = [1] * 80
    shared = [asking(prompt, [7] * length) for length in (3, 5, 8)]
    scheduler = beside_decoding(*shared, budget=400)
    outputs = [scheduler.schedule(background="free") for _ in range(20)]
    assert not any(output.background for output in outputs)
    assert all(sequence.num_computed == sequence.num_prefill for sequence in shared)


def test_rows_with_images_adapters_or_embeddings_are_computed_in_steps():
    adapter = Adapter("a", "f", "folder", 8, "lora")
    adapted, pooled = scored(20), Sequence(token_ids=[0] * 20, pooling="last")
    adapted.adapter = adapter
    scheduler = beside_decoding(adapted, pooled, budget=400)
    output = scheduler.schedule(background="free")
    assert not output.background
    assert {slice_.sequence for slice_ in output.slices if not slice_.is_decode} == {adapted, pooled}


@given(**batches)
def test_the_background_keeps_its_budget(sequences: list[Sequence], budget: int, max_running: int):
    scheduler = scheduler_of(sequences, 4 * budget, max_running)
    while scheduler.has_work:
        output, _ = step(scheduler, "free")
        assert sum(slice_.num_tokens for slice_ in chain(*output.background)) <= budget
        assert not any(slice_.keeps_cache for slice_ in chain(*output.background))


def test_no_prefix_is_computed_for_sequences_that_cannot_begin():
    """They would pile up: a prefix is not evicted while a sequence waits for it."""
    row = generating(10, max_tokens=400)
    scheduler = scheduler_of([row], budget=200, max_cached_tokens=500)
    scheduler.schedule()
    prompts = [[prompt] * 100 for prompt in range(1, 11)]
    waiting = [asking(prompt, [last] * 300) for prompt in prompts for last in (20, 21)]
    scheduler.add(waiting)
    for _ in range(30):
        assert not prefills(scheduler.schedule())
    assert scheduler.remove([row]) == [row]
    while scheduler.has_work:
        scheduler.schedule()
    assert all(sequence.num_computed == sequence.num_prefill for sequence in waiting)


@pytest.mark.parametrize("num_waiting", [65, 500])
def test_a_scored_sequence_begins_behind_many_that_wait_for_a_row(num_waiting: int):
    scheduler = scheduler_of([generating(3, max_tokens=10**6), generating(3, max_tokens=10**6)], 400, max_running=2)
    scheduler.schedule()
    last = scored(20)
    scheduler.add([*(generating(3) for _ in range(num_waiting)), last])
    for _ in range(3):
        scheduler.schedule(background="free")
    assert last.num_computed == last.num_prefill


def test_a_prompt_begins_behind_a_hundred_that_the_background_computes():
    prompt = generating(3)
    scheduler = beside_decoding(*(scored(30) for _ in range(100)), prompt)
    scheduler.schedule(background="busy")
    assert prompt.num_computed == 3
