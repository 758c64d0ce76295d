"""A quantised model computes what MLX's own single forward pass of it does, in every format.

A mended one computes what it does with the weights that the packed ones stand for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from scorepool.engine.model.config import read_config
from scorepool.engine.model.dequantize import dequantized_weights
from scorepool.engine.model.load import load_checked
from survey import quantised

IN_MAKE_TEST = [
    *(
        "affine, 2 bits, groups of 64",
        "affine, 3 and 6 bits (mixed_3_6)",
        "affine, 4 bits, scales trained (DWQ)",
        "mxfp4",
        "mxfp8",
        "nvfp4",
    ),
]


@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_a_quantised_model_computes_what_mlx_does(name: str):
    ((_, found),) = quantised.compare("llama", {name: quantised.FORMATS[name]})
    assert found.error <= quantised.TOLERANCE_NATS
    assert found.rms > 0


@pytest.mark.soak
@pytest.mark.parametrize("model", quantised.MODELS)
def test_every_format_of_every_model_computes_what_mlx_does(model: str):
    findings = dict(quantised.compare(model))
    assert {name: found.error for name, found in findings.items() if found.error > quantised.TOLERANCE_NATS} == {}


@pytest.mark.parametrize(
    ("name", "base", "changes"),
    [
        ("falcon_h1", "norm", {"attention_in_multiplier": 1.7, "attention_bias": True, "projectors_bias": True}),
        ("glm", "base", {}),
        ("gpt_bigcode", "base", {"multi_query": False}),
        ("kimi_linear", "grouped", {}),
        ("minicpm3", "tied", {}),
        ("nemotron_h", "grouped", {}),
        ("olmoe", "base", {"clip_qkv": 0.3}),
    ],
)
def test_a_mend_holds_for_packed_weights(
    family: Callable[..., tuple[Path, Any]], tmp_path: Path, name: str, base: str, changes: dict[str, object]
):
    source, packed, unpacked = family(name, base, **changes)[0], tmp_path / "packed", tmp_path / "unpacked"
    config = json.loads((source / "config.json").read_text())
    model, _ = load_model(source, model_config=read_config(source))
    model, packed_config = quantize_model(model, dict(config), group_size=32, bits=4)
    for folder, its_config in ((packed, packed_config), (unpacked, config)):
        folder.mkdir()
        save_config(its_config, folder / "config.json")
    save_model(packed, model)
    mx.save_safetensors(str(unpacked / "model.safetensors"), dict(dequantized_weights(packed)), {"format": "mlx"})

    token_ids = mx.array([[0, *range(3, 60)]])
    logits = [load_checked(folder, "float32")[0](token_ids) for folder in (packed, unpacked)]

    assert mx.abs(logits[0] - logits[1]).max().item() < 1e-4


def test_experts_with_a_scale_of_their_own_are_dequantised(tmp_path: Path):
    experts = SwitchLinear(64, 32, 4, bias=False)
    experts.weight = mx.random.normal((4, 32, 64), key=mx.random.key(0)) * mx.array([0.01, 0.1, 1, 10])[:, None, None]
    packed = experts.to_quantized(group_size=16, bits=4, mode="nvfp4", global_scale=True)
    stored = {f"mlp.{name}": array for name, array in packed.parameters().items() if array is not None}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    save_config(
        {"model_type": "llama", "quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}},
        tmp_path / "config.json",
    )

    [(name, found)] = dequantized_weights(tmp_path)

    largest = mx.abs(experts.weight).max(axis=(1, 2), keepdims=True)
    assert name == "mlp.weight"
    assert (
        mx.abs(found - experts.weight) / largest
    ).max().item() < 1 / 6  # half of the step between the largest numbers
