"""What the same weights have computed is given again, to the bit, and nothing else is. Real model, real Redis."""

import collections.abc
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from redis import Redis

from scorepool import wire
from scorepool.engine import Engine, EngineSettings, Sampling, Sequence, Targets
from scorepool.engine.errors import InvalidRequest, NonFiniteLogits
from scorepool.store import Keys
from scorepool.worker.inference.result_cache.cache_store import CacheStore, Found, Use, Write
from scorepool.worker.inference.result_cache.digest import OPTIONS, digests, is_kept, may_be_cached
from scorepool.worker.inference.result_cache.entry import copy_unbegun, to_entry
from scorepool.worker.inference.result_cache.result_cache import CachedGroup, ResultCache
from tests.tiny_models import TinyModels
from tests.worker.conftest import until
from tests.worker.fake import FakeEngine

TOKENS = [5, 9, 3, 7, 11, 30, 41, 8]


@pytest.fixture(scope="module")
def engine(tiny_models: TinyModels) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(tiny_models("llama"))))
    yield engine
    engine.close()


@pytest.fixture
def open_cache(redis: Redis) -> Iterator[Callable[..., ResultCache]]:
    opened: list[ResultCache] = []

    def open_(engine: Engine, max_bytes: int = 2**20, ttl_s: int = 60) -> ResultCache:
        opened.append(ResultCache(engine, CacheStore(redis, max_bytes, ttl_s)))
        return opened[-1]

    yield open_
    for cache in opened:
        cache.close()


def scored(**options: Any) -> Sequence:
    return Sequence(**{"token_ids": list(TOKENS), "score_from": 3} | options)


def greedy(**options: Any) -> Sequence:
    sampling = Sampling(**{"max_tokens": 6, "temperature": 0.0, "seed": 1} | options)
    return Sequence(token_ids=list(TOKENS), sampling=sampling)


def run(cache: ResultCache, *sequences: Sequence, owner: str = "alice", salt: str | None = None) -> CachedGroup:
    group = cache.add(list(sequences), owner, salt)
    assert group.future.result(60) == list(sequences)
    return group


def until_written(redis: Redis, num_entries: int) -> None:
    until(lambda: redis.zcard(Keys.result_cache_uses) == num_entries)


def values(sequence: Sequence) -> tuple[object, ...]:
    columns = dataclasses.asdict(sequence.columns)
    rows = {
        name: [list(row) if hasattr(row, "__iter__") else row for row in column] for name, column in columns.items()
    }
    end = (sequence.token_ids, sequence.text_bytes, sequence.finish_reason, sequence.stop_reason)
    return (*end, rows, sequence.is_done)


SAME = [
    pytest.param(scored(), id="score"),
    pytest.param(scored(score_from=0, top_logprobs=3, rank=True, entropy=True, min_logprob=True), id="all columns"),
    pytest.param(scored(targets=Targets([[1, 2, 3]], is_shared=True), temperature=0.7), id="targets"),
    pytest.param(scored(score_from=6, targets=Targets([[1], [2, 3]], is_shared=False)), id="targets of each token"),
    pytest.param(greedy(), id="greedy"),
    pytest.param(greedy(temperature=1.0, top_k=1), id="top_k 1"),
    pytest.param(greedy(stop_token_ids=(3, 5), logit_bias=((5, 20.0),)), id="stop token"),
    pytest.param(greedy(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3), id="penalties"),
]


@pytest.mark.parametrize("sequence", SAME)
def test_a_cached_sequence_equals_the_computed_one_to_the_bit(
    engine: Engine, open_cache: Callable[..., ResultCache], redis: Redis, sequence: Sequence
):
    computed, again = copy_unbegun(sequence), copy_unbegun(sequence)
    assert not run(open_cache(engine), computed).cached
    until_written(redis, 1)
    steps = engine.stats.steps
    assert run(open_cache(engine), again).cached == {again}  # another worker's cache: from Redis
    assert engine.stats.steps == steps
    assert values(again) == values(computed)
    assert again.model_info is not None
    assert again.model_info.fingerprint == engine.model_info.fingerprint


