"""If mlx-lm ignores a setting of a checkpoint, the engine patches the model, limits the context, or refuses to load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import step3p5
from mlx_lm.utils import load_model

from scorepool.engine import ContextLengthExceeded, Engine, EngineSettings, LoadError, Sampling, Sequence
from scorepool.engine.model import kv_cache, rope
from scorepool.engine.model.load import load_checked
from survey import reference
from survey.families import FAMILIES
from survey.mutations import Config
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, TinyModels

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 3000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def sequence_of(length: int) -> Sequence:
    draw = Random(length)
    return Sequence(token_ids=[draw.randrange(3, VOCAB_SIZE) for _ in range(length)], score_from=0, top_logprobs=5)


def assert_context_is(limit: int, engine: Engine, oracle: Oracle) -> None:
    longest = sequence_of(limit)
    engine.add([longest]).result(60)
    assert_agrees(longest, oracle)
    with pytest.raises(ContextLengthExceeded, match=f"context is {limit} tokens"):
        engine.add([sequence_of(limit + 1)])


@pytest.mark.parametrize("setting", ["use_dynamic_ntk", "use_logn_attn"])
def test_scaling_beyond_the_trained_length_limits_the_context(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], setting: str
):
    engine = open_engine(edited("llama", seq_length=64, **{setting: True}))

    assert engine.model_info.context_length == 64


def test_the_context_of_phi3small_ends_where_its_attention_becomes_sparse(tiny_models: TinyModels):
    config = {"model_type": "phi3small", "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 3}
    model, _ = load_model(tiny_models("phi"))

    assert rope.check_or_patch(model, config) == 96


MINICPM = {  # as MiniCPM-2B's, which leaves the base out; with neutral scales it is a Llama
    "model_type": "minicpm",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "scale_emb": 1,
    "dim_model_base": 64,
    "scale_depth": 2**0.5,
}


def test_minicpm_without_a_base_has_that_of_its_own_configuration_class(
    tiny_models: TinyModels, tmp_path: Path, open_engine: Callable[..., Engine]
):
    folder = Path(shutil.copytree(tiny_models("llama"), tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps(MINICPM))
    sequence = sequence_of(70)

    open_engine(folder).add([sequence]).result(60)

    assert_agrees(sequence, Oracle(tiny_models("llama")))


@pytest.mark.parametrize("key", ["rotary_emb_base", "rope_embedding_base"])
def test_another_name_of_the_base_is_read_for_a_type_that_transformers_does_not_know(key: str, tiny_models: TinyModels):
    """Qwen's first release and Phi-3-small have these names, and no rope_theta."""
    model, _ = load_model(tiny_models("llama"))
    scaling = {"type": "su", "short_factor": [1.5] * 8, "short_mscale": 1.2, "original_max_position_embeddings": 128}
    config = {"model_type": "phi3small", key: 500.0, "max_position_embeddings": 512, "rope_scaling": scaling}

    rope.check_or_patch(model, config)

    rotary = model.layers[0].self_attn.rope
    assert rotary._freqs.tolist() == pytest.approx([1.5 * 500.0 ** (dim / 16) for dim in range(0, 16, 2)])
    assert rotary.attention_factor == 1.2


def test_a_scale_of_positions_is_kept(tiny_models: TinyModels):
    model, _ = load_model(tiny_models("llama"))
    config = {"model_type": "phi3small", "rope_embedding_base": 500.0, "rope_position_scale": 0.5}

    rope.check_or_patch(model, config)

    periods = model.layers[0].self_attn.rope._freqs.tolist()
    assert periods == pytest.approx([2 * 500.0 ** (dim / 16) for dim in range(0, 16, 2)])


def test_a_scaling_without_a_base_is_refused_for_a_type_that_transformers_does_not_know(tiny_models: TinyModels):
    model, _ = load_model(tiny_models("llama"))
    config = {"model_type": "internlm2", "rope_scaling": {"type": "linear", "factor": 2.0}}

    with pytest.raises(LoadError, match=r"rope_scaling is .*linear.*, and there is no rope_theta, expected both"):
        rope.check_or_patch(model, config)
    rope.check_or_patch(model, config | {"model_type": "gptj"})  # in transformers it has no such setting


def test_longrope_limits_the_context_to_its_original_length(
    tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    folder = tiny_models("phi3_longrope")

    assert_context_is(128, open_engine(folder), Oracle(folder))


@pytest.mark.parametrize("mode", ["default", "exact"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_forward_pass_has_positions_beyond_the_context(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], name: str, mode: Literal["default", "exact"]
):
    """A dynamic scaling begins there, and learned positions end: neither may see padding, whose tiles are of 64."""
    folder = edited(name, **({"max_position_embeddings": 100, "rope_parameters": DYNAMIC} if name == "llama" else {}))
    engine, oracle = open_engine(folder, mode=mode, max_batch_tokens=60), Oracle(folder)
    sequences = [
        sequence_of(100),
        sequence_of(99),
        *(Sequence(token_ids=sequence_of(length).token_ids, sampling=Sampling(max_tokens=20)) for length in (80, 50)),
        *(Sequence(token_ids=sequence_of(length).token_ids, score_from=1) for length in (10, 66, 97)),
    ]

    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(60)

    for sequence in sequences:
        assert_agrees(sequence, oracle)
    assert engine.model_info.mode == mode
    with pytest.raises(ContextLengthExceeded, match="context is 100 tokens"):
        engine.add([sequence_of(101)])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("granitehybrid", {"position_embedding_type": "nope", "rope_theta": 10000}),
        ("nemotron_h", {"rope_theta": 10000, "partial_rotary_factor": 1.0}),
    ],
)
def test_an_unused_rotary_base_does_not_refuse_the_model(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], name: str, values: dict[str, Any]
):
    folder = edited(name, **values)
    sequence = sequence_of(40)

    open_engine(folder).add([sequence]).result(60)

    assert_agrees(sequence, Oracle(folder))


