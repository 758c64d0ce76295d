"""Batches: one forward pass of the model, and the KV caches that sequences continue with after it.

A prefill is right-padded: pads come after the tokens, so no causal model sees them. What generates joins the
decoding batch, whose caches are left-padded to the longest row:

    prefill     a a a a .      decoding    . a a a a | next
                b b . . .  ──►             . . . b b | next
                c c c c c                  c c c c c | next

Three ways to run sequences:

    padded_batch.py       all rows in one forward pass
    sequential_batch.py   one row a forward pass, for a model whose caches cannot be batched
    batch_invariant.py    one row a forward pass, in tiles of one size: a sequence's numbers are bit for bit the same,
                          whatever runs beside it, before it or after it
"""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence

OnPrompt = Callable[[list[Slice], mx.array], None]  # slices, and their hidden states [rows, longest, width]


class BatchRunner(Protocol):
    """A way to run forward passes. No method waits for the device: results are being computed, or lazy."""

    can_share: bool  # sequences can continue from a computed prefix
    can_speculate: bool  # `decode` takes proposed tokens, and `drop_rejected` those that were rejected
    on_prompt: OnPrompt | None  # is given the hidden states of prompts that generate

    def prefill(self, slices: list[Slice]) -> mx.array:
        """Return hidden states [n, width] of the slices' predictors, in order. Keep the caches for later steps."""

    def decode(self, slices: list[Slice], last_ids: mx.array) -> mx.array:
        """Return hidden states [n, width] of the last tokens, each followed by those of its slice's proposed tokens.

        `slices` are those of all decoding sequences, last_ids [rows] their last tokens.
        """

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens `decode` takes after the token at `position`."""

    def drop_rejected(self, num_rejected: dict[Sequence, int]) -> None:
        """Drop the rejected ones of the proposed tokens that the last `decode` was given, before the next one."""

    def pause(self, sequences: list[Sequence]) -> None:
        """Take decoding sequences out of the next steps, and keep their caches."""

    def resume(self, sequences: list[Sequence]) -> None:
        """Let paused sequences decode again, after those that decode."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""
