"""Adapters that mlx-lm trained run beside peft's, with the numbers of torch, or are refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from safetensors.torch import load_file, save_file

from scorepool.engine import AdapterError, Engine
from scorepool.engine.model.dequantize import dequantized_weights
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.mlx_adapters import oracle_with_mlx, save_mlx_adapter, train_mlx_adapter
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_adapter_formats import check_beside_base, edit_config
from tests.engine.test_adapters import mixed_queue
from tests.tiny_models import TinyModels

Open = Callable[..., Engine]
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_mixed_queue_of_both_formats_and_none_equals_torch(
    model: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Open
):
    base = tiny_models(model)
    lora = save_mlx_adapter(base, tmp_path / "lora", 0)
    dora = save_mlx_adapter(base, tmp_path / "dora", 1, "dora", rank=5, scale=3.0)
    peft = save_adapter(base, tmp_path / "peft", 2)
    folders = {"lora": lora, "dora": dora, "peft": peft}
    engine = open_engine(base, adapters=tuple((name, str(folder)) for name, folder in folders.items()))
    oracles: dict[str | None, Oracle] = {None: Oracle(base), "peft": oracle_with(base, peft)}
    oracles |= {name: oracle_with_mlx(base, folders[name]) for name in ("lora", "dora")}
    queue = mixed_queue(160, names=(None, "lora", "dora", "peft"))

    for future in [engine.add([sequence]) for sequence in queue]:
        future.result(120)

    for sequence in queue:
        assert_agrees(sequence, oracles[sequence.adapter_name])
        assert (sequence.model_info.adapter or "").partition("@")[0] == (sequence.adapter_name or "")
    assert {each.name: (each.kind, each.rank) for each in engine.adapters} == {
        "lora": ("lora", 8),
        "dora": ("dora", 5),
        "peft": ("lora", 8),
    }


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_that_mlx_lm_trained_equals_torch_and_mlx_lm(
    kind: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Open
):
    base = tiny_models("llama")
    folder = train_mlx_adapter(base, tmp_path / "a", fine_tune_type=kind)
    oracle, token_ids = oracle_with_mlx(base, folder), [1, 40, 50, 60, 70, 80]
    model, _ = load_model(base)
    logits = load_adapters(model, str(folder))(mx.array([token_ids])).astype(mx.float32)[0]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert np.abs(logprobs - oracle.logprobs(token_ids)).max() < 1e-4
    assert np.abs(logprobs - Oracle(base).logprobs(token_ids)).max() > 0.1

    engine = open_engine(base, adapters=(("a", str(folder)),))

    check_beside_base(engine, Oracle(base), oracle)


@pytest.mark.parametrize(
    ("model", "settings", "rename"),
    [
        ("llama", {"num_layers": 1}, str),
        ("llama", {"keys": ["self_attn.q_proj", "mlp.down_proj"], "rank": 1}, str),
        ("llama", {"keys": ["self_attn.q_proj", "model.layers.0.mlp.up_proj"], "num_layers": 1}, str),
        ("starcoder2", {"kind": "dora"}, str),  # with biases
        ("qwen3_moe", {"keys": ATTENTION}, str),
        ("gpt_neox", {}, lambda path: path.replace("model.h.", "gpt_neox.layers.")),
    ],
    ids=["one layer", "keys", "keys of both kinds", "biases", "attention of experts", "other paths"],
)
def test_settings_of_mlx_lm_are_followed(
    model: str,
    settings: dict[str, Any],
    rename: Callable[[str], str],
    tiny_models: TinyModels,
    tmp_path: Path,
    open_engine: Open,
):
    base = tiny_models(model)
    folder = save_mlx_adapter(base, tmp_path / "a", 0, **settings)

    engine = open_engine(base, adapters=(("a", str(folder)),))

    check_beside_base(engine, Oracle(base), oracle_with_mlx(base, folder, rename))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_a_quantised_base_equals_torch_on_the_dequantised_weights(
    kind: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Open
):
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    for copy in (packed, unpacked):
        shutil.copytree(tiny_models("llama"), copy)
        (copy / "model.safetensors").unlink()
    model, config = quantize_model(*load_model(tiny_models("llama")), group_size=64, bits=4)
    save_model(packed, model)
    save_config(config, packed / "config.json")
    mx.save_safetensors(str(unpacked / "model.safetensors"), dict(dequantized_weights(packed)), {"format": "pt"})
    folder = save_mlx_adapter(packed, tmp_path / "a", 0, kind)

    engine = open_engine(packed, adapters=(("a", str(folder)),))

    check_beside_base(engine, Oracle(unpacked), oracle_with_mlx(unpacked, folder))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_goes_on_with_other_weights(kind: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Open):
    base, other = tiny_models("llama"), tmp_path / "other"
    folder = save_mlx_adapter(base, tmp_path / "a", 0, kind)
    engine = open_engine(base, adapters=(("a", str(folder)),))
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})

    engine.stage_weights(str(other), 1).result(60)
    engine.switch_weights().result(60).result(60)

    check_beside_base(engine, Oracle(other), oracle_with_mlx(other, folder))


def test_whole_layers_that_mlx_lm_trained_are_refused_by_name(tiny_models: TinyModels, tmp_path: Path, engine: Engine):
    folder = train_mlx_adapter(tiny_models("llama"), tmp_path / "a", fine_tune_type="full")

    with pytest.raises(
        AdapterError, match=r"'a' cannot be loaded: .*fine_tune_type is 'full', expected .*\(mlx_lm\.fuse\)"
    ):
        engine.load_adapter("a", str(folder)).result(60)


PARAMETERS = {"rank": 8, "scale": 2.0, "dropout": 0.0}
BAD_SETTINGS: list[tuple[dict[str, object], str]] = [
    ({"fine_tune_type": "loha"}, 'fine_tune_type is \'loha\', expected "lora" or "dora"'),
    ({"fine_tune_type": "dora"}, "has no model.layers.0.mlp.down_proj.m, expected one of each layer"),
    ({"num_layers": None}, "num_layers is None, expected a whole number"),
    ({"num_layers": 16}, "num_layers is 16, expected at most 2, the base model's layers"),
    ({"num_layers": 1}, "changes model.layers.0.mlp.down_proj, which adapter_config.json: num_layers and"),
    ({"lora_parameters": None}, "lora_parameters is None, expected an object with rank and scale"),
    ({"lora_parameters": PARAMETERS | {"rank": 4}}, "expected [in, 4] and [4, out] for lora_parameters.rank"),
    ({"lora_parameters": PARAMETERS | {"rank": "8"}}, "lora_parameters.rank is '8', expected a whole number from 1 on"),
    ({"lora_parameters": {"rank": 8, "dropout": 0}}, "lora_parameters.scale is None, expected a number"),
    ({"lora_parameters": PARAMETERS | {"scale": 1e400}}, "lora_parameters.scale is inf, expected a number"),
    (
        {"lora_parameters": PARAMETERS | {"alpha": 16}},
        "lora_parameters.alpha is 16, expected only dropout, keys, rank, ",
    ),
    ({"lora_parameters": PARAMETERS | {"keys": "q_proj"}}, "lora_parameters.keys is 'q_proj', expected a list of"),
    (
        {"lora_parameters": PARAMETERS | {"keys": ["self_attn.q_proj"]}},
        "changes model.layers.0.mlp.down_proj, which adapter_config.json: num_layers and lora_parameters.keys do not",
    ),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], expected it to be unset"),
    ({"use_rslora": True}, "use_rslora is True, expected it to be unset"),
]
BAD_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda found: found.pop(f"{Q}.lora_a"), f"has no {Q}.lora_a, expected one of each layer"),
    (lambda found: [found.pop(f"{Q}.lora_{part}") for part in "ab"], f"has no {Q}.lora_a, expected one of each layer"),
    (lambda found: found.update({"lm_head.weight": torch.ones(2, 2)}), "has a tensor 'lm_head.weight', expected only"),
    (lambda found: found.update({f"{Q}.m": torch.ones(64)}), ".lora_b, because fine_tune_type is not dora"),
    (
        lambda found: found.update({"model.layers.7.mlp.up_proj.lora_a": torch.ones(64, 8)}),
        "the base model has no layer model.layers.7.mlp.up_proj, expected an adapter of its architecture",
    ),
    (lambda found: found[f"{Q}.lora_b"].fill_(torch.nan), "q_proj: lora_b holds numbers that are not finite"),
    (
        lambda found: found.update({f"{Q}.lora_a": torch.ones(65, 8)}),
        "takes 65 numbers and gives 64, expected 64 and 64, those of the base model's layer",
    ),
    (lambda found: found.update({f"{Q}.lora_a": torch.ones(8, 64)}), "lora_a is [8, 64] and lora_b [8, 64], expected"),
    (lambda found: found.clear(), "has no tensors"),
]


@pytest.fixture
def llama_adapter(tiny_models: TinyModels, tmp_path: Path) -> Path:
    return save_mlx_adapter(tiny_models("llama"), tmp_path / "adapter", 3)


@pytest.mark.parametrize(("values", "message"), BAD_SETTINGS, ids=[str(values) for values, _ in BAD_SETTINGS])
def test_a_setting_that_cannot_be_followed_refuses_the_adapter(
    values: dict[str, object], message: str, llama_adapter: Path, engine: Engine
):
    edit_config(llama_adapter, **values)

    with pytest.raises(AdapterError) as refused:
        engine.load_adapter("a", str(llama_adapter)).result(60)

    assert "adapter 'a' cannot be loaded: " in refused.value.message
    assert message in refused.value.message
    assert engine.adapters == []


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[message for _, message in BAD_TENSORS])
def test_tensors_that_do_not_fit_refuse_the_adapter(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, llama_adapter: Path, engine: Engine
):
    path = llama_adapter / "adapters.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)

    with pytest.raises(AdapterError) as refused:
        engine.load_adapter("a", str(llama_adapter)).result(60)

    assert message in refused.value.message
    assert engine.adapters == []


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("qwen3_moe", None, "mlp.switch_mlp.down_proj is a SwitchLinear, expected linear layers only: train with"),
        (
            "llama",
            ["self_attn.q_proj", "lm_head"],
            "lora_parameters.keys name lm_head, expected layers of the model's blo",
        ),
        (
            "llama",
            ["model.embed_tokens"],
            "lora_parameters.keys name model.embed_tokens, expected layers of the model's",
        ),
    ],
)
def test_layers_that_cannot_be_served_refuse_the_adapter(
    model: str, keys: list[str] | None, message: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Open
):
    parameters = {} if keys is None else {"keys": keys}
    folder = save_mlx_adapter(tiny_models(model), tmp_path / "a", 0, **parameters)
    engine = open_engine(tiny_models(model))

    with pytest.raises(AdapterError) as refused:
        engine.load_adapter("a", str(folder)).result(60)

    assert message in refused.value.message


def test_an_adapter_of_another_architecture_is_refused(tiny_models: TinyModels, tmp_path: Path, engine: Engine):
    folder = save_mlx_adapter(tiny_models("gpt_neox"), tmp_path / "a", 0)

    with pytest.raises(AdapterError, match=r"the base model has no layer model\.h\.0\.attention\.dense, expected an"):
        engine.load_adapter("a", str(folder)).result(60)


def test_settings_without_tensors_or_with_broken_ones_are_refused(llama_adapter: Path, engine: Engine):
    file = llama_adapter / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError, match=r"adapters\.safetensors cannot be read"):
        engine.load_adapter("a", str(llama_adapter)).result(60)

    file.rename(llama_adapter / "0000100_adapters.safetensors")
    with pytest.raises(
        AdapterError, match=r"expected adapters\.safetensors .* found 0000100_adapters\.safetensors, ad"
    ):
        engine.load_adapter("a", str(llama_adapter)).result(60)


def test_settings_that_name_pefts_type_are_peft_s(llama_adapter: Path, engine: Engine):
    config = json.loads((llama_adapter / "adapter_config.json").read_text())
    (llama_adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LORA", "r": 8}))

    with pytest.raises(AdapterError, match="expected adapter_model"):
        engine.load_adapter("a", str(llama_adapter)).result(60)
