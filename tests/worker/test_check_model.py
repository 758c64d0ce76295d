"""`scorepool check-model` says how a model would be served, or why not, without serving it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scorepool.worker import check_model as command
from scorepool.worker.check_model import ModelReport

SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))


def check_model(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [SCOREPOOL, "check-model", *arguments]
    environ = os.environ | {"SCOREPOOL_STATE_DIR": str(state)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_loaded_tested_and_measured(root: Path, tmp_path: Path):
    folder = root / "scorepool" / "models" / "demo"
    done = check_model(tmp_path, "demo", "--mode", "exact", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report.items() >= {"mode": "exact", "dtype": "float32", "self_test": "passed", "quantization": None}.items()
    size_bytes = (folder / "model.safetensors").stat().st_size
    assert size_bytes * 0.5 < report["weights_bytes"] < size_bytes * 4  # the file may hold 16 bits
    assert report["peak_memory_bytes"] > report["weights_bytes"]
    assert min(report["scored_tokens_per_s"], report["generated_tokens_per_s"], report["load_s"]) > 0
    shown = msgspec.convert(report, ModelReport).lines()
    assert shown[:2] == [f"{folder} can be served", "mode       exact, float32, not quantised"]
    assert "tokens/s scored" in shown[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["/no/such/folder"], "there is no folder '/no/such/folder'"), (["x", "--mode", "fast"], "SCOREPOOL_MODE='fast'")],
)
def test_a_model_that_cannot_be_served_has_a_reason(tmp_path: Path, arguments: list[str], message: str):
    done = check_model(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("scorepool: ")
    assert message in line


def test_ctrl_c_ends_it_with_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(source: str, settings: object) -> ModelReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelReport, "measure", interrupted)
    monkeypatch.setattr(sys, "argv", ["check-model", "x"])
    with pytest.raises(SystemExit) as exited:
        command.main()
    assert exited.value.code == 130
    assert capsys.readouterr() == ("", "")