def test_prompt_logprobs_and_a_stop_string_are_kept(
    engine: Engine, open_cache: Callable[..., ResultCache], redis: Redis
):
    text = greedy()
    engine.add([text]).result(60)
    assert text.text_bytes
    sampling = Sampling(max_tokens=6, temperature=0.0, stop=(text.text_bytes[-2:],))
    first, second = (Sequence(token_ids=list(TOKENS), score_from=0, sampling=sampling) for _ in range(2))
    run(open_cache(engine), first)
    until_written(redis, 1)
    assert run(open_cache(engine), second).cached == {second}
    assert first.stop_reason == text.text_bytes[-2:]
    assert values(second) == values(first)


def test_a_seed_does_not_decide_a_greedy_generation(engine: Engine):
    [one], [other] = (list(digests([greedy(seed=seed)], engine.model_info, "alice", None)) for seed in (1, 2))
    assert one == other is not None


@pytest.mark.parametrize(
    "other",
    [
        scored(token_ids=[*TOKENS[:-1], 9]),
        scored(token_ids=[*TOKENS, 9]),
        scored(score_from=4),
        scored(top_logprobs=2),
        scored(targets=Targets([[1, 2]], is_shared=True)),
        scored(targets=Targets([[1], [2]], is_shared=False)),
        scored(rank=True),
        scored(entropy=True),
        scored(temperature=0.5),
        greedy(),
        greedy(max_tokens=7),
        greedy(stop=(b"a",)),
        greedy(stop_token_ids=(4,)),
        greedy(min_tokens=2),
        greedy(ignore_eos=True),
        greedy(include_stop=True),
        greedy(logit_bias=((4, 1.0),)),
        greedy(allowed_bitmask=b"\xff\xff\xff\xff"),
        greedy(bad_words=((4, 5),)),
        greedy(presence_penalty=0.5),
        greedy(frequency_penalty=0.5),
        greedy(repetition_penalty=1.5),
        greedy(temperature=1.0, top_k=1),
        greedy(temperature=1.0, top_k=1, top_p=0.5),
    ],
)
def test_whatever_changes_the_numbers_changes_the_digest(engine: Engine, other: Sequence):
    info = engine.model_info
    before = list(digests([scored(), scored(top_logprobs=5), greedy(temperature=0.0, min_p=0.1)], info, "alice", None))
    [after] = digests([other], info, "alice", None)
    assert after is not None
    assert after not in before


def test_lists_of_targets_are_told_apart(engine: Engine):
    def digest(*lists: list[int]) -> bytes | None:
        sequence = scored(score_from=6, targets=Targets([*lists], is_shared=False))
        return next(digests([sequence], engine.model_info, "alice", None))

    assert digest([1], [2, 3]) != digest([1, 2], [3])


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "0" * 64},
        {"dtype": "bfloat16"},
        {"quantization": "4-bit affine, groups of 64"},
        {"adapter": "sql"},
        {"mode": "exact"},
        {"backend": "metal (Apple M2 Ultra)"},
        {"versions": {"mlx": "9", "mlx-lm": "9"}},
    ],
)
def test_whatever_computes_is_a_part_of_the_digest(engine: Engine, change: dict[str, Any]):
    infos = (engine.model_info, dataclasses.replace(engine.model_info, **change))
    one, other = (next(digests([scored()], info, "alice", None)) for info in infos)
    assert one != other


def test_owners_and_salts_are_told_apart(engine: Engine, open_cache: Callable[..., ResultCache], redis: Redis):
    cache = open_cache(engine)
    for owner, salt in (("alice", None), ("bob", None), ("alice", "a"), ("alice", "b"), ("bob", "a")):
        assert not run(cache, scored(), owner=owner, salt=salt).cached
    until_written(redis, 5)
    assert run(cache, scored(), owner="bob", salt="a").cached


def test_every_input_of_a_sequence_is_digested_or_known_to_change_no_number():
    names = {"score_from", "top_logprobs", "rank", "entropy", "min_logprob", "temperature", "processed"}
    assert set(OPTIONS) == names | {"adapter_name", "reports_proposals"}


