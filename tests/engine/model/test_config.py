"""Renamed settings get the names that mlx-lm reads, and settings that mlx-lm ignores are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from scorepool.engine import LoadError
from scorepool.engine.model.config import read_config, refuse_ignored_settings

YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "settings",
    [
        {"use_bidirectional_attention": True},
        {"is_causal": False},
        {"text_config": {"use_bidirectional_attention": "all"}},
    ],
)
def test_loading_refuses_attention_to_later_tokens(settings: dict[str, Any]):
    with pytest.raises(LoadError, match="causal"):
        refuse_ignored_settings({"model_type": "gemma3", **settings}, set())


def test_no_head_dim_is_derived_for_gemma(tmp_path: Path):
    text = {"model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16}  # as in gemma-3-12b
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))

    assert read_config(tmp_path)["text_config"]["head_dim"] == 256  # transformers' default, not 3840 / 16


def test_null_has_the_value_that_transformers_gives_it(tmp_path: Path):
    settings = {"model_type": "falcon_h1", "num_attention_heads": 4, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))

    assert read_config(tmp_path)["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"sliding_window": 16}, "LLLG"),
        ({"sliding_window": 16, "sliding_window_pattern": 4}, "LLLG"),  # as transformers 5 saves it
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_the_period_of_exaone4s_layers_is_spelled(tmp_path: Path, settings: dict[str, Any], pattern: str | None):
    saved = {"model_type": "exaone4", "num_hidden_layers": 4, **settings}
    (tmp_path / "config.json").write_text(json.dumps(saved))

    assert read_config(tmp_path).get("sliding_window_pattern") == pattern


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 5.0, "rotary_emb_base": 5.0, "rope_scaling": None}),
        ({"rope_parameters": YARN}, {"rope_theta": 3000.0, "rope_scaling": {**YARN, "type": "yarn"}}),
        ({"num_local_experts": 8}, {"num_experts": 8}),
        ({"n_positions": 64}, {"n_ctx": 64}),
        ({"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}),
        ({"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}, {"sliding_window_pattern": 3}),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, {"sliding_window_pattern": 1}),
        ({"text_config": {"num_local_experts": 8}}, {"text_config": {"num_local_experts": 8, "num_experts": 8}}),
    ],
)
def test_renamed_keys_get_their_old_names_and_existing_keys_stay(
    tmp_path: Path, saved: dict[str, Any], expected: dict[str, Any]
):
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = read_config(tmp_path)
    assert config.items() >= expected.items()
    assert "text_config" in saved or config.items() >= saved.items()

    kept = {key: "its own" for key in expected if key != "text_config"} | saved
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert "text_config" in saved or read_config(tmp_path).items() >= kept.items()
