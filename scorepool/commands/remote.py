"""The options of the subcommands that talk to an API. The modules that implement them are executed on first use."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scorepool.commands.running import REMOTE_STATUSES, LazyModule, exit_statuses, run

if TYPE_CHECKING:
    from scorepool.commands import jobs as job_commands
    from scorepool.commands import models as served
    from scorepool.commands import status as monitor
    from scorepool.commands import top as screen
else:
    job_commands = LazyModule("scorepool.commands.jobs")
    served = LazyModule("scorepool.commands.models")
    monitor = LazyModule("scorepool.commands.status")
    screen = LazyModule("scorepool.commands.top")

DEFAULT_URL = "http://127.0.0.1:8000"  # as in scorepool.sdk, which would import msgspec

PANEL = "Jobs and workers of an API"

app = typer.Typer()
Url = Annotated[str, typer.Option(envvar="SCOREPOOL_URL", help="The API: http://HOST:PORT or unix:///PATH.")]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", "--key", envvar=["SCOREPOOL_API_KEY", "SCOREPOOL_CLIENT_KEY"], help="API key."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(rich_help_panel=PANEL, epilog=exit_statuses(**REMOTE_STATUSES))
def jobs(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    status: Annotated[
        Literal["queued", "started", "finished", "failed", "canceled"] | None, typer.Option(help="Only such jobs.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only jobs of this model.")] = None,
    kind: Annotated[
        Literal["score", "compare", "generate", "tokenize", "classify", "embed"] | None,
        typer.Option(help="Only such jobs."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Jobs to list.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="List those after a page that ended with this cursor.")] = None,
    as_json: Json = False,
) -> None:
    """List your jobs, newest first."""
    run(
        "jobs",
        lambda: job_commands.list_jobs(
            url, api_key, status=status, model=model, kind=kind, cursor=cursor, limit=limit, as_json=as_json
        ),
    )


@app.command(rich_help_panel=PANEL, epilog=exit_statuses(**REMOTE_STATUSES))
def job(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for its end.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Show a job, with its result or failure; or a batch, by its id."""
    run("job", lambda: job_commands.show_job(url, api_key, job_id, wait_s=wait_s, as_json=as_json))


@app.command(
    rich_help_panel=PANEL,
    epilog=exit_statuses(**REMOTE_STATUSES | {"_1": "one of them was not canceled, or the API refuses"}),
)
def cancel(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Cancel jobs that are queued or run, and batches."""
    run("cancel", lambda: job_commands.cancel(url, api_key, job_ids, as_json=as_json))


@app.command(rich_help_panel=PANEL, epilog=exit_statuses(**REMOTE_STATUSES))
def models(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False) -> None:
    """List the models that live workers serve."""
    run("models", lambda: served.models(url, api_key, as_json=as_json))


@app.command(
    rich_help_panel=PANEL,
    epilog=exit_statuses(**REMOTE_STATUSES | {"_0": "ready", "_1": "no job can be computed, or the API refuses"}),
)
def status(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show queues and workers."""
    run("status", lambda: monitor.status(url, api_key, as_json=as_json))


@app.command(rich_help_panel=PANEL, epilog=exit_statuses(**REMOTE_STATUSES))
def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between readings.")] = 2.0,
    is_once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    as_json: Json = False,
) -> None:
    """Watch queues and workers, with their speeds, rows and caches, until Ctrl-C.

    On a terminal the screen refreshes; elsewhere one follows the other. tokens/s and jobs/s are those of the last work.
    batch: rows that generate, of those that may. KV: share of the memory for KV caches that is in use.
    """
    run("top", lambda: screen.top(url, api_key, interval_s=interval_s, is_once=is_once, as_json=as_json))