def test_what_is_drawn_or_constrained_or_classified_is_not_kept():
    assert not is_kept(greedy(temperature=0.7))
    assert not is_kept(greedy(temperature=1.0, top_k=2))
    assert not is_kept(Sequence(token_ids=[1], classify=True))
    constrained = greedy()
    constrained.constraint = object()  # type: ignore[assignment]
    assert not is_kept(constrained)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (wire.Score(model="m", items=[wire.ScoreItem(prompt="a", completion="b")]), True),
        (wire.Score(model="m", items=[wire.ScoreItem(prompt="a", completion="b")], cache=False), False),
        (wire.Generate(model="m", prompt="a", temperature=0), True),
        (wire.Generate(model="m", prompt="a", top_k=1), True),
        (wire.Generate(model="m", prompt="a", max_tokens=0, prompt_logprobs=True), True),
        (wire.Generate(model="m", prompt="a"), False),
        (wire.Generate(model="m", prompt="a", temperature=0, cache=False), False),
        (wire.Generate(model="m", prompt="a", temperature=0, stream=True), False),
        (wire.Generate(model="m", prompt="a", temperature=0, recompute=True), False),
        (wire.Classify(model="m", items=[wire.ClassifyItem(prompt="a")]), False),
        (wire.Tokenize(model="m", prompt="a"), False),
    ],
)
def test_which_requests_may_be_answered_from_the_cache(request_: wire.Request, expected: bool):
    assert may_be_cached(request_) is expected


