"""The options of the subcommands that compare models on a file. scorepool/files implements them."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from scorepool.commands.on_files import (
    EXIT_STATUS,
    Completion,
    DryRun,
    File,
    InputFormat,
    Local,
    Model,
    Out,
    OutputFormat,
    Overwrite,
    Plot,
    Priority,
    Prompt,
    Temperature,
    Text,
    Tokens,
    run_on_file,
    show_summary,
)
from scorepool.commands.remote import DEFAULT_URL, ApiKey, Url
from scorepool.commands.running import LazyModule

if TYPE_CHECKING:
    from scorepool import files
    from scorepool.commands import corpus_table
else:
    from scorepool.commands.on_files import files

    corpus_table = LazyModule("scorepool.commands.corpus_table")

app = typer.Typer()


@app.command(epilog=EXIT_STATUS)
def compare(
    file: File,
    out: Out,
    models: Annotated[
        list[str], typer.Option("--model", help="A model; give at least two. Differences are from the first one.")
    ],
    prompt: Prompt = None,
    completion: Completion = None,
    text: Text = None,
    temperature: Temperature = 1.0,
    tokens: Tokens = False,
    priority: Priority = "normal",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    local: Local = None,
    input_format: InputFormat = None,
    output_format: OutputFormat = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    plot: Plot = None,
) -> None:
    """Score each row of FILE under several models: its columns, the scores of each model, and the differences."""
    run_on_file("compare", files.compare_file, partial(show_comparison, later_models=models[1:]), **locals())


@app.command(epilog=EXIT_STATUS)
def perplexity(
    file: Annotated[
        str, typer.Argument(metavar="FILE|FOLDER", help="A table as for `scorepool score`, a text file, or a folder.")
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="OUT", help="A row per document. Default: a table on stdout."),
    ] = None,
    model: Model = None,
    text: Annotated[str | None, typer.Option(help="Column of texts of a table. Default: text.")] = None,
    glob: Annotated[str, typer.Option(help="Files of FOLDER that are read.")] = "**/*.txt",
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window, at most. Default: the model's context.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window's beginning to the next. Default: half the context.")
    ] = None,
    priority: Priority = "normal",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    local: Local = None,
    input_format: InputFormat = None,
    output_format: OutputFormat = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    plot: Plot = None,
) -> None:
    """Compute the perplexity, bits per byte and bits per token of texts, in overlapping windows."""
    run_on_file("perplexity", files.perplexity, corpus_table.show_perplexity, **locals())


def show_comparison(summary: "files.Summary", out: str, later_models: list[str]) -> None:
    """Print on stderr what was done, and in how many rows the models do not see the same tokens."""
    show_summary(summary, out)
    for model in later_models:
        by_byte, by_token = (
            summary.means[name].number if name in summary.means else 0
            for name in (f"{model}_{files.PER_BYTE_DIFFERENCE}", f"{model}_{files.PER_TOKEN_DIFFERENCE}")
        )
        if by_token < by_byte:
            typer.echo(
                f"{model} and the first model divide {by_byte - by_token} of {by_byte} rows into different tokens: "
                f"their {files.PER_TOKEN_DIFFERENCE} is null, and bits per byte can be compared",
                err=True,
            )
