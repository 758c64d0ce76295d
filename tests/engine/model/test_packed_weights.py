"""Checkpoints of AutoAWQ, AutoGPTQ and compressed-tensors compute what plain NumPy reads from them, or are refused.

The layouts are written here as their documentation has them, one word at a time.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn
from safetensors.numpy import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError, Sequence
from scorepool.engine.model.checkpoint import quantization
from scorepool.engine.model.contradictions import refuse_contradictions
from survey import reference
from survey.families import FAMILIES
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_tokenizer import build_tokenizer

GROUP_SIZE = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose integer is at each place of a word
SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "desc_act": False, "sym": False}
Layer = dict[str, np.ndarray]


def pack_words(integers: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Pack [n, m] integers along the last axis into int32 words; place i of a word holds number order[i]."""
    per_word = len(order)
    words = np.zeros((integers.shape[0], integers.shape[1] // per_word), np.uint32)
    for place, number in enumerate(order):
        words |= integers[:, number::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def pack_awq(integers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, settings: dict[str, Any]) -> Layer:
    """Pack integers [in, out], zeros [groups, out] and scales [groups, out]."""
    return {
        "qweight": pack_words(integers, 4, AWQ_ORDER),
        "qzeros": pack_words(zeros, 4, AWQ_ORDER),
        "scales": scales.astype(np.float16),
    }


def pack_gptq(integers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, settings: dict[str, Any]) -> Layer:
    bits = settings["bits"]
    order = tuple(range(32 // bits))
    stored = zeros if settings.get("checkpoint_format") == "gptq_v2" else zeros - 1
    return {
        "qweight": np.ascontiguousarray(pack_words(np.ascontiguousarray(integers.T), bits, order).T),
        "qzeros": pack_words(stored, bits, order),
        "scales": scales.astype(np.float16),
        "g_idx": np.arange(len(integers), dtype=np.int32) // GROUP_SIZE,
    }


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., tuple[Path, Oracle]]:
    """Write a checkpoint of packed weights; return its folder, and transformers' model of what they stand for."""

    def write(settings: dict[str, Any], edit: Callable[[Layer], None] | None = None) -> tuple[Path, Oracle]:
        pack, bits, draw = (
            pack_awq if settings["quant_method"] == "awq" else pack_gptq,
            settings["bits"],
            np.random.default_rng(0),
        )
        model = reference.build_model(reference.build_config(SHAPE), seed=0)
        model.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        for name in [name for name in weights if "proj" in name]:
            width_out, width_in = weights.pop(name).shape
            groups = (width_in // GROUP_SIZE, width_out)
            integers = draw.integers(0, 2**bits, (width_in, width_out))
            zeros = draw.integers(1, 2**bits - 1, groups)
            scales = draw.uniform(0.1, 0.2, groups).astype(np.float16) / np.float16(2**bits)
            layer = pack(integers, zeros, scales, settings)
            if edit is not None:
                edit(layer)
            weights |= {f"{name.removesuffix('weight')}{leaf}": array for leaf, array in layer.items()}
            value = (integers - zeros.repeat(GROUP_SIZE, 0)) * scales.astype(np.float64).repeat(GROUP_SIZE, 0)
            model.get_parameter(name).data = torch.from_numpy(value.T.astype(np.float32))
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        build_tokenizer().save_pretrained(tmp_path)
        return tmp_path, Oracle(model)

    return write


@pytest.mark.parametrize(
    "settings",
    [
        AWQ,
        GPTQ,
        GPTQ | {"bits": 8},
        GPTQ | {"bits": 2},
        GPTQ | {"checkpoint_format": "gptq_v2"},
    ],
    ids=["awq", "gptq", "gptq-8", "gptq-2", "gptq_v2"],
)
def test_packed_weights_are_those_of_numpy(packed: Callable[..., tuple[Path, Oracle]], settings: dict[str, Any]):
    folder, oracle = packed(settings)
    engine = Engine(EngineSettings(model=str(folder), dtype="float32"))
    sequences = [
        Sequence(token_ids=[0, *range(start, start + 3 * length, 3)], score_from=1)
        for start, length in ((5, 60), (9, 7))
    ]
    engine.add(sequences).result(60)
    engine.close()

    assert engine.model_info.quantization == f"{settings['bits']}-bit affine, groups of {GROUP_SIZE}"
    for sequence in sequences:
        assert_agrees(sequence, oracle)


def by_activation(layer: Layer) -> None:
    layer["g_idx"] = layer["g_idx"][::-1].copy()


def ambiguous(layer: Layer) -> None:
    layer["qzeros"][0, 0] |= 15


def misspelled(layer: Layer) -> None:
    layer["scales_of_activations"] = np.ones(4, np.float16)


@pytest.mark.parametrize(
    ("settings", "edit", "reason"),
    [
        (AWQ | {"version": "gemv"}, None, "version is 'gemv', expected gemm for awq"),
        (AWQ | {"version": "GEMV_FAST"}, None, "version is 'gemv_fast', expected gemm"),
        (AWQ | {"backend": "llm-awq"}, None, "version is 'llm-awq'"),
        (AWQ | {"group_size": -1}, None, "group_size is -1, expected 32, 64, 128"),
        (AWQ, misspelled, "scales_of_activations"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, None, "checkpoint_format is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, None, "is_marlin_format is True"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, None, "dynamic is"),
        (GPTQ, by_activation, "desc_act"),
        (GPTQ, ambiguous, "qzeros has 15"),
    ],
)
def test_what_cannot_be_read_is_refused(
    packed: Callable[..., tuple[Path, Oracle]],
    settings: dict[str, Any],
    edit: Callable[[Layer], None] | None,
    reason: str,
):
    folder, _ = packed(settings, edit)
    with pytest.raises(LoadError, match=reason):
        Engine(EngineSettings(model=str(folder)))


def compressed(bits: int, group_size: int, **changed: object) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights | changed}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def pack_compressed(weight: np.ndarray, bits: int, group_size: int) -> tuple[Layer, np.ndarray]:
    """Pack weights [out, in] as compressed-tensors does, and return what they stand for too."""
    highest, shape = 2 ** (bits - 1), weight.shape
    groups = weight.reshape(shape[0], -1, group_size)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / highest
    integers = np.clip(np.round(groups / scales), -highest, highest - 1)
    words = pack_words((integers.reshape(shape) + highest).astype(np.uint32), bits, tuple(range(32 // bits)))
    layer = {
        "weight_packed": words,
        "weight_scale": np.ascontiguousarray(scales[..., 0]),
        "weight_shape": np.array(shape),
    }
    return layer, (integers * scales).reshape(shape).astype(np.float32)


def write_compressed(folder: Path, bits: int, group_size: int) -> Oracle:
    """Write a DeepSeek V3 whose MLPs are packed; return transformers' model of what they stand for."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    model = reference.build_model(reference.build_config(FAMILIES["deepseek_v3"].bases()["lite"] | widths), seed=0)
    model.save_pretrained(folder)
    FAMILIES["deepseek_v3"].convert(folder)
    weights = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())  # in which experts have other names
    for name in [name for name in weights if "mlp" in name and name.endswith("proj.weight") and name in parameters]:
        layer, value = pack_compressed(weights.pop(name), bits, group_size)
        weights |= {f"{name.removesuffix('weight')}{leaf}": array for leaf, array in layer.items()}
        parameters[name].data = torch.from_numpy(value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quantization_config": compressed(bits, group_size)}
    (folder / "config.json").write_text(json.dumps(config | settings))
    build_tokenizer().save_pretrained(folder)
    return Oracle(model)


@pytest.mark.parametrize("group_size", [32, 64])
def test_weights_that_compressed_tensors_packed_are_those_of_numpy(group_size: int, tmp_path: Path):
    oracle = write_compressed(tmp_path, 4, group_size)
    engine = Engine(EngineSettings(model=str(tmp_path), dtype="float32"))
    sequence = Sequence(token_ids=[0, *range(5, 185, 3)], score_from=1)
    engine.add([sequence]).result(60)
    engine.close()

    assert_agrees(sequence, oracle)
    assert engine.model_info.quantization == f"4-bit affine, groups of {group_size}"


def test_eight_bits_that_compressed_tensors_packed_are_refused(tmp_path: Path):
    """mlx-lm takes the zero point of 4 bits for them."""
    write_compressed(tmp_path, 8, 32)
    with pytest.raises(LoadError, match=r"config_groups\.group_0\.weights\.num_bits is 8, expected 4"):
        Engine(EngineSettings(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (compressed(4, 32, symmetric=False), "group_0.weights.symmetric is False, expected True"),
        (compressed(4, 32, type="float"), "group_0.weights.type is 'float', expected 'int'"),
        (compressed(4, 32, strategy="channel"), "group_0.weights.strategy is 'channel', expected 'group'"),
        (compressed(4, 32) | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16 is ['Linear'], expected an object with"),
        (compressed(4, 32) | {"config_groups": None}, "config_groups is None, expected an object of groups"),
    ],
)
def test_other_packed_integers_are_refused_by_the_setting(settings: dict[str, Any], reason: str):
    for config in ({"quantization_config": settings}, {"text_config": {"quantization_config": settings}}):
        with pytest.raises(LoadError, match=re.escape(reason)):
            refuse_contradictions({"model_type": "kimi_k25"} | config)


def test_packed_weights_whose_activations_are_rounded_are_refused():
    settings = compressed(4, 32)
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(LoadError, match=r"group_0\.input_activations is .*, expected null"):
        refuse_contradictions({"model_type": "kimi_k2", "quantization_config": settings})


class OwnLayer(nn.Module):
    """A quantised layer that an architecture brings along, which does not name its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scales = mx.zeros((4, 8), dtype=mx.uint32), mx.zeros((4, 1))
        self.bits, self.group_size = 2, 128


def test_a_quantised_layer_that_does_not_name_its_mode_is_described():
    assert quantization(OwnLayer(), {"quantization": {"bits": 2}}) == "2-bit affine, groups of 128"
