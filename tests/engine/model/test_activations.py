"""The activation is the one that the checkpoint states, also where mlx-lm's architecture has another in its code."""

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

INTO_ACTIVATIONS = ("gate_proj", "c_fc", "dense_h_to_4h", "fc1")


@pytest.fixture
def stating(tiny_models: TinyModels, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model that states this activation, or none, with inputs large enough to tell GELUs apart."""

    def state(name: str, key: str, activation: str | None) -> Path:
        folder = Path(shutil.copytree(tiny_models(name), tmp_path / f"{name}-{activation}"))
        config = json.loads((folder / "config.json").read_text())
        config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config | ({key: activation} if activation else {})))
        weights = load_file(folder / "model.safetensors")
        louder = {
            path: 4 * weight if any(name in path for name in INTO_ACTIVATIONS) else weight
            for path, weight in weights.items()
        }
        save_file(louder, folder / "model.safetensors", {"format": "pt"})
        return folder

    return state


def row() -> Sequence:
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
def test_a_stated_activation_is_computed(
    stating: Callable[..., Path],
    open_engine: Callable[[Path], Engine],
    name: str,
    key: str,
    activation: str | None,
):
    folder = stating(name, key, activation)
    scored = row()
    open_engine(folder).add([scored]).result(60)
    assert_agrees(scored, Oracle(folder), 2e-5)


def test_the_two_gelus_can_be_told_apart_here(stating: Callable[..., Path]):
    exact, by_tanh = (Oracle(stating("starcoder2", "hidden_act", name)) for name in ("gelu", "gelu_pytorch_tanh"))
    difference = abs(exact.logprobs(row().token_ids) - by_tanh.logprobs(row().token_ids)).max()
    assert difference > 1e-4


def test_models_of_one_architecture_side_by_side_have_each_its_own(
    stating: Callable[..., Path], open_engine: Callable[[Path], Engine]
):
    folders = [stating("gpt_neox", "hidden_act", name) for name in ("gelu", "gelu_new", "relu")]
    engines = [open_engine(folder) for folder in folders]
    for engine, folder in zip(engines, folders, strict=True):
        scored = row()
        engine.add([scored]).result(60)
        assert_agrees(scored, Oracle(folder), 2e-5)


def test_a_gelu_where_mlx_lm_computes_silu_is_refused(
    stating: Callable[..., Path], open_engine: Callable[[Path], Engine]
):
    with pytest.raises(LoadError, match="activation is gelu, and mlx-lm's llama computes silu"):
        open_engine(stating("llama", "hidden_act", "gelu"))
