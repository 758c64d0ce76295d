"""Implement the subcommands of `scorepool` that start processes. Each returns an exit status or raises CommandError."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, ParamSpec, TypeVar

from scorepool import store
from scorepool import verify as verification
from scorepool.commands.running import INTERRUPTED, CommandError
from scorepool.local import demo as demonstration
from scorepool.local import doctor as machine
from scorepool.local.local_models import LocalModels
from scorepool.local.redis_check import check_redis_url
from scorepool.local.redis_server import RedisServerError
from scorepool.local.stack import (
    Stack,
    StackError,
    add_import_path,
    api_command,
    certify_command,
    check_model_command,
    embedded_redis,
    follower_command,
    model_environ,
    webhook_command,
    webhook_secret_command,
    worker_command,
)
from scorepool.sdk import JobFailed, ScorepoolError, split_unix
from scorepool.sdk.connection import DEFAULT_URL

P = ParamSpec("P")
T = TypeVar("T")
DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo"


def ends_in_log(process: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make the sentence that ends a process that logs JSON a line of JSON too."""

    def decorate(command: Callable[P, T]) -> Callable[P, T]:
        @wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return command(*args, **kwargs)
            except CommandError as error:
                if store.logs.wants_json():
                    store.logs.end_process(str(error), process)
                raise

        return run

    return decorate


def demo() -> int:
    """Run the demo."""
    settings = load_settings({})
    interrupt_on_sigterm()
    try:
        demonstration.run(str(DEMO_MODEL), make_state_dir(settings))
    except (StackError, RedisServerError, JobFailed, ScorepoolError, TimeoutError) as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


@ends_in_log("serve")
def serve(models: list[str] | None, environ: dict[str, str], *, one_worker: bool = False) -> int:
    """Run every process until Ctrl-C."""
    settings = load_server_settings(environ)
    if not load_servers(settings).is_one:
        raise CommandError(
            "`serve` runs all processes on one Redis, and SCOREPOOL_REDIS_URLS names several: start `scorepool api` "
            "and `scorepool worker` instead, or unset it"
        )
    specs = models or [f"demo={DEMO_MODEL}"]
    names = [name for spec in specs for name in parse_model(spec)[0]]
    if len(set(names)) < len(names):
        raise CommandError("--model: the same NAME is given twice")
    check_drafts(settings, [parse_model(spec)[0][0] for spec in specs])
    check_adapters(settings, names, len(specs))
    given = merge(environ)
    url = settings.redis_url if given.keys() & {"SCOREPOOL_REDIS_URL", "SCOREPOOL_REDIS_URL_FILE"} else ""
    if url:
        check_url(url)
    elif url := os.environ.get("REDIS_URL", ""):
        check_url(url, "REDIS_URL")
    warn_of_password(environ)
    interrupt_on_sigterm()
    store.logs.configure("serve", settings.log_format, settings.log_level)
    try:
        with Stack(
            specs, state=make_state_dir(settings), environ=environ, redis_url=url, one_worker=one_worker
        ) as stack:
            print(f"ready {stack.url}", flush=True)  # noqa: T201
            has_keys = bool(settings.api_keys or settings.api_keys_file)
            print(example_command(stack.url, next(iter(stack.models)), has_keys=has_keys), flush=True)  # noqa: T201
            print(file_command(stack.url), flush=True)  # noqa: T201
            stack.watch()
    except (StackError, RedisServerError) as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        return 0


def check_drafts(settings: store.Settings, names: Sequence[str]) -> None:
    """Refuse drafts of models that have none of these first names. Raises CommandError."""
    try:
        drafts = store.parse_drafts(settings.drafts)
    except store.SettingsError as error:
        raise CommandError(f"--draft: {error}") from None
    if unknown := drafts.keys() - set(names):
        expected = f"expected the first name of a model that is served: {', '.join(names)}"
        raise CommandError(f"--draft names {min(unknown)!r}; {expected}")


def check_adapters(settings: store.Settings, names: Sequence[str], num_models: int) -> None:
    """Check that each adapter belongs to one of the models, and that its name is free. Raises CommandError."""
    try:
        specs = store.parse_adapters(settings.adapters)
    except store.SettingsError as error:
        raise CommandError(str(error)) from None
    for spec in specs:
        if spec.model is None and num_models > 1:
            raise CommandError(
                f"--adapter {spec.name}={spec.folder}: several models are served, so say which as {spec.name}@MODEL=..."
            )
        if spec.model is not None and spec.model not in names:
            raise CommandError(f"--adapter {spec.name}@{spec.model}: expected one of the models {', '.join(names)}")
        if spec.name in names:
            raise CommandError(f"--adapter {spec.name}: the name is taken by a model; choose another")


