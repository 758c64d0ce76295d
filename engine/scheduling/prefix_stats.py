"""Count how computed prefixes are found and dropped, in memory and in the store's files. Knows nothing else."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the engine's start, and the size now, of one of the two places that keep prefixes."""

    hits: int = 0  # sequences that found a prefix there
    misses: int = 0  # that looked there and did not
    evictions: int = 0  # prefixes that were dropped to make room
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The two places. A sequence is looked up on the disk if it finds nothing in memory, and there is a store."""

    memory: TierStats = field(default_factory=TierStats)
    disk: TierStats = field(default_factory=TierStats)


@dataclass(slots=True)
class PrefixCounts:
    """What a prefix cache counts; it goes on with the next cache of the engine."""

    memory_hits: int = 0
    memory_misses: int = 0
    memory_evictions: int = 0
    disk_hits: int = 0
    disk_misses: int = 0

    def count(self, *, has_store: bool, is_found: bool, is_loaded: bool) -> None:
        """Count a sequence: whether it continues from a prefix that was there, and whether that came from the store."""
        self.memory_hits += is_found and not is_loaded
        self.memory_misses += not is_found or is_loaded
        if has_store and (is_loaded or not is_found):
            self.disk_hits += is_loaded
            self.disk_misses += not is_loaded
