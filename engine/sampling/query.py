"""What is asked of rows of logits: positions of one sequence, whose tokens are given, or sampled now."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import mlx.core as mx

from scorepool.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class UnreadToken:
    """A token that the last launch samples, and that the host has not appended to its sequence yet."""

    launched_ids: mx.array  # [rows]: all tokens of that launch, which the device computes already
    row: int

    @property
    def on_device(self) -> mx.array:
        """The token [1], without waiting for it."""
        return self.launched_ids[self.row : self.row + 1]

    def read(self) -> int:
        """Wait for that launch only. A slice of the array would be computed after all that was launched since."""
        return int(memoryview(self.launched_ids)[self.row])  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class LogprobQuery:
    """Rows of logits of one sequence: one for each of `positions`, whose tokens are reported.

    The tokens up to the sequence's input are given, those after it are sampled now: one, or one beside each proposed
    token and one more. A sampled token follows the proposed ones before it, so it counts only if they were sampled too.
    """

    sequence: Sequence
    positions: range
    unread: UnreadToken | None = None  # the token before the sampled one, for logits processors
    eos_ids: AbstractSet[int] = frozenset()  # the tokenizer's, which must not be sampled within `min_tokens`
    proposed: tuple[int, ...] = ()  # the tokens from position `proposed_from` on, if they are accepted
    proposed_from: int = 0

    @property
    def samples(self) -> bool:
        """True if the token at the last position is sampled now."""
        return self.positions.stop > self.sequence.num_input_tokens

    @property
    def sampled_positions(self) -> range:
        """The positions whose tokens are sampled now: the last ones."""
        return self.positions[max(0, self.sequence.num_input_tokens - self.positions.start) :]

    def proposed_before(self, position: int) -> tuple[int, ...]:
        """Return the proposed tokens before a position."""
        return self.proposed[: max(0, position - self.proposed_from)]

    @property
    def proposed_positions(self) -> range:
        """The positions for which a token is proposed."""
        start = max(self.positions.start, self.proposed_from)
        return range(start, max(start, min(self.positions.stop, self.proposed_from + len(self.proposed))))

    @property
    def temperatures(self) -> list[float]:
        """The temperature that divides each row of the model's logits: 1 for a token that is sampled now.

        Its row is the model's own, or is replaced by the logits that it was sampled from.
        """
        num_sampled = len(self.sampled_positions)
        return [self.sequence.temperature] * (len(self.positions) - num_sampled) + [1.0] * num_sampled
