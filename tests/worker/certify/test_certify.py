"""`scorepool certify` compares the engine with transformers on the real weights, and a load finds its certificate."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.convert import convert
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from scorepool import cli
from scorepool.commands import running
from scorepool.engine import Engine, EngineSettings, Verification
from scorepool.engine.certificate import Certificate
from scorepool.engine.model.config import read_config
from scorepool.store import Settings
from scorepool.worker.certify import measure
from scorepool.worker.certify.__main__ import certify
from scorepool.worker.certify.reference import CannotCompare, Reference
from scorepool.worker.certify.rows import LENGTHS, NUM_GENERATED, draw_rows, longest_row
from tests.tiny_models import TinyModels

TOKENS = 300


def certified(folder: Path, **settings: str) -> Certificate:
    return certify(str(folder), Settings(**settings), TOKENS, "ann@mac")[0]


def verification(folder: Path, certificate: Certificate, **settings: str) -> Verification:
    """Load the model with the certificate beside it."""
    (folder / "certificate.json").write_text(certificate.to_json())
    engine = Engine(EngineSettings(model=str(folder), **settings))
    engine.close()
    (folder / "certificate.json").unlink()
    return engine.model_info.verification


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"dtype": "float32"}),
        pytest.param("llama", {"dtype": "bfloat16"}, marks=pytest.mark.soak),
        pytest.param("qwen3", {"dtype": "float16"}, marks=pytest.mark.soak),
        pytest.param("gemma3", {"dtype": "float32", "mode": "exact"}, marks=pytest.mark.soak),
        pytest.param("gemma2", {"dtype": "float32"}, marks=pytest.mark.soak),
        ("qwen3_moe", {"dtype": "float32"}),
        pytest.param("mamba2", {"dtype": "float32"}, marks=pytest.mark.soak),
    ],
)
def test_a_right_model_is_verified_as_it_is_served(tiny_models: TinyModels, name: str, settings: dict[str, str]):
    certificate = certified(tiny_models(name), **settings)

    assert certificate.fault() is None
    assert certificate.tokens >= TOKENS
    assert certificate.rows >= 4
    assert (certificate.peer_rms_error_nats is None) == (settings["dtype"] == "float32")
    assert verification(tiny_models(name), certificate, **settings).by == "ann@mac"


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_a_quantised_model_is_compared_with_the_weights_that_it_stands_for(
    tiny_models: TinyModels, tmp_path: Path, bits: int
):
    source = shutil.copytree(tiny_models("llama"), tmp_path / "source")
    (source / "config.json").write_text(json.dumps(read_config(source)))
    convert(str(source), str(tmp_path / "quantised"), quantize=True, q_bits=bits, q_group_size=32)

    certificate = certified(tmp_path / "quantised", dtype="float32")

    assert certificate.quantization == f"{bits}-bit affine, groups of 32"
    assert certificate.fault() is None


def test_a_wrong_model_is_not_verified(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    other = shutil.copytree(folder, tmp_path / "other")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("scorepool.worker.certify.__main__.find_folder", lambda model: other)

    certificate = certified(folder, dtype="float32")

    assert "its largest error is" in (certificate.fault() or "")
    monkeypatch.undo()
    assert "its largest error is" in (verification(folder, certificate).reason or "")


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')

    with pytest.raises(CannotCompare, match=f"transformers cannot load {tmp_path}: .*unheard_of"):
        Reference(tmp_path, "float32")


def test_nan_and_excluded_tokens_are_compared():
    one = np.array([[-1.0, -np.inf], [-2.0, -3.0]])

    assert measure.errors([one], [one]).largest == 0
    assert measure.errors([one], [one + np.array([[0.5, 0.0], [0.0, 0.0]])]).largest == 0.5
    assert measure.errors([one], [np.array([[-1.0, -5.0], [-2.0, -3.0]])]).largest == np.inf
    assert measure.errors([one], [np.array([[np.nan, -np.inf], [-2.0, -3.0]])]).largest == np.inf


def test_rows_are_long_and_short_of_text_and_of_random_ids_and_share_a_prompt():
    text_ids = list(range(100_000, 200_000))
    rows = draw_rows(lambda text: text_ids, range(1000), 4096, 2048)

    lengths = [len(row) for row in rows.scored]
    assert lengths[0] == 1024
    assert sum(lengths) >= 2048
    assert min(lengths[1:]) == LENGTHS[0]
    assert max(lengths[1:]) > LENGTHS[-1]
    assert {row[0] in text_ids for row in rows.scored} == {True, False}
    assert len({tuple(row[:48]) for row in rows.scored}) < len(rows.scored)
    assert draw_rows(lambda text: text_ids, range(1000), 4096, 2048) == rows


@pytest.mark.parametrize("longest", [2, 20, 100])
def test_rows_fit_into_the_context(longest: int):
    rows = draw_rows(lambda text: list(range(1000)), range(1000), longest, 512)

    assert all(2 <= len(row) <= longest for row in rows.scored)
    assert sum(map(len, rows.scored)) >= 512
    if longest > NUM_GENERATED:
        assert all(len(prompt) + NUM_GENERATED <= longest for prompt in rows.prompts)


def test_a_row_is_so_short_that_all_its_logits_fit_into_memory():
    assert longest_row(2048, 1000) == 2048
    assert 4 * 256_000 * longest_row(131_072, 256_000) <= 2**30


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("scorepool")), "certify", *arguments]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.timeout(300)
def test_the_command_writes_a_certificate_that_a_load_finds(root: Path, tmp_path: Path):
    demo = root / "scorepool" / "models" / "demo"
    done = run(str(demo), "--tokens", "256", "--by", "ann", SCOREPOOL_CERTIFICATE_DIR=str(tmp_path / "certificates"))

    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (tmp_path / "certificates").iterdir()
    assert f"wrote {file}" in done.stdout
    assert "is verified in float32, mode default" in done.stdout
    engine = Engine(EngineSettings(model=str(demo), certificates=str(file.parent), require_certificate=True))
    engine.close()
    assert engine.model_info.verification.by == "ann"


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["/no/such/folder"], {}, "there is no folder '/no/such/folder'"),
        (["x", "--dtype", "float8"], {}, "SCOREPOOL_DTYPE='float8'"),
        (["x"], {"SCOREPOOL_MODE": "fast"}, "SCOREPOOL_MODE='fast'"),
    ],
)
def test_a_certificate_that_cannot_be_made_ends_with_one_sentence(
    arguments: list[str], environ: dict[str, str], message: str
):
    done = run(*arguments, **environ)

    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_torch_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    present: Callable[[str], object] = running.find_spec
    monkeypatch.setattr(running, "find_spec", lambda name: None if name == "torch" else present(name))

    result = CliRunner().invoke(cli.app, ["certify", "x"])

    assert result.exit_code == 1
    assert result.stderr == (
        "scorepool: `scorepool certify` needs packages that are not installed (torch): "
        f"run `{sys.executable} -m pip install 'scorepool[certify]'`\n"
    )
