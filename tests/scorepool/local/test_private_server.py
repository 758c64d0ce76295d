"""`--local` runs every process for one command and leaves nothing behind, however the command ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scorepool.commands import running
from scorepool.commands.running import CommandError
from scorepool.local import private_server
from scorepool.local.private_server import _spec

SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def start(root: Path, state: Path, folder: Path, num_rows: int, *options: str) -> subprocess.Popen[str]:
    """Start `scorepool generate --local` on many rows."""
    rows = ({"id": index, "prompt": f"import {index}"} for index in range(num_rows))
    path = folder / "in.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-o", str(folder / "out.jsonl"), "--max-tokens", "8", "--seed", "1", *options)
    return subprocess.Popen(
        [SCOREPOOL, "generate", str(path), *options, "--local", f"{root}/scorepool/models/demo"],
        env=os.environ | {"SCOREPOOL_STATE_DIR": str(state), "SCOREPOOL_URL": "http://127.0.0.1:9"},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(command: subprocess.Popen[str], folder: Path) -> None:
    """Wait until the command has written some rows."""
    journal = folder / "out.jsonl.journal"
    while not (journal.exists() and json.loads(journal.read_text())["counts"]["num_rows"]):
        assert command.poll() is None, command.communicate()
        time.sleep(0.02)


def stop(command: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    """Stop a command; return its status and stderr after every process that it started has ended."""
    processes = psutil.Process(command.pid).children(recursive=True)
    assert len(processes) >= 4  # the reaper, Redis, the API and a worker
    command.send_signal(how)
    _, stderr = command.communicate(timeout=120)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    return command.returncode, stderr


@pytest.mark.soak
def test_nothing_is_left_when_the_command_is_killed(root: Path, state: Path, tmp_path: Path):
    command = start(root, state, tmp_path, 100_000)
    wait_for_rows(command, tmp_path)

    stop(command, signal.SIGKILL)

    assert list(state.iterdir()) == []


@pytest.mark.soak
@pytest.mark.parametrize(("how", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_stopped_command_goes_on(root: Path, state: Path, tmp_path: Path, how: signal.Signals, status: int):
    command = start(root, state, tmp_path, 800)
    wait_for_rows(command, tmp_path)
    found, stderr = stop(command, how)
    assert (found, "Traceback" in stderr) == (status, False)
    assert list(state.iterdir()) == []

    second = start(root, state, tmp_path, 800)
    _, stderr = second.communicate(timeout=240)

    assert second.returncode == 0, stderr
    assert [json.loads(row)["id"] for row in (tmp_path / "out.jsonl").read_text().splitlines()] == list(range(800))
    assert list(state.iterdir()) == []


@pytest.mark.soak
def test_a_worker_that_dies_is_started_again(root: Path, state: Path, tmp_path: Path):
    command = start(root, state, tmp_path, 800)
    wait_for_rows(command, tmp_path)
    children = psutil.Process(command.pid).children()
    next(each for each in children if "BatchWorker" in " ".join(each.cmdline())).kill()

    _, stderr = command.communicate(timeout=240)

    assert command.returncode == 0, stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 800


@pytest.mark.soak
def test_a_model_that_cannot_be_loaded_is_one_sentence(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCOREPOOL_STATE_DIR", str(state))
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(CommandError, match=r"--local: worker \S+ ended with \d+ before it was ready: \S+") as raised,
        private_server.private_server([str(tmp_path)]),
    ):
        pass
    assert "\n" not in str(raised.value)
    assert raised.value.status == 3
    assert list(state.iterdir()) == []


def test_a_model_is_named_after_its_folder_or_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("my model.v2").mkdir()
    folder = tmp_path / "my model.v2"
    with pytest.raises(CommandError, match="the folder holds no model"):
        _spec("my model.v2", None)
    (folder / "config.json").touch()
    assert _spec("my model.v2", None) == f"my-model.v2={folder}"
    assert _spec("my model.v2", "m") == f"m={folder}"
    assert _spec("a=my model.v2", None) == f"a={folder}"
    assert _spec("org/Model-4bit", None) == "Model-4bit=org/Model-4bit"
    for missing in ("./nowhere", "/nowhere/model", "a/b/c"):
        with pytest.raises(CommandError, match="no such folder; expected a folder with a model, or a hub id"):
            _spec(missing, None)


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "missing_modules", lambda names: ["mlx"])
    with pytest.raises(
        CommandError, match=r"`scorepool score --local` needs .* \(mlx\): run `\S+ -m pip install 'scorepool\[all"
    ):
        running.check_packages("score", "--local")
