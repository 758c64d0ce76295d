"""`scorepool doctor`: every check is a line, and one that fails says what to do."""

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from scorepool.cli import app
from scorepool.engine import Engine, EngineSettings
from scorepool.local import doctor
from scorepool.local.demo import free_port

CPU = {
    "blas": "openblas Haswell, 2 threads",
    "gpu": None,
    "device": "Device(cpu, 0)",
    "name": "AMD EPYC",
    "backends": ["mlx-cpu"],
}
CUDA = {"gpu": "cuda", "device": "Device(gpu, 0)", "name": "NVIDIA H100", "backends": ["mlx-cuda-12"]}


@pytest.fixture
def run(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(doctor, "_device", lambda: CPU)
    set_free_disk(monkeypatch, 100 * 2**30)  # how full this machine is decides no test

    def run(*arguments: str, **environ: str) -> Result:
        defaults = {"STATE_DIR": str(tmp_path), "REDIS_URL": redis_url, "PORT": str(free_port())}
        given = {f"SCOREPOOL_{name}": value for name, value in (defaults | environ).items()}
        return CliRunner().invoke(app, ["doctor", *arguments], env=given, catch_exceptions=False)

    return run


def set_free_disk(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    usage = SimpleNamespace(free=free_bytes)
    monkeypatch.setattr(doctor, "shutil", SimpleNamespace(disk_usage=lambda folder: usage))


def failed(done: Result) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.split()[1] == "FAILED"]


def test_a_healthy_machine_passes_every_check(run: Callable[..., Result], tmp_path: Path):
    done = run()
    assert done.exit_code == 0, done.stdout
    assert failed(done) == []
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["settings", *doctor.CHECKS]
    assert list(tmp_path.iterdir()) == []


def test_programs_read_json(run: Callable[..., Result]):
    checks = json.loads(run("--json").stdout)
    assert {check["name"]: check["ok"] for check in checks} == dict.fromkeys(["settings", *doctor.CHECKS], True)


@pytest.mark.parametrize(
    ("environ", "name", "remedy"),
    [
        ({"PROT": "1"}, "settings", "did you mean SCOREPOOL_PORT?"),
        ({"API_KEY": "sp_x"}, "keys", "set SCOREPOOL_API_KEYS to the entry that `scorepool key NAME` prints"),
        ({"STATE_DIR": "/dev/null/x"}, "state", "set SCOREPOOL_STATE_DIR to a folder that you may write"),
        ({"REDIS_URL": "redis://127.0.0.1:1"}, "redis", "start it, or correct SCOREPOOL_REDIS_URL"),
        ({"MEMORY_BYTES": str(2**47)}, "memory", "SCOREPOOL_MEMORY_BYTES=140737488355328 is more than"),
        ({"PORT": "0"}, "port", "expected a port from 1 to 65535"),
    ],
)
def test_a_check_that_fails_names_its_remedy(
    run: Callable[..., Result], environ: dict[str, str], name: str, remedy: str
):
    done = run(**environ)
    assert done.exit_code == 1
    [line] = [line for line in failed(done) if line.split()[0] == name]
    assert remedy in line


def test_a_full_disk_is_named(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    set_free_disk(monkeypatch, 7 * 2**30 // 10)
    done = run()
    assert done.exit_code == 1
    [line] = failed(done)
    assert f"{tmp_path} has 0.7 GiB left: free some, or set SCOREPOOL_STATE_DIR to another disk" in line


@pytest.fixture
def spec(root: Path) -> str:
    return f"{root / 'scorepool' / 'models' / 'demo'}"


def line_of(done: Result, name: str) -> str:
    [line] = [line for line in done.stdout.splitlines() if line.split()[0] == name]
    return " ".join(line.split()[1:])


@pytest.mark.parametrize(
    ("memory_mib", "words"),
    [
        (
            1000,
            r"ok weights of a 7 MiB, b 7 MiB, c \(hub id, not looked at\): together 14 MiB, so one worker holds all",
        ),
        (16, r"ok weights of a .*: together \d+ MiB, so of 16 MiB one worker holds some at a time, by turns of 7 s"),
        (
            5,
            r"FAILED model 'a': its weights take \d+ MiB, expected less than the 5 MiB that models may use: quantise",
        ),
    ],
)
def test_several_models_of_one_worker_fit_or_come_and_go_or_cannot_be_served(
    run: Callable[..., Result], spec: str, memory_mib: int, words: str
):
    models = f"a={spec};b,c2={spec};c=owner/name"
    done = run(MODELS=models, MEMORY_BYTES=str(memory_mib * 2**20), MODEL_TURN_S="7")
    assert re.match(words, line_of(done, "models")), line_of(done, "models")
    assert done.exit_code == (1 if memory_mib == 5 else 0)


def test_the_weights_of_the_demo_model_take_what_the_engine_says(run: Callable[..., Result], spec: str):
    found = re.match(r"ok weights of demo (\d+) MiB, of", line_of(run("--model", f"demo={spec}"), "models"))
    assert found
    engine = Engine(EngineSettings(model=spec))
    engine.close()
    assert int(found[1]) == pytest.approx(engine.model_info.weights_bytes / 2**20, abs=1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"MODELS": "a=/none;b={demo}"}, "model 'a': there is no folder '/none'"),
        ({"MODELS": "a={tmp};b={demo}"}, "model 'a': {tmp} has no config.json"),
        ({"MODELS": "a={demo};a={demo}"}, "the name 'a' is given to two models"),
        ({"MODELS": "a={demo};b={cut}"}, "model.safetensors is no complete safetensors file"),
        (
            {"MODELS": "a={demo};b={demo}", "ADAPTERS": "x=/x"},
            "several models are served; expected x@MODEL=/x with one",
        ),
        ({"MODELS": "a={demo};b={demo}", "ADAPTERS": "x@c=/x"}, "there is no model 'c', expected one of a, b"),
        ({"MODEL": "a={demo}", "ADAPTERS": "a=/x"}, "the name 'a' is taken by a model"),
        (
            {"MODEL": "a={demo}", "ADAPTERS": "x={tmp}"},
            "expected a folder with adapter_config.json and adapter_model.sa",
        ),
    ],
)
def test_models_and_adapters_that_cannot_be_served_are_named(
    run: Callable[..., Result], spec: str, tmp_path: Path, environ: dict[str, str], words: str
):
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_text("{}")
    (cut / "model.safetensors").write_bytes((Path(spec) / "model.safetensors").read_bytes()[:-1000])
    places = {"demo": spec, "tmp": str(tmp_path), "cut": str(cut)}
    done = run(**{name: value.format(**places) for name, value in environ.items()})
    [line] = failed(done)
    assert line.startswith("models ")
    assert words.format(**places) in line


