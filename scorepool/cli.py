"""The `scorepool` command. local/commands.py implements the subcommands that start processes.

A plain `pip install scorepool` brings this module's imports. NEEDS in commands/running.py lists what each subcommand
needs beside them. The module that implements a subcommand is executed when the subcommand first uses it.

To add a subcommand: a function here, in commands/remote.py if it talks to an API, or in commands/on_files.py if it
works on files; its modules in NEEDS.
"""

import hashlib
import re
import secrets
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scorepool.commands import evaluations, on_files, plotting, remote
from scorepool.commands.remote import DEFAULT_URL, ApiKey, Json
from scorepool.commands.running import LazyModule, exit_statuses, fail, run

# As in scorepool.store, which a plain installation cannot import.
KEY_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
LOCAL_OWNER = "local"

if TYPE_CHECKING:
    from scorepool import verify as verification
    from scorepool.local import commands
else:
    commands = LazyModule("scorepool.local.commands")
    verification = LazyModule("scorepool.verify")  # needs no extra

START = "Servers"
CHECK = "Checks"
NOT_STARTED = "it could not start, and stderr says why"
STARTED = exit_statuses(_0="stopped by Ctrl-C or SIGTERM", _1=NOT_STARTED, _130=None)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous LLM scoring on Macs.",
    epilog="Exit status 0: done. The help of each command says what others mean.",
)

Model = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME[,ALIAS...]=FOLDER_OR_HUB_ID",
        help="Serve a model; repeatable.",
        show_default="the demo model",
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME[@MODEL]=FOLDER",
        help="Load a LoRA adapter beside its model; repeatable.",
        show_default="$SCOREPOOL_ADAPTERS",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8000")]
Uds = Annotated[
    str | None, typer.Option(metavar="PATH", help="Listen on a unix socket that only this user can open, not a port.")
]
RedisUrl = Annotated[
    str | None, typer.Option(help="URL of Redis.", show_default="$SCOREPOOL_REDIS_URL, else redis://127.0.0.1:6379/0")
]
RedisUrlOrEmbedded = Annotated[
    str | None,
    typer.Option(
        "--redis-url", help="URL of Redis.", show_default="$SCOREPOOL_REDIS_URL, $REDIS_URL, or an embedded one"
    ),
]
RedisUrlFile = Annotated[
    str | None, typer.Option(metavar="PATH", help="A file with the URL, whose password other users must not see.")
]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", show_default="auto")]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar="NAME=FOLDER_OR_HUB_ID",
        help="A smaller model with the same tokenizer, which proposes tokens for the model NAME; repeatable.",
        show_default="$SCOREPOOL_DRAFTS, else none",
    ),
]
ToolParser = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The format in which the model calls functions, by vLLM's name.", show_default="auto"
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The tags around the model's reasoning, by vLLM's name.", show_default="auto"),
]
Mode = Annotated[
    str | None, typer.Option(help="default or exact, as the model is to be served.", show_default="default")
]
LogLevel = Annotated[
    str | None, typer.Option(help="debug, info, warning, error or critical, in any case.", show_default="info")
]


