"""Divide the items of `score` and `classify` into jobs, and join results. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from scorepool import wire
from scorepool.options import ClassifyOptions, ScoreOptions
from scorepool.sdk.errors import JobFailed, MixedResults, ScorepoolError

T = TypeVar("T")
Pair = tuple[str, str] | tuple[list[int], list[int]]  # a prompt and a completion, both text or both token ids
Item = Pair | str | list[int] | wire.ScoreItem
ItemsRequest = wire.Score | wire.Classify | wire.Embed  # a compare job is a score job too
# What to classify: a text, token ids, or a chat, whose messages may be dicts.
ClassifyInput = str | list[int] | list[wire.Message] | list[dict[str, Any]]
ITEMS_PER_JOB = 256  # large enough that jobs cost little, small enough that several workers share the items


def chunks(items: Iterable[T], size: int = ITEMS_PER_JOB) -> Iterator[list[T]]:
    """Yield lists of at most `size` items, as they come."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def score_requests(model: str, items: Iterable[Item], options: ScoreOptions) -> Iterator[wire.Score]:
    """Yield the jobs of `score`. Raises TypeError, and ValueError if there are no items."""
    if isinstance(items, str):
        raise TypeError(
            "`items` is a str: expected a list of (prompt, completion) pairs, or of completions of `prompt`"
        )
    position = 0
    for chunk in chunks(items):
        yield wire.Score(model=model, items=[to_item(item, position + i) for i, item in enumerate(chunk)], **options)
        position += len(chunk)
    if not position:
        raise ValueError("`items` is empty: expected (prompt, completion) pairs, or completions of `prompt`")


def to_item(item: Item, position: int) -> wire.ScoreItem:
    """Return a pair or a completion as an item. Raises TypeError."""
    match item:
        case wire.ScoreItem():
            return item
        case (str(), str()) | (list(), list()) if isinstance(item, tuple):
            return wire.ScoreItem(prompt=item[0], completion=item[1])
        case str():
            return wire.ScoreItem(completion=item)
        case list() if all(isinstance(token_id, int) for token_id in item):
            return wire.ScoreItem(completion=item)
    raise TypeError(
        f"`items[{position}]` is {wire.quote(repr(item))}: expected a tuple (prompt, completion), both str or both "
        "lists of token ids, or the completion alone"
    )


def classify_requests(model: str, items: Iterable[ClassifyInput], options: ClassifyOptions) -> Iterator[wire.Classify]:
    """Yield the jobs of `classify`. Raises TypeError, ValueError for a chat that is none or if there are no items."""
    if isinstance(items, str):
        raise TypeError("`items` is a str: expected a list of texts, of token ids or of chats")
    position = 0
    for chunk in chunks(items):
        converted = [to_classify_item(item, position + i) for i, item in enumerate(chunk)]
        yield wire.Classify(model=model, items=converted, **options)
        position += len(chunk)
    if not position:
        raise ValueError("`items` is empty: expected texts, token ids or chats")


def to_classify_item(item: ClassifyInput, position: int) -> wire.ClassifyItem:
    """Return a text, token ids or a chat as an item. Raises TypeError, ValueError."""
    if isinstance(item, str):
        return wire.ClassifyItem(prompt=item)
    if isinstance(item, list) and item:
        if isinstance(item[0], dict | wire.Message):
            return wire.ClassifyItem(messages=wire.convert(item, list[wire.Message], f"items[{position}]"))
        token_ids = [token_id for token_id in item if isinstance(token_id, int)]
        if len(token_ids) == len(item):
            return wire.ClassifyItem(prompt=token_ids)
    raise TypeError(
        f"`items[{position}]` is {wire.quote(repr(item))}: expected a str, a list of token ids, or a list of messages"
    )


