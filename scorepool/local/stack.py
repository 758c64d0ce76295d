"""Run scorepool on one machine: Redis, the API, a worker per model and the webhook worker."""

import logging
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
from typing import NoReturn, Self
from urllib.parse import quote

import httpx

from scorepool import store
from scorepool.local.child_output import ChildOutput
from scorepool.local.child_reaper import ChildReaper
from scorepool.local.redis_server import RedisServer, RedisServerError
from scorepool.sdk import split_unix

log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 90.0  # longer than a worker's drain
READY_TIMEOUT_S = 1800.0  # a model may have to be downloaded first
RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0  # of a process that ends within STEADY_S again and again, e.g. because its model is damaged
STEADY_S = 10.0
CONNECTION_CLASS = ("--connection-class", "scorepool.worker.Redis")  # supports Sentinel
# For a stack that serves its own process alone, whatever the environment says. None unsets a variable.
PRIVATE: Mapping[str, str | None] = {
    "SCOREPOOL_HOST": "127.0.0.1",
    "SCOREPOOL_API_KEYS": None,
    "SCOREPOOL_API_KEYS_FILE": None,
    "SCOREPOOL_API_KEY": None,
    "SCOREPOOL_UDS": None,
}
IMPORT_PATH = str(Path(__file__).parents[2])  # the folder that holds the package `scorepool`


def embedded_redis(state: Path, settings: store.Settings) -> RedisServer:
    """Return the server whose data lies in the state folder."""
    return RedisServer(
        state / "redis", appendfsync=settings.redis_appendfsync, maxmemory_bytes=settings.redis_maxmemory
    )


class StackError(RuntimeError):
    """A process that did not start. The message names it and shows the end of its log."""


def worker_command(*models: Sequence[str]) -> list[str]:
    """Return the `rq worker` command that serves models in one process. Each is given by its names."""
    return [
        rq(),
        "worker",
        "-w",
        "scorepool.worker.BatchWorker",
        *CONNECTION_CLASS,
        "--with-scheduler",
        *(queue for names in models for queue in store.queue_names(*names)),
    ]


def follower_command(name: str, source: str) -> list[str]:
    """Return the command of a rank of the worker that is not its first."""
    return [sys.executable, "-m", "scorepool.worker.follow", name, source]


def model_environ(specs: Sequence[str]) -> dict[str, str]:
    """Return the settings of a worker that name its models."""
    if len(specs) == 1:
        return {"SCOREPOOL_MODEL": specs[0], "SCOREPOOL_MODELS": ""}
    return {"SCOREPOOL_MODEL": "", "SCOREPOOL_MODELS": ";".join(specs)}


def webhook_command() -> list[str]:
    """Return the `rq worker` command that delivers webhooks."""
    return [
        rq(),
        "worker",
        "-w",
        "scorepool.worker.WebhookWorker",
        *CONNECTION_CLASS,
        "--with-scheduler",
        store.WEBHOOKS,
    ]


def add_import_path(command: list[str]) -> list[str]:
    """Make an `rq worker` command import from IMPORT_PATH instead of the current folder, RQ's default."""
    return [*command[:2], "--path", IMPORT_PATH, *command[2:]]


def api_command() -> list[str]:
    """Return the command that runs the API."""
    return [sys.executable, "-P", "-m", "scorepool.api"]  # -P: do not import from the current folder


def certify_command() -> list[str]:
    """Return the command that compares a model with transformers."""
    return [sys.executable, "-P", "-m", "scorepool.worker.certify"]


def check_model_command() -> list[str]:
    """Return the command that checks that a model can be served."""
    return [sys.executable, "-P", "-m", "scorepool.worker.check_model"]


def webhook_secret_command() -> list[str]:
    """Return the command that prints the secret of a name's webhooks."""
    return [sys.executable, "-P", "-m", "scorepool.worker.webhooks.show_secret"]


def rq() -> str:
    """Return the path of the `rq` command in this Python's environment."""
    return str(Path(sys.executable).with_name("rq"))


def api_url(settings: store.Settings) -> str:
    """Return the URL at which `scorepool.Client` reaches the API from this machine."""
    if settings.uds:
        return f"unix://{quote(str(Path(settings.uds).absolute()))}"
    return f"http://{url_host(settings.host)}:{settings.port}"


