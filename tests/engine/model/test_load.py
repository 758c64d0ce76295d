"""Loading names what is wrong, never runs code of a checkpoint, and fingerprints weights by their content."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError
from scorepool.engine.model import checkpoint, products
from scorepool.engine.model.checkpoint import fingerprint
from tests.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, TinyModels


@pytest.fixture
def folder(tiny_models: TinyModels, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models("llama"), tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load_error(model: Path | str) -> str:
    with pytest.raises(LoadError) as caught:
        Engine(EngineSettings(model=str(model)))
    return caught.value.message


def test_model_info_describes_the_served_model(engine_of: Callable[..., Engine]):
    model_info = engine_of("llama").model_info

    assert (model_info.context_length, model_info.vocab_size) == (CONTEXT_LENGTH, VOCAB_SIZE)
    assert (model_info.dtype, model_info.quantization, model_info.adapter) == ("float32", None, None)
    assert set(model_info.versions) == {"mlx", "mlx-lm"}
    assert re.fullmatch(
        r"cpu \(\w+, (openblas \w+, \d+ threads|reference blas|accelerate)(, numpy [\d.]+)?\)|(metal|cuda) \([^()]+\)",
        model_info.backend,
    )


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only there a BLAS is chosen")
WITHOUT_TORCH = "from scorepool.engine.trial import prevent_torch_import\nprevent_torch_import()\n"  # as a worker does


def test_the_backend_names_what_the_rounding_of_openblas_depends_on(root: Path):
    if mx.default_device() != mx.cpu or "openblas" not in products.prepare():
        pytest.skip("MLX does not compute on a CPU with OpenBLAS")
    code = f"{WITHOUT_TORCH}from scorepool.engine.model import load; print(load._backend())"
    for num_threads in (1, 2):
        environ = os.environ | {"OPENBLAS_NUM_THREADS": str(num_threads)}
        done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True)
        assert re.fullmatch(rf"cpu \(\w+, openblas \w+, {num_threads} threads(, numpy [\d.]+)?\)\n", done.stdout)


@pytest.mark.parametrize(
    ("name", "expected", "other"),
    [
        pytest.param("OPENBLAS_THREAD_TIMEOUT", "14", "20", marks=LINUX, id="idle threads of OpenBLAS sleep soon"),
        pytest.param("MLX_ENABLE_TF32", "0", "1", id="products of float32 are not rounded to TF32"),
    ],
)
def test_how_mlx_multiplies_is_chosen_unless_the_environment_says_otherwise(
    root: Path, name: str, expected: str, other: str
):
    code = f"import os; from scorepool.engine.model import products; products.prepare(); print(os.environ['{name}'])"
    environ = {known: value for known, value in os.environ.items() if known != name}
    for chosen, used in (({}, expected), ({name: other}, other)):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=environ | chosen, capture_output=True, text=True
        )
        assert done.stdout == f"{used}\n", done.stderr


def describe_processor(vendor: str, family: int, flags: str) -> str:
    """Return the beginning of /proc/cpuinfo on x86."""
    core = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\npower management:\nflags\t\t: fpu {flags}\n"
    return f"{core}\n{core.replace(': 0', ': 1')}\n"


AVX2 = "avx fma avx2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        pytest.param(describe_processor("GenuineIntel", 6, f"{AVX512} amx_tile"), "SKYLAKEX", id="Emerald Rapids"),
        pytest.param(describe_processor("GenuineIntel", 6, AVX2), "HASWELL", id="Alder Lake"),
        pytest.param(
            describe_processor("GenuineIntel", 6, f"{AVX2} avx512f avx512cd"), "HASWELL", id="Knights Landing"
        ),
        pytest.param(describe_processor("GenuineIntel", 6, "avx"), None, id="Sandy Bridge"),
        pytest.param(describe_processor("AuthenticAMD", 25, f"{AVX512} avx512_bf16"), "ZEN", id="Zen 4"),
        pytest.param(describe_processor("AuthenticAMD", 25, AVX2), "ZEN", id="Zen 3"),
        pytest.param(describe_processor("AuthenticAMD", 26, AVX512), "SKYLAKEX", id="Zen 5, with units of 512 bits"),
        pytest.param(describe_processor("AuthenticAMD", 21, "avx fma4"), None, id="Bulldozer"),
        pytest.param("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n\n", None, id="ARM"),
        pytest.param("", None, id="nothing is told"),
    ],
)
def test_openblas_has_the_kernels_for_what_the_processor_can_do(processors: str, expected: str | None):
    assert products.find_kernels(processors) == expected


@LINUX
def test_openblas_takes_the_kernels_it_is_told(root: Path):
    kernels = products.find_kernels(Path("/proc/cpuinfo").read_text())
    if kernels is None or "openblas" not in products.prepare():
        pytest.skip("OpenBLAS finds its kernels itself, or is not there")
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    code = f"{WITHOUT_TORCH}from scorepool.engine.model import products; print(products.prepare())"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True)
    assert done.stdout.lower().startswith(f"openblas {kernels.lower()},"), done.stdout + done.stderr


@LINUX
def test_openblas_has_these_kernels_unless_the_environment_says_otherwise(root: Path, tmp_path: Path):
    processors = tmp_path / "cpuinfo"
    processors.write_text(describe_processor("AuthenticAMD", 25, AVX512))
    code = (
        f"{WITHOUT_TORCH}import os, pathlib; from scorepool.engine.model import products;"
        f"products._PROCESSORS = pathlib.Path({str(processors)!r}); products.prepare();"
        "print(os.environ['OPENBLAS_CORETYPE'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    for chosen, used in (({}, "ZEN"), ({"OPENBLAS_CORETYPE": "Haswell"}, "Haswell")):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=environ | chosen, capture_output=True, text=True
        )
        assert done.stdout == f"{used}\n", done.stderr


@LINUX
@pytest.mark.parametrize("is_prevented", [False, True])
def test_torch_is_imported_before_openblas_whose_functions_it_would_take(root: Path, is_prevented: bool):
    code = (
        f"{WITHOUT_TORCH if is_prevented else ''}from scorepool.engine.model import products; import ctypes, sys;"
        "load = ctypes.CDLL; seen = [];"
        "ctypes.CDLL = lambda *a, **k: (seen.append(bool(sys.modules.get('torch'))), load(*a, **k))[1];"
        "products.prepare(); print(seen[-1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == f"{not is_prevented}\n", done.stderr


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_a_backend_that_rounds_products_to_tf32_says_so(root: Path, enabled: str):
    """Only GPUs with matrix units round: those of NVIDIA from Ampere on, and Apple's from the M5 on."""
    code = (
        "from scorepool.engine.model import load, device; import mlx.core as mx, numpy as np;"
        "random = np.random.default_rng(0).standard_normal((64, 64));"
        "factor = random.astype(np.float32); found = np.array(mx.array(factor) @ mx.array(factor));"
        "print(np.abs(found - factor.astype(np.float64) @ factor).max() > 1e-4, ', tf32' in load._backend())"
    )
    environ = os.environ | {"MLX_ENABLE_TF32": enabled}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True)
    is_rounded, is_named = done.stdout.split()
    assert is_named == is_rounded
    assert is_rounded == "False" or enabled == "1"


