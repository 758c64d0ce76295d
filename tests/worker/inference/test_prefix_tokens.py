"""What heartbeats add to the counters of shared prompts is what the engine has done since the last one."""

from redis import Redis

from scorepool.engine import EngineStats
from scorepool.engine.scheduling.prefix_stats import PrefixStats, TierStats
from scorepool.store import Keys
from scorepool.worker.inference.prefix_tokens import PrefixTokens


def count(redis: Redis, counter: PrefixTokens, stats: EngineStats) -> None:
    with redis.pipeline() as pipeline:
        counter.count(pipeline, stats)
        pipeline.execute()


def test_counters_are_those_of_all_workers_and_survive_other_weights(redis: Redis):
    one, other = PrefixTokens(), PrefixTokens()
    first = PrefixStats(TierStats(hits=3, misses=2), TierStats(evictions=4, num_bytes=99))
    count(redis, one, EngineStats(prompt_tokens=10, prefixes=first))
    count(redis, one, EngineStats(prompt_tokens=10, prefixes=first))  # nothing since
    count(redis, other, EngineStats(prefixes=PrefixStats(TierStats(hits=1))))
    # Other weights have another store, whose evictions begin at 0.
    later = PrefixStats(TierStats(hits=5, misses=2), TierStats(evictions=1))
    count(redis, one, EngineStats(prompt_tokens=25, cached_tokens=7, prefixes=later))
    found = {name.decode(): int(number) for name, number in redis.hgetall(Keys.prefix_events).items()}
    assert found == {"memory:hits": 6, "memory:misses": 2, "disk:evictions": 5}
    assert redis.hgetall(Keys.prefix_tokens) == {b"computed": b"25", b"cache": b"7"}
    assert 0 < redis.ttl(Keys.prefix_events) <= 30 * 86_400