def url_host(host: str) -> str:
    """Return the host part of a URL that reaches a server bound to `host` from this machine."""
    if host in ("0.0.0.0", "::"):  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def check_port_is_free(host: str, port: int) -> None:
    """Check that the API can listen on the port; raise StackError. Another server there would be taken for the API."""
    if port == 0:
        raise StackError("SCOREPOOL_PORT=0: expected a port from 1 to 65535, because clients need to know it")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StackError(f"cannot listen on {host} port {port}: {error.strerror}. Choose another with --port") from None


class Stack:
    """A context in which every process runs. `url` answers once the context is entered.

    `models` have the form of SCOREPOOL_MODEL: `NAME=FOLDER_OR_HUB_ID`. `environ` holds settings for every process;
    None unsets one.
    Each model has a worker process of its own, or with `one_worker` all have one together.
    A model that cannot be loaded at the start is left out if there are others, except of one worker. `watch` and
    `restart_dead` restart a process that died, as launchd or systemd would. The folder `state` of a temporary stack is
    deleted at the end, also if this process is killed.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        state: Path,
        environ: Mapping[str, str | None],
        redis_url: str | None = None,
        logs: Path | None = None,
        is_temporary: bool = False,
        one_worker: bool = False,
    ) -> None:
        self._one_worker = one_worker
        self.models = {store.parse_model(spec)[0][0]: spec for spec in models}  # by name
        urls = ("REDIS_URL", "REDIS_URL_FILE", "REDIS_URLS", "REDIS_URLS_FILE")
        merged = {**os.environ, **environ, **{f"SCOREPOOL_{name}": None for name in urls}}  # see _start
        self._environ = {name: value for name, value in merged.items() if value is not None}
        self.settings = store.Settings.load(self._environ)
        self.url = api_url(self.settings)
        self.redis = None if redis_url else embedded_redis(state, self.settings)
        self.redis_url = redis_url or (self.redis.url if self.redis else "")
        self._logs = logs
        self._temporary_folder = state.absolute() if is_temporary else None
        self._open = ExitStack()
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, ChildOutput] = {}  # without a log folder
        self._started_at: dict[str, float] = {}  # time.monotonic()
        self._restart_delay_s: dict[str, float] = {}  # before the next restart, of processes that ended early

    def __enter__(self) -> Self:
        if not self.settings.uds:
            check_port_is_free(self.settings.host, self.settings.port)
        self._child_reaper = ChildReaper()
        self._open.callback(self._child_reaper.close)
        if self._temporary_folder is not None:
            self._child_reaper.delete_folder(self._temporary_folder)
        try:
            if self.redis is not None:
                self._open.enter_context(self.redis)
                self._watch_redis()
            self._open.callback(self._stop)
            self._start("api", api_command(), {})
            if self.settings.webhook_secret:  # without one the API accepts no job that has a webhook
                self._start("webhooks", add_import_path(webhook_command()), {})
            for name, specs in self._workers().items():
                command = worker_command(*(store.parse_model(spec)[0] for spec in specs))
                self._start(f"worker {name}", add_import_path(command), model_environ(specs))
            self._wait_until_ready()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def watch(self) -> NoReturn:
        """Restart processes that die, until KeyboardInterrupt."""
        while True:
            time.sleep(RESTART_DELAY_S)
            self.restart_dead()

    def restart_dead(self) -> None:
        """Restart every process that has died."""
        if self.redis is not None and self.redis.process is not None and self.redis.process.poll() is not None:
            log.warning("redis ended; restarting it")
            self._child_reaper.unwatch(self.redis.process.pid)
            try:
                self.redis.start()
            except RedisServerError:  # for example a full disk: try again at the next call
                log.warning("redis does not start; see the end of %s", self.redis.log)
            self._watch_redis()
        for name, process in list(self._processes.items()):
            if process.poll() is None or not self._is_due(name):
                continue
            log.warning("%s ended with %d; restarting it", name, process.returncode)
            self._child_reaper.unwatch(process.pid)
            self._start(name, *self._commands[name])

    def pid(self, name: str) -> int:
        """Return the process id of `api`, `webhooks`, `worker NAME`, or `worker NAME,NAME` of one worker of all."""
        return self._processes[name].pid

    def _workers(self) -> dict[str, list[str]]:
        """Return the models of each worker process, by its name."""
        if self._one_worker:
            return {",".join(self.models): list(self.models.values())}
        return {name: [spec] for name, spec in self.models.items()}

    def _is_due(self, name: str) -> bool:
        """True if a process that ended may start again. Each early end doubles the delay."""
        age_s = time.monotonic() - self._started_at[name]
        delay_s = self._restart_delay_s.get(name, 0.0)
        if age_s < delay_s:
            return False
        is_early = age_s < max(STEADY_S, 2 * delay_s)
        self._restart_delay_s[name] = min(max(2 * delay_s, RESTART_DELAY_S), MAX_RESTART_DELAY_S) if is_early else 0.0
        return True

    def _start(self, name: str, command: list[str], extra_environ: dict[str, str]) -> None:
        self._commands[name] = (command, extra_environ)
        environ = {
            **self._environ,
            "SCOREPOOL_REDIS_URL": self.redis_url,
            "RQ_REDIS_URL": self.redis_url,
            **extra_environ,
        }
        # Each process has its own session, so that Ctrl-C reaches only this one, which stops them in order. Logs are
        # appended to. Without a log folder they are copied to stderr; stdout is reserved for this process's messages.
        with ExitStack() as files:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(self._log_path(name).open("ab")) if self._logs else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if process.stdout is not None:
            self._outputs[name] = ChildOutput(process.stdout)
        self._processes[name] = process
        self._started_at[name] = time.monotonic()
        self._child_reaper.watch(process.pid)

    def _stop(self) -> None:
        """Stop the workers first, so that they can still write results, and the API last.

        Ctrl-C, or a second SIGTERM, asks them again: a worker then puts its jobs back at once.
        """
        log.info(
            "stopping: a worker may finish its jobs for %g s; Ctrl-C ends it sooner", self.settings.drain_timeout_s
        )
        self._terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            while process.poll() is None:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                except KeyboardInterrupt:
                    log.info("asked to stop again: workers put their jobs back")
                    self._terminate()
            self._child_reaper.unwatch(process.pid)

    def _terminate(self) -> None:
        for name in sorted(self._processes, key="api".__eq__):
            if self._processes[name].poll() is None:
                self._processes[name].send_signal(signal.SIGTERM)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        missing = set(self.models)
        while missing:
            for name, process in list(self._processes.items()):
                if process.poll() is None:
                    continue
                ended = f"{name} ended with {process.returncode} before it was ready{self._log_tail(name)}"
                model = name.removeprefix("worker ")
                if model == name or len(self.models) == 1 or self._one_worker:
                    raise StackError(ended)
                log.warning("%s; serving the other models without it", ended)
                self._child_reaper.unwatch(process.pid)
                missing.discard(model)
                del self.models[model], self._processes[name]
            if time.monotonic() > deadline:
                raise StackError(
                    f"not ready after {READY_TIMEOUT_S:.0f} s: no worker serves {', '.join(sorted(missing))}"
                )
            time.sleep(0.1)
            missing = set(self.models) - self._served()

    def _served(self) -> set[str]:
        base_url, path = split_unix(self.url)
        if path and not Path(path).exists():  # httpcore would not close its socket
            return set()
        transport = httpx.HTTPTransport(uds=path) if path else None
        try:
            with httpx.Client(base_url=base_url, transport=transport, timeout=5.0, trust_env=False) as http:
                reply = http.get("/readyz")
        except httpx.HTTPError:
            return set()
        return set(reply.json()["models"]) if reply.status_code == httpx.codes.OK else set()

    def _watch_redis(self) -> None:
        if self.redis is not None and self.redis.process is not None:
            self._child_reaper.watch(self.redis.process.pid)

    def _log_path(self, name: str) -> Path:
        assert self._logs is not None
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs / f"{name.replace(' ', '-').replace('/', '-')}.log"

    def _log_tail(self, name: str) -> str:
        if self._logs is None:
            return f": {self._outputs[name].last_line()}"
        return ":\n" + "\n".join(self._log_path(name).read_text(errors="replace").splitlines()[-15:])