def print_version(is_asked: bool) -> None:
    """Print the installed version and exit."""
    if is_asked:
        typer.echo(version("scorepool"))
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous LLM scoring on Macs."""


@app.command(rich_help_panel=START, epilog=exit_statuses())
def demo() -> None:
    """Run a scoring job and a generate job through every process, show the results, stop everything."""
    run("demo", lambda: commands.demo())


@app.command(rich_help_panel=START, epilog=STARTED)
def serve(
    model: Model = None,
    adapter: Adapter = None,
    one_worker: Annotated[
        bool,
        typer.Option("--one-worker", help="Serve all models by one worker process, in which they share the memory."),
    ] = False,
    host: Host = None,
    port: Port = None,
    uds: Uds = None,
    redis_url: RedisUrlOrEmbedded = None,
    redis_url_file: RedisUrlFile = None,
    dtype: Dtype = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    draft: Draft = None,
    log_level: LogLevel = None,
) -> None:
    """Run everything on this machine until Ctrl-C: Redis, the API, one worker per model, the webhook worker."""
    environ = to_environ(
        host=host,
        port=port,
        uds=uds,
        redis_url=redis_url,
        redis_url_file=redis_url_file,
        dtype=dtype,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        drafts=join_drafts(draft),
        log_level=log_level,
        adapters=join_adapters(adapter),
    )
    run("serve", lambda: commands.serve(model, environ, one_worker=one_worker))


@app.command(rich_help_panel=START, epilog=exit_statuses(_0=None, _1=NOT_STARTED, _143="SIGTERM"))
def api(
    host: Host = None,
    port: Port = None,
    uds: Uds = None,
    redis_url: RedisUrl = None,
    redis_url_file: RedisUrlFile = None,
    log_level: LogLevel = None,
) -> None:
    """Run the API alone."""
    environ = to_environ(
        host=host, port=port, uds=uds, redis_url=redis_url, redis_url_file=redis_url_file, log_level=log_level
    )
    run("api", lambda: commands.api(environ))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, rich_help_panel=START, epilog=STARTED
)
def worker(
    rq_options: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,ALIAS...]=FOLDER_OR_HUB_ID",
            help="Several share this process and its memory. Default: $SCOREPOOL_MODEL or $SCOREPOOL_MODELS.",
        ),
    ] = None,
    adapter: Adapter = None,
    webhooks: Annotated[bool, typer.Option("--webhooks", help="Deliver webhooks instead of serving a model.")] = False,
    redis_url: RedisUrl = None,
    redis_url_file: RedisUrlFile = None,
    dtype: Dtype = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    draft: Draft = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Share the model among N processes that `mlx.launch` started.",
            show_default="$SCOREPOOL_RANKS, else 1",
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Run one worker: `rq worker` with scorepool's class. Other options, such as --burst, are passed to `rq worker`."""
    environ = to_environ(
        redis_url=redis_url,
        redis_url_file=redis_url_file,
        dtype=dtype,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        drafts=join_drafts(draft),
        ranks=ranks,
        log_level=log_level,
        adapters=join_adapters(adapter),
    )
    if webhooks:
        run("worker --webhooks", lambda: commands.webhook_worker(environ, rq_options.args))
    else:
        run("worker", lambda: commands.worker(model, environ, rq_options.args))


@app.command(rich_help_panel=START, epilog=STARTED)
def redis() -> None:
    """Run the embedded Redis alone until Ctrl-C, and print its URL."""
    run("redis", lambda: commands.redis())


