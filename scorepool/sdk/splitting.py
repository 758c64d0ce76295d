"""Divide many items into jobs, and join their results. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from scorepool import wire

T = TypeVar("T")
ITEMS_PER_JOB = 256  # large enough that jobs cost little, small enough that several workers share the items


class MixedResults(ValueError):
    """Results that cannot be joined, because different models or software computed them."""


def chunks(items: Iterable[T], size: int = ITEMS_PER_JOB) -> Iterator[list[T]]:
    """Yield lists of at most `size` items, as they come."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def join(results: Sequence[wire.Result]) -> wire.Result:
    """Return one result with the sequences of all. Raises MixedResults."""
    first = results[0]
    for other in results[1:]:
        if differences := wire.stamp_differences(first.stamp, other.stamp):
            raise MixedResults(f"the results of one call have different stamps: {'; '.join(differences)}")
    return wire.Result(
        sequences=[sequence for result in results for sequence in result.sequences],
        temperature=first.temperature,
        usage=wire.Usage(
            prompt_tokens=sum(result.usage.prompt_tokens for result in results),
            completion_tokens=sum(result.usage.completion_tokens for result in results),
        ),
        stamp=first.stamp,
    )
