"""`scorepool doctor`: check what this machine needs to serve models. Each check is a line with `ok` or its remedy.

To add a check: a function that takes the settings and returns what it found or raises Trouble, and its name in CHECKS.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from msgspec import Struct
from redis import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.commands.running import FAILED
from scorepool.local.doctor_models import describe_fit, named_models
from scorepool.local.machine_memory import machine_memory_bytes
from scorepool.local.redis_check import check_redis_url
from scorepool.local.redis_server import RedisServerError
from scorepool.local.stack import IMPORT_PATH, StackError, api_url, check_port_is_free, embedded_redis

MIN_MEMORY_BYTES = 4 * 2**30
MIN_DISK_BYTES = 2**30
MAX_CLOCK_ERROR_S = 60.0  # a receiver of webhooks refuses a signature that is some minutes old
DEVICE_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 2.0
MIN_REDIS = 7


class Trouble(Exception):
    """A check that failed. The message says what to do."""


class Check(Struct, frozen=True):
    """The outcome of a check."""

    name: str
    ok: bool
    text: str


def doctor(environ: dict[str, str], *, as_json: bool) -> int:
    """Print every check; return FAILED if one failed."""
    checks = []
    for check in run_checks(environ):
        checks.append(check)
        if not as_json:
            print(f"{check.name:<9} {'ok    ' if check.ok else 'FAILED'}  {check.text}", flush=True)  # noqa: T201
    if as_json:
        print(wire.encode_json(checks).decode())  # noqa: T201
    return 0 if all(check.ok for check in checks) else FAILED


def run_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield the outcome of each check."""
    try:
        settings = store.Settings.load(environ)
        yield Check("settings", True, "every variable is known and its value allowed")
    except store.SettingsError as error:
        settings = store.Settings()
        yield Check("settings", False, f"{error}; what follows is of the default settings")
    for name, check in CHECKS.items():
        try:
            yield Check(name, True, check(settings, environ))
        except Trouble as error:
            yield Check(name, False, " ".join(str(error).split()))


def check_keys(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that a server would have the keys that its operator meant it to have."""
    try:
        settings.check_keys()
    except store.SettingsError as error:
        raise Trouble(f"{error}. This says nothing of a server that was started with other settings") from None
    if settings.api_keys or settings.api_keys_file:
        return "clients need an API key"
    return "none in this environment: an API started from it serves programs of this machine only"


def check_state(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that the state folder can be written and has room."""
    try:
        folder = settings.state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=folder, prefix="doctor-"):
            free_bytes = shutil.disk_usage(folder).free
    except (OSError, store.SettingsError) as error:
        raise Trouble(f"{error}: set SCOREPOOL_STATE_DIR to a folder that you may write") from None
    if free_bytes < MIN_DISK_BYTES:
        raise Trouble(f"{folder} has {_gib(free_bytes)} left: free some, or set SCOREPOOL_STATE_DIR to another disk")
    return f"{folder}, {_gib(free_bytes)} left"