@ends_in_log("api")
def api(environ: dict[str, str]) -> NoReturn:
    """Replace this process with the API."""
    for server in load_servers(load_server_settings(environ)).servers:
        check_url(server.url, server.setting, must_answer=False)
    warn_of_password(environ)
    replace_process(api_command(), environ)


@ends_in_log("worker")
def worker(models: list[str] | None, environ: dict[str, str], rq_options: Sequence[str]) -> NoReturn:
    """Replace this process with the worker of one model or several."""
    if models:
        environ = environ | model_environ(models)
    settings = load_settings(environ)
    specs = settings.model_specs
    if not specs:
        raise CommandError(
            "name the model to serve: --model NAME=FOLDER_OR_HUB_ID or SCOREPOOL_MODEL; or use --webhooks"
        )
    try:
        parsed = store.parse_models(specs, "--model" if models else "SCOREPOOL_MODELS")
    except store.SettingsError as error:
        raise CommandError(str(error)) from None
    if "SCOREPOOL_DRAFTS" in environ:  # the environment's may name the models of other workers
        check_drafts(settings, [names[0] for names, _ in parsed])
    if settings.ranks > 1:
        check_ranks(settings.ranks, len(specs))
        if os.environ["MLX_RANK"] != "0":
            [(names, source)] = parsed
            replace_process(follower_command(names[0], source), environ)
    try:
        server = load_servers(settings).of_worker(name for names, _ in parsed for name in names)
    except store.SettingsError as error:
        raise CommandError(str(error)) from None
    run_rq(worker_command(*(names for names, _ in parsed)), settings, environ, rq_options, server)


def check_ranks(num_ranks: int, num_models: int) -> None:
    """Check that this process is one of several that share one model. Raises CommandError."""
    if num_models > 1:
        raise CommandError(f"--ranks {num_ranks}: {num_models} models are served, expected one")
    if not os.environ.get("MLX_RANK", "").isdecimal():
        raise CommandError(
            f"--ranks {num_ranks}: this process has no rank; start one on each machine with "
            "`mlx.launch --hosts FIRST,SECOND -- scorepool worker ...`"
        )


@ends_in_log("webhooks")
def webhook_worker(environ: dict[str, str], rq_options: Sequence[str]) -> NoReturn:
    """Replace this process with a webhook worker."""
    settings = load_settings(environ)
    run_rq(webhook_command(), settings, environ, rq_options, load_servers(settings).servers[0])


def run_rq(
    command: list[str],
    settings: store.Settings,
    environ: dict[str, str],
    rq_options: Sequence[str],
    server: store.MappedServer,
) -> NoReturn:
    """Replace this process with `rq worker` on a server, and these options."""
    check_url(server.url, server.setting)
    warn_of_password(environ)
    command = add_import_path(command)
    command = [*command[:2], "--logging_level", settings.log_level, *rq_options, *command[2:]]
    replace_process(command, {**environ, "RQ_REDIS_URL": server.url})


def redis() -> int:
    """Run the embedded Redis until it ends."""
    settings = load_settings({})
    interrupt_on_sigterm()
    try:
        with embedded_redis(make_state_dir(settings), settings) as server:
            print(server.url, flush=True)  # noqa: T201
            assert server.process is not None
            return server.process.wait()
    except RedisServerError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        return 0


def webhook_secret(owner: str, environ: dict[str, str]) -> NoReturn:
    """Replace this process with the one that prints the secret of an owner's webhooks."""
    settings = load_settings(environ)
    if not re.fullmatch(store.KEY_NAME, owner):
        raise CommandError(f"NAME is {owner!r}: expected the name of an API key")
    check_url(settings.redis_url)
    warn_of_password(environ)
    replace_process([*webhook_secret_command(), owner], environ)


def verify(
    job_ids: Sequence[str],
    url: str,
    api_key: str | None,
    models: Sequence[str],
    request_path: Path | None,
    timeout_s: float,
    report: verification.Report,
) -> int:
    """Compute the results of jobs of the API at `url` again on this machine. Raises CannotTell."""
    sources = {name: source for spec in models for names, source in [parse_model(spec)] for name in names}
    interrupt_on_sigterm()
    try:
        with (
            verification.connect(url, api_key) as client,
            TemporaryDirectory(dir=make_state_dir(load_settings({})), prefix="verify-") as state,
            LocalModels(sources, Path(state), timeout_s) as local,
        ):
            return verification.run(job_ids, client, local.recompute_of, request_path, report)
    except KeyboardInterrupt:
        return INTERRUPTED


