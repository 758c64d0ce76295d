"""Score the rows of a file."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from os import fspath
from pathlib import Path

from scorepool import wire
from scorepool.files.columns import ScoreColumns, check_new_columns
from scorepool.files.formats import STDIO, make_sink, open_source
from scorepool.files.journal import Counts, JournaledOutput
from scorepool.files.measures import RANKS, SCORE_COLUMNS, TOKEN_COLUMNS
from scorepool.files.process import Output, Summary, choose_model, first_row, process_rows
from scorepool.files.stdout_output import StdoutOutput
from scorepool.files.tasks import ScoreTask
from scorepool.sdk import AsyncClient
from scorepool.sdk.async_client import DEFAULT_URL
from scorepool.sdk.splitting import ITEMS_PER_JOB

JOBS_IN_FLIGHT = 16
RETRY_S = 3600.0  # for which a server may be away in the middle of a file


def score_file(
    path: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    text: str | None = None,
    tokens: bool = False,
    prefix: str = "",
    temperature: float = 1.0,
    priority: wire.Priority = "normal",
    url: str = DEFAULT_URL,
    api_key: str | None = None,
    input_format: str | None = None,
    output_format: str | None = None,
    overwrite: bool = False,
    max_in_flight: int = JOBS_IN_FLIGHT,
    report: Callable[[Counts, int | None], None] = lambda counts, size: None,
) -> Summary:
    """Score each row of a file, and write the rows with the columns of the scores.

    `prompt`, `completion` and `text` name columns: by default `prompt` and `completion`, or `text`, whose first token
    is scored after BOS. `-` is stdin or stdout. The same call goes on where another process stopped. `report` gets
    what is done so far and the input's size. Raises FileError.
    """
    with open_source(fspath(path), input_format) as source:
        first, rows = first_row(source)
        columns = ScoreColumns.choose(first, source.name, prompt, completion, text)
        new = (*SCORE_COLUMNS, *((*TOKEN_COLUMNS, RANKS) if tokens else ()))
        check_new_columns(first, tuple(prefix + name for name in new), source.name)
        sink = make_sink(fspath(out), output_format, source)

        async def work() -> Summary:
            name = await choose_model(url, api_key, model)
            command = {
                **source.identity, "--model": name, "--prompt": columns.prompt, "--completion": columns.completion,
                "--tokens": tokens, "--prefix": prefix, "--temperature": temperature,
            }  # fmt: skip
            output: Output = (
                StdoutOutput(sink)
                if fspath(out) == STDIO
                else JournaledOutput(Path(out), sink, {"the command": "score", **command}, overwrite)
            )
            with closing(output):
                differences: list[str] = []
                async with AsyncClient(url, api_key, retry_s=RETRY_S) as client:
                    request = partial(
                        wire.Score,
                        model=name,
                        temperature=temperature,
                        priority=priority,
                        rank=True,
                        wait_for_model=True,
                    )
                    task = ScoreTask(
                        client,
                        lambda items: request(items=items),
                        columns,
                        output.run_id,
                        with_tokens=tokens,
                        prefix=prefix,
                    )
                    if not output.is_complete:
                        differences = await process_rows(
                            rows,
                            task,
                            output,
                            client,
                            rows_per_chunk=ITEMS_PER_JOB,
                            max_in_flight=max_in_flight,
                            report=lambda counts: report(counts, source.size),
                        )
                output.finish()
                return summary_of(output.counts, differences)

        return asyncio.run(work())


def summary_of(counts: Counts, differences: list[str]) -> Summary:
    return Summary(
        num_rows=counts.num_rows,
        num_failed=counts.num_failed,
        num_tokens=counts.num_tokens,
        stamp_differences=differences,
    )
