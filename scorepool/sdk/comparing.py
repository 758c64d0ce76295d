"""Divide the items of `compare` into jobs. Pure."""

from collections.abc import Iterable, Iterator

from scorepool import wire
from scorepool.options import CompareOptions
from scorepool.sdk.splitting import ITEMS_PER_JOB, Item, to_item
from scorepool.wire.request_fields import MAX_TOP_LOGPROBS, WHOLE_VOCABULARY
from scorepool.wire.score import DEFAULT_COMPARED


def compare_requests(model: str, base: str, items: Iterable[Item], options: CompareOptions) -> Iterator[wire.Compare]:
    """Yield the jobs of `compare`. Raises TypeError, and ValueError if there are no items."""
    if isinstance(items, str):
        raise TypeError(
            "`items` is a str: expected a list of (prompt, completion) pairs, or of completions of `prompt`"
        )
    max_size = max_size_of(options.get("top_logprobs", DEFAULT_COMPARED))
    chunk: list[wire.ScoreItem] = []
    size = position = 0
    for position, each in enumerate(items, 1):
        item = to_item(each, position - 1)
        item_size = size_of(item)
        if chunk and (len(chunk) == ITEMS_PER_JOB or size + item_size > max_size):
            yield wire.Compare(model=model, base=base, items=chunk, **options)
            chunk, size = [], 0
        chunk.append(item)
        size += item_size
    if not position:
        raise ValueError("`items` is empty: expected (prompt, completion) pairs, or completions of `prompt`")
    yield wire.Compare(model=model, base=base, items=chunk, **options)


def max_size_of(top_logprobs: int, vocab_size: int | None = None) -> int:
    """Return how many tokens a compare job may have. The whole vocabulary is an item per job if it is not known."""
    num_top = vocab_size if top_logprobs == WHOLE_VOCABULARY else top_logprobs
    return MAX_TOP_LOGPROBS // max(1, num_top) if num_top is not None else 0


def size_of(item: wire.ScoreItem) -> int:
    """Return the most tokens that a completion may have. A token has a byte at least."""
    completion = item.completion
    return len(completion.encode()) + 1 if isinstance(completion, str) else len(completion)
