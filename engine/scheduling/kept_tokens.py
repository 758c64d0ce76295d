"""Choose which tokens of a long prompt go through the model, by how much each matters. Pure.

The score of a token is how much the prompt's last tokens attend to it in the draft model. Scores of neighbours are
averaged in chunks, so that what is kept can still be read:

    chunks      0 0 0 0  1 1 1 1  2 2 2 2  3 3 3 3  4 4
    scores      (first)    0.1      0.7      0.2    (last)
    kept        0 0 0 0           2 2 2 2           4 4
"""

from collections.abc import Sequence as Items
from math import ceil

MIN_PROMPT_TOKENS = 256  # of which some are left out; all of a shorter prompt are kept
CHUNK = 32  # tokens that are kept or left out together
MAX_KEEP_PCT = 100.0


def choose_kept(scores: Items[float], keep_pct: float) -> list[int]:
    """Return the positions to keep, in order: about `keep_pct` percent, the first and last chunk of them always."""
    num_tokens = len(scores)
    chunks = [range(start, min(start + CHUNK, num_tokens)) for start in range(0, num_tokens, CHUNK)]
    last = len(chunks) - 1
    if last > 1 and len(chunks[-1]) < CHUNK:
        chunks[-2:] = [range(chunks[-2].start, num_tokens)]
        last -= 1
    means = [sum(scores[position] for position in chunk) / len(chunk) for chunk in chunks]
    kept = {0, last}
    missing = ceil(num_tokens * keep_pct / MAX_KEEP_PCT) - sum(len(chunks[number]) for number in kept)
    for number in sorted(range(1, last), key=lambda number: -means[number]):
        if missing <= 0:
            break
        kept.add(number)
        missing -= len(chunks[number])
    return [position for number in sorted(kept) for position in chunks[number]]
