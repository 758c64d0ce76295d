"""Run every process for one command, and stop them when it ends."""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from scorepool.commands.running import MISUSED, UNREACHABLE, CommandError
from scorepool.local.commands import load_settings, make_state_dir, parse_model
from scorepool.local.redis_server import RedisServerError
from scorepool.local.stack import PRIVATE, RESTART_DELAY_S, Stack, StackError

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+|^[._-]+")  # what a model's name cannot have


@contextmanager
def private_server(models: Sequence[str], name: str | None = None) -> Iterator[str]:
    """Serve models, each FOLDER_OR_HUB_ID or NAME=FOLDER_OR_HUB_ID, and yield the URL. Raises CommandError.

    `name` is the name of a single model without one; by default it follows from the end of its path. The server listens
    on a unix socket in a folder that only this user can open. The processes and the folder go when the context is left,
    and also when this process is killed. Processes that die are started again.
    """
    specs = [_spec(model, name if len(models) == 1 else None) for model in models]
    folder = Path(tempfile.mkdtemp(dir=make_state_dir(load_settings({})), prefix="local-"))
    environ = {
        **PRIVATE,
        "SCOREPOOL_STATE_DIR": str(folder),
        "SCOREPOOL_UDS": str(folder / "api.sock"),
        "SCOREPOOL_WEBHOOK_SECRET": "",
        "SCOREPOOL_REDIS_MIN_REPLICAS": "0",
    }
    print(f"loading {', '.join(specs)} ...", file=sys.stderr, flush=True)  # noqa: T201
    try:
        stack = Stack(specs, state=folder, environ=environ, logs=folder / "logs", is_temporary=True)
        with stack, _restarts(stack):
            yield stack.url
    except (StackError, RedisServerError) as error:
        first, *rest = str(error).splitlines()
        raise CommandError(" ".join([f"--local: {first}", *rest[-1:]]), UNREACHABLE) from None


@contextmanager
def _restarts(stack: Stack) -> Iterator[None]:
    """Restart processes of the stack that die."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(RESTART_DELAY_S):
            stack.restart_dead()

    thread = Thread(target=watch, name="restarts")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _spec(model: str, name: str | None) -> str:
    """Return NAME=FOLDER_OR_HUB_ID. Raises CommandError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise CommandError(f"--local {model}: the folder holds no model: expected config.json in it", MISUSED)
        return f"{name or _name(folder.resolve().name)}={folder.resolve()}"
    if "=" in model:
        names, source = parse_model(model)
        return f"{','.join(names)}={_spec(source, 'any').partition('=')[2]}"
    if model.count("/") > 1 or model.startswith(("/", ".", "~")) or not model.strip():
        raise CommandError(f"--local {model}: no such folder; expected a folder with a model, or a hub id", MISUSED)
    return f"{name or _name(model.rpartition('/')[2])}={model}"


def _name(text: str) -> str:
    return _NO_NAME.sub("", text.replace(" ", "-"))[:100] or "model"
