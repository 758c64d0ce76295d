"""Split the texts of one request into classify jobs, and find the text that a job's field belongs to. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from scorepool import wire
from scorepool.api.dialects.truncation import RIGHT, TruncationFields, truncation_fields

ITEMS_PER_JOB = 64  # so that the texts of one request are shared by several workers
_ITEM = re.compile(r"(?:\[(?P<job>\d+)\]\.)?items\[(?P<item>\d+)\](?:\.prompt)?(?P<rest>.*)", re.DOTALL)


def num_jobs(num_items: int) -> int:
    """Return how many jobs classify so many texts."""
    return -(-num_items // ITEMS_PER_JOB)


def to_classify_jobs(
    items: Iterable[wire.ClassifyItem],
    model: str,
    timeout_s: int,
    *,
    add_special_tokens: bool,
    priority: wire.Priority = "normal",
    cache_salt: str | None = None,
    truncation: TruncationFields | None = None,
) -> Iterator[wire.Classify]:
    """Yield the jobs, in the order of the items."""
    cut = truncation or truncation_fields(None, None, RIGHT)
    remaining = iter(items)
    while batch := list(islice(remaining, ITEMS_PER_JOB)):
        yield wire.Classify(
            model=model,
            priority=priority,
            timeout_s=timeout_s,
            items=batch,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
            **cut,
        )


def find_item(field: str) -> tuple[int, str] | None:
    """Return the index of the item that a field of the jobs belongs to, and the rest: `[1].items[2].prompt[0]`.

    None if it is not the field of an item.
    """
    match = _ITEM.fullmatch(field)
    return match and (ITEMS_PER_JOB * int(match["job"] or 0) + int(match["item"]), match["rest"])


def classifications(results: Sequence[wire.Result]) -> list[wire.Classification]:
    """Join the classifications of the jobs."""
    return [each for result in results for each in result.classifications]


def check_one_label(served_model: wire.ServedModel) -> None:
    """Check that the model's classification of a text is one number. Raise wire.Invalid."""
    labels = () if served_model.classifier is None else served_model.classifier.labels
    if len(labels) != 1:
        found = f"which has {len(labels)}" if labels else "which is a language model"
        name = served_model.id
        raise wire.Invalid(
            f"model: expected a classifier of one label, such as a reward model, found {name!r}, {found}", "model"
        )
