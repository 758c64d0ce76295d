"""The options of the subcommand that draws files. scorepool/plots implements it, and is executed on first use."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scorepool.commands.running import MISUSED, CommandError, exit_statuses, run

if TYPE_CHECKING:
    from scorepool import files, plots
else:
    from scorepool.commands.on_files import files, plots

app = typer.Typer()
EXIT_STATUS = exit_statuses(_1=None, _2="wrong options, or FILE has not the columns", _4="a plot cannot be written")


@app.command(epilog=EXIT_STATUS)
def plot(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="An OUT of score, generate, compare or perplexity; `-`: stdin.")
    ],
    out: Annotated[
        list[str] | None,
        typer.Option(
            "--out", "-o", metavar="PATH.png|PATH.svg|-", help="Repeatable. Default: `-`, which is the terminal."
        ),
    ] = None,
    kind: Annotated[
        Literal["histogram", "tokens", "calibration", "comparison"] | None,
        typer.Option(help="Default: calibration of choices, comparison of models, or else histogram."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="What is drawn of each row, e.g. logprob_per_token. Default: perplexity in a histogram, bits_per_byte "
            "in a comparison."
        ),
    ] = None,
    row: Annotated[int, typer.Option(min=1, help="Row whose tokens are drawn; `--tokens` wrote them.")] = 1,
    model: Annotated[
        list[str] | None, typer.Option(help="Two models to compare. Default: the first two of FILE.")
    ] = None,
    title: Annotated[str, typer.Option(help="Begin the title with this, e.g. the name of the model.")] = "",
    input_format: Annotated[str | None, typer.Option(help="Format of FILE. Default: as its name ends.")] = None,
) -> None:
    """Draw the columns of a file that score, generate, compare or perplexity wrote, in bounded memory."""

    def implementation() -> int:
        targets = out or ["-"]
        try:
            plots.plot_file(
                file, targets, kind=kind, column=column, row=row, models=model, title=title, input_format=input_format
            )
        except files.FileError as error:
            raise CommandError(str(error), error.exit_status) from None
        return 0

    run("plot", implementation, MISUSED)
