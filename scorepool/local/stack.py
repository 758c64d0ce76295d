"""The whole of scorepool on one machine: Redis, API, a worker per model, the webhook worker. Starts, watches, stops."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from scorepool import store
from scorepool.local.child_reaper import Tether
from scorepool.local.redis_server import RedisServer, RedisServerError

STOP_TIMEOUT_S = 90.0  # longer than a worker's drain
READY_TIMEOUT_S = 1800.0  # a model may have to be downloaded first
RESTART_DELAY_S = 1.0
CONNECTION = ("--connection-class", "scorepool.worker.Redis")  # which knows Sentinel
OURS = str(Path(__file__).parents[2])


class StackError(RuntimeError):
    """A part did not start; the message says which and shows the end of what it said."""


def worker_command(names: Sequence[str]) -> list[str]:
    """RQ's own command line for the worker of one model, by its names."""
    return [
        rq(),
        "worker",
        "-w",
        "scorepool.worker.BatchWorker",
        *CONNECTION,
        "--with-scheduler",
        *store.queue_names(*names),
    ]


def webhook_command() -> list[str]:
    return [rq(), "worker", "-w", "scorepool.worker.WebhookWorker", *CONNECTION, "--with-scheduler", store.WEBHOOKS]


def from_any_folder(command: list[str]) -> list[str]:
    """An `rq worker` command that does not look in the current folder for `worker`, as RQ does by default."""
    return [*command[:2], "--path", OURS, *command[2:]]


def api_command() -> list[str]:
    return [sys.executable, "-P", "-m", "scorepool.api"]  # -P: not a folder `api` of the user's own place


def rq() -> str:
    """The `rq` beside this Python. Not `python -m`: it would import a folder `worker` of the user's own place."""
    return str(Path(sys.executable).with_name("rq"))


def reachable(host: str) -> str:
    """The host part of a URL that reaches a server bound to `host` from this machine."""
    if host in ("0.0.0.0", "::"):  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def refuse_taken_port(host: str, port: int) -> None:
    """Raises StackError. Whatever answers there would be taken for our API: another `serve` says that it is ready."""
    if port == 0:
        raise StackError("SCOREPOOL_PORT=0: say which port, for jobs are submitted to it")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StackError(f"cannot listen on {host} port {port}: {error.strerror}. Say another with --port") from None


class Stack:
    """Runs while the context is open; `url` answers once it is entered.

    `models` are as SCOREPOOL_MODEL: `NAME=FOLDER_OR_HUB_ID`. `environ` holds settings that go to every process.
    A part that dies is started again by `watch` or `revive`, as launchd or systemd would.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        state: Path,
        environ: Mapping[str, str],
        redis_url: str | None = None,
        logs: Path | None = None,
    ) -> None:
        self.models = {store.parse_model(spec)[0][0]: spec for spec in models}  # by name
        self.settings = store.Settings.load({**os.environ, **environ})
        self.url = f"http://{reachable(self.settings.host)}:{self.settings.port}"
        self.redis = None if redis_url else RedisServer(state / "redis", appendfsync=self.settings.redis_appendfsync)
        self.redis_url = redis_url or (self.redis.url if self.redis else "")
        self._environ = {**os.environ, **environ}
        self._logs = logs
        self._open = ExitStack()
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        refuse_taken_port(self.settings.host, self.settings.port)
        self._tether = Tether()
        self._open.callback(self._tether.close)
        try:
            if self.redis is not None:
                self._open.enter_context(self.redis)
                self._watch_redis()
            self._open.callback(self._stop)
            self._start("api", api_command(), {})
            if self.settings.webhook_secret:  # without one the API accepts no job that has a webhook
                self._start("webhooks", from_any_folder(webhook_command()), {})
            for name, spec in self.models.items():
                command = from_any_folder(worker_command(store.parse_model(spec)[0]))
                self._start(f"worker {name}", command, {"SCOREPOOL_MODEL": spec})
            self._wait_until_ready()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def watch(self) -> None:
        """Keep every part running until KeyboardInterrupt."""
        while True:
            time.sleep(RESTART_DELAY_S)
            self.revive()

    def revive(self) -> None:
        """Start again whatever has died."""
        if self.redis is not None and self.redis.process is not None and self.redis.process.poll() is not None:
            self._say("redis ended and is started again")
            self._tether.reaped(self.redis.process.pid)
            try:
                self.redis.start()
            except RedisServerError:  # a full disk, perhaps: the others wait for it, and so do we
                self._say(f"redis does not start; the end of {self.redis.log} says why")
            self._watch_redis()
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._say(f"{name} ended with {process.returncode} and is started again")
                self._tether.reaped(process.pid)
                self._start(name, *self._commands[name])

    def pid(self, name: str) -> int:
        """Of one part: `api`, `webhooks` or `worker NAME`."""
        return self._processes[name].pid

    def _start(self, name: str, command: list[str], more: dict[str, str]) -> None:
        self._commands[name] = (command, more)
        environ = {
            **self._environ,
            "SCOREPOOL_REDIS_URL": self.redis_url,
            "RQ_REDIS_URL": self.redis_url,
            **more,
        }
        # A session of its own: Ctrl-C reaches us alone, and we stop the parts in order. Its log goes on where it ended
        # before; without a folder for logs it is our stderr, for stdout is for what we say ourselves.
        with ExitStack() as opened:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=opened.enter_context(self._log_path(name).open("ab")) if self._logs else sys.stderr,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[name] = process
        self._tether.watch(process.pid)

    def _stop(self) -> None:
        """Workers first, so that they can still write what they finish; the API last."""
        for name in sorted(self._processes, key="api".__eq__):
            process = self._processes[name]
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._tether.reaped(process.pid)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        missing = set(self.models)
        while missing:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise StackError(
                        f"{name} ended with {process.returncode} before it was ready{self._log_tail(name)}"
                    )
            if time.monotonic() > deadline:
                raise StackError(
                    f"not ready after {READY_TIMEOUT_S:.0f} s: no worker serves {', '.join(sorted(missing))}"
                )
            time.sleep(0.1)
            missing = set(self.models) - self._served()

    def _served(self) -> set[str]:
        try:
            reply = httpx.get(f"{self.url}/readyz", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return set()
        return set(reply.json()["models"]) if reply.status_code == httpx.codes.OK else set()

    def _watch_redis(self) -> None:
        if self.redis is not None and self.redis.process is not None:
            self._tether.watch(self.redis.process.pid)

    def _log_path(self, name: str) -> Path:
        assert self._logs is not None
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs / f"{name.replace(' ', '-').replace('/', '-')}.log"

    def _log_tail(self, name: str) -> str:
        if self._logs is None:
            return ""
        return ":\n" + "\n".join(self._log_path(name).read_text(errors="replace").splitlines()[-15:])

    def _say(self, what: str) -> None:
        print(f"scorepool: {what}", file=sys.stderr, flush=True)  # noqa: T201
