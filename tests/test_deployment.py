"""The deployment files, checked as far as possible without a container engine and without a Mac."""

import json
import os
import plistlib
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis import Redis
from redis.exceptions import AuthenticationError

from scorepool import store
from scorepool.api.serve import SHUTDOWN_GRACE_S
from scorepool.local.redis_server import find_binary
from scorepool.local.stack import webhook_command
from tests.conftest import wait_until_up

VALUES = {
    "REDIS_PASSWORD": "a1b2c3",
    "SCOREPOOL_API_KEYS": "alice:" + "0" * 64,
    "SCOREPOOL_WEBHOOK_SECRET": "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    "SCOREPOOL_PUBLIC_URL": "https://scorepool.example.com",
}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[?-])(?P<rest>[^}]*))?\}")


@pytest.fixture
def compose(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "docker-compose.yml").read_text())


@pytest.fixture
def schema() -> dict[str, Any]:
    """Return the schema of the Compose specification from the package check-jsonschema."""
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    return json.loads((folder / "compose-spec.json").read_text())


def interpolate(text: str, values: Mapping[str, str]) -> str:
    """Substitute `${NAME:?message}` and `${NAME:-default}` as Compose does."""

    def value(match: re.Match[str]) -> str:
        if match["name"] in values:
            return values[match["name"]]
        assert match["kind"] == "-", f"{match['name']} has neither a value nor a default"
        return match["rest"]

    return VARIABLE.sub(value, text)


def mistakes(document: object, schema: dict[str, Any]) -> list[str]:
    """List where the document breaks the schema."""
    return [error.message for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(document)]


def test_the_compose_file_follows_the_compose_schema(compose: dict[str, Any], schema: dict[str, Any]):
    assert mistakes(compose, schema) == []


@pytest.mark.parametrize(
    "mistake", [{"helthcheck": {}}, {"ports": {"6379": True}}, {"restart": 1}, {"depends_on": {"redis": "healthy"}}]
)
def test_a_mistake_in_the_compose_file_is_found(
    compose: dict[str, Any], schema: dict[str, Any], mistake: dict[str, Any]
):
    compose["services"]["api"] |= mistake
    assert mistakes(compose, schema) != []


def test_the_files_hold_no_secret_and_no_default_for_one(root: Path):
    text = (root / "docker-compose.yml").read_text()
    example = (root / "deploy" / "env.example").read_text()
    for name in ("REDIS_PASSWORD", "SCOREPOOL_API_KEYS", "SCOREPOOL_WEBHOOK_SECRET"):
        uses = [match for match in VARIABLE.finditer(text) if match["name"] == name]
        assert uses
        assert all(use["kind"] == "?" for use in uses)
        assert f"\n{name}=\n" in example
    ignored = (root / ".gitignore").read_text().split()
    assert ".env" in ignored
    assert (root / ".dockerignore").read_text().splitlines()[1] == "*"


def test_each_service_accepts_its_settings(compose: dict[str, Any]):
    for name in ("api", "webhooks"):
        environ = {key: interpolate(text, VALUES) for key, text in compose["services"][name]["environment"].items()}
        settings = store.Settings.load(environ)
        assert settings.redis_url == "redis://:a1b2c3@redis:6379/0"
        assert settings.job_url("1") == "https://scorepool.example.com/v1/jobs/1"
        assert settings.webhook_secret == VALUES["SCOREPOOL_WEBHOOK_SECRET"]


def test_every_service_has_a_health_check_and_restarts(compose: dict[str, Any]):
    assert set(compose["services"]) == {"redis", "api", "webhooks"}
    for service in compose["services"].values():
        assert service["healthcheck"]["test"]
        assert service["restart"] == "unless-stopped"
        assert all(port.startswith("${") and ":-127.0.0.1}:" in port for port in service.get("ports", []))


def test_every_service_is_confined(compose: dict[str, Any]):
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert 0 < service["pids_limit"] <= 2048
        assert to_bytes(interpolate(service["mem_limit"], VALUES)) > 0
        assert not {"privileged", "cap_add", "devices", "pid", "network_mode", "ipc"} & set(service)
    assert compose["services"]["redis"]["user"] == "redis"


def test_every_image_can_be_pinned_by_its_digest(compose: dict[str, Any], root: Path):
    example = (root / "deploy" / "env.example").read_text()
    pinned = VALUES | {"REDIS_IMAGE": "redis@sha256:1", "PYTHON_IMAGE": "python@sha256:2"}
    services = compose["services"]
    assert interpolate(services["redis"]["image"], pinned) == "redis@sha256:1"
    for name in ("api", "webhooks"):
        assert interpolate(services[name]["build"]["args"]["PYTHON_IMAGE"], pinned) == "python@sha256:2"
    for variable in ("REDIS_IMAGE", "PYTHON_IMAGE"):
        assert f"{variable}=" in example


