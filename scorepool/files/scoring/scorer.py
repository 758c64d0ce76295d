"""Score the items of rows under one model, many items per job. Knows no files.

A row has any number of items, and a job has items of several rows, or some of one row's. A row at fault is found and
left out, and the others are computed without it.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scorepool import wire
from scorepool.files.rows import DoneRows
from scorepool.files.scoring.jobs import RowFault, run_job
from scorepool.sdk import AsyncClient
from scorepool.sdk.splitting import ITEMS_PER_JOB

T = TypeVar("T")
JOBS_IN_FLIGHT = 16
MAX_ITEMS_SIZE = 2**18  # bytes or token ids of one job's items: a job should take well below its timeout


@dataclass(frozen=True, slots=True)
class _RowItem:
    """An item: the one at `index` among those of a row."""

    row_number: int
    index: int
    item: wire.ScoreItem


@dataclass(slots=True)
class ScoredRows(Generic[T]):
    """What was computed of rows, by their numbers: one for each item, or why there is none."""

    sequences: dict[int, list[T]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def sequences_of(result: wire.Result) -> Sequence[wire.SequenceResult]:
    """Return the sequences of a result, one for each item."""
    return result.sequences


class Scorer(Generic[T]):
    """Scores items under `model`. The jobs' Idempotency-Keys follow from `run_id` and the items' places, so that a
    process that goes on after another gets the jobs of that one."""

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        make_request: Callable[..., wire.Score],
        run_id: str,
        read: Callable[[wire.Result], Sequence[T]],
        max_size: int = MAX_ITEMS_SIZE,
        *,
        is_named: bool = False,
    ) -> None:
        """`read` takes one for each item out of a result. A job has items of `max_size`, or a larger one alone.

        Reasons begin with the model's name if `is_named`.
        """
        self.model, self.is_named = model, is_named
        self._client, self._make_request, self._run_id = client, make_request, run_id
        self._read, self._max_size = read, max_size
        self._slots = asyncio.Semaphore(JOBS_IN_FLIGHT)  # a row may have items of any number of jobs

    async def score(self, items: Mapping[int, Sequence[wire.ScoreItem]], done: DoneRows) -> ScoredRows[T]:
        """Score the items of rows, which are given by the rows' numbers. Raises ServerError."""
        row_items = [_RowItem(row, index, item) for row, each in items.items() for index, item in enumerate(each)]
        parts = await asyncio.gather(*(self._score_part(part, done) for part in _divide(row_items, self._max_size)))
        scored = ScoredRows[T]()
        for part in reversed(parts):  # of several reasons, the first stays
            scored.reasons |= part.reasons
        for row in items:
            if row not in scored.reasons:
                scored.sequences[row] = [each for part in parts for each in part.sequences.get(row, ())]
        return scored

    async def _score_part(self, row_items: list[_RowItem], done: DoneRows) -> ScoredRows[T]:
        """Score items in one job, and again without a row at fault, divided as often as that is not known."""
        found: dict[tuple[int, int], T] = {}
        scored = ScoredRows[T]()
        pending = [row_items]
        while pending:
            part = [each for each in pending.pop() if each.row_number not in scored.reasons]
            if not part:
                continue
            try:
                sequences = await self._run(part, done)
            except RowFault as fault:
                if len(part) == 1 or fault.index is not None:
                    scored.reasons[part[fault.index or 0].row_number] = fault.reason
                    pending.append(part)
                else:
                    half = len(part) // 2
                    pending += [part[half:], part[:half]]
            else:
                places = ((each.row_number, each.index) for each in part)
                found |= dict(zip(places, sequences, strict=True))
        for row, index in sorted(found):
            scored.sequences.setdefault(row, []).append(found[row, index])
        return scored

    async def _run(self, part: list[_RowItem], done: DoneRows) -> Sequence[T]:
        first, last = part[0], part[-1]
        place = f"{first.row_number}.{first.index}-{last.row_number}.{last.index}"
        request = self._make_request(model=self.model, items=[each.item for each in part])
        async with self._slots:
            result = await run_job(self._client, request, f"{self._run_id}-{place}-{len(part)}", done)
        return self._read(result)


def _divide(row_items: Sequence[_RowItem], max_size: int) -> Iterator[list[_RowItem]]:
    """Yield the items of one job each."""
    part: list[_RowItem] = []
    size = 0
    for each in row_items:
        item_size = _size_of(each.item.completion) + _size_of(each.item.prompt or "")
        if part and (len(part) == ITEMS_PER_JOB or size + item_size > max_size):
            yield part
            part, size = [], 0
        part.append(each)
        size += item_size
    if part:
        yield part


def _size_of(text: str | list[int]) -> int:
    """Return how many tokens it has at most: one for each byte."""
    return len(text.encode()) if isinstance(text, str) else len(text)
