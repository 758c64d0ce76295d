"""`scorepool`: one command a process, each a thin front. No part of the product lives here."""

import hashlib
import os
import secrets
import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from scorepool import store
from scorepool.client import JobFailed, ScorepoolError
from scorepool.local import demo as demonstration
from scorepool.local.redis_server import RedisServer, RedisServerError
from scorepool.local.stack import Stack, StackError, api_command, from_any_folder, webhook_command, worker_command
from scorepool.local.state_dir import state_dir

DEMO_MODEL = Path(__file__).parent / "models" / "demo"

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


@app.command()
def demo() -> None:
    """Show a scoring job and a generate job going through every real part, then stop everything."""
    settings = load({})
    on_sigterm_exit()
    try:
        demonstration.run(str(DEMO_MODEL), state_of(settings), Console())
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
    """Run everything on this machine until Ctrl-C: Redis, the API, one worker a model, the webhook worker."""
    environ = options(host=host, port=port, dtype=dtype, log_level=log_level)
    settings = load(environ)
    specs = model or [f"demo={DEMO_MODEL}"]
    names = [name for spec in specs for name in parse_model(spec)[0]]
    if len(set(names)) < len(names):
        fail("--model: the same NAME is given twice")
    url = redis_url or os.environ.get("SCOREPOOL_REDIS_URL") or os.environ.get("REDIS_URL")
    on_sigterm_exit()
    try:
        with Stack(specs, state=state_of(settings), environ=environ, redis_url=url) as stack:
            print(f"ready {stack.url}", flush=True)  # noqa: T201
            print(example(stack.url, names[0]), flush=True)  # noqa: T201
            stack.watch()
    except (StackError, RedisServerError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
def api(host: Host = None, port: Port = None, redis_url: RedisUrl = None, log_level: LogLevel = None) -> None:
    """Run the API alone."""
    replace_process(api_command(), options(host=host, port=port, redis_url=redis_url, log_level=log_level))


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
    """Run one worker: `rq worker` with our class. Further options, --burst for one, go to `rq worker` as they are."""
    environ = options(model=model, redis_url=redis_url, dtype=dtype, log_level=log_level)
    settings = load(environ)
    environ["RQ_REDIS_URL"] = settings.redis_url
    if webhooks:
        command = webhook_command()
    elif settings.model:
        command = worker_command(parse_model(settings.model)[0])
    else:
        fail("say which model to serve: --model NAME=FOLDER_OR_HUB_ID, or SCOREPOOL_MODEL; or --webhooks")
    command = from_any_folder(command)
    replace_process([*command[:2], "--logging_level", settings.log_level, *rq_options.args, *command[2:]], environ)


@app.command()
def redis() -> None:
    """Run the embedded Redis alone until Ctrl-C, and print its URL."""
    settings = load({})
    on_sigterm_exit()
    try:
        with RedisServer(state_of(settings) / "redis", appendfsync=settings.redis_appendfsync) as server:
            print(server.url, flush=True)  # noqa: T201
            assert server.process is not None
            raise typer.Exit(server.process.wait())
    except RedisServerError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
def key(name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, `-` and `_`.")]) -> None:
    """Make an API key, and print it with the entry for SCOREPOOL_API_KEYS, which holds only its hash."""
    secret = "sp_" + secrets.token_urlsafe(32)
    print(f"key:   {secret}")  # noqa: T201
    print(f"entry: {name}:{hashlib.sha256(secret.encode()).hexdigest()}")  # noqa: T201


def options(**given: str | int | None) -> dict[str, str]:
    """Command-line options as the settings that they set."""
    return {f"SCOREPOOL_{name.upper()}": str(value) for name, value in given.items() if value is not None}


def load(environ: dict[str, str]) -> store.Settings:
    try:
        return store.Settings.load({**os.environ, **environ})
    except store.SettingsError as error:
        fail(str(error))


def state_of(settings: store.Settings) -> Path:
    try:
        return state_dir(settings.state_dir)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        fail(f"no folder for what must be kept: {error}. Set SCOREPOOL_STATE_DIR to one that you may write")


def parse_model(spec: str) -> tuple[list[str], str]:
    try:
        return store.parse_model(spec)
    except store.SettingsError as error:
        fail(str(error))


def example(url: str, model: str) -> str:
    body = f'{{"type":"score","model":"{model}","items":[{{"prompt":"import","completion":" os"}}],"top_logprobs":2}}'
    return f"curl -s {url}/v1/jobs -H 'Content-Type: application/json' -H 'Prefer: wait=30' -d '{body}'"


def replace_process(command: list[str], environ: dict[str, str]) -> NoReturn:
    load(environ)
    os.execve(command[0], command, {**os.environ, **environ})  # noqa: S606


def on_sigterm_exit() -> None:
    """SIGTERM ends us as Ctrl-C does: through the contexts that stop our children."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"scorepool: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)