def test_llama3_scaling_with_equal_low_and_high_frequency_factors_is_computed(
    edited: Callable[..., Path], open_engine: Callable[..., Engine]
):
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    folder = edited("llama3", rope_parameters=scaling | {"rope_theta": 5e5, "original_max_position_embeddings": 128})
    sequence = sequence_of(200)

    open_engine(folder).add([sequence]).result(60)

    assert_agrees(sequence, Oracle(folder))


@pytest.mark.parametrize("values", [{"rope_parameters": YARN}, {"rope_parameters": None, "rope_scaling": YARN}])
def test_a_scaling_that_mlx_lm_ignores_is_computed(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], values: dict[str, Any]
):
    folder = edited("qwen3_moe", rope_theta=3000.0, **values)
    engine, oracle = open_engine(folder, max_batch_tokens=60), Oracle(folder)  # 60: the first row needs several chunks
    sequences = [
        sequence_of(200),
        *(Sequence(token_ids=sequence_of(length).token_ids, sampling=Sampling(max_tokens=20)) for length in (80, 5)),
        *(Sequence(token_ids=sequence_of(length).token_ids, score_from=1) for length in (33, 50)),
    ]

    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(60)

    for sequence in sequences:
        assert_agrees(sequence, oracle)


LONGROPE = {"original_max_position_embeddings": 128, "factor": 3.0, "short_mscale": 1.2}
MLA_LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], **LONGROPE}
HEAD_LONGROPE = {"short_factor": [1 + place / 10 for place in range(8)], "long_factor": [2.0] * 8, **LONGROPE}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "longrope", **MLA_LONGROPE}}),
        ("glm", {}),  # rotates a half of each head
        ("glm", {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.85}}),
        ("glm4", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.85}}),  # odd
        ("glm4_moe_lite", {"rope_interleave": False}),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}),
        ("granitemoehybrid", {"position_embedding_type": None}),
        ("llama", {"rope_parameters": {"rope_type": "longrope", **HEAD_LONGROPE}}),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
        ("recurrent_gemma", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}),
        ("llama4", {"text_config.rope_parameters": {"rope_type": "longrope", **HEAD_LONGROPE}}),
        (
            "mellum",  # transformers reads truncate only outside of the layers' sections
            {
                "rope_parameters": {
                    "full_attention": {**YARN, "truncate": False},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                }
            },
        ),
    ],
)
def test_positions_of_a_family_are_those_of_transformers(name: str, values: Config, tmp_path: Path):
    settings = FAMILIES[name].bases()["base"]
    for key, value in values.items():
        section, _, inner = key.rpartition(".")
        settings |= {section: settings[section] | {inner: value}} if section else {key: value}
    transformers_model = reference.build_model(reference.build_config(settings), seed=0)
    transformers_model.save_pretrained(tmp_path)
    FAMILIES[name].convert(tmp_path)
    model, _, limit = load_checked(tmp_path, "float32", checks_settings=False)
    token_ids = sequence_of(100).token_ids

    logits = model(mx.array([token_ids]), cache=kv_cache.new(model))[0]

    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert limit is None or limit >= len(token_ids)
    assert np.abs(logprobs - reference.logprobs(transformers_model, token_ids)).max() < 1e-3


STEP = {  # as Step-3.5-Flash, whose lists have an entry for each layer
    "model_type": "step3p5",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 16},
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT_LENGTH,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_theta": [5_000_000.0, 10_000.0, 10_000.0, 5_000_000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 128,
    },
    "yarn_only_types": ["full_attention"],
    "moe_layers_enum": "2,3",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("has_yarn_only_types", [True, False])
def test_the_base_of_each_layer_in_a_list_is_checked(tmp_path: Path, has_yarn_only_types: bool):
    written = step3p5.Model(step3p5.ModelArgs.from_dict(STEP))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(written.parameters())))
    config = STEP if has_yarn_only_types else STEP | {"yarn_only_types": []}  # then mlx-lm scales all layers
    (tmp_path / "config.json").write_text(json.dumps(config))

    model, _, _ = load_checked(tmp_path, "float32")

    found = [layer.self_attn.rope for layer in model.layers]
    periods = [getattr(rotary, "_freqs", None) for rotary in found]
    sliding = [10_000 ** (dim / 16) for dim in range(0, 16, 2)]
    for layer in (1, 2):
        base, given = getattr(found[layer], "base", None), periods[layer]
        assert base == 10_000 if given is None else given.tolist() == pytest.approx(sliding)
    for layer in (0, 3):
        assert periods[layer].tolist() == written.layers[layer].self_attn.rope._freqs.tolist()


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 3000.0}}, "rope_type is 'spiral'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 3000.0}}, "linear.*factor"),
        ("phi", {"rope_parameters": {"rope_theta": 3000.0, "partial_rotary_factor": 0.1}}, "expected at least 2"),
        ("phi", {"rope_parameters": {"rope_theta": 3000.0, "partial_rotary_factor": 0.0}}, "partial_rotary_factor"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "rotary positions"),
        ("qwen3", {"rope_theta": 77.0}, "rotary positions .*10000"),  # contradicts rope_parameters
        ("gemma3", {"sliding_window_pattern": 2}, "sliding layers"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling 8.0"),
    ],
)
def test_loading_refuses_what_mlx_lm_would_compute_wrong(
    edited: Callable[..., Path], name: str, values: dict[str, Any], reason: str
):
    with pytest.raises(LoadError, match=reason):
        Engine(EngineSettings(model=str(edited(name, **values))))
