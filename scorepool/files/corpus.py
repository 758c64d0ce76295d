"""Compute the perplexity of a corpus, as a function."""

from collections.abc import Sequence
from functools import partial
from os import fspath
from pathlib import Path
from typing import Any, Unpack

from msgspec import Struct

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.file_run import FileOptions, Plan, place_of, run_file
from scorepool.files.formats.documents import DEFAULT_GLOB, TEXT_COLUMN, are_files, open_documents
from scorepool.files.options import check_options
from scorepool.files.output.journal import paths_of
from scorepool.files.output.stdout_output import CollectedOutput
from scorepool.files.process import Estimate, Model, Output, Summary
from scorepool.files.rows import Values
from scorepool.files.scoring.columns import check_has_columns
from scorepool.files.scoring.scorer import Scorer, sequences_of
from scorepool.files.scoring.tasks import ScoreTask, Task
from scorepool.files.scoring.windows import DOCUMENT_COLUMNS, DocumentTask, WindowScoring, document_columns, document_of
from scorepool.sdk import AsyncClient

ROWS_PER_CHUNK = 32
CHUNKS_IN_FLIGHT = 8


class Perplexity(Struct, frozen=True, kw_only=True):
    """The perplexity of a corpus. Values are null if no token was scored."""

    num_documents: int  # those that did not fail
    num_failed: int
    num_tokens: int  # scored: all but the first of each document; of a dry run those of all windows
    num_bytes: int  # of these tokens
    logprob_sum: float | None  # natural logarithm
    perplexity: float | None
    bits_per_token: float | None
    bits_per_byte: float | None
    models: list[str]
    documents: list[dict[str, Any]]  # empty if they were written to a file
    numbers: list[int]  # of the rows that these documents are, from 1
    stamp_differences: list[str]
    estimate: Estimate | None = None  # of a dry run alone

    @property
    def num_rows(self) -> int:
        """The number of documents, with those that failed."""
        return self.num_documents + self.num_failed


def perplexity(
    path: str | Path,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    text: str | None = None,
    glob: str = DEFAULT_GLOB,
    context: int | None = None,
    stride: int | None = None,
    priority: wire.Priority = "normal",
    **options: Unpack[FileOptions],
) -> Perplexity:
    """Compute the perplexity of the files of a folder that `glob` names, of a text file, or of the rows of a table.

    Documents longer than `context` tokens, by default the model's context, are cut into windows that begin `stride`
    tokens after each other, by default half the context. Each token but the first is scored once, after the tokens
    before it in its window. `text` names the column of a table, by default `text`. With `out` a row per document is
    written there; without it, `documents` of the result holds them. The rest is as in `score_file`. Raises FileError.
    """
    source, input_format = fspath(path), options.get("input_format")
    dropped = (TEXT_COLUMN,) if are_files(source, input_format) else ()
    if dropped and text:
        raise BadInput(f"{path} is no table, so it has no column {text!r}: expected no --text, or --input-format")
    column = text or TEXT_COLUMN
    documents: list[Values] = []
    numbers: list[int] = []

    def plan(first: Values, name: str) -> Plan:
        check_has_columns(first, name, {"--text": column})
        check_options(wire.Score, priority=priority)
        return Plan(
            {"the command": "perplexity", "--text": column, "--priority": priority},
            DOCUMENT_COLUMNS,
            (column,),
            make_task,
            ROWS_PER_CHUNK,
            CHUNKS_IN_FLIGHT,
            lambda values: [{"prompt": document_of(values, column)}],
            tokens_read,
            options_of=options_of,
        )

    def options_of(models: list[Model]) -> dict[str, Any]:
        return choose_windows(models[0], context, stride).options

    def tokens_read(model: Model, lengths: Sequence[int], _: int) -> int:
        return sum(map(choose_windows(model, context, stride).tokens_read, lengths))

    def make_task(client: AsyncClient, models: list[Model], run_id: str) -> Task:
        name = models[0].name
        make_request = partial(wire.Score, priority=priority, wait_for_model=True)
        scorer = Scorer(client, name, make_request, run_id, sequences_of)
        task = ScoreTask(scorer, choose_windows(models[0], context, stride))
        return DocumentTask(client, name, run_id, column=column, dropped=dropped, priority=priority, task=task)

    def collect(*_: object) -> Output:
        return CollectedOutput(documents, numbers)

    outputs = () if out is None else paths_of(fspath(out))
    documents_in = open_documents(source, input_format, glob, outputs)
    place = place_of(documents_in, collect if out is None else out, model, options)
    return total(run_file(place, plan), documents, numbers)


def choose_windows(model: Model, context: int | None, stride: int | None) -> WindowScoring:
    """Return the windows. Raises BadInput if the model has no such context."""
    longest = model.context_length
    if context is not None and not 2 <= context <= longest:
        raise BadInput(f"--context is {context}: expected 2 to {longest}, the context of {model.name}")
    chosen = context or longest
    if stride is not None and not 1 <= stride < chosen:
        raise BadInput(f"--stride is {stride}: expected 1 to {chosen - 1}, less than the context")
    return WindowScoring(chosen, stride or max(1, chosen // 2))


def total(summary: Summary, documents: list[Values], numbers: list[int]) -> Perplexity:
    """Return the corpus's perplexity: that of all tokens, not a mean over documents."""
    sums = {name: mean.total for name, mean in summary.means.items()}
    num_tokens, num_bytes = round(sums.get("num_tokens", 0)), round(sums.get("num_bytes", 0))
    columns = document_columns(sums["logprob_sum"], num_tokens, num_bytes) if num_tokens else {}
    return Perplexity(
        num_documents=summary.num_rows - summary.num_failed,
        num_failed=summary.num_failed,
        num_tokens=summary.num_tokens if summary.estimate else num_tokens,
        num_bytes=num_bytes,
        logprob_sum=columns.get("logprob_sum"),
        perplexity=columns.get("perplexity"),
        bits_per_token=columns.get("bits_per_token"),
        bits_per_byte=columns.get("bits_per_byte"),
        documents=documents,
        numbers=numbers,
        models=summary.models,
        stamp_differences=summary.stamp_differences,
        estimate=summary.estimate,
    )
