"""The model computes the activation that the checkpoint configures, even if mlx-lm's code has another one."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx_lm.models
import pytest
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, LoadError, Sequence
from scorepool.engine.model import activations
from scorepool.engine.model.load import load_checked
from survey.families import FAMILIES
from survey.run import survey
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE, TinyModels

Config = dict[str, Any]
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


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "quick_gelu", None])
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


def test_every_layer_that_computes_the_activation_is_patched():
    family = FAMILIES["recurrent_gemma"]  # in its MLPs and in its recurrent blocks
    settings = {**family.settings, "hidden_activation": "quick_gelu"}
    base = next(survey(replace(family, settings=settings), 0, checks_settings=False))
    assert base.outcome == "agrees", base


def test_two_models_of_one_architecture_keep_their_own_activations(
    with_activation: Callable[..., Path], open_engine: Callable[[Path], Engine]
):
    folders = [with_activation("gpt_neox", "hidden_act", name) for name in ("gelu", "gelu_new", "relu")]
    engines = [open_engine(folder) for folder in folders]
    for engine, folder in zip(engines, folders, strict=True):
        scored = sequence()
        engine.add([scored]).result(60)
        assert_agrees(scored, Oracle(folder), 2e-5)


def test_loading_refuses_an_activation_that_mlx_lm_does_not_compute(with_activation: Callable[..., Path]):
    with pytest.raises(LoadError, match=r"hidden_act is 'gelu', which mlx-lm's llama does not compute.*silu or swish"):
        load_checked(with_activation("llama", "hidden_act", "gelu"), "float32", checks_settings=False)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_act": "relu2"},
        {"model_type": "llama", "hidden_act": "unheard_of"},
        {"model_type": "gemma2", "hidden_activation": "gelu_10"},
        {"model_type": "gpt2", "activation_function": "mish"},
        {"model_type": "gemma4_unified", "text_config": {"hidden_activation": "gelu"}},
        {"model_type": "mamba", "hidden_act": "relu"},
        {"model_type": "nanochat", "hidden_act": "silu"},
        {"model_type": "nemotron", "hidden_act": "relu"},
        {"model_type": "nemotron_h", "mlp_hidden_act": "silu"},
        {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "mamba_hidden_act": "relu2"},
        {"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "gelu"}}},
        {"model_type": "qwen3_5", "text_config": {"hidden_act": "gelu"}},
        {"model_type": "qwen2_vl", "hidden_act": "gelu"},  # as published, without text_config
        {"model_type": "kimi_k2", "hidden_act": "gelu"},  # this type and the next are unknown to transformers
        {"model_type": "exaone", "activation_function": "gelu"},
    ],
)
def test_other_activations_are_refused_by_key_and_value(config: Config):
    section = config.get("text_config") or config
    key = [key for key in section if key != "model_type"][-1]
    value = "gelu" if key == "ffn_config" else section[key]
    with pytest.raises(LoadError, match=f"{key}.* is '{value}', which mlx-lm's {config['model_type']} does not"):
        activations.check(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "apertus", "hidden_act": "xielu"},
        {"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "silu"}}},
        {"model_type": "exaone", "activation_function": "silu"},
        {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
        {"model_type": "gemma2", "hidden_act": "unread", "hidden_activation": "gelu_pytorch_tanh"},
        {"model_type": "gemma3n", "text_config": {"hidden_activation": "gelu_new"}},
        {"model_type": "gpt_oss", "hidden_act": "swigluoai"},
        {"model_type": "lfm2", "hidden_act": "unread"},
        {"model_type": "minimax_m3_vl", "text_config": {"hidden_act": "swigluoai"}},
        {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "hidden_act": "unread"},
        {"model_type": "openelm", "activation_fn_name": "swish"},
        {"model_type": "phi-msft", "activation_function": "gelu_new"},
        {"model_type": "pixtral", "hidden_act": "gelu", "text_config": {"hidden_act": "silu"}},  # gelu is for images
        {"model_type": "rwkv7", "hidden_act": "sqrelu"},
    ],
)
def test_activations_of_published_checkpoints_are_accepted(config: Config):
    activations.check(config)


def test_every_architecture_that_computes_another_activation_than_silu_is_in_a_table():
    folder = Path(mlx_lm.models.__path__[0])
    named = re.compile(r"nn\.(gelu|relu|GELU|ReLU)|XieLU|SwigluOAI|SwitchMLP|gegelu|situ\b")
    no_architectures = {"activations", "switch_layers"}
    others = {path.stem for path in folder.glob("*.py") if named.search(path.read_text())} - no_architectures
    gated_by_silu = {"muse_spark"}  # its GELU is for images
    tables = activations.REPLACEABLE | activations.COMPUTED.keys() | activations.UNCHECKED
    text_models_of_others = {"gemma3", "gemma4"}
    without_the_setting = {"lfm2", "lfm2-vl", "lfm2_moe"}
    assert others - gated_by_silu == tables - text_models_of_others - without_the_setting
