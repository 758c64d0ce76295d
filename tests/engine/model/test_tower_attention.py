"""On a CPU, towers attend in blocks, so that the memory of an image does not grow with the square of its patches."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scorepool.engine import Engine, EngineSettings
from scorepool.engine.model import tower_attention
from tests.images import image_bytes


@pytest.mark.parametrize("has_mask", [False, True])
def test_blocks_have_the_numbers_of_the_whole_and_no_more_weights_than_they_may(
    has_mask: bool, monkeypatch: pytest.MonkeyPatch
):
    q, k, v = (mx.random.normal((1, 3, 50, 8)) for _ in range(3))
    mask = mx.where(mx.random.uniform(shape=(1, 1, 50, 50)) > 0.5, 0.0, -1e9) if has_mask else None
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    lengths: list[int] = []
    whole = mx.fast.scaled_dot_product_attention

    def attend(block: mx.array, *others: Any, **options: Any) -> mx.array:
        lengths.append(block.shape[2])
        return whole(block, *others, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(tower_attention, "MAX_BYTES", 4 * 3 * 50 * 7)
    found = tower_attention.attention(q, k, v, scale=0.3, mask=mask)
    assert mx.abs(found - expected).max().item() < 1e-6
    assert lengths == [7] * 7 + [1]


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="GPUs have a fused kernel")
@pytest.mark.parametrize("family", ["mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_towers_of_families_whose_images_have_many_patches_attend_in_blocks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
    from tests.engine.vision.rows import check, scored
    from tests.tiny_vision import BUILD

    calls: list[int] = []

    def attend(q: mx.array, *others: Any, **options: Any) -> mx.array:
        calls.append(q.shape[2])
        return attention(q, *others, **options)

    attention = tower_attention.attention
    monkeypatch.setattr(tower_attention, "attention", attend)
    monkeypatch.setattr(tower_attention, "MAX_BYTES", 1000)  # a few rows
    oracle = BUILD[family](tmp_path)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        row = scored(engine, [image_bytes(33, 33)])
        engine.add([row]).result()
    finally:
        engine.close()
    assert max(calls) > 1
    check(row, oracle)