def test_identical_sequences_at_once_are_one_forward(engine: Engine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(engine)
    before = engine.stats.prompt_tokens
    groups = [cache.add([scored(), scored()], "alice", None) for _ in range(100)]
    sequences = [sequence for group in groups for sequence in group.future.result(60)]
    assert engine.stats.prompt_tokens - before == len(TOKENS) - 1
    assert sum(len(group.cached) for group in groups) == 199
    assert len({tuple(sequence.columns.logprobs) for sequence in sequences}) == 1


class HeldEngine(FakeEngine):
    """An engine whose groups end when the test ends them."""

    def __init__(self) -> None:
        self.added: list[tuple[list[Sequence], Future[list[Sequence]]]] = []
        self.error: Exception | None = None

    def check(self, sequences: list[Sequence]) -> None:
        if any(-1 in sequence.token_ids for sequence in sequences):
            raise InvalidRequest("a token is negative")

    def add(self, sequences: list[Sequence], on_step: object = None) -> Future[list[Sequence]]:
        if self.error is not None:
            raise self.error
        self.added.append((sequences, Future()))
        return self.added[-1][1]

    def cancel(self, future: Future[list[Sequence]]) -> None:
        future.cancel()

    def finish(self, index: int, value: float = -1.0) -> None:
        sequences, future = self.added[index]
        for sequence in sequences:
            sequence.columns.logprobs = [value] * (len(sequence.token_ids) - (sequence.score_from or 0))
            sequence.model_info = self.model_info
        if future.set_running_or_notify_cancel():
            future.set_result(sequences)


def computed(engine: HeldEngine) -> Sequence:
    sequence = scored()
    sequence.columns.logprobs, sequence.model_info = [-1.0] * 5, engine.model_info
    return sequence


@pytest.fixture
def held() -> HeldEngine:
    return HeldEngine()


def logprobs(group: CachedGroup) -> list[float | None]:
    return group.future.result(60)[0].columns.logprobs


def test_those_that_wait_for_a_canceled_job_are_computed(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    first, second, third = (cache.add([scored()], "alice", None) for _ in range(3))
    until(lambda: len(held.added) == 1)
    cache.cancel(first)
    assert len(held.added) == 2
    held.finish(1)
    assert logprobs(second) == logprobs(third) == [-1.0] * 5
    assert (len(second.cached), len(third.cached)) == (0, 1)
    assert first.future.cancelled()


def test_a_job_that_waits_can_be_canceled(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    first, second, third = (cache.add([scored()], "alice", None) for _ in range(3))
    until(lambda: len(held.added) == 1)
    cache.cancel(second)
    cache.cancel(first)
    held.finish(1)
    assert logprobs(third) == [-1.0] * 5
    assert len(held.added) == 2


class HeldStore(CacheStore):
    """A store whose lookups end when the test ends them."""

    def __init__(self) -> None:
        self.lookups: list[tuple[list[bytes], Callable[[Found], object]]] = []

    def look_up(self, digests: collections.abc.Sequence[bytes], on_found: Callable[[Found], object]) -> None:
        self.lookups.append((list(digests), on_found))

    def write(self, writes: collections.abc.Sequence[Write]) -> None:
        pass

    def count(self, use: Use, number: int = 1) -> None:
        pass


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_a_job_that_is_canceled_while_it_is_looked_up_gives_no_other_one_values(held: HeldEngine, num_waiting: int):
    """Those that wait for it are computed, from then on without it."""
    store = HeldStore()
    cache = ResultCache(held, store)
    canceled, *waiting = (cache.add([scored()], "alice", None) for _ in range(1 + num_waiting))
    cache.cancel(canceled)
    ((key,), on_found), *_ = store.lookups
    on_found([to_entry(key, computed(held))])

    assert not [group for group in waiting if group.future.done()]
    assert len(held.added) == (1 if waiting else 0)
    if waiting:
        held.finish(0, value=-2.0)
    assert [logprobs(group) for group in waiting] == [[-2.0] * 5] * num_waiting


def test_a_failure_is_not_shared(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    other = scored(token_ids=[1, 2, 3, 4])
    first, second = cache.add([other, scored()], "alice", None), cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    error = NonFiniteLogits("NaN")
    error.index = 1
    held.added[0][1].set_exception(error)
    assert first.future.exception(60) is error
    assert len(held.added) == 2
    held.finish(1)
    assert logprobs(second) == [-1.0] * 5


def test_an_item_that_fails_alone_is_not_shared(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    first = cache.add([scored(fails_alone=True), scored(token_ids=[1, 2, 3, 4])], "alice", None)
    second = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    held.added[0][0][0].error = NonFiniteLogits("NaN")
    held.finish(0)
    assert first.future.result(60)[0].error is not None
    assert len(held.added) == 2
    held.finish(1)
    assert logprobs(second) == [-1.0] * 5


def test_an_engine_that_ends_fails_all_that_wait_however_many(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    groups = [cache.add([scored()], "alice", None) for _ in range(2000)]
    until(lambda: len(held.added) == 1)
    held.error = NonFiniteLogits("the engine has ended")
    held.added[0][1].set_exception(held.error)
    assert all(group.future.exception(60) for group in groups)


def test_the_index_of_an_error_is_that_of_the_job(
    held: HeldEngine, open_cache: Callable[..., ResultCache], redis: Redis
):
    cache = open_cache(held)
    one = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    held.finish(0)
    assert one.future.result(60)
    until_written(redis, 1)
    both = cache.add([scored(), scored(token_ids=[1, 2, 3, 4])], "alice", None)
    until(lambda: len(held.added) == 2)
    error = NonFiniteLogits("NaN")
    error.index = 0  # of the sequences that were added to the engine
    held.added[1][1].set_exception(error)
    assert both.future.exception(60) is error
    assert error.index == 1


def test_an_invalid_sequence_is_refused_at_once(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    with pytest.raises(InvalidRequest):
        open_cache(held).add([scored(token_ids=[1, -1], score_from=1)], "alice", None)


def test_no_job_mixes_the_values_of_two_models(held: HeldEngine, open_cache: Callable[..., ResultCache], redis: Redis):
    """The weights change after the first item was found in Redis and before the second is computed."""
    cache = open_cache(held)
    one = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    held.finish(0, -1.0)
    assert one.future.result(60)
    until_written(redis, 1)
    both = cache.add([scored(), scored(token_ids=[1, 2, 3, 4])], "alice", None)
    until(lambda: len(held.added) == 2)
    held.model_info = dataclasses.replace(held.model_info, fingerprint="0" * 64)
    held.finish(1, -2.0)
    assert len(held.added) == 3
    held.finish(2, -3.0)
    assert [sequence.columns.logprobs for sequence in both.future.result(60)] == [[-3.0] * 5, [-3.0]]
    assert all(sequence.model_info is held.model_info for sequence in both.future.result(60))
    assert not both.cached


def test_values_of_new_weights_are_not_kept_under_the_old_ones(
    held: HeldEngine, open_cache: Callable[..., ResultCache], redis: Redis
):
    cache = open_cache(held)
    old = held.model_info
    one = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    held.model_info = dataclasses.replace(old, fingerprint="0" * 64)
    held.finish(0, -2.0)
    assert one.future.result(60)
    held.model_info = old
    two = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 2)
    held.finish(1, -1.0)
    assert logprobs(two) == [-1.0] * 5


@pytest.mark.parametrize("damage", ["garbage", "other", "short", "type", "uses"])
def test_what_is_corrupt_in_redis_is_computed_again(
    held: HeldEngine,
    open_cache: Callable[..., ResultCache],
    redis: Redis,
    damage: str,
    caplog: pytest.LogCaptureFixture,
):
    cache = open_cache(held)
    one = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    held.finish(0)
    assert one.future.result(60)
    until_written(redis, 1)
    until(lambda: not cache._running)  # until then it is given from memory
    [digest] = redis.zrange(Keys.result_cache_uses, 0, -1)
    entry = wire.parse(redis.hget(Keys.result_cache, digest), wire.CachedSequence, "msgpack")
    match damage:
        case "garbage":
            redis.hset(Keys.result_cache, digest, b"\xff")
        case "other":
            other = wire.CachedSequence(digest=b"0" * 32, logprobs=entry.logprobs)
            redis.hset(Keys.result_cache, digest, wire.encode(other))
        case "short":
            short = wire.CachedSequence(digest=digest, logprobs=entry.logprobs[1:])
            redis.hset(Keys.result_cache, digest, wire.encode(short))
        case "type":
            redis.set(Keys.result_cache, "mine")
        case "uses":
            redis.delete(Keys.result_cache_uses)
    again = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 2)
    held.finish(1, -7.0)
    assert logprobs(again) == [-7.0] * 5
    assert not again.cached


def test_jobs_do_not_wait_for_a_redis_that_is_away(held: HeldEngine):
    cache = ResultCache(held, CacheStore(Redis(port=1), 2**20, 60))
    groups = [cache.add([scored(score_from=1 + number % 4)], "alice", None) for number in range(8)]
    until(lambda: len(held.added) == 4)
    for index in range(4):
        held.finish(index)
    assert all(logprobs(group) for group in groups)
    cache.close()
    closed = cache.add([scored(rank=True)], "alice", None)
    held.finish(4)
    assert closed.future.result(60)


def test_a_group_has_begun_when_what_it_waits_for_has(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    first, second = (cache.add([scored()], "alice", None) for _ in range(2))
    until(lambda: len(held.added) == 1)
    assert not first.has_begun()
    assert not second.has_begun()
    first.sequences[0].num_computed = 3
    assert second.has_begun()


def test_a_group_has_begun_when_redis_has_a_part_of_it_and_not_when_the_engine_takes_it(
    held: HeldEngine, open_cache: Callable[..., ResultCache], redis: Redis
):
    cache = open_cache(held)
    first = cache.add([scored(score_from=0)], "alice", None)
    until(lambda: len(held.added) == 1)
    first.sequences[0].append_unpredicted()  # as the engine does at once
    assert not first.has_begun()
    held.finish(0)
    until_written(redis, 1)
    second = cache.add([scored(score_from=0), scored(rank=True)], "alice", None)
    until(lambda: len(held.added) == 2)
    assert second.has_begun()


def test_a_sequence_is_known_until_redis_has_it(held: HeldEngine, open_cache: Callable[..., ResultCache]):
    cache = open_cache(held)
    first = cache.add([scored()], "alice", None)
    until(lambda: len(held.added) == 1)
    held.finish(0)
    for _ in range(50):  # while it is written, and after
        assert run(cache, scored()).cached
    assert len(held.added) == 1
    assert logprobs(first) == [-1.0] * 5
