"""Many rows of few tokens each are rotated, however few their dimensions: compared with the formula in float64."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.model import cuda_rotary
from scorepool.engine.model.device import gpu_kind


class Model(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.rope = RoPE(dims)


@pytest.mark.parametrize("num_rows", [1, 3, 300])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("dims", [4, 6, 16, 30, 32])
@pytest.mark.parametrize("is_padding", [False, True])
def test_rows_of_few_tokens_are_rotated_by_their_positions(num_rows: int, length: int, dims: int, is_padding: bool):
    model = Model(dims)
    cuda_rotary.install(model)
    if is_padding:  # as on CUDA
        model.rope.__class__ = cuda_rotary.padding(RoPE, dims // 2)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((num_rows, 8, length, dims)).astype(np.float32)
    positions = draw.integers(0, 1000, num_rows)

    rotated = np.array(model.rope(mx.array(x), offset=mx.array(positions.astype(np.int32))))

    half = dims // 2
    positions = positions[:, None, None, None] + np.arange(length)[:, None]
    angles = positions * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half].astype(np.float64), x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    assert rotated.shape == x.shape
    assert np.abs(rotated - expected).max() < 1e-3  # float32 angles of up to 1,000 radians


def test_only_modules_of_few_dimensions_are_changed_and_only_on_cuda():
    narrow, wide = Model(30), Model(32)
    for model in (narrow, wide):
        cuda_rotary.install(model)
    assert type(wide.rope) is RoPE
    assert (type(narrow.rope) is not RoPE) is (gpu_kind() == "cuda")
