"""What mlx-lm computes in another way than transformers is mended: rows in a batch have transformers' numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import bailing_moe, bailing_moe_linear, kimi_k3
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError, Sampling, Sequence
from scorepool.engine.model import mends
from scorepool.engine.model.load import load_checked
from scorepool.engine.model.mends import experts
from scorepool.engine.model.mends.experts import ROUTER_BIAS
from scorepool.engine.model.skipped_layers import skip_equal_layers
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS

FULL_FIRST = ("full_attention", "sliding_attention", "sliding_attention", "sliding_attention")
BIASED = dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), True)


def tokens(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [BOS] + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - 1)]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 3.0,
    "original_max_position_embeddings": 32,
    "mscale_all_dim": 0.5,
}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # which Kimi Linear's release has
@pytest.mark.parametrize(
    ("name", "base", "changes"),
    [
        ("cohere2", "base", {"layer_types": FULL_FIRST}),
        ("deepseek_v3", "base", {"num_experts_per_tok": 1}),
        ("deepseek_v3", "base", {"topk_group": 1, "num_experts_per_tok": 4}),
        ("dots1", "groups", {"topk_group": 1, "num_experts_per_tok": 4}),
        ("ernie4_5_moe", "base", {}),
        ("ernie4_5_moe", "base", {"moe_norm_min": 0.5}),
        ("exaone4", "full", {"sliding_window": 16}),  # no layer slides, so none rotates
        ("falcon_h1", "base", {**BIASED, "attention_in_multiplier": 1.7}),
        ("falcon_h1", "base", {"time_step_limit": (0.01, 0.1)}),
        ("glm4_moe_lite", "base", {"rms_norm_eps": 0.5}),
        ("gpt2", "base", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
        ("gpt_bigcode", "base", {"multi_query": False, "scale_attn_weights": False}),
        ("gpt_bigcode", "base", {"scale_attn_by_inverse_layer_idx": True}),  # which transformers ignores there
        ("gpt_oss", "base", {"swiglu_limit": 0.5, "swiglu_alpha": 1.1}),
        ("jamba", "experts", {"num_experts_per_tok": 3}),
        ("kimi_linear", "base", {"rms_norm_eps": 0.5}),
        ("kimi_linear", "grouped", {"topk_group": 1}),
        ("llama4", "base", {"no_rope_layers": (0, 1, 1, 1)}),
        ("mamba", "base", {"layer_norm_epsilon": 0.5}),
        ("mimo_v2_flash", "base", {}),
        ("minicpm3", "base", {"rope_parameters": YARN}),
        ("nemotron_h", "base", {"time_step_limit": (0.01, 0.1)}),
        ("olmoe", "base", {"clip_qkv": 0.3}),
        ("solar_open", "grouped", {"topk_group": 1}),
        ("youtu", "base", {"rms_norm_eps": 0.5, "rope_parameters": YARN}),
    ],
)
def test_a_mended_setting_equals_transformers(
    family: Callable[..., tuple[Path, Oracle]],
    open_engine: Callable[..., Engine],
    name: str,
    base: str,
    changes: dict[str, object],
):
    folder, oracle = family(name, base, **changes)
    engine = open_engine(folder, max_batch_tokens=50)
    sequences = [
        Sequence(token_ids=tokens(70, 1), score_from=0),
        Sequence(token_ids=tokens(9, 2), score_from=1),
        Sequence(token_ids=tokens(20, 3), sampling=Sampling(max_tokens=8, temperature=0, ignore_eos=True)),
    ]

    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(60)

    for sequence in sequences:
        assert_agrees(sequence, oracle)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("bailing_hybrid", "kv_a_layernorm"),
        ("deepseek_v32", "k_norm"),
        ("longcat_flash", "q_a_layernorm"),
        ("minicpm3", "kv_a_layernorm"),
    ],
)
def test_norms_have_the_epsilon_of_transformers(family: Callable[..., tuple[Path, Oracle]], name: str, norm: str):
    model, _, _ = load_checked(family(name, rms_norm_eps=0.25)[0], "float32")

    assert {module[norm].eps for module in model.modules() if norm in module} == {1e-6}


def test_a_router_without_the_bias_that_mlx_lm_drops_is_refused(
    family: Callable[..., tuple[Path, Oracle]], tmp_path: Path
):
    folder = Path(shutil.copytree(family("ernie4_5_moe")[0], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ROUTER_BIAS not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(LoadError, match=rf"the checkpoint has no {ROUTER_BIAS} for model\.layers"):
        Engine(EngineSettings(model=str(folder)))


@pytest.mark.parametrize("name", ["dots1", "ernie4_5_moe", "solar_open"])
def test_the_bias_of_a_router_is_never_narrowed(family: Callable[..., tuple[Path, Oracle]], name: str):
    model, _, _ = load_checked(family(name)[0], "bfloat16")

    assert {module[ROUTER_BIAS].dtype for module in model.modules() if ROUTER_BIAS in module} == {mx.float32}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmoe", {"clip_qkv": 0.3, "num_hidden_layers": 5}),
        ("falcon_h1", {"attention_in_multiplier": 1.7, "num_hidden_layers": 5}),
    ],
)
def test_the_self_test_skips_equal_layers_of_a_mended_model(
    family: Callable[..., tuple[Path, Oracle]], name: str, changes: dict[str, object]
):
    model, _, _ = load_checked(family(name, **changes)[0], "float32")

    with skip_equal_layers(model) as num_skipped:
        assert num_skipped == 2


LING: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_router_enable_expert_bias": True,
    "moe_router_enable_routed_scaling": True,
    "score_function": "sigmoid",
}


def choice_of_experts(scores: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 3 best of 16 experts in the 2 best of 4 groups, and their weights."""
    grouped = (scores + bias).reshape(len(scores), 4, 4)
    dropped = np.argsort(np.sort(grouped)[..., -2:].sum(axis=-1))[:, :2]
    np.put_along_axis(grouped, dropped[..., None], -np.inf, axis=1)
    indices = np.argsort(-grouped.reshape(len(scores), 16))[:, :3]
    chosen = np.take_along_axis(scores, indices, axis=-1)
    return indices, 1.5 * chosen / chosen.sum(axis=-1, keepdims=True)