def test_a_port_that_another_server_holds_is_named(run: Callable[..., Result]):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        [line] = failed(run(PORT=str(server.getsockname()[1])))
    assert line.startswith("port ")
    assert "Address already in use. Choose another with --port or SCOREPOOL_PORT" in line


@pytest.mark.parametrize(
    ("platform", "device", "name", "remedy"),
    [
        ("linux", CPU | {"blas": "reference blas"}, "blas", "apt install libopenblas0-pthread"),
        ("darwin", CPU | {"blas": "accelerate", "backends": []}, "gpu", "use Apple silicon"),
        ("linux", CPU | {"backends": ["mlx-cuda-12"]}, "gpu", "mlx-cuda-12 is installed, and MLX sees no GPU"),
        ("linux", CPU | CUDA | {"backends": ["mlx-cpu", "mlx-cuda-12"]}, "gpu", "pip uninstall mlx-cpu mlx-cuda-12"),
    ],
)
def test_a_slow_device_is_named(
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    device: dict[str, Any],
    name: str,
    remedy: str,
):
    monkeypatch.setattr(doctor, "_device", lambda: device)
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(platform=platform, executable="python"))
    [line] = failed(run())
    assert line.startswith(f"{name} ")
    assert remedy in line


@pytest.mark.parametrize(
    ("platform", "device", "line"),
    [
        ("linux", CPU, "none; MLX computes on Device(cpu, 0)"),
        ("linux", CPU | CUDA | {"blas": "reference blas"}, "CUDA, NVIDIA H100; MLX computes on Device(gpu, 0)"),
        (
            "darwin",
            CPU | CUDA | {"gpu": "metal", "name": "Apple M2", "backends": [], "blas": "accelerate"},
            "Metal, Apple M2; MLX computes on Device(gpu, 0)",
        ),
    ],
)
def test_the_gpu_is_named(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, platform: str, device: dict[str, Any], line: str
):
    monkeypatch.setattr(doctor, "_device", lambda: device)
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(platform=platform, executable="python"))
    done = run()
    assert (failed(done), done.exit_code) == ([], 0)
    assert [one for one in done.stdout.splitlines() if one.startswith("gpu ") and one.endswith(line)]


@pytest.mark.parametrize(
    ("error_s", "words"), [(3600, "+3600 s from Redis's"), (-(10**9), "before that of scorepool's")]
)
def test_a_clock_that_is_wrong_is_named(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error_s: int, words: str
):
    now = doctor.time.time()
    monkeypatch.setattr(doctor, "time", SimpleNamespace(time=lambda: now + error_s))
    [line] = failed(run())
    assert line.startswith("clock ")
    assert words in line


def test_the_device_is_that_of_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    doctor._device.cache_clear()
    assert set(doctor._device()) == set(CPU)
    doctor._device.cache_clear()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        doctor.Trouble, match=r"MLX does not work here \(exit status 1\): run `/bin/false -m pip install"
    ):
        doctor._device()


def test_the_embedded_redis_is_tried(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    done = run(REDIS_URL="")
    assert re.search(r"the embedded one starts \((valkey|redis) ", done.stdout)
