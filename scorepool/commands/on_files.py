"""The options of the subcommands that work on files. scorepool/files implements them, and is executed on first use."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer

from scorepool.commands.remote import DEFAULT_URL, ApiKey, Url
from scorepool.commands.running import INTERRUPTED, MISUSED, CommandError, LazyModule, check_packages, run

if TYPE_CHECKING:
    from scorepool import files, plots
    from scorepool.commands import progress_bar
    from scorepool.local import private_server
else:
    files = LazyModule("scorepool.files")
    plots = LazyModule("scorepool.plots")
    progress_bar = LazyModule("scorepool.commands.progress_bar")
    private_server = LazyModule("scorepool.local.private_server")

Found = TypeVar("Found", "files.Summary", "files.Perplexity")
OutPath = TypeVar("OutPath", str, str | None)
app = typer.Typer()
TERMINAL_S = 0.2  # between changes of the bar
LOG_S = 30.0  # between such lines in a log
EXIT_STATUS = (
    "Exit status 0: every row is done; 1: OUT.errors.jsonl names rows that are not; 2: the command or FILE cannot "
    "work; 3: no server, or it refuses; 4: OUT cannot be written; 130: Ctrl-C. After 3, 4 and 130 the same command "
    "goes on where it stopped."
)

File = Annotated[str, typer.Argument(metavar="FILE", help="JSONL, CSV, TSV, Parquet or Arrow; `-`: stdin.")]
Out = Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="As FILE; `-`: stdout.")]
Model = Annotated[str | None, typer.Option(help="Default: the only model that is served.")]
Prompt = Annotated[str | None, typer.Option(help="Column of prompts. Default: prompt.")]
Completion = Annotated[str | None, typer.Option(help="Column of completions. Default: completion.")]
Text = Annotated[str | None, typer.Option(help="Column of texts that are scored by themselves.")]
Temperature = Annotated[float, typer.Option(min=1e-9, max=100, help="Divides the logits before the softmax.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Add the columns token_ids, tokens, logprobs and ranks.")]
Prefix = Annotated[str, typer.Option(help="Begin the names of the new columns with this.")]
InputFormat = Annotated[str | None, typer.Option(help="Format of FILE. Default: as its name ends; of stdin jsonl.")]
OutputFormat = Annotated[str | None, typer.Option(help="Format of OUT. Default: as its name ends; of stdout jsonl.")]
Priority = Annotated[str, typer.Option(help="Of the jobs: high, normal or low.")]
Local = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]FOLDER_OR_HUB_ID",
        help="Serve this model for this command alone, without a server at --url; repeatable.",
    ),
]
Plot = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH.png|PATH.svg|-",
        help="Draw OUT when it is done, as `scorepool plot` does; `-`: in the terminal; repeatable.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing: count rows, and estimate tokens and time from a sample.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]


@app.command(epilog=EXIT_STATUS)
def score(
    file: File,
    out: Out,
    model: Model = None,
    prompt: Prompt = None,
    completion: Completion = None,
    text: Text = None,
    choices: Annotated[
        str | None, typer.Option(help="Column of lists of texts, each of which is scored after the prompt.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="Column of the right choices, or of their indices from 0.")] = None,
    answer_is: Annotated[
        Literal["auto", "index", "text"], typer.Option(help="What the answers are; auto refuses rows where both fit.")
    ] = "auto",
    delimiter: Annotated[str, typer.Option(help="Text between the prompt and each choice.")] = "",
    temperature: Temperature = 1.0,
    tokens: Tokens = False,
    prefix: Prefix = "",
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
    """Score each row of FILE: its columns, and logprob_sum, num_tokens, perplexity, bits_per_byte, ..."""
    run_on_file("score", files.score_file, show_summary, **locals())


@app.command(epilog=EXIT_STATUS)
def generate(
    file: File,
    out: Out,
    model: Model = None,
    prompt: Annotated[str, typer.Option(help="Column of prompts: text, token ids or chat messages.")] = "prompt",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-9, max=1, help="Sample from the tokens of this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of each row. Default: another for each.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; repeatable.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Add the columns token_ids, tokens and logprobs.")] = False,
    prefix: Prefix = "",
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
    """Continue the prompt of each row of FILE: its columns, and generated_text, finish_reason, logprob_sum, ..."""
    run_on_file("generate", files.generate_file, show_summary, **locals())


def show_summary(summary: "files.Summary", out: str) -> None:
    """Print on stderr what was done, or would be."""
    if summary.estimate is not None:
        show_estimate(summary, summary.estimate)
        return
    typer.echo(counted(summary.num_rows - summary.num_failed, summary.num_failed, "row"), err=True)
    width = max(map(len, summary.means), default=0)
    for name, mean in summary.means.items():
        stderr = "" if mean.stderr is None else f" ± {mean.stderr:.4f}"
        typer.echo(f"{name:{width}}  {mean.mean:.4f}{stderr} in {mean.number:,} rows", err=True)
    show_remarks(summary, out)


def counted(num_done: int, num_failed: int, noun: str) -> str:
    """Return the line that says how many are done."""
    return f"{num_done:,} {noun}{'' if num_done == 1 else 's'} done, {num_failed:,} failed"


def show_estimate(summary: "files.Summary | files.Perplexity", estimate: "files.Estimate") -> None:
    """Print on stderr what the work would be."""
    at_most = f", with {estimate.max_new_tokens} for each answer" if estimate.max_new_tokens else ""
    lines = [
        f"{summary.num_rows:,} rows, {summary.num_failed:,} of them bad",
        f"about {summary.num_tokens:,} tokens{at_most}, by a sample of {estimate.num_sampled:,} rows, of which "
        f"{estimate.num_unfit:,} cannot be done",
    ]
    if estimate.first_reason:
        lines.append(f"the first bad one: {estimate.first_reason}")
    if estimate.duration_s is None:
        lines.append("the time is not known: the workers have ended no jobs yet")
    else:
        lines.append(
            f"about {files.duration(estimate.duration_s)} at {estimate.tokens_per_s:,.0f} tokens/s, the workers' speed "
            "in their last jobs; jobs of another kind may be faster or slower"
        )
    typer.echo("\n".join((*lines, "nothing was written")), err=True)


def show_remarks(summary: "files.Summary | files.Perplexity", out: str | None) -> None:
    """Print on stderr where the rows that failed are named, and how the results differ."""
    if summary.num_failed and out not in (None, "-"):
        typer.echo(f"{out}.errors.jsonl names the rows that failed, with the reasons", err=True)
    if summary.stamp_differences:
        differences = "; ".join(summary.stamp_differences)
        typer.echo(f"warning: different models or software computed the rows: {differences}", err=True)


def run_on_file(
    command: str,
    function: Callable[..., Found],
    show: Callable[[Found, OutPath], None],
    *,
    file: str,
    out: OutPath,
    url: str,
    api_key: str | None,
    local: list[str] | None,
    plot: list[str] | None,
    **options: Any,
) -> NoReturn:
    """Run a function of scorepool.files, report what it did on stderr, and exit with a status of EXIT_STATUS.

    Subcommands pass `**locals()`: the names of their parameters are those of the function's.
    """

    def implementation() -> int:
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as after `nohup`
            signal.signal(signal.SIGHUP, interrupt)
        if plot:
            check_plot(command, plot, out)
        reporter = Reporter()
        logging.getLogger("scorepool").addHandler(reporter)
        try:
            with server_of(command, url, api_key, local, options.get("model")) as server:
                summary = function(file, out, report=reporter.report, **server, **options)
        except files.FileError as error:
            raise CommandError(str(error), error.exit_status) from None
        except KeyboardInterrupt:
            going_on = "" if out in (None, "-") else "; the same command goes on where it stopped"
            raise CommandError(f"stopped{going_on}", INTERRUPTED) from None
        finally:
            logging.getLogger("scorepool").removeHandler(reporter)
            reporter.close()
        show(summary, out)
        if options.get("dry_run"):
            return 0
        if plot and out:
            draw_plot(plot, out, options.get("output_format"), summary.models)
        return 1 if summary.num_failed else 0

    run(command, implementation, MISUSED)


def interrupt(*_: object) -> None:
    """Treat a signal as Ctrl-C, of which asyncio makes a cancellation. To raise an error would do so in any task."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def check_plot(command: str, targets: list[str], out: str | None) -> None:
    """Check that plots of OUT can be drawn, before the work on the file. Raises CommandError."""
    check_packages(command, "--plot")
    if out in (None, "-"):
        raise CommandError("--plot draws the columns of OUT: expected `-o` with a path")
    try:
        plots.check_targets(targets)
    except files.FileError as error:
        raise CommandError(str(error), error.exit_status) from None


