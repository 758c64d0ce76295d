"""What mlx-lm computes in another way than transformers is mended: rows in a batch have transformers' numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS

ROUTER_BIAS = "e_score_correction_bias"


def tokens(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [BOS] + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - 1)]


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # which Kimi Linear's release has
@pytest.mark.parametrize(
    ("name", "base", "changes"),
    [
        ("deepseek_v3", "base", {"num_experts_per_tok": 1}),
        ("deepseek_v3", "base", {"topk_group": 1, "num_experts_per_tok": 4}),
        ("dots1", "groups", {"topk_group": 1, "num_experts_per_tok": 4}),
        ("ernie4_5_moe", "base", {}),
        ("ernie4_5_moe", "base", {"moe_norm_min": 0.5}),
        ("glm4_moe_lite", "base", {"rms_norm_eps": 0.5}),
        ("jamba", "experts", {"num_experts_per_tok": 3}),
        ("kimi_linear", "base", {"rms_norm_eps": 0.5}),
        ("kimi_linear", "grouped", {"topk_group": 1}),
        ("longcat_flash", "base", {}),
        ("mamba", "base", {"layer_norm_epsilon": 0.5}),
        ("minicpm3", "base", {}),
        ("solar_open", "grouped", {"topk_group": 1}),
    ],
)
def test_a_mended_setting_equals_transformers(
    family: Callable[..., tuple[Path, Oracle]],
    open_engine: Callable[..., Engine],
    name: str,
    base: str,
    changes: dict[str, float],
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


def test_a_router_without_the_bias_that_mlx_lm_drops_is_refused(
    family: Callable[..., tuple[Path, Oracle]], tmp_path: Path
):
    folder = Path(shutil.copytree(family("ernie4_5_moe")[0], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ROUTER_BIAS not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(LoadError, match=rf"the checkpoint has no {ROUTER_BIAS} for model\.layers"):
        Engine(EngineSettings(model=str(folder)))