def check_redis(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that the configured Redis accepts the user, or that the embedded one starts."""
    url, setting = _redis_url(settings, environ)
    try:
        if not url:
            with TemporaryDirectory(prefix="doctor-") as folder, embedded_redis(Path(folder), settings) as server:
                return f"the embedded one starts ({_redis_version(server.url)})"
        check_redis_url(url, setting, must_answer=True)
        for other in store.ServerMap.load(settings).servers[1:]:
            setting = other.setting
            check_redis_url(other.url, setting, must_answer=True)
        return "a Sentinel URL, of which only the form was checked" if _is_sentinel(url) else _redis_version(url)
    except store.SettingsError as error:
        is_home = "[" not in setting  # not an entry of SCOREPOOL_REDIS_URLS
        remedy = f"start it, or correct {setting}" + (", or unset it to use the embedded Redis" if is_home else "")
        raise Trouble(f"{str(error).rstrip('.')}: {remedy}") from None
    except RedisServerError as error:
        raise Trouble(f"the embedded one does not start: {error}; or set SCOREPOOL_REDIS_URL to another") from None
    except RedisError as error:
        raise Trouble(f"{setting}: Redis refuses INFO: {error}; give the user the rights of docs/deploy.md") from None


def check_blas(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that MLX computes, and with a fast BLAS where it uses the CPU."""
    blas, gpu = str(_device()["blas"]), _device()["gpu"]
    if gpu == "cuda":
        return "not used: MLX computes on the GPU"
    if blas == "reference blas":
        raise Trouble("MLX would use its slow one: install OpenBLAS, on Debian `apt install libopenblas0-pthread`")
    return blas


def check_gpu(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that a Mac's GPU is used, or one that MLX was installed for with an extra such as cuda12."""
    device = _device()
    if sys.platform == "darwin" and device["gpu"] is None:
        raise Trouble("MLX sees no GPU: use Apple silicon, macOS 14 or newer, and an arm64 Python (not Rosetta's)")
    backends = device["backends"]
    if len(backends) > 1:
        uninstall = f"`{sys.executable} -m pip uninstall {' '.join(backends)}`"
        raise Trouble(
            f"{' and '.join(backends)} are installed, and each replaces files of the other: run {uninstall}, then "
            "install scorepool with one of the extras `worker`, `cuda12` and `cuda13` (docs/deploy.md)"
        )
    if device["gpu"] is None and backends not in ([], ["mlx-cpu"]):
        raise Trouble(f"{backends[0]} is installed, and MLX sees no GPU: `nvidia-smi` must list one, with its driver")
    if device["gpu"] is None:
        return f"none; MLX computes on {device['device']}"
    kind = {"metal": "Metal", "cuda": "CUDA"}[device["gpu"]]
    return f"{kind}, {device['name']}; MLX computes on {device['device']}"


def check_memory(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that the machine, or the container, has memory for a model."""
    total = machine_memory_bytes()
    if total < MIN_MEMORY_BYTES:
        raise Trouble(f"{_gib(total)}: expected {_gib(MIN_MEMORY_BYTES)}; raise the container's limit, if it has one")
    if settings.memory_bytes > total:
        raise Trouble(f"SCOREPOOL_MEMORY_BYTES={settings.memory_bytes} is more than the {_gib(total)} of this machine")
    return f"{_gib(total)}, of which models may use {_gib(settings.memory_bytes or total * 4 // 5)}"


def check_models(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that the models and adapters of the settings are there, and that their weights fit into the memory."""
    try:
        models = named_models(settings)
        if not models:
            return "none in this environment"
        sizes = _weights_bytes(settings.dtype, [model.source for model in models])
        return describe_fit(settings, models, sizes, settings.memory_bytes or machine_memory_bytes() * 4 // 5)
    except store.SettingsError as error:
        raise Trouble(str(error)) from None


def check_port(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check that the API can listen, or listens already."""
    if settings.uds:
        return f"not needed: SCOREPOOL_UDS={settings.uds}"
    try:
        check_port_is_free(settings.host, settings.port)
    except StackError as error:
        url = api_url(settings)
        with suppress(httpx.HTTPError, ValueError):
            if httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S, trust_env=False).json() == {"status": "ok"}:
                return f"an API runs at {url}"
        raise Trouble(f"{error} or SCOREPOOL_PORT, or stop what listens there") from None
    return f"{settings.host} port {settings.port} is free"


def check_clock(settings: store.Settings, environ: Mapping[str, str]) -> str:
    """Check the time against Redis's, or against the time at which scorepool was installed."""
    url, _ = _redis_url(settings, environ)
    remedy = "let the system set it from the network (macOS: `sudo sntp -sS time.apple.com`; Linux: systemd-timesyncd)"
    if time.time() < Path(__file__).stat().st_mtime:
        raise Trouble(f"the time is before that of scorepool's files: {remedy}")
    if not url or _is_sentinel(url):
        return "later than scorepool's files; there is no other machine to compare with"
    try:
        with Redis.from_url(url, socket_timeout=PROBE_TIMEOUT_S, socket_connect_timeout=PROBE_TIMEOUT_S) as redis:
            seconds, microseconds = redis.time()
    except RedisError as error:
        raise Trouble("Redis does not tell its time: see the line of redis") from error
    difference_s = time.time() - (seconds + microseconds / 1e6)
    if abs(difference_s) > MAX_CLOCK_ERROR_S:
        raise Trouble(f"{difference_s:+.0f} s from Redis's: on both machines, {remedy}")
    return f"{difference_s:+.2f} s from Redis's"


CHECKS: dict[str, Callable[[store.Settings, Mapping[str, str]], str]] = {
    "keys": check_keys,
    "state": check_state,
    "redis": check_redis,
    "blas": check_blas,
    "gpu": check_gpu,
    "memory": check_memory,
    "models": check_models,
    "port": check_port,
    "clock": check_clock,
}


def _redis_url(settings: store.Settings, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the URL that is configured, and the variable; an empty URL for the embedded Redis."""
    for name in ("SCOREPOOL_REDIS_URL", "SCOREPOOL_REDIS_URL_FILE"):
        if environ.get(name):
            return settings.redis_url, name
    return environ.get("REDIS_URL", ""), "REDIS_URL"


def _is_sentinel(url: str) -> bool:
    return store.SentinelUrl.parse(url) is not None


def _redis_version(url: str) -> str:
    """Return the server's version. Raises RedisError, Trouble."""
    with Redis.from_url(url, socket_timeout=PROBE_TIMEOUT_S, socket_connect_timeout=PROBE_TIMEOUT_S) as redis:
        info: Any = redis.info("server")
    version = str(info.get("valkey_version") or info["redis_version"])
    if int(version.split(".")[0]) < MIN_REDIS:
        raise Trouble(f"the server's version is {version}: expected Redis {MIN_REDIS} or newer, or Valkey")
    return f"{info.get('server_name', 'redis')} {version}"


@cache
def _device() -> dict[str, Any]:
    """Ask a process of its own what MLX computes with. Raises Trouble."""
    try:
        done = _run_module("scorepool.engine.model.device")
    except subprocess.TimeoutExpired:
        raise Trouble(f"MLX did not compute a sum in {DEVICE_TIMEOUT_S:.0f} s: restart the machine") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Trouble(
            f"MLX does not work here ({last}): run `{sys.executable} -m pip install --force-reinstall mlx mlx-lm`"
        )
    description: dict[str, Any] = json.loads(done.stdout)
    return description


def _weights_bytes(dtype: str, sources: Sequence[str]) -> list[dict[str, Any]]:
    """Ask a process of its own what models take in memory: `num_bytes`, or `error`. Raises Trouble."""
    try:
        done = _run_module("scorepool.engine.weights_size", dtype, *sources)
        sizes: list[dict[str, Any]] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise Trouble(f"the files of the models could not be read in {DEVICE_TIMEOUT_S:.0f} s") from None
    return sizes


def _run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of ours to its end. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, "-P", "-m", name, *arguments]
    environ = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEVICE_TIMEOUT_S, check=False)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