def draw_plot(targets: list[str], out: str, output_format: str | None, models: list[str]) -> None:
    """Draw the columns of OUT. Raises CommandError."""
    title = models[0] if len(models) == 1 else ""  # the plot names several models itself
    try:
        plots.plot_file(out, targets, title=title, input_format=output_format)
    except files.FileError as error:
        raise CommandError(f"{out} is complete, but not its plot: {error}", error.exit_status) from None


@contextmanager
def server_of(
    command: str, url: str, api_key: str | None, local: list[str] | None, model: str | None
) -> Iterator[dict[str, str | None]]:
    """Yield the URL and the key of the server to use, one run here if there are local models. Raises CommandError."""
    if not local:
        yield {"url": url, "api_key": api_key}
        return
    check_packages(command, "--local")
    with private_server.private_server(local, model) as private_url:
        yield {"url": private_url, "api_key": ""}


class Reporter(logging.Handler):
    """Show on stderr how far the work is: a bar on a terminal, a line per LOG_S elsewhere.

    As a handler of the client's log, show its warnings, each once per LOG_S: every waiting job has its own.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warned_at: dict[str, float] = {}
        self._progress: files.Progress | None = None
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: progress_bar.ProgressBar | None = None
        self._shown_at = 0.0

    def report(self, counts: "files.Counts", size: int | None) -> None:
        """Take what is done, first of all what an earlier process had done."""
        now = monotonic()
        if self._progress is None:
            self._progress = files.Progress()
            self._progress.start(counts)
            self._shown_at = now
        self._progress.note(counts)
        if now - self._shown_at >= (TERMINAL_S if self._is_terminal else LOG_S):
            self._shown_at = now
            line = self._progress.line(counts, size)
            if self._is_terminal:
                self._bar = self._bar or progress_bar.ProgressBar()
                self._bar.show(line, counts.position, size)
            else:
                typer.echo(line, err=True)

    def emit(self, record: logging.LogRecord) -> None:
        now, message = monotonic(), record.getMessage()
        if now - self._warned_at.get(message, -LOG_S) >= LOG_S:
            self._warned_at[message] = now
            line = f"scorepool: {message}"
            if self._bar:
                self._bar.print_above(line)
            else:
                typer.echo(line, err=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.close()
        super().close()