def negative_bias() -> mx.array:
    return mx.random.uniform(-1.0, -0.8, (16,), key=mx.random.key(1))


def hidden_states() -> mx.array:
    return mx.random.normal((200, 32), key=mx.random.key(2))


@pytest.mark.parametrize("kind", [bailing_moe.BailingMoeGate, bailing_moe_linear.Gate])
def test_ling_chooses_no_expert_of_a_dropped_group(kind: type):
    model, hidden = Module(), hidden_states()
    model.gate = router = kind(SimpleNamespace(**LING))
    router.expert_bias = negative_bias()
    scores = 1 / (1 + np.exp(-np.array(router.gate_proj(hidden))))
    indices, weights = choice_of_experts(scores, np.array(router.expert_bias))

    experts.mend_routers(model, {}, {})
    found, found_weights = map(np.array, router(hidden))

    order, right = np.argsort(found), np.argsort(indices)
    assert (np.take_along_axis(found, order, -1) == np.take_along_axis(indices, right, -1)).all()
    assert np.take_along_axis(found_weights, order, -1) == pytest.approx(
        np.take_along_axis(weights, right, -1), abs=1e-5
    )


@pytest.mark.parametrize("changes", [{"n_group": 1, "topk_group": 4}, {"moe_router_enable_expert_bias": False}])
def test_ling_without_groups_or_without_a_bias_routes_as_before(changes: dict[str, object]):
    """Ling 1 has neither, chooses by softmax, and has the defaults of these settings."""
    model, hidden = Module(), hidden_states()
    model.gate = router = bailing_moe.BailingMoeGate(SimpleNamespace(**LING | {"score_function": "softmax"} | changes))
    before = [np.sort(np.array(each)) for each in router(hidden)]

    experts.mend_routers(model, {}, {})

    for found, expected in zip(router(hidden), before, strict=True):
        assert np.sort(np.array(found)) == pytest.approx(expected, abs=1e-6)


def test_kimi_k3_chooses_no_expert_of_a_dropped_group():
    settings = {"num_expert_group": 4, "topk_group": 2, "num_experts": 16, "num_experts_per_token": 3}
    args = kimi_k3.TextArgs(hidden_size=32, moe_intermediate_size=32, routed_scaling_factor=1.5, **settings)
    model, hidden = Module(), hidden_states()
    model.mlp = layer = kimi_k3.KimiK3SparseMoE(args)
    layer.e_score_correction_bias = negative_bias()
    scores = 1 / (1 + np.exp(-np.array(layer.gate(hidden))))
    indices, weights = choice_of_experts(scores, np.array(layer.e_score_correction_bias))
    outputs = layer.switch_mlp(hidden, mx.array(indices))
    expected = (outputs * mx.array(weights.astype(np.float32))[..., None]).sum(axis=-2)

    mends.apply(model, {"model_type": "kimi_k3"}, {})

    assert mx.abs(layer(hidden) - expected).max().item() < 1e-5
