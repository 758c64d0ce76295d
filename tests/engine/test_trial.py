"""A load that ends a process of its own by a crash is a LoadError, once; a load that ended well is not tried again."""

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scorepool.engine import Engine, EngineSettings, LoadError
from scorepool.engine import trial as trial_module
from scorepool.engine.trial import Trial
from tests.tiny_models import TinyModels

CRASHES = """
import os, signal, sys


class CrashOnImport:
    def find_spec(self, name, path, target=None):
        if name == "mlx_lm.models.llama":
            {crash}


sys.meta_path.insert(0, CrashOnImport())
"""


@pytest.fixture
def settings(tiny_models: TinyModels, tmp_path: Path) -> EngineSettings:
    return EngineSettings(model=str(tiny_models("llama")), tries_load=True, load_marks=str(tmp_path / "loads"))


def in_the_child(monkeypatch: pytest.MonkeyPatch, folder: Path, crash: str) -> None:
    """Run `crash` in a child process that loads a llama."""
    (folder / "sitecustomize.py").write_text(CRASHES.format(crash=crash))
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def trials(caplog: pytest.LogCaptureFixture):
    """Count the trials that were started."""
    caplog.set_level(logging.INFO, trial_module.__name__)
    return lambda: sum("in a process of its own" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("crash", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("print('no such array', file=sys.stderr, flush=True); os.abort()", "was killed by SIGABRT: no such array"),
        ("os._exit(7)", "ended with exit status 7"),
    ],
)  # fmt: skip
def test_a_crash_while_loading_is_a_load_error_every_time(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str, expected: str
):
    in_the_child(monkeypatch, tmp_path, crash)
    for _ in range(2):
        with pytest.raises(LoadError) as caught:
            Engine(settings)
        assert caught.value.message == (
            f"the model {settings.model!r} cannot be loaded: a process that tried it {expected}"
        )


def test_the_reason_of_a_trial_is_the_reason_of_the_load(settings: EngineSettings, tmp_path: Path):
    with pytest.raises(LoadError, match=f"^there is no folder '{tmp_path}/gone'"):
        Engine(replace(settings, model=str(tmp_path / "gone")))


def test_a_load_that_ended_well_is_tried_again_only_when_something_changed(settings: EngineSettings, trials):
    for changes, expected in (({}, 1), ({}, 1), ({"max_running_rows": 8}, 2)):
        Engine(replace(settings, **changes)).close()
        assert trials() == expected

    os.utime(Path(settings.model) / "model.safetensors")
    Engine(replace(settings, max_running_rows=8)).close()

    assert trials() == 3


def test_a_load_that_ended_its_own_process_is_on_trial_the_next_time(settings: EngineSettings, trials):
    Engine(settings).close()
    Trial(settings).__enter__()  # a load that never ends
    assert trials() == 1

    Engine(settings).close()

    assert trials() == 2


def test_without_a_folder_that_can_be_written_every_load_is_on_trial(settings: EngineSettings, tmp_path: Path, trials):
    (tmp_path / "loads").touch()
    for expected in (1, 2):
        Engine(settings).close()
        assert trials() == expected


def test_a_library_user_gets_no_trial_unless_asked_for(settings: EngineSettings, trials):
    Engine(replace(settings, tries_load=False)).close()

    assert trials() == 0
    assert not Path(settings.load_marks).exists()


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the child in /proc")
def test_a_trial_ends_with_the_process_that_waits_for_it(settings: EngineSettings, tmp_path: Path, root: Path):
    (tmp_path / "sitecustomize.py").write_text(CRASHES.format(crash="import time; time.sleep(600)"))
    code = f"from scorepool.engine.engine import *; open_runner({settings!r})"
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environ)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    until(lambda: children.read_text().strip())
    child = int(children.read_text())
    time.sleep(1)

    parent.send_signal(signal.SIGKILL)
    parent.wait()

    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_text())


def until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "the folder"])
def test_a_wrong_path_is_refused_before_anything_is_loaded(
    settings: EngineSettings, tmp_path: Path, trials, missing: str
):
    folder = tmp_path / "model"
    if missing != "the folder":
        folder.mkdir()
        for name in {"config.json", "model.safetensors"} - {missing}:
            (folder / name).touch()
    with pytest.raises(LoadError) as caught:
        Trial(replace(settings, model=str(folder))).__enter__()
    assert str(folder) in caught.value.message
    assert trials() == 0
