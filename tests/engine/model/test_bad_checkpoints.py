"""Every failure of a load is a LoadError of one sentence, which names the setting and its value, or the tensor."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from mlx_lm.convert import convert
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError
from tests.tiny_models import TinyModels

Edit = Callable[[Path], object]
Weights = dict[str, torch.Tensor]
GONE = object()


def configure(**changes: object) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != GONE}))

    return edit


def change_weights(change: Callable[[Weights], object]) -> Edit:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def write(name: str, text: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def reason(folder: Path, edit: Edit, dtype: str = "auto") -> str:
    """Return the reason for which an edited copy of a checkpoint is refused."""
    edit(folder)
    with pytest.raises(LoadError) as caught:
        Engine(EngineSettings(model=str(folder), dtype=dtype))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def copy_of(tiny_models: TinyModels, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(tiny_models(name), tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, expected at least 1"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers is -1, expected at least 1"),
        ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers is 'two', expected a whole number"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected at most 21, the number of"),
        ("llama", {"hidden_size": 66, "head_dim": GONE}, "hidden_size is 66: The hidden size (66) is not a multiple"),
        ("llama", {"hidden_size": 10**12}, "hidden_size is 1000000000000, expected at most 2147483647"),
        ("llama", {"hidden_size": None}, "Field 'hidden_size' expected int, got NoneType"),
        ("llama", {"vocab_size": 0}, "vocab_size is 0, expected at least 1"),
        ("llama", {"vocab_size": 256}, "vocab_size is 256, expected at least 363: the tokenizer has ids up to 362"),
        ("llama", {"max_position_embeddings": -5}, "max_position_embeddings is -5, expected at least 1"),
        ("llama", {"intermediate_size": -128}, "intermediate_size is -128, expected at least 1"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, expected a finite number of at least 0"),
        ("llama", {"rope_parameters": {"rope_theta": 0.0}}, "rope_parameters.rope_theta is 0.0, expected a finite"),
        ("llama", {"rope_parameters": "yes"}, "rope_parameters is 'yes', expected an object"),
        ("llama", {"rope_parameters": {"rope_theta": "high"}}, "rope_theta is 'high', expected a finite number"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 3}}, "partial_rotary_factor is 3, expected at most 1"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast is 0, exp"),
        ("llama", {"text_config": "yes"}, "text_config is 'yes', expected an object"),
        ("llama", {"text_config": None}, "text_config is None, expected an object"),
        ("llama", {"layer_types": True}, "layer_types is True, expected a list"),
        ("llama", {"layer_types": [["full"]]}, "layer_types is [['full']]: unhashable"),
        ("llama", {"intermediate_size": 0}, "intermediate_size is 0, expected at least 1"),
        ("llama", {"sliding_window": 1.5}, "sliding_window is 1.5, expected a whole number"),
        ("llama", {"quantization": ""}, "quantization is '', expected an object with bits and group_size"),
        ("llama", {"quantization_config": ""}, "quantization_config is '', expected an object"),
        ("llama", {"model_file": "model.py"}, "model_file is 'model.py', expected no such key: code of a checkpoint"),
        ("llama", {"model_type": GONE}, "model_type is None, expected the name of an architecture"),
        ("llama", {"model_type": "olmo"}, "mlx-lm has no 'olmo': To run olmo install"),
        ("llama", {"quantization": {"bits": 4}}, "quantization is {'bits': 4}, expected an object with bits and"),
        ("llama", {"quantization_config": {"quant_method": "gguf"}}, "quant_method is 'gguf', expected awq, bitnet"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings is true, but the checkpoint has a lm_head"),
        ("gemma3", {"sliding_window": -4}, "sliding_window is -4, expected at least 0"),
        ("gemma3", {"sliding_window": 0}, "sliding_window is 0, expected at least 1, because layer_types has sliding_"),
        ("gemma3", {"sliding_window": None}, "sliding_window is None, expected at least 1, because layer_types has sl"),
        ("gemma3", {"layer_types": ["sliding_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99, expected at most num_"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0, expected at least 1"),
        ("qwen3_moe", {"n_group": 3, "topk_group": 1}, "n_group is 3, expected a divisor of num_"),
        ("qwen3_moe", {"n_group": 4, "topk_group": 0}, "topk_group is 0, expected 1 to n_group, which is 4"),
        ("qwen3_moe", {"n_group": 8, "topk_group": 1}, "num_experts_per_tok is 2, expected at most 1, the number of"),
        ("qwen3_moe", {"n_shared_experts": 0}, "n_shared_experts is 0, expected at least 1"),
    ],
)  # fmt: skip
def test_an_impossible_setting_is_named_with_its_value(
    copy_of: Callable[[str], Path], name: str, changes: dict[str, object], expected: str
):
    assert expected in reason(copy_of(name), configure(**changes))


def test_a_setting_of_the_text_model_is_named_by_its_path(copy_of: Callable[[str], Path]):
    text = {"num_attention_heads": 0}

    assert "text_config.num_attention_heads is 0" in reason(copy_of("llama"), configure(text_config=text))


def test_the_vocabulary_that_phi3small_would_write_beyond_is_refused(copy_of: Callable[[str], Path]):
    phi3small = {"model_type": "phi3small", "vocab_size": 512}

    assert "vocab_size is 512, expected at least 100352" in reason(copy_of("llama"), configure(**phi3small))


EMBEDDINGS = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("llama", lambda weights: weights.pop(UP), f"Missing 1 parameters: {UP}"),
        ("llama", lambda weights: weights.update(extra=torch.ones(3)), "Received 1 parameters not in model: extra"),
        ("llama", lambda weights: weights.update({NORM: torch.ones(3)}), f"received shape (3,) for parameter {NORM}"),
        ("llama", lambda weights: weights.update({NORM: torch.ones(64).int()}), f"{NORM} has dtype int32, expected"),
        ("llama", lambda weights: weights[NORM][:1].fill_(torch.nan), f"{NORM} holds NaN in float32"),
        ("llama", lambda weights: weights[UP][:1].fill_(torch.inf), f"{UP} holds infinite numbers in float32"),
        ("llama", lambda weights: weights[UP].zero_(), f"{UP} is all zeros"),
        ("llama", lambda weights: weights[NORM].zero_(), f"{NORM} is all zeros"),
        ("llama", lambda weights: weights["lm_head.weight"].zero_(), "lm_head.weight is all zeros"),
        ("qwen3_moe", lambda weights: weights["model.layers.1.mlp.experts.7.down_proj.weight"][:1].fill_(torch.nan),
         "model.layers.1.mlp.switch_mlp.down_proj.weight holds NaN"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(
    copy_of: Callable[[str], Path], name: str, change: Callable[[Weights], object], expected: str
):
    assert expected in reason(copy_of(name), change_weights(change))


@pytest.mark.parametrize("leaf", ["scales", "weight"])
def test_zeroed_scales_and_zeroed_packed_weights_are_named(copy_of: Callable[[str], Path], tmp_path: Path, leaf: str):
    convert(str(copy_of("llama")), str(tmp_path / "quantised"), quantize=True, q_bits=4, q_group_size=32)
    name = f"model.layers.1.mlp.up_proj.{leaf}"

    zeroed = reason(tmp_path / "quantised", change_weights(lambda weights: weights[name].zero_()))

    assert f"{name} is all zeros" in zeroed


@pytest.mark.parametrize(
    ("same", "expected"),
    [("lm_head.weight", "every token has the same logprob"), (EMBEDDINGS, "do not depend on the tokens")],
)
def test_logits_that_say_nothing_are_refused(copy_of: Callable[[str], Path], same: str, expected: str):
    repeat_first_row = change_weights(lambda weights: weights[same][:].copy_(weights[same][0].clone()))

    assert expected in reason(copy_of("llama"), repeat_first_row)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (write("config.json", "{nope"), "config.json or generation_config.json of"),
        (write("config.json", "[1]"), "config.json or generation_config.json of"),
        (write("generation_config.json", "[]"), "config.json or generation_config.json of"),
        (write("tokenizer.json", "["), "the tokenizer of"),
        (write("model.safetensors", b""), "Unable to read"),
        (write("model.safetensors", b"\xff" * 1000), "Invalid json header"),
        (truncate, "exceeding the size of the file"),
    ],
)
def test_a_damaged_file_is_named(copy_of: Callable[[str], Path], edit: Edit, expected: str):
    assert expected in reason(copy_of("llama"), edit)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="only the CPU multiplies experts in float32 alone")
def test_experts_in_16_bits_are_refused_by_dtype(copy_of: Callable[[str], Path]):
    assert "dtype is bfloat16, expected float32" in reason(copy_of("qwen3_moe"), lambda _: None, "bfloat16")


def test_whatever_a_step_of_the_load_raises_is_a_load_error(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.engine.model.windows.smallest_window", lambda model: 1 // 0)

    assert "cannot be loaded: ZeroDivisionError" in reason(copy_of("llama"), lambda _: None)


def test_a_refused_checkpoint_logs_no_traceback(copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        reason(copy_of("llama"), write("model.safetensors", b""))

    assert "Traceback" not in caplog.text
