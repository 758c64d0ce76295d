"""Draw the rows of token ids that a certificate compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pydoc_data.topics import topics
from random import Random

LENGTHS = (17, 64, 130, 257)  # tokens; no multiples of a tile, and longer than a chunk of a CPU's queries
PROMPT_LENGTH = 48  # tokens of a text that every second row begins with
NUM_GENERATED = 16
MAX_LOGITS_BYTES = 2**30  # of one row in float32: transformers computes them all


@dataclass(frozen=True, slots=True)
class Rows:
    """Token ids to score, and prompts to continue greedily by NUM_GENERATED tokens."""

    scored: list[list[int]]
    prompts: list[list[int]]


def draw_rows(encode: Callable[[str], list[int]], token_ids: Sequence[int], longest: int, num_tokens: int) -> Rows:
    """Draw rows of at most `longest` tokens, of Python's documentation and of random ids in turn.

    The first row is the longest one, of at most half of all tokens, so that it crosses sliding windows up to its
    length. `num_tokens` is the number of tokens of all scored rows, at least.
    """
    draw = Random(0)  # noqa: S311
    text = encode("\n\n".join(topics[name] for name in sorted(topics)))
    rows = [text[: min(longest, max(num_tokens // 2, LENGTHS[-1]))]]
    prompt = text[:PROMPT_LENGTH]
    for number, length in enumerate(cycle(LENGTHS)):
        if sum(map(len, rows)) >= num_tokens:
            break
        start = draw.randrange(max(1, len(text) - length))
        row = text[start : start + length] if number % 2 else [draw.choice(token_ids) for _ in range(length)]
        rows.append((prompt + row if number % 4 > 1 else row)[:longest])
    room = max(1, longest - NUM_GENERATED)
    return Rows([row for row in rows if len(row) > 1], [prompt[:room], text[:17][:room]])


def longest_row(context_length: int, vocab_size: int) -> int:
    """Return how many tokens a row may have, so that transformers' logits for it fit into MAX_LOGITS_BYTES."""
    return max(2, min(context_length, MAX_LOGITS_BYTES // (4 * vocab_size)))
