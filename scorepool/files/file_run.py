"""Run one task on one file, from the command's options to OUT."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import Any, TypedDict

from scorepool.files.errors import BadInput
from scorepool.files.estimate import PromptsOf, TokensRead, estimate_rows, read_whole
from scorepool.files.formats.registry import STDIO, Source, check_texts, format_of, make_sink
from scorepool.files.output.journal import Counts, JournaledOutput, paths_of
from scorepool.files.output.stdout_output import StdoutOutput
from scorepool.files.process import Model, Output, Summary, choose_models, first_row, process_rows
from scorepool.files.rows import Values
from scorepool.files.scoring.columns import check_new_columns
from scorepool.files.scoring.tasks import Task
from scorepool.sdk import AsyncClient
from scorepool.sdk.connection import url_and_key
from scorepool.sdk.loop_thread import LoopThread

RETRY_S = 3600.0  # for which a server may be away in the middle of a file
Report = Callable[[Counts, int | None], None]

OpenOutput = Callable[[Source, tuple[str, ...], dict[str, Any]], Output]  # of the new columns and the command


def no_report(counts: Counts, size: int | None) -> None:
    """Ignore how far the work is."""
    del counts, size


class FileOptions(TypedDict, total=False):
    """Options of every function that works on a file."""

    url: str | None  # as of `Client`
    api_key: str | None
    input_format: str | None  # jsonl, csv, tsv, parquet or arrow; by default as `path` ends
    output_format: str | None  # the same of `out`
    overwrite: bool  # replace `out` if it exists
    dry_run: bool  # write nothing: `estimate` of the summary says what the work would take
    report: Report  # gets what is done, first of all before, and the size of the input in bytes if it is known


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows come from, where they are computed, and where they go."""

    source: AbstractContextManager[Source]
    open_output: OpenOutput
    models: tuple[str, ...]  # none: the only one that is served
    url: str
    api_key: str  # "": none
    report: Report
    dry_run: bool


def place_of(
    source: AbstractContextManager[Source],
    out: str | Path | OpenOutput,
    model: str | Sequence[str] | None,
    options: FileOptions,
) -> Place:
    """Return where the work is done that a function's arguments ask for. Raises TypeError for an unknown option."""
    if unknown := options.keys() - FileOptions.__annotations__.keys():
        raise TypeError(f"{min(unknown)!r} is no option: expected {', '.join(FileOptions.__annotations__)}")
    if not callable(out):
        out = output_to(fspath(out), options.get("output_format"), options.get("overwrite", False))
    url, api_key = url_and_key(options.get("url"), options.get("api_key"))
    return Place(
        source,
        out,
        models=(model,) if isinstance(model, str) else tuple(model or ()),
        url=url,
        api_key=api_key or "",
        report=options.get("report", no_report),
        dry_run=options.get("dry_run", False),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with each row."""

    command: dict[str, Any]  # what must be the same for the work to go on
    new_columns: tuple[str, ...]
    text_columns: tuple[str, ...]  # of the input, texts or lists
    make_task: Callable[[AsyncClient, list[Model], str], Task]  # of a client, the models and a run id
    rows_per_chunk: int
    max_in_flight: int  # chunks
    prompts_of: PromptsOf  # what the models read for a row
    tokens_read: TokensRead = read_whole
    max_new_tokens: int = 0  # that they generate for each
    # What of the command follows from the models, and must be the same too. Raises BadInput if they cannot do the work.
    options_of: Callable[[list[Model]], dict[str, Any]] = lambda _: {}


def run_file(place: Place, make_plan: Callable[[Values, str], Plan]) -> Summary:
    """Work on a file. The plan follows from its first row and its name. Raises FileError."""
    with place.source as source:
        first, rows = first_row(source)
        plan = make_plan(first, source.name)
        check_texts(source, plan.text_columns)
        check_new_columns(first, plan.new_columns, source.name, has_prefix="--prefix" in plan.command)

        async def work() -> Summary:
            models = await choose_models(place.url, place.api_key, place.models)
            options = plan.options_of(models)
            if place.dry_run:
                async with AsyncClient(place.url, place.api_key, retry_s=RETRY_S) as client:
                    return await estimate_rows(
                        rows, plan.prompts_of, plan.tokens_read, plan.max_new_tokens, models, client
                    )
            command = {
                **plan.command,
                **options,
                **source.identity,
                "--model": ", ".join(model.name for model in models),
                **{f"the fingerprint of {model.name}": model.weights for model in models},
            }
            differences: list[str] = []
            with closing(place.open_output(source, plan.new_columns, command)) as output, abandoned_if_bad(output):
                if not output.is_complete:
                    async with AsyncClient(place.url, place.api_key, retry_s=RETRY_S) as client:
                        differences = await process_rows(
                            rows,
                            plan.make_task(client, models, output.run_id),
                            output,
                            client,
                            models=models,
                            rows_per_chunk=plan.rows_per_chunk,
                            max_in_flight=plan.max_in_flight,
                            report=lambda counts: place.report(counts, source.size),
                        )
                output.finish()
                return Summary(
                    num_rows=output.counts.num_rows,
                    num_failed=output.counts.num_failed,
                    num_tokens=output.counts.num_tokens,
                    models=[model.name for model in models],
                    means=output.counts.means,
                    divergences={name: each.summarise() for name, each in output.counts.divergences.items()},
                    stamp_differences=differences,
                )

        return run_to_end(work())


def run_to_end(work: Coroutine[Any, Any, Summary]) -> Summary:
    """Run work and return its summary. Where a loop runs already, as in a notebook, it runs in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with closing(LoopThread(_no_end)) as thread:
        return thread.run(work)


async def _no_end() -> None:
    """Do nothing when the loop stops: the work has closed what it opened."""


def output_to(out: str, output_format: str | None, overwrite: bool) -> OpenOutput:
    """Return what opens a file for the rows, `-` being stdout."""

    def open_output(source: Source, new_columns: tuple[str, ...], command: dict[str, Any]) -> Output:
        for written in paths_of(out):
            if _is_same_file(source.path, written):
                raise BadInput(f"FILE is {written}, which is written with -o {out}: give another -o")
        sink = make_sink(out, output_format, source, new_columns)
        if out == STDIO:
            return StdoutOutput(sink)
        command = {**command, "--output-format": format_of(out, output_format)}
        return JournaledOutput(Path(out), sink, command, overwrite)

    return open_output


@contextmanager
def abandoned_if_bad(output: Output) -> Iterator[None]:
    """Abandon an output that has no row yet if the work on it cannot be done."""
    try:
        yield
    except BadInput:
        output.abandon()
        raise


def _is_same_file(path: str, out: Path) -> bool:
    try:
        return path != STDIO and Path(path).samefile(out)
    except OSError:  # one of them does not exist
        return False