@app.command(
    rich_help_panel=CHECK,
    epilog=exit_statuses(_0="equal, or within the tolerance", _1="different", _2="cannot tell, or wrong options"),
)
def verify(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs that have results.")],
    url: Annotated[str, typer.Option(envvar="SCOREPOOL_URL", help="The API that holds the results.")] = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME=FOLDER_OR_HUB_ID",
            help="Compute on this machine, with this model; repeatable. Default: the API's workers.",
        ),
    ] = None,
    request: Annotated[
        Path | None, typer.Option(help="The request of the only JOB, in JSON, if its prompt was token ids.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for computing one job again.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Compute the results of jobs again and compare them."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):  # as HTTP headers are
        fail(
            "the API key has characters that no key has: expected what `scorepool key` prints", verification.CANNOT_TELL
        )
    report = verification.print_json if as_json else verification.print_line
    try:
        if model:
            run(
                "verify --model",
                lambda: commands.verify(jobs, url, api_key, model, request, timeout_s, report),
                verification.CANNOT_TELL,
            )
        raise typer.Exit(verification.run_on_server(jobs, url, api_key, request, timeout_s, report))
    except verification.CannotTell as error:
        fail(f"cannot tell: {error}", verification.CANNOT_TELL)


@app.command(rich_help_panel=CHECK, epilog=exit_statuses(_0="verified", _1="not, and stderr says why"))
def certify(
    model: Annotated[str, typer.Argument(metavar="FOLDER_OR_HUB_ID", help="The model.")],
    dtype: Dtype = None,
    mode: Mode = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens to compare, at least.")] = 2048,
    by: Annotated[str | None, typer.Option(help="Who certifies. Default: user@host.")] = None,
    out: Annotated[Path | None, typer.Option(help="Default: a file in SCOREPOOL_CERTIFICATE_DIR.")] = None,
) -> None:
    """Compare a model's numbers with transformers' and write a certificate."""
    environ = to_environ(dtype=dtype, mode=mode)
    run("certify", lambda: commands.certify(model, tokens, by, out, environ))


@app.command(rich_help_panel=CHECK, epilog=exit_statuses(_0="it can be served", _1="not, and stderr says why"))
def check_model(
    model: Annotated[str, typer.Argument(metavar="FOLDER_OR_HUB_ID", help="The model.")],
    dtype: Dtype = None,
    mode: Mode = None,
    as_json: Json = False,
) -> None:
    """Load and self-test a model without serving it; say its mode, memory and speed."""
    environ = to_environ(dtype=dtype, mode=mode)
    run("check-model", lambda: commands.check_model(model, environ, as_json=as_json))


@app.command(
    rich_help_panel=CHECK, epilog=exit_statuses(_0="every check passed", _1="one failed, and its line says what to do")
)
def doctor(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,ALIAS...]=FOLDER_OR_HUB_ID",
            help="Look whether it fits; several: into one worker. Default: $SCOREPOOL_MODEL or $SCOREPOOL_MODELS.",
        ),
    ] = None,
    adapter: Adapter = None,
    dtype: Dtype = None,
    host: Host = None,
    port: Port = None,
    redis_url: RedisUrlOrEmbedded = None,
    redis_url_file: RedisUrlFile = None,
    as_json: Json = False,
) -> None:
    """Check this machine: settings, disk, Redis, BLAS, Metal, memory, models, port, clock; say what to do."""
    environ = to_environ(
        host=host,
        port=port,
        redis_url=redis_url,
        redis_url_file=redis_url_file,
        dtype=dtype,
        adapters=join_adapters(adapter),
    )
    run("doctor", lambda: commands.doctor(model, environ, as_json=as_json))


@app.command(rich_help_panel=START, epilog=exit_statuses(_1="no key can have this name"))
def key(name: Annotated[str, typer.Argument(help="Name of the key's owner: letters, digits, `.`, `_`, `-`.")]) -> None:
    """Make an API key. Print it with its entry for SCOREPOOL_API_KEYS, which holds only the key's hash."""
    if not re.fullmatch(KEY_NAME, name):
        fail(f"NAME is {name!r}: expected 1 to 64 letters, digits, `.`, `_` or `-`, beginning with a letter or digit")
    if name == LOCAL_OWNER:
        fail(f"NAME is {name!r}, which belongs to servers without keys: expected another")
    secret = "sp_" + secrets.token_urlsafe(32)
    print(f"key:   {secret}")  # noqa: T201
    print(f"entry: {name}:{hashlib.sha256(secret.encode()).hexdigest()}")  # noqa: T201


@app.command(rich_help_panel=START, epilog=exit_statuses())
def webhook_secret(
    name: Annotated[str, typer.Argument(help="Name of the key's owner.")], redis_url: RedisUrl = None
) -> None:
    """Print the secret that signs the webhooks of a name's jobs. It follows from SCOREPOOL_WEBHOOK_SECRET and Redis."""
    environ = to_environ(redis_url=redis_url)
    run("webhook-secret", lambda: commands.webhook_secret(name, environ))


def join_drafts(drafts: list[str] | None) -> str | None:
    """Return the value of SCOREPOOL_DRAFTS; None without drafts."""
    return ";".join(drafts) if drafts else None


def to_environ(**options: str | int | None) -> dict[str, str]:
    """Translate command-line options to the environment variables that they set."""
    return {f"SCOREPOOL_{name.upper()}": str(value) for name, value in options.items() if value is not None}


def join_adapters(adapters: list[str] | None) -> str | None:
    """Return the setting SCOREPOOL_ADAPTERS; None if there is no option."""
    if bad := next((each for each in adapters or () if ";" in each), None):
        fail(f"--adapter {bad}: expected NAME[@MODEL]=FOLDER without semicolons; repeat the option for several", 2)
    return ";".join(adapters) if adapters else None


app.add_typer(on_files.app)
app.add_typer(evaluations.app)
app.add_typer(plotting.app)
app.add_typer(remote.app)