def to_bytes(size: str) -> int:
    """Return a size in bytes: `1gb` of Redis, `2g` of Compose."""
    number, unit = size[: len(size.rstrip("kmgb"))], size.lstrip("0123456789").removesuffix("b")
    return int(number) * 1024 ** " kmg".index(unit)


def test_each_service_has_more_time_to_stop_than_it_needs(compose: dict[str, Any], root: Path):
    drain_s = store.Settings().drain_timeout_s
    assert float(compose["services"]["webhooks"]["stop_grace_period"].removesuffix("s")) > drain_s
    plist = plistlib.loads((root / "deploy" / "com.scorepool.worker.plist").read_bytes())
    assert plist["ExitTimeOut"] > drain_s
    assert float(compose["services"]["api"]["stop_grace_period"].removesuffix("s")) > SHUTDOWN_GRACE_S


def test_the_services_run_the_same_commands_as_serve(compose: dict[str, Any]):
    assert compose["services"]["webhooks"]["command"] == ["rq", *webhook_command()[1:]]
    assert compose["services"]["api"]["command"] == ["python", "-m", "scorepool.api"]


def test_redis_runs_with_a_password_an_append_only_file_and_no_eviction(compose: dict[str, Any], tmp_path: Path):
    """Run the same configuration on the embedded server's binary, with another folder and socket."""
    path = tmp_path / "redis.conf"
    path.write_text(interpolate(compose["configs"]["redis"]["content"], VALUES).replace("/data", str(tmp_path)))
    command = [find_binary(), str(path), "--port", "0", "--unixsocket", str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            url = f"unix://:{VALUES['REDIS_PASSWORD']}@{tmp_path / 's'}"
            wait_until_up(url)
            with Redis.from_url(f"unix://{tmp_path / 's'}") as anonymous, pytest.raises(AuthenticationError):
                anonymous.ping()
            with Redis.from_url(url, decode_responses=True) as redis:
                settings = redis.config_get("append*", "maxmemory*", "save")
        finally:
            server.terminate()
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["maxmemory-policy"] == "noeviction"
    limit = to_bytes(interpolate(compose["services"]["redis"]["mem_limit"], VALUES))
    assert 0 < 2 * int(settings["maxmemory"]) <= limit
    assert settings["save"] == ""


@pytest.mark.parametrize(("hostname", "status"), [(socket.gethostname(), 0), ("another", 1), (None, 1)])
def test_a_worker_container_is_healthy_while_redis_knows_a_worker_of_its_host(
    redis: Redis, redis_url: str, root: Path, hostname: str | None, status: int
):
    redis.sadd("rq:workers", "rq:worker:gone")
    if hostname:
        redis.sadd("rq:workers", "rq:worker:w")
        redis.hset("rq:worker:w", "hostname", hostname)
    for environ in (
        {"SCOREPOOL_REDIS_URL": redis_url},
        {"RQ_REDIS_URL": redis_url, "SCOREPOOL_REDIS_URL": "unix:///absent"},  # it is on another server than home
    ):
        command = [sys.executable, root / "deploy" / "worker_is_alive.py"]
        assert subprocess.run(command, env=os.environ | environ, check=False).returncode == status


def test_the_image_has_two_extras_and_does_not_run_as_root(root: Path):
    lines = (root / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM")] == [
        "FROM ${PYTHON_IMAGE} AS build",
        "FROM ${PYTHON_IMAGE}",
    ]
    assert "ARG PYTHON_IMAGE=python:3.11-slim" in lines
    installs = [line for line in lines if "pip install" in line]
    assert "--require-hashes --requirement deploy/requirements-server.txt" in installs[0]
    assert "--no-deps --no-build-isolation ." in installs[1]
    assert "USER scorepool" in lines


def required_distributions(root: Path, *extras: str) -> set[str]:
    """Return every distribution that `pip install .[extras]` brings."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    pending, found = [Requirement(line) for line in lines], set[str]()
    while pending:
        requirement = pending.pop()
        found.add(canonicalize_name(requirement.name))
        for line in metadata.requires(requirement.name) or []:
            child = Requirement(line)
            requested = [""] if child.marker is None else ["", *requirement.extras]
            applies = child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in requested)
            if applies and canonicalize_name(child.name) not in found:
                pending.append(child)
    return found


@pytest.mark.parametrize(("name", "extras"), [("server", ("api", "webhook")), ("all", ("all",))])
def test_the_hashes_cover_every_package_in_the_version_that_was_tested(root: Path, name: str, extras: tuple[str, ...]):
    """`make lock` writes these files. A package without a hash, or an unlisted one, would stop the installation."""
    text = (root / "deploy" / f"requirements-{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text).strip())
    pins = [Requirement(entry.partition(" \\\n")[0]) for entry in entries]
    assert all(re.search(r"\n    --hash=sha256:[0-9a-f]{64}( \\|$)", entry) for entry in entries)
    constraints = [
        Requirement(line) for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    ]
    tested = {canonicalize_name(one.name): one.specifier for one in constraints}
    assert [pin.name for pin in pins if pin.specifier != tested.get(canonicalize_name(pin.name))] == []
    assert {canonicalize_name(pin.name) for pin in pins} >= required_distributions(root, *extras) - {"scorepool"}
    assert not re.search(r"https?:|index-url|find-links|trusted-host", text)


def test_the_image_has_everything_that_its_processes_import_and_no_mlx(root: Path):
    """Import the processes' modules while only the distributions of the two extras can be imported."""
    found = required_distributions(root, "api", "webhook")
    assert found.isdisjoint({"mlx", "mlx-lm", "numpy", "transformers", "torch"})
    hidden = [
        module
        for module, owners in metadata.packages_distributions().items()
        if module not in ("scorepool", "tests") and found.isdisjoint(canonicalize_name(owner) for owner in owners)
    ]
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import scorepool.api.app, scorepool.api.__main__, rq.cli
from scorepool.worker import Redis, WebhookWorker
"""
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


@pytest.mark.parametrize("installed_at", ["scorepool/.venv/bin", ".local/bin"])  # a checkout; pipx or uv
def test_the_launchd_job_reads_its_settings_from_a_private_file(root: Path, tmp_path: Path, installed_at: str):
    plist = plistlib.loads((root / "deploy" / "com.scorepool.worker.plist").read_bytes())
    assert plist["Label"] == "com.scorepool.worker"
    assert plist["RunAtLoad"] is True
    assert plist["KeepAlive"] is True
    assert "EnvironmentVariables" not in plist

    (tmp_path / ".config/scorepool").mkdir(parents=True)
    url = "redis://:x@10.0.0.1:6379/0?protocol=3&client_name=mac"
    (tmp_path / ".config/scorepool/worker.env").write_text(
        f"SCOREPOOL_REDIS_URL='{url}'\nSCOREPOOL_MODEL=\"demo=$HOME/model\"\n"
    )
    (tmp_path / "Library/Logs").mkdir(parents=True)
    fake_scorepool = tmp_path / installed_at / "scorepool"
    fake_scorepool.parent.mkdir(parents=True)
    fake_scorepool.write_text('#!/bin/sh\necho "$@" "$SCOREPOOL_MODEL" "$SCOREPOOL_REDIS_URL"\n')
    fake_scorepool.chmod(0o755)
    subprocess.run(plist["ProgramArguments"], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    log = (tmp_path / "Library/Logs/scorepool-worker.log").read_text()
    assert log == f"worker demo={tmp_path}/model {url}\n"


def test_the_launchd_job_does_not_start_without_its_settings(root: Path, tmp_path: Path):
    plist = plistlib.loads((root / "deploy" / "com.scorepool.worker.plist").read_bytes())
    done = subprocess.run(plist["ProgramArguments"], env={"HOME": str(tmp_path)}, capture_output=True, check=False)
    assert done.returncode != 0
    assert b"worker.env" in done.stderr


@pytest.mark.parametrize("extra", ["cuda", "cuda12", "cuda13", "worker"])
def test_an_extra_brings_one_backend_of_mlx_and_what_a_worker_needs(root: Path, extra: str):
    """MLX's backends for Linux hold the same file. Each extra of scorepool that an extra names is followed."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pending, found = [Requirement(line) for line in extras[extra]], dict[str, set[str]]()
    while pending:
        requirement = pending.pop()
        if requirement.name == "scorepool":
            pending += [Requirement(line) for name in requirement.extras for line in extras[name]]
        elif requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}):
            found.setdefault(requirement.name, set()).update(requirement.extras)
    backend = {"worker": "cpu", "cuda": "cuda13"}.get(extra, extra)
    assert found.pop("mlx") == {backend}
    headers = {"nvidia-cuda-crt"} if backend == "cuda13" else set()
    assert (
        set(found)
        == {"jinja2", "llguidance", "mlx-lm", "numpy", "redis", "rq", "threadpoolctl", "transformers"} | headers
    )
