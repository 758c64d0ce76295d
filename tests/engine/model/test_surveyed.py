"""Every setting of a checkpoint is one that the survey found to be followed, or the load is refused by its name."""

import json
from typing import Any

import pytest

from scorepool.engine import LoadError
from scorepool.engine.model import surveyed

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


@pytest.fixture(autouse=True)
def surveyed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = json.loads((surveyed._FOLDER / "llama.json").read_text())["versions"]
    monkeypatch.setattr(surveyed, "installed_version", versions.__getitem__)


def test_a_published_configuration_passes():
    assert surveyed.check(LLAMA) is True


def test_another_mlx_lm_was_not_surveyed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(surveyed, "installed_version", {"mlx-lm": "0.32.999"}.__getitem__)
    assert surveyed.check(LLAMA) is False
    with pytest.raises(LoadError, match="rope_traditional"):
        surveyed.check(LLAMA | {"rope_traditional": True})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rope_traditional": True},
            "rope_traditional is True, with which mlx-lm's llama computes something else.*expected False",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_a_setting_that_is_not_followed_is_named(changed: dict[str, Any], message: str):
    with pytest.raises(LoadError, match=message):
        surveyed.check(LLAMA | changed)


def test_a_setting_that_neither_mlx_lm_nor_transformers_knows_passes():
    assert surveyed.check(LLAMA | {"comment": "fine-tuned on a Mac"}) is True


def test_a_type_has_the_table_of_the_architecture_that_transformers_knows():
    assert surveyed.transformers_type({"model_type": "kimi_k2"}) == "deepseek_v3"
    assert surveyed.check(LLAMA | {"model_type": "xverse"}) is True
    with pytest.raises(LoadError, match="rope_traditional"):
        surveyed.check(LLAMA | {"model_type": "xverse", "rope_traditional": True})


def test_a_type_that_transformers_does_not_know_is_not_surveyed():
    assert surveyed.check({"model_type": "plamo2", "rope_traditional": True}) is False


def test_ling_2_5_does_not_get_the_settings_of_ling_3_whose_type_it_has():
    ling = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"]}
    assert surveyed.canonical_config(ling) is None
    assert surveyed.check(ling) is False
    assert surveyed.default_settings(ling) == {}
    assert surveyed.check(ling | {"architectures": ["BailingMoeV3ForCausalLM"]}) is True


def test_old_names_of_rotary_settings_are_read_without_a_warning():
    canonical = surveyed.canonical_config(LLAMA)
    assert canonical is not None
    assert canonical["rope_parameters"]["rope_theta"] == 500_000.0
    assert surveyed.flatten(canonical)["rope_parameters.llama3.factor"] == 32.0


def test_a_text_models_settings_are_checked_in_their_section():
    flat = surveyed.flatten({"text_config": {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default"}}})
    assert flat == {"text_config.rms_norm_eps": 1e-6, "text_config.rope_parameters.rope_type": "default"}


def test_a_text_models_settings_are_checked_without_a_section_too():
    released = {"model_type": "qwen2_vl", "rms_norm_eps": 1e-6}  # as in Qwen2-VL-2B, which has no text_config
    assert surveyed.check(released) is True
    assert surveyed.default_of(released, "text_config.rms_norm_eps") == 1e-5
    with pytest.raises(LoadError, match="rope_traditional is True"):
        surveyed.check(released | {"rope_traditional": True})


def test_the_default_of_a_setting_may_depend_on_others():
    assert surveyed.default_of(LLAMA | {"head_dim": 128}, "head_dim") == 64  # hidden_size / num_attention_heads


def test_a_whole_number_may_stand_for_a_float():
    released = {"model_type": "dbrx", "ffn_config": {"moe_normalize_expert_weights": 1}}  # as in dbrx-instruct
    canonical = surveyed.canonical_config(released)
    assert canonical is not None
    assert canonical["ffn_config"]["moe_normalize_expert_weights"] == 1.0


def test_a_value_that_an_architecture_treats_apart_is_refused_and_others_are_not():
    afmoe = {"model_type": "afmoe", "num_hidden_layers": 4}
    assert surveyed.check(afmoe | {"num_experts_per_tok": 4}) is True
    with pytest.raises(LoadError, match="num_experts_per_tok is 1"):
        surveyed.check(afmoe | {"num_experts_per_tok": 1})
