"""Count in Redis the given tokens of all sequences, of shared prefixes and computed, and how prefixes were found."""

from threading import Lock

from redis.client import Pipeline

from scorepool.engine import EngineStats
from scorepool.store import Keys

COUNTERS_TTL_S = 30 * 86_400


class PrefixTokens:
    """The part of one worker. What it counts in a heartbeat that Redis does not get is lost."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counted = EngineStats()

    def count(self, pipeline: Pipeline, stats: EngineStats) -> None:
        """Add what was computed since the last call."""
        with self._lock:
            before, self._counted = self._counted, stats
        new = {
            "cache": stats.cached_tokens - before.cached_tokens,
            "computed": stats.prompt_tokens - before.prompt_tokens,
        }
        for source, number in new.items():
            if number > 0:
                pipeline.hincrby(Keys.prefix_tokens, source, number)
                pipeline.expire(Keys.prefix_tokens, COUNTERS_TTL_S)
        for tier in ("memory", "disk"):
            earlier, now = getattr(before.prefixes, tier), getattr(stats.prefixes, tier)
            for event in ("hits", "misses", "evictions"):
                number = getattr(now, event) - getattr(earlier, event)
                if number < 0:  # other weights have another store, which counts from 0
                    number = getattr(now, event)
                if number > 0:
                    pipeline.hincrby(Keys.prefix_events, f"{tier}:{event}", number)
                    pipeline.expire(Keys.prefix_events, COUNTERS_TTL_S)