class Division:
    """The requests of one call with items. Names an item by its place in the call, not by that in its job."""

    def __init__(self, requests: Iterable[ItemsRequest]) -> None:
        self._requests = requests
        self._starts: list[int] = []
        self._num_items = 0

    def __iter__(self) -> Iterator[ItemsRequest]:
        for request in self._requests:
            self._starts.append(self._num_items)
            self._num_items += len(request.items)
            yield request

    def refusal(self, error: ScorepoolError, job: int) -> ScorepoolError:
        """Return the refusal of job number `job` in terms of the call."""
        message, field = self._renamed(error.message, job), self._renamed(error.field or "", job)
        body = wire.ErrorBody(code=error.code, type="", message=message, field=field or None)
        return ScorepoolError(error.status, body, error.request, error.job_id, error.retry_after_s)

    def join(self, jobs: Sequence[wire.Job], url: str) -> wire.Result:
        """Return one result with the sequences of all jobs. Raises JobFailed, MixedResults."""
        for index, job in enumerate(jobs):
            if job.failure:
                raise JobFailed(job.id, self._named(index, job.failure), url)
        return join(jobs, url, self._named)

    def _named(self, job: int, failure: wire.Failure) -> wire.Failure:
        message, field = self._renamed(failure.message, job), self._renamed(failure.field or "", job)
        return wire.Failure(code=failure.code, message=message, field=field or None)

    def _renamed(self, text: str, job: int) -> str:
        return _ITEM.sub(lambda match: f"items[{self._starts[job] + int(match[1])}]", text)


_ITEM = re.compile(r"\bitems\[([0-9]{1,4})\]")


def result_of(job: wire.Job, url: str) -> wire.Result:
    """Return the result of a job that has ended. Raises JobFailed."""
    if job.result is None:
        raise JobFailed(job.id, job.failure or wire.Failure(code="internal", message="it ended without a result"), url)
    return job.result


def join(
    jobs: Sequence[wire.Job], url: str, name_failure: Callable[[int, wire.Failure], wire.Failure] | None = None
) -> wire.Result:
    """Return one result with the sequences of all jobs. Raises JobFailed, MixedResults.

    `name_failure` names the failures of items, given the number of their job.
    """
    results = [result_of(job, url) for job in jobs]
    if name_failure is not None:
        results = [wire.map_failures(result, partial(name_failure, index)) for index, result in enumerate(results)]
    first = results[0]
    for job, other in zip(jobs, results, strict=True):
        if differences := _differences(first, other):
            raise MixedResults(
                f"the results of one call at {url} have different stamps, those of job {jobs[0].id} and job {job.id}: "
                f"{'; '.join(differences)}; call again, or submit jobs of your own and compare their stamps"
            )
    comparisons = [result.comparison for result in results if result.comparison]
    return wire.Result(
        sequences=[sequence for result in results for sequence in result.sequences],
        comparison=wire.join_comparisons(comparisons) if comparisons else None,
        labels=first.labels,
        classifications=[one for result in results for one in result.classifications],
        embeddings=[one for result in results for one in result.embeddings],
        packed=wire.join_packed([result.packed for result in results if result.packed]) if first.packed else None,
        temperature=first.temperature,
        logprobs_mode=first.logprobs_mode,
        usage=wire.Usage(
            prompt_tokens=sum(result.usage.prompt_tokens for result in results),
            completion_tokens=sum(result.usage.completion_tokens for result in results),
            cached_tokens=sum(result.usage.cached_tokens for result in results),
            images=sum(result.usage.images for result in results),
            video_frames=sum(result.usage.video_frames for result in results),
            speculation=first.usage.speculation,
            speculation_tokens=max(result.usage.speculation_tokens for result in results),
            proposed_tokens=sum(result.usage.proposed_tokens for result in results),
            accepted_tokens=sum(result.usage.accepted_tokens for result in results),
        ),
        stamp=wire.join_stamps([result.stamp for result in results]),
    )


def _differences(first: wire.Result, other: wire.Result) -> list[str]:
    """Return how the stamps of two results differ, and of compare jobs those of their bases."""
    differences = wire.stamp_differences(first.stamp, other.stamp)
    if first.comparison and other.comparison:
        differences += wire.stamp_differences(first.comparison.base, other.comparison.base)
    return differences
