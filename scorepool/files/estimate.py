"""Estimate the work on a file from its rows and from the tokens of a sample of them. Writes nothing."""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from scorepool import wire
from scorepool.files.process import Estimate, Model, Summary, delete_jobs
from scorepool.files.rows import DoneRows, Row, Values
from scorepool.files.scoring.jobs import RowFault, run_job
from scorepool.files.window import in_daemon_thread
from scorepool.sdk import AsyncClient

MAX_SAMPLE = 128  # rows whose tokens are counted; from half as many on, evenly over a larger file
JOBS_IN_FLIGHT = 16

Prompt = dict[str, Any]  # arguments of wire.Tokenize
PromptsOf = Callable[[Values], Sequence[Prompt]]  # what the model reads for a row. Raises ValueError with a reason.
# The tokens that a model reads for prompts of these lengths, with a number that it generates after each. Raises
# ValueError with a reason.
TokensRead = Callable[[Model, Sequence[int], int], int]


class _Sampled(NamedTuple):
    row: Row
    prompts: Sequence[Prompt]
    size: int


class _Sample:
    """Rows at equal distances, and the sizes of all rows: characters, or token ids."""

    def __init__(self) -> None:
        self.rows: list[_Sampled] = []
        self.num_rows = self.size = 0
        self._distance = 1

    def add(self, row: Row, prompts: Sequence[Prompt]) -> None:
        each = _Sampled(row, prompts, sum(map(_size, prompts)))
        if self.num_rows % self._distance == 0:
            self.rows.append(each)
        self.num_rows += 1
        self.size += each.size
        if len(self.rows) > MAX_SAMPLE:
            del self.rows[1::2]
            self._distance *= 2


def read_whole(model: Model, lengths: Sequence[int], max_new_tokens: int) -> int:
    """Return the tokens of prompts that a model reads whole. Raises ValueError if one does not fit."""
    longest = max(lengths) + max_new_tokens
    if longest > model.context_length:
        raise ValueError(f"the row has {longest} tokens; at most {model.context_length} fit")
    return sum(lengths)


def _size(prompt: Prompt) -> int:
    return len(prompt["prompt"] if "prompt" in prompt else msgspec.json.encode(prompt["messages"]))


async def estimate_rows(
    rows: Iterator[Row],
    prompts_of: PromptsOf,
    tokens_read: TokensRead,
    max_new_tokens: int,
    models: Sequence[Model],
    client: AsyncClient,
) -> Summary:
    """Read all rows, and count the tokens of a sample on the server. Raises ServerError."""
    sample = _Sample()
    reasons: list[str] = []
    num_bad = 0

    def note_bad(row: Row, reason: str) -> None:
        if not reasons:
            reasons.append(f"row {row.number} (line {row.line}): {reason}")

    def read() -> None:
        nonlocal num_bad
        for row in rows:
            try:
                sample.add(row, prompts_of(row.readable_values()))
            except ValueError as error:
                num_bad += 1
                note_bad(row, str(error))

    await in_daemon_thread(read)
    tokenizers = [_Tokenizer(client, model, tokens_read, max_new_tokens) for model in models]
    counted = [await tokenizer.count(sample.rows) for tokenizer in tokenizers]
    unfit: dict[int, str] = {}
    for each in reversed(counted):
        unfit |= each.unfit
    for sampled in sample.rows:
        if sampled.row.number in unfit:
            note_bad(sampled.row, unfit[sampled.row.number])
    num_tokens = [
        round(each.num_tokens / max(1, each.size) * sample.size) + max_new_tokens * sample.num_rows for each in counted
    ]
    speeds = [model.tokens_per_s for model in models if model.tokens_per_s]
    is_known = len(speeds) == len(models)
    return Summary(
        num_rows=sample.num_rows + num_bad,
        num_failed=num_bad,
        num_tokens=sum(num_tokens),
        models=[model.name for model in models],
        stamp_differences=[],
        estimate=Estimate(
            num_sampled=len(sample.rows),
            num_unfit=len(unfit),
            first_reason="".join(reasons),
            max_new_tokens=max_new_tokens,
            tokens_per_s=sum(speeds) if is_known else None,
            # Workers of different models work at the same time.
            duration_s=max(map(lambda n, speed: n / speed, num_tokens, speeds)) if is_known else None,
        ),
    )


class _Counted(NamedTuple):
    num_tokens: int
    size: int  # of the rows that fit
    unfit: dict[int, str]  # reasons by row


class _Tokenizer:
    """Counts the tokens of rows as one model divides them."""

    def __init__(self, client: AsyncClient, model: Model, tokens_read: TokensRead, max_new_tokens: int) -> None:
        self._client, self._model = client, model
        self._tokens_read, self._max_new_tokens = tokens_read, max_new_tokens
        self._slots = asyncio.Semaphore(JOBS_IN_FLIGHT)
        self._run_id = uuid.uuid4().hex

    async def count(self, rows: Sequence[_Sampled]) -> _Counted:
        found = await asyncio.gather(*map(self._count_row, rows))
        fitting = [(row.size, each) for row, each in zip(rows, found, strict=True) if isinstance(each, int)]
        unfit = {row.row.number: each for row, each in zip(rows, found, strict=True) if isinstance(each, str)}
        return _Counted(sum(each for _, each in fitting), sum(size for size, _ in fitting), unfit)

    async def _count_row(self, row: _Sampled) -> int | str:
        """Return the number of tokens, or the reason why the row cannot be done."""
        try:
            lengths = await asyncio.gather(
                *(self._count(prompt, f"{row.row.number}.{index}") for index, prompt in enumerate(row.prompts))
            )
            return self._tokens_read(self._model, lengths, self._max_new_tokens)
        except (RowFault, ValueError) as error:
            return str(error)

    async def _count(self, prompt: Prompt, place: str) -> int:
        if isinstance(ids := prompt.get("prompt"), list):
            return len(ids)
        request = wire.Tokenize(model=self._model.name, wait_for_model=True, **prompt)
        done = DoneRows([])
        async with self._slots:
            try:
                result = await run_job(self._client, request, f"{self._run_id}-{place}", done)
            finally:
                await delete_jobs(self._client, done.job_ids)
        return len(result.sequences[0].token_ids)
