"""The model computes the activation that the checkpoint configures, even if mlx-lm's code has another one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, LoadError, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE, TinyModels

ACTIVATION_INPUTS = ("gate_proj", "c_fc", "dense_h_to_4h", "fc1")


@pytest.fixture
def with_activation(tiny_models: TinyModels, tmp_path: Path) -> Callable[..., Path]:
    """Copy a tiny model, configure an activation or none, and scale its inputs so that the two GELUs differ."""

    def copy(name: str, key: str, activation: str | None) -> Path:
        folder = Path(shutil.copytree(tiny_models(name), tmp_path / f"{name}-{activation}"))
        config = json.loads((folder / "config.json").read_text())
        config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config | ({key: activation} if activation else {})))
        weights = load_file(folder / "model.safetensors")
        scaled = {
            path: 4 * weight if any(name in path for name in ACTIVATION_INPUTS) else weight
            for path, weight in weights.items()
        }
        save_file(scaled, folder / "model.safetensors", {"format": "pt"})
        return folder

    return copy


def sequence() -> Sequence:
    draw = Random(1)
    return Sequence(token_ids=[draw.randrange(3, VOCAB_SIZE) for _ in range(60)], score_from=0, top_logprobs=5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", None])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gemma", "hidden_act"),
        ("gpt_bigcode", "activation_function"),
        ("gpt_neox", "hidden_act"),
        ("phi", "hidden_act"),
        ("starcoder2", "hidden_act"),
    ],
)
def test_the_configured_activation_is_computed(
    with_activation: Callable[..., Path],
    open_engine: Callable[[Path], Engine],
    name: str,
    key: str,
    activation: str | None,
):
    folder = with_activation(name, key, activation)
    scored = sequence()
    open_engine(folder).add([scored]).result(60)
    assert_agrees(scored, Oracle(folder), 2e-5)


def test_the_two_gelus_differ_measurably_on_the_test_sequence(with_activation: Callable[..., Path]):
    exact, tanh = (Oracle(with_activation("starcoder2", "hidden_act", name)) for name in ("gelu", "gelu_pytorch_tanh"))
    difference = abs(exact.logprobs(sequence().token_ids) - tanh.logprobs(sequence().token_ids)).max()
    assert difference > 1e-4


def test_two_models_of_one_architecture_keep_their_own_activations(
    with_activation: Callable[..., Path], open_engine: Callable[[Path], Engine]
):
    folders = [with_activation("gpt_neox", "hidden_act", name) for name in ("gelu", "gelu_new", "relu")]
    engines = [open_engine(folder) for folder in folders]
    for engine, folder in zip(engines, folders, strict=True):
        scored = sequence()
        engine.add([scored]).result(60)
        assert_agrees(scored, Oracle(folder), 2e-5)


def test_loading_refuses_a_gelu_that_mlx_lm_computes_as_silu(
    with_activation: Callable[..., Path], open_engine: Callable[[Path], Engine]
):
    with pytest.raises(LoadError, match="activation is gelu, but mlx-lm's llama computes silu"):
        open_engine(with_activation("llama", "hidden_act", "gelu"))
