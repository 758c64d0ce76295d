"""Turn the engine's counters into rates over the last seconds, for metrics and pages."""

from collections import deque
from threading import Lock

from scorepool.engine import EngineStats
from scorepool.store.clock import awake_s
from scorepool.wire import EngineRates

WINDOW_S = 15.0  # the time between two scrapes of Prometheus, and a few heartbeats
_DECAY = 0.8  # of the longest step, with each one after it


class RateWindow:
    """The counters at the last reads. Any thread may read."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._reads: deque[tuple[float, EngineStats]] = deque()  # when (awake_s()), oldest first

    def rates(self, stats: EngineStats) -> EngineRates | None:
        """Return the rates from the newest read that is WINDOW_S old, or the oldest, until now; None at the first."""
        with self._lock:
            now_s = awake_s()
            self._reads.append((now_s, stats))
            while len(self._reads) > 2 and now_s - self._reads[1][0] >= WINDOW_S:
                self._reads.popleft()
            since_s, before = self._reads[0]
        seconds = now_s - since_s
        if seconds <= 0:
            return None
        steps = stats.steps - before.steps
        proposed = stats.proposed_tokens - before.proposed_tokens
        prompt, cached = stats.prompt_tokens - before.prompt_tokens, stats.cached_tokens - before.cached_tokens
        return EngineRates(
            prompt_tokens_per_s=prompt / seconds,
            cached_tokens_per_s=cached / seconds,
            scored_tokens_per_s=(stats.scored_tokens - before.scored_tokens) / seconds,
            generated_tokens_per_s=(stats.generated_tokens - before.generated_tokens) / seconds,
            steps_per_s=steps / seconds,
            busy=min(1.0, (stats.busy_s - before.busy_s) / seconds),
            step_s=(stats.busy_s - before.busy_s) / steps if steps else None,
            rows_per_step=(stats.rows - before.rows) / steps if steps else None,
            batch_fill=(stats.fill - before.fill) / steps if steps else None,
            acceptance=(stats.accepted_tokens - before.accepted_tokens) / proposed if proposed else None,
        )


class LongestStep:
    """How long the engine's longest step took lately. Used by one thread."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._seconds = 0.0

    def read(self, stats: EngineStats, running_s: float = 0.0) -> float:
        """Return seconds: the mean of the steps since the last read, or what decays of longer ones before.

        It is no less than what the step that runs now has taken, `running_s`.
        """
        num_steps = stats.steps - self._stats.steps
        if num_steps > 0:
            mean_s = (stats.busy_s - self._stats.busy_s) / num_steps
            self._seconds = max(mean_s, self._seconds * _DECAY**num_steps)
            self._stats = stats
        return max(self._seconds, running_s)
