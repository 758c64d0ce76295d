"""Count the given tokens of all sequences in Redis: those of shared prefixes, and those that were computed."""

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
