"""Define the rows of a file, before and after the work on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from scorepool.wire import Provenance

Values = dict[str, Any]  # a row's values by column, in the order of the columns


@dataclass(frozen=True, slots=True)
class Row:
    """A row as the file has it. `values` are missing if it cannot be read, and `reason` then says why."""

    number: int  # 1 is the first
    line: int  # of the file, at which the row ends; the row's number in files without lines
    position: int  # of the file after the row, in the units of `Source.size`
    values: Values | None
    reason: str = ""

    def digest_after(self, digest: str) -> str:
        """Return a digest of this row and the rows before it. `digest` is that of these, "" before the first row."""
        content = self.reason if self.values is None else self.values
        encoded = msgspec.json.encode((digest, content), enc_hook=repr)
        return blake2b(encoded, digest_size=16).hexdigest()

    def readable_values(self) -> Values:
        """Return the values. Raises ValueError with the reason why there are none."""
        if self.values is None:
            raise ValueError(self.reason)
        return self.values


class TokenComparison(NamedTuple):
    """One token under two models. The divergence of the two distributions at it lies between the bounds, in nats."""

    kld_lower: float
    kld_upper: float
    same_top: bool
    logprob: float
    base_logprob: float


@dataclass(frozen=True, slots=True)
class Done:
    """A row with its new columns, or with the reason why it has none."""

    row: Row
    columns: Values | None = None
    reason: str = ""
    num_tokens: int = 0  # that the models read
    averaged: dict[str, float] = field(default_factory=dict)  # values whose means the summary has
    # The tokens at which a model was compared with the first one, by the model.
    divergences: Mapping[str, Sequence[TokenComparison]] = field(default_factory=dict)


@dataclass(slots=True)
class DoneRows:
    """Consecutive rows, and the ids of the jobs that computed them."""

    rows: list[Done]
    job_ids: list[str] = field(default_factory=list)
    stamps: list[tuple[str, Provenance]] = field(default_factory=list)  # of each result, with the model's name
