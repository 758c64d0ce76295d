"""The result cache in Redis: bounded in bytes by least use, expiring, refused when memory is short, counted."""

from collections.abc import Callable, Iterator
from queue import Queue
from threading import Event

import pytest
from redis import Redis

from scorepool import wire
from scorepool.store import Keys
from scorepool.worker.inference.result_cache import cache_store
from scorepool.worker.inference.result_cache.cache_store import CacheStore, Found, Write
from tests.worker.conftest import until

OpenStore = Callable[..., CacheStore]


@pytest.fixture
def open_store(redis: Redis) -> Iterator[OpenStore]:
    opened: list[CacheStore] = []

    def open_(max_bytes: int = 2**20, ttl_s: int = 60) -> CacheStore:
        opened.append(CacheStore(redis, max_bytes, ttl_s))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int, num_tokens: int = 10) -> wire.CachedSequence:
    return wire.CachedSequence(digest=digest(number), logprobs=wire.Floats([-float(number)] * num_tokens))


def write(store: CacheStore, *numbers: int, num_tokens: int = 10) -> None:
    """Write entries one after another, so that each has a later use."""
    for number in numbers:
        done = Event()
        store.write([Write(digest(number), lambda number=number: entry(number, num_tokens), done.set)])
        assert done.wait(30)


def look_up(store: CacheStore, *numbers: int) -> list[bool]:
    found: Queue[Found] = Queue()
    store.look_up([digest(number) for number in numbers], found.put)
    entries = found.get(timeout=30)
    pairs = zip(numbers, entries, strict=True)
    assert all(each is None or each == entry(number, len(each.logprobs)) for number, each in pairs)
    return [each is not None for each in entries]


def stored_bytes(redis: Redis) -> int:
    return int(redis.hget(Keys.result_cache, "bytes") or 0)


def test_the_entries_that_were_not_used_for_longest_make_room(redis: Redis, open_store: OpenStore):
    store = open_store(max_bytes=5 * 400)  # an entry takes about 350 bytes, what Redis adds included
    write(store, 1, 2, 3, 4, 5)
    assert look_up(store, 1) == [True]
    write(store, 6)
    assert look_up(store, 1, 2, 3, 4, 5, 6) == [True, False, True, True, True, True]
    assert stored_bytes(redis) <= 2000
    assert redis.hget(Keys.result_cache_counts, "evictions") == b"1"


def test_the_bytes_are_those_of_the_entries_and_what_redis_adds(redis: Redis, open_store: OpenStore):
    store = open_store(max_bytes=2**30)
    before = redis.info("memory")["used_memory"]
    for start in range(0, 5000, 250):
        store.write([Write(digest(n), lambda n=n: entry(n, 30), lambda: None) for n in range(start, start + 250)])
    until(lambda: redis.zcard(Keys.result_cache_uses) == 5000)
    used = redis.info("memory")["used_memory"] - before
    assert 0.7 < used / stored_bytes(redis) < 1.1
    write(store, 1, num_tokens=100)
    write(store, 1, num_tokens=30)
    total = sum(264 + len(body) for name, body in redis.hgetall(Keys.result_cache).items() if name != b"bytes")
    assert stored_bytes(redis) == total


def test_an_entry_expires_after_its_last_use(redis: Redis, open_store: OpenStore):
    store = open_store(ttl_s=100)
    write(store, 1, 2)
    assert 0 < redis.ttl(Keys.result_cache) <= 100
    assert 0 < redis.ttl(Keys.result_cache_uses) <= 100
    now = redis.time()[0]
    redis.zadd(Keys.result_cache_uses, {digest(1): now - 101})
    assert look_up(store, 1, 2) == [False, True]
    assert redis.hexists(Keys.result_cache, digest(1)) is False
    redis.zadd(Keys.result_cache_uses, {digest(2): now - 101})
    write(store, 3)
    assert redis.zrange(Keys.result_cache_uses, 0, -1) == [digest(3)]


def test_nothing_is_kept_while_redis_has_little_memory(redis: Redis, open_store: OpenStore):
    store = open_store()
    write(store, 1)
    used = redis.info("memory")["used_memory"]
    try:
        redis.config_set("maxmemory", used + 200_000)  # more than 80 % are in use
        write(store, 2)
        assert look_up(store, 1, 2) == [True, False]
        redis.config_set("maxmemory", used - 200_000)  # Redis refuses whatever needs memory
        write(store, 3)
        assert look_up(store, 1, 3)[1] is False
    finally:
        redis.config_set("maxmemory", 0)
    assert redis.hget(Keys.result_cache_counts, "refused") == b"1"


def test_a_large_entry_is_not_kept(redis: Redis, open_store: OpenStore):
    store = open_store(max_bytes=2**30)
    write(store, 1, num_tokens=cache_store.MAX_ENTRY_BYTES // 4)
    write(store, 2)
    assert look_up(store, 1, 2) == [False, True]


def test_an_entry_that_cannot_be_encoded_is_left_out(open_store: OpenStore):
    store = open_store()
    done = [Event(), Event()]
    store.write([Write(digest(1), lambda: 1 // 0, done[0].set), Write(digest(2), lambda: entry(2), done[1].set)])  # type: ignore[arg-type, return-value]
    assert all(each.wait(30) for each in done)
    assert look_up(store, 1, 2) == [False, True]


def test_many_lookups_are_answered_in_their_order(open_store: OpenStore):
    store = open_store()
    write(store, *range(0, 300, 50))
    assert look_up(store, *range(300)) == [number % 50 == 0 for number in range(300)]


def test_uses_are_counted(redis: Redis, open_store: OpenStore):
    store = open_store()
    store.count("hits", 3)
    store.count("misses")
    store.count("shared", 2)
    until(lambda: redis.hgetall(Keys.result_cache_counts) == {b"hits": b"3", b"misses": b"1", b"shared": b"2"})
    store.count("hits")
    store.close()
    assert redis.hget(Keys.result_cache_counts, "hits") == b"4"


@pytest.mark.parametrize("key", [Keys.result_cache, Keys.result_cache_uses, Keys.result_cache_counts])
def test_a_key_of_a_wrong_type_is_left_alone(redis: Redis, open_store: OpenStore, key: str):
    redis.set(key, "mine")
    store = open_store()
    store.count("hits")
    write(store, 1)
    assert look_up(store, 1) == [key == Keys.result_cache_counts]
    assert redis.get(key) == b"mine"


def test_a_total_that_is_no_number_empties_the_cache(redis: Redis, open_store: OpenStore):
    store = open_store()
    write(store, 1)
    redis.hset(Keys.result_cache, "bytes", "many")
    assert look_up(store, 1) == [False]
    write(store, 2)
    assert look_up(store, 1, 2) == [False, True]
