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
    top_logprobs: Annotated[
        int, typer.Option(min=-1, help="Most likely tokens from which KLD is computed. -1: the whole vocabulary.")
    ] = 128,  # DEFAULT_COMPARED of wire, which is not imported here
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
    """Score each row of FILE under several models: its columns, the scores of each model, and the differences.

    Models that have the first one's vocabulary get the divergence of their distributions from its own, by the names of
    llama.cpp's perplexity tool: Mean KLD, Same top p and so on.
    """
    run_on_file("compare", files.compare_file, partial(show_comparison, models=models), **locals())


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


def show_comparison(summary: "files.Summary", out: str, models: list[str]) -> None:
    """Print on stderr what was done, how far the models are apart, and in how many rows they see other tokens."""
    show_summary(summary, out)
    first, *later_models = models
    for model in later_models:
        if model in summary.divergences:
            typer.echo("\n".join(divergence_lines(model, first, summary.divergences[model])), err=True)
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


def divergence_lines(model: str, first: str, found: "files.Divergence") -> list[str]:
    """Return what llama.cpp's perplexity tool prints of two models, by its names. Q is the model."""
    lower, upper = found.kld_lower, found.kld_upper
    stderr = "" if found.kld_stderr is None else f" ± {found.kld_stderr:.6f}"
    lines = {
        "Mean PPL(Q)": f"{found.perplexity:.4f}",
        "Mean PPL(base)": f"{found.base_perplexity:.4f}",
        "Mean KLD": _between(lower.mean, upper.mean) + stderr,
        "Maximum KLD": _between(lower.max, upper.max),
        "99.0% KLD": _between(lower.p99, upper.p99),
        "Median KLD": _between(lower.median, upper.median),
        "Mean Δp": f"{100 * found.mean_delta_p:.3f} %",
        "RMS Δp": f"{100 * found.rms_delta_p:.3f} %",
        "Same top p": f"{100 * found.same_top_p:.3f} %",
    }
    return [
        f"{model} (Q) against {first} (base), {found.num_tokens:,} tokens",
        *(f"{name:14}  {value}" for name, value in lines.items()),
    ]


def _between(lower: float, upper: float) -> str:
    one, other = f"{lower:.6f}", f"{upper:.6f}"
    return one if one == other else f"{one} to {other}"
