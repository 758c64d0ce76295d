"""What peft can save is computed as peft computes it, or refused by name."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from safetensors.torch import load_file, save_file

from scorepool.engine import AdapterError, Engine, LoadError, Sampling, Sequence
from scorepool.engine.model.dequantize import dequantized_weights
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.mlx_adapters import save_mlx_adapter
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_adapters import tokens
from tests.tiny_models import TinyModels
from tests.tiny_tokenizer import BOS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "rank 1": {"r": 1},
    "patterns": {"rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 5}, "alpha_pattern": {"v_proj": 40}},
    "one layer": {"layers_to_transform": [1]},
    "excluded": {"exclude_modules": ["k_proj"]},
    "a pattern": {"target_modules": r".*\.(q|v)_proj"},
    "dora": {"use_dora": True},
    "dora with rslora": {"use_dora": True, "use_rslora": True, "r": 5},
}
FAMILIES = {
    "qwen3_moe": ATTENTION,
    "gemma": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "gemma3": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
    "phi3_longrope": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "starcoder2": [*ATTENTION, "c_fc", "c_proj"],
    "gpt_oss": ATTENTION,
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "lfm2": ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
}


def check_beside_base(engine: Engine, base: Oracle, adapted: Oracle) -> None:
    """Run rows of the adapter "a" and of none together, and compare them with the oracles."""
    draw = Random(1)
    sequences = [
        Sequence(
            token_ids=tokens(draw, draw.randrange(3, 30)),
            score_from=1,
            sampling=Sampling(max_tokens=4, temperature=0) if number % 3 else None,
            adapter_name="a" if number % 2 else None,
        )
        for number in range(12)
    ]
    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(60)
    for sequence in sequences:
        assert_agrees(sequence, adapted if sequence.adapter_name else base)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_peft_are_followed(
    settings: dict[str, Any], tiny_models: TinyModels, tmp_path: Path, open_engine: Callable[..., Engine]
):
    base = tiny_models("llama")
    folder = save_adapter(base, tmp_path / "a", 0, **settings)

    engine = open_engine(base, adapters=(("a", str(folder)),))

    check_beside_base(engine, Oracle(base), oracle_with(base, folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_equal_peft(
    name: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Callable[..., Engine]
):
    base = tiny_models(name)
    folder = save_adapter(base, tmp_path / "a", 0, target_modules=FAMILIES[name])

    engine = open_engine(base, adapters=(("a", str(folder)),))

    check_beside_base(engine, Oracle(base), oracle_with(base, folder))


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
UNSET = "it to be unset: it would be ignored, and the logprobs would be others"
BAD_SETTINGS: list[tuple[dict[str, object], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected \"LORA\""),
    ({"bias": "all"}, "bias is 'all', expected \"none\""),
    ({"modules_to_save": ["lm_head"]}, f"modules_to_save is ['lm_head'], expected {UNSET}"),
    ({"layer_replication": [[0, 2]]}, f"layer_replication is [[0, 2]], expected {UNSET}"),
    ({"trainable_token_indices": [3]}, f"trainable_token_indices is [3], expected {UNSET}"),
    ({"alora_invocation_tokens": [3]}, f"alora_invocation_tokens is [3], expected {UNSET}"),
    ({"lora_bias": True}, f"lora_bias is True, expected {UNSET}"),
    ({"a_setting_of_tomorrow": 1}, f"a_setting_of_tomorrow is 1, expected {UNSET}"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected an init that does not change the base"),
    ({"r": "8"}, "r is '8', expected a whole number from 1 on"),
    ({"r": 4}, "lora_A is [8, 128] and lora_B [64, 8], expected [4, in] and [out, 4]"),
    ({"target_modules": "all-linear"}, "target_modules is 'all-linear', expected a pattern, or a list"),
    ({"target_modules": ["q_proj"]}, "mlp.down_proj, which adapter_config.json does not name: peft ignores it"),
    ({"target_modules": "("}, "target_modules is '(', expected a pattern, or a list"),
    ({"use_dora": True}, "has no lora_magnitude_vector for"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is {'q_proj': 0}, expected an object with ranks by pattern"),
]
BAD_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda found: found.pop(f"{Q}.lora_A.weight"), "has no lora_A for model.layers.0.self_attn.q_proj"),
    (
        lambda found: [found.pop(f"{Q}.lora_{part}.weight") for part in "AB"],
        "has no tensors for model.layers.0.self_attn.q_proj, which adapter_config.json: target_modules names",
    ),
    (lambda found: found.update({"lm_head.weight": torch.ones(2, 2)}), "has a tensor 'lm_head.weight', expected only"),
    (lambda found: found[f"{Q}.lora_B.weight"].fill_(torch.nan), "q_proj: lora_B holds numbers that are not finite"),
    (
        lambda found: found.update({f"{Q}.lora_A.weight": torch.ones(8, 65)}),
        "takes 65 numbers and gives 64, expected 64 and 64, those of the base model's layer",
    ),
    (lambda found: found.clear(), "has no tensors"),
]


@pytest.mark.parametrize(("values", "message"), BAD_SETTINGS, ids=[str(values) for values, _ in BAD_SETTINGS])
def test_a_setting_that_would_be_ignored_refuses_the_adapter(
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
    edit_tensors(llama_adapter, change)

    with pytest.raises(AdapterError) as refused:
        engine.load_adapter("a", str(llama_adapter)).result(60)

    assert message in refused.value.message


def test_an_adapter_of_another_architecture_is_refused(tiny_models: TinyModels, tmp_path: Path, engine: Engine):
    targets = ["query_key_value"]
    folder = save_adapter(tiny_models("gpt_neox"), tmp_path / "a", 0, target_modules=targets)

    with pytest.raises(
        AdapterError, match=r"the base model has no layer gpt_neox\.layers\.0\.attention\.query_key_value"
    ):
        engine.load_adapter("a", str(folder)).result(60)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "lm_head",
            "lm_head is changed, expected layers of the backbone only: the head must be the base model's, so train",
        ),
        (
            "embed_tokens",
            "model.embed_tokens is changed, .* the embeddings must .* train without embed_tokens in target_",
        ),
    ],
)
def test_an_adapter_of_head_or_embeddings_is_refused(
    target: str, message: str, tiny_models: TinyModels, tmp_path: Path, engine: Engine
):
    folder = save_adapter(tiny_models("llama"), tmp_path / "a", 0, target_modules=["q_proj", target])

    with pytest.raises(AdapterError, match=message):
        engine.load_adapter("a", str(folder)).result(60)


def test_a_folder_that_is_not_there_or_holds_no_adapter_is_refused(tmp_path: Path, engine: Engine):
    for folder, message in ((tmp_path / "none", "there is no folder"), (tmp_path, "has no adapter_config.json")):
        with pytest.raises(AdapterError, match=message):
            engine.load_adapter("a", str(folder)).result(60)


def test_a_broken_file_is_refused_and_what_is_served_goes_on(
    llama_adapter: Path, tmp_path: Path, tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), adapters=(("a", str(llama_adapter)),))
    before = engine.adapters
    broken = Path(shutil.copytree(llama_adapter, tmp_path / "broken"))
    file = broken / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(AdapterError, match="cannot be read"):
        engine.load_adapter("a", str(broken)).result(60)

    assert engine.adapters == before
    check_beside_base(engine, Oracle(tiny_models("llama")), oracle_with(tiny_models("llama"), llama_adapter))


def test_an_engine_does_not_start_without_an_adapter_of_its_settings(
    tiny_models: TinyModels, tmp_path: Path, open_engine: Callable[..., Engine]
):
    with pytest.raises(LoadError, match="adapter 'a' cannot be loaded: there is no folder"):
        open_engine(tiny_models("llama"), adapters=(("a", str(tmp_path / "none")),))


def test_adapters_beyond_the_memory_are_refused(
    llama_adapter: Path, tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), memory_bytes=1_400_000, prefix_cache_bytes=0, max_running_rows=4)
    room = engine.model_info.max_cached_tokens
    loads = [engine.load_adapter(name, str(llama_adapter)) for name in "abcdefghijklmnopqrstuvwxyz"]

    with pytest.raises(AdapterError, match=r"adapters of this worker take \d+ bytes, expected at most \d+, half of"):
        loads[-1].result(60)

    assert len(engine.adapters) >= 1
    assert room // 2 - 1 <= engine.model_info.max_cached_tokens < room
    for adapter in engine.adapters:
        engine.unload_adapter(adapter.name).result(60)
    assert engine.model_info.max_cached_tokens == room
    assert engine.add([Sequence(token_ids=[BOS, 5], score_from=1)]).result(60)


@pytest.fixture
def llama_adapter(tiny_models: TinyModels, tmp_path: Path) -> Path:
    return save_adapter(tiny_models("llama"), tmp_path / "adapter", 3)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_quantised_base_equals_peft_on_its_dequantised_weights(
    settings: dict[str, Any], tiny_models: TinyModels, tmp_path: Path, open_engine: Callable[..., Engine]
):
    base, packed, unpacked = tiny_models("llama"), tmp_path / "packed", tmp_path / "unpacked"
    folder = save_adapter(base, tmp_path / "a", 0, **settings)
    for copy in (packed, unpacked):
        shutil.copytree(base, copy)
        (copy / "model.safetensors").unlink()
    model, config = load_model(base)
    model, config = quantize_model(model, config, group_size=64, bits=4)
    save_model(packed, model)
    save_config(config, packed / "config.json")
    mx.save_safetensors(str(unpacked / "model.safetensors"), dict(dequantized_weights(packed)), {"format": "pt"})

    engine = open_engine(packed, adapters=(("a", str(folder)),))

    assert engine.model_info.quantization is not None
    check_beside_base(engine, Oracle(unpacked), oracle_with(unpacked, folder))


@pytest.mark.parametrize(("kind", "rank"), [("peft", 64), ("peft", 256), ("mlx-lm", 256)])
def test_a_rank_that_is_too_large_is_refused_before_it_takes_memory(
    kind: str,
    rank: int,
    llama_adapter: Path,
    tiny_models: TinyModels,
    tmp_path: Path,
    open_engine: Callable[..., Engine],
):
    base = tiny_models("llama")
    save = save_adapter if kind == "peft" else save_mlx_adapter
    wide = save(base, tmp_path / "wide", 0, **{"r" if kind == "peft" else "rank": rank})
    read_bytes = sum(file.stat().st_size for file in wide.glob("*.safetensors")) if rank == 64 else 0
    engine = open_engine(base, memory_bytes=1_400_000, prefix_cache_bytes=0, max_running_rows=4)
    engine.load_adapter("a", str(llama_adapter)).result(60)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    with pytest.raises(
        AdapterError, match=r"'wide' cannot be loaded: with it, .* expected at most \d+, half of .* lower rank"
    ):
        engine.load_adapter("wide", str(wide)).result(60)

    assert mx.get_peak_memory() - before < 1.5 * read_bytes + 10_000  # of 3 slots: 3 times
    check_beside_base(engine, Oracle(base), oracle_with(base, llama_adapter))