def test_a_missing_folder_is_named(tmp_path: Path):
    assert str(tmp_path / "gone") in load_error(tmp_path / "gone")
    assert "hub id" in load_error("not-a-folder")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, missing: str):
    (folder / missing).unlink()

    assert f"{missing.split('.')[0]}" in load_error(folder)


def test_an_unknown_architecture_is_named(folder: Path):
    edit_config(folder, model_type="unknown-architecture")

    assert "unknown-architecture" in load_error(folder)


def test_code_in_a_checkpoint_is_never_run(folder: Path, tmp_path: Path):
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    edit_config(folder, model_file="evil.py")

    assert "evil.py" in load_error(folder)
    assert not canary.exists()


def test_weights_that_do_not_fit_the_configuration_are_refused(folder: Path):
    edit_config(folder, num_hidden_layers=3)

    assert "model.layers.2" in load_error(folder)


def test_the_fingerprint_depends_on_content_and_not_on_the_path(folder: Path, tiny_models: TinyModels):
    before = fingerprint(folder)
    assert before == fingerprint(tiny_models("llama"))
    (folder / "README.md").write_text("the numbers do not depend on this file")
    assert before == fingerprint(folder)

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    assert before != fingerprint(folder)


@pytest.mark.parametrize(
    ("name", "is_fingerprinted"),
    [("preprocessor_config.json", True), ("video_preprocessor_config.json", True), ("1_Pooling/config.json", False)],
)
def test_settings_beside_the_models_are_fetched_from_the_hub_and_fingerprinted_if_logprobs_depend_on_them(
    name: str, is_fingerprinted: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    before = fingerprint(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert (before != fingerprint(folder)) == is_fingerprinted
    fetched: list[str] = []
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda _, allow_patterns: fetched.extend(allow_patterns) or "")
    checkpoint.find_folder("someone/a-model")
    assert name in fetched


def test_a_process_can_exit_during_a_step(tiny_models: TinyModels, root: Path):
    code = (
        f"{WITHOUT_TORCH}from scorepool.engine import Engine, EngineSettings, Sampling, Sequence\n"
        f"engine = Engine(EngineSettings(model={str(tiny_models('llama'))!r}))\n"
        "engine.add([Sequence(token_ids=[1], sampling=Sampling(max_tokens=500))])\n"
        "raise SystemExit(3)\n"
    )

    completed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)

    assert (completed.returncode, completed.stdout) == (3, b"")