def certify(model: str, num_tokens: int, by: str | None, out: Path | None, environ: dict[str, str]) -> NoReturn:
    """Replace this process with the comparison of a model with transformers."""
    load_settings(environ)
    options = [*(["--by", by] if by else []), *(["--out", str(out)] if out else [])]
    replace_process([*certify_command(), "--tokens", str(num_tokens), *options, "--", model], environ)


def check_model(model: str, environ: dict[str, str], *, as_json: bool) -> NoReturn:
    """Replace this process with the check of a model. `demo` is the one that `serve` serves by default."""
    load_settings(environ)
    if model == "demo" and not Path(model).exists():
        model = str(DEMO_MODEL)
    replace_process([*check_model_command(), *(["--json"] if as_json else []), "--", model], environ)


def doctor(models: list[str] | None, environ: dict[str, str], *, as_json: bool) -> int:
    """Check this machine, also for these models."""
    if models:
        environ = environ | model_environ(models)
    return machine.doctor(merge(environ), as_json=as_json)


def load_settings(environ: dict[str, str]) -> store.Settings:
    """Read the settings from the environment and `environ`. Raises CommandError."""
    try:
        return store.Settings.load(merge(environ))
    except store.SettingsError as error:
        raise CommandError(str(error)) from None


def load_servers(settings: store.Settings) -> store.ServerMap:
    """Read which servers there are. Raises CommandError."""
    try:
        return store.ServerMap.load(settings)
    except store.SettingsError as error:
        raise CommandError(str(error)) from None


def load_server_settings(environ: dict[str, str]) -> store.Settings:
    """Read the settings of a process that serves an API. Raises CommandError."""
    settings = load_settings(environ)
    try:
        settings.check_keys()
    except store.SettingsError as error:
        raise CommandError(str(error)) from None
    return settings


def parse_model(spec: str) -> tuple[list[str], str]:
    """Parse NAME[,ALIAS...]=SOURCE. Raises CommandError."""
    try:
        return store.parse_model(spec)
    except store.SettingsError as error:
        raise CommandError(str(error)) from None


def check_url(url: str, setting: str = "SCOREPOOL_REDIS_URL", *, must_answer: bool = True) -> None:
    """Check that the URL is well formed, its password right, and its Redis up. Raises CommandError."""
    try:
        check_redis_url(url, setting, must_answer=must_answer)
    except store.SettingsError as error:
        raise CommandError(str(error)) from None


def make_state_dir(settings: store.Settings) -> Path:
    """Create the state folder, readable only by its owner. Raises CommandError."""
    try:
        folder = settings.state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder
    except (OSError, store.SettingsError) as error:
        raise CommandError(
            f"cannot create the state folder: {error}. Set SCOREPOOL_STATE_DIR to a folder that you may write"
        ) from None


def example_command(url: str, model: str, *, has_keys: bool = False) -> str:
    """Return a curl command that scores one completion, with the key of SCOREPOOL_API_KEY where one is needed."""
    body = f'{{"type":"score","model":"{model}","items":[{{"prompt":"import","completion":" os"}}],"top_logprobs":2}}'
    base_url, path = split_unix(url)
    socket = f"--unix-socket {shlex.quote(path)} " if path else ""
    key = ' -H "Authorization: Bearer $SCOREPOOL_API_KEY"' if has_keys else ""
    headers = f"-H 'Content-Type: application/json' -H 'Prefer: wait=30'{key}"
    return f"curl -s {socket}{base_url}/v1/jobs {headers} -d '{body}'"


def file_command(url: str) -> str:
    """Return the command that scores a file. Its URL is left out where it is the default."""
    option = "" if url == DEFAULT_URL else f" --url {shlex.quote(url)}"
    return f"{shlex.quote(sys.argv[0])} score FILE.jsonl -o OUT.jsonl{option}"


def replace_process(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Exec the command with these settings."""
    os.execve(command[0], command, merge(environ))  # noqa: S606


def merge(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment with these settings. An option that names Redis replaces both of its variables."""
    redis = {"SCOREPOOL_REDIS_URL", "SCOREPOOL_REDIS_URL_FILE"}
    replaced = redis if environ.keys() & redis else set()
    return {name: value for name, value in os.environ.items() if name not in replaced} | environ


def warn_of_password(environ: dict[str, str]) -> None:
    """Print a warning if a password was given by `--redis-url`. The URL has been checked."""
    if store.has_password(environ.get("SCOREPOOL_REDIS_URL", "")):
        print(  # noqa: T201
            "scorepool: warning: the password of Redis is in the command line, which all users of this machine can "
            "read: use --redis-url-file, SCOREPOOL_REDIS_URL_FILE or SCOREPOOL_REDIS_URL",
            file=sys.stderr,
        )


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that the contexts that stop child processes are left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
