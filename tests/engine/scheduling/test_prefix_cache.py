"""Shared prefixes are found exactly, kept within their bytes, and forgotten in the end."""

from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine.scheduling.prefix_cache import MIN_SAVED_TOKENS, MIN_TOKENS, Prefix, PrefixCache
from scorepool.engine.scheduling.prefix_stats import PrefixCounts, TierStats
from scorepool.engine.sequence import Sequence


def sequence_of(prompt: list[int]) -> Sequence:
    """Make a sequence whose shareable tokens are `prompt`."""
    return Sequence(token_ids=[*prompt, 0], score_from=len(prompt))


def take(prefix_cache: PrefixCache, sequence: Sequence, num_bytes: int = 0) -> tuple[Prefix | None, list[Prefix]]:
    """Do with a waiting sequence what a scheduler and a batch do."""
    cached, missing = prefix_cache.match(sequence)
    for prefix in missing:
        prefix.cache, prefix.num_bytes = "computed", num_bytes
        prefix_cache.insert(prefix)
    prefix_cache.remove(sequence)
    return cached, missing


segments = st.lists(st.sampled_from([[1] * 20, [2] * 20, [1] * 7 + [3] * 30, [4]]), max_size=5)
prompts = segments.map(lambda parts: [token_id for part in parts for token_id in part])


@given(prompts=st.lists(prompts, min_size=1, max_size=30), max_tree_tokens=st.sampled_from([50, 10_000]))
def test_a_sequence_continues_from_its_own_tokens_only(prompts: list[list[int]], max_tree_tokens: int):
    prefix_cache = PrefixCache(max_bytes=3, max_tree_tokens=max_tree_tokens)
    for prompt in prompts:
        sequence = sequence_of(prompt)
        prefix_cache.add(sequence)
        cached, missing = take(prefix_cache, sequence, num_bytes=1)
        start = 0
        for prefix in [cached, *missing] if cached else missing:
            assert prefix.token_ids == prompt[: prefix.length]
            assert prefix.length - start >= MIN_TOKENS
            start = prefix.length
        if cached:
            assert cached.cache == "computed"
        prefix_cache.evict()
        assert prefix_cache.num_bytes <= 3


def test_a_prompt_that_was_seen_once_is_not_cached():
    prefix_cache = PrefixCache(max_bytes=0)
    first, second = sequence_of([1] * 100), sequence_of([1] * 100)
    prefix_cache.add(first)
    assert prefix_cache.match(first) == (None, [])

    prefix_cache.add(second)

    (shared,) = prefix_cache.match(second)[1]
    assert shared.length == 100


def test_a_system_prompt_and_its_questions_are_computed_one_after_the_other():
    system, questions = [1] * 200, [[2] * 80, [3] * 80]
    prefix_cache = PrefixCache(max_bytes=0)
    sequences = [sequence_of(system + question) for question in questions for _ in range(2)]
    for sequence in sequences:
        prefix_cache.add(sequence)

    lengths = [[prefix.length for prefix in take(prefix_cache, sequence)[1]] for sequence in sequences]

    assert lengths == [[200, 280], [], [280], []]


def test_a_prefix_that_saves_little_is_not_computed_by_itself():
    prefix_cache = PrefixCache(max_bytes=0)
    short, rare = (
        [sequence_of([1] * (MIN_TOKENS - 1)) for _ in range(99)],
        [sequence_of([2] * MIN_TOKENS) for _ in range(2)],
    )
    for sequence in short + rare:
        prefix_cache.add(sequence)

    assert MIN_SAVED_TOKENS > MIN_TOKENS
    assert [take(prefix_cache, sequence) for sequence in short + rare] == [(None, [])] * 101


def test_the_least_recently_used_is_evicted_first_unless_a_sequence_waits_for_it():
    prefix_cache = PrefixCache(max_bytes=20)
    for token_id in (1, 2, 3):
        sequences = [sequence_of([token_id] * 100) for _ in range(2)]
        for sequence in sequences:
            prefix_cache.add(sequence)
        for sequence in sequences:
            take(prefix_cache, sequence, num_bytes=10)
    waits, fresh = sequence_of([1] * 100), sequence_of([2] * 100)
    prefix_cache.add(waits)
    assert prefix_cache.num_bytes == 30

    prefix_cache.evict()

    assert prefix_cache.num_bytes == 20
    assert prefix_cache.match(waits)[0] is not None
    prefix_cache.add(fresh)
    cached, missing = prefix_cache.match(fresh)
    assert cached is None
    assert [prefix.length for prefix in missing] == [100]


def test_prompts_seen_long_ago_are_forgotten():
    prefix_cache = PrefixCache(max_bytes=0, max_tree_tokens=1000)
    for token_id in range(50):
        old = sequence_of([token_id] * 100)
        prefix_cache.add(old)
        prefix_cache.remove(old)

    again = sequence_of([0] * 100)
    prefix_cache.add(again)

    assert prefix_cache.match(again) == (None, [])


def test_scopes_share_nothing_and_are_forgotten_with_their_last_prompt():
    prefix_cache = PrefixCache(max_bytes=10, max_tree_tokens=1000)

    def take_two(scope: str | None) -> list[Prefix | None]:
        found = []
        for _ in range(2):
            sequence = sequence_of([1] * 100)
            sequence.prefix_scope = scope
            prefix_cache.add(sequence)
            found.append(take(prefix_cache, sequence)[0])
        return found

    for scope in ("alice", "bob", None):
        assert take_two(scope) == [None, None]  # the second one computes it
        assert all(take_two(scope))
    for number in range(50):
        take_two(f"scope {number}")
    assert len(prefix_cache._roots) <= 11
    assert len(prefix_cache._keys) == len(prefix_cache._roots)


class OneFile:
    """A store that has one prefix."""

    num_bytes, num_evicted = 77, 3

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def longest(self, token_ids: list[int]) -> int:
        return len(self.token_ids) if token_ids[: len(self.token_ids)] == self.token_ids else 0

    def load(self, prefix: Prefix) -> bool:
        prefix.cache, prefix.num_bytes = "loaded", 10
        return True

    def save(self, prefix: Prefix) -> bool:
        raise AssertionError("a short prefix is not worth a file")


def test_lookups_are_counted_in_the_tier_that_answers_them():
    counts = PrefixCounts()
    stored, other = [1] * 100, [2] * 100

    def begin(cache: PrefixCache, prompt: list[int]) -> None:
        """Let a scheduler admit a sequence; its own missing prefixes are no hits."""
        sequence = sequence_of(prompt)
        cache.add(sequence)
        cache.load(sequence)
        cached, missing = cache.match(sequence)
        for prefix in missing:
            prefix.cache, prefix.num_bytes = "computed", 10
            cache.insert(prefix)
        sequence.num_cached = cached.length if cached else 0
        cache.count(sequence)
        cache.remove(sequence)

    cache = PrefixCache(max_bytes=15, store=OneFile(stored), counts=counts)
    for prompt in (stored, stored, other, other, other, [3] * (MIN_TOKENS - 1)):  # the last can share nothing
        begin(cache, prompt)
    cache.evict()
    # stored: from the file, then from memory; other: seen once, computed, from memory
    assert cache.stats.memory == TierStats(hits=2, misses=3, evictions=1, num_bytes=10)
    assert cache.stats.disk == TierStats(hits=1, misses=2, evictions=3, num_bytes=77)
    later = PrefixCache(max_bytes=15, counts=counts)  # of other weights
    begin(later, other)
    assert later.stats.memory == TierStats(hits=2, misses=4, evictions=1)
    assert later.stats.disk == TierStats()
