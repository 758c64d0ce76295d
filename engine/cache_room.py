"""Compute how many tokens' keys and values fit beside a model's weights. Pure."""

from dataclasses import dataclass

UNLIMITED_TOKENS = 2**31  # for a model whose cache does not grow


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What KV caches take."""

    bytes_per_token: int = 0
    bytes_per_row: int = 0  # beside its tokens

    def max_tokens(self, spare_bytes: int, num_rows: int) -> int:
        """Return how many tokens of so many rows, and of a prompt half way beside them, fit; 0 or less if none do."""
        spare = spare_bytes - (num_rows + 1) * self.bytes_per_row
        if spare < self.bytes_per_token:
            return 0
        return spare // self.bytes_per_token if self.bytes_per_token else UNLIMITED_TOKENS
