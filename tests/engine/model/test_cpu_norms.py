"""Norms of few elements have MLX's own values, and stay MLX's where they cannot be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from scorepool.engine.model import cpu_kernels, cpu_norms

pytestmark = pytest.mark.skipif(not cpu_kernels.are_used(), reason="MLX has SIMD here")

COMPILES = "from scorepool.engine.model import cpu_norms; print(cpu_norms.are_compiled())"


class Norms(Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps=eps)
        self.other = Linear(2, 2)


def compile_in_process(folder: Path) -> "subprocess.Popen[str]":
    """Start a process that compiles into a folder for temporary files."""
    environ = os.environ | {"TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", COMPILES], env=environ, stdout=subprocess.PIPE, text=True)


def output_of(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output.strip()


@given(
    size=st.integers(1, 400),  # of 1 the sums have the shape of x
    outer=st.lists(st.integers(0, 5), max_size=3),
    scale=st.sampled_from([1e-25, 1e-3, 1.0, 1e4, 1e20]),
    eps=st.sampled_from([1e-6, 1e-5, 1e-12]),
    is_strided=st.booleans(),
)
def test_values_are_those_of_mlx_to_the_bit(size: int, outer: list[int], scale: float, eps: float, is_strided: bool):
    mx.random.seed(size)
    norms = Norms(size, eps)
    norms.norm.weight = mx.random.normal((size,))
    x = mx.random.normal((*outer, 2 * size)) * scale
    x = x[..., ::2] if is_strided else mx.contiguous(x[..., :size])
    expected = norms.norm(x)
    cpu_norms.install(norms)

    found = norms.norm(x)

    assert np.array_equal(np.array(found), np.array(expected), equal_nan=True)


def test_values_are_those_of_float64():
    norms = Norms(192)
    norms.norm.weight = mx.random.normal((192,))
    x = mx.random.normal((3, 192))
    cpu_norms.install(norms)

    exact, weight = np.array(x, np.float64), np.array(norms.norm.weight, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-6) * weight

    assert np.abs(np.array(norms.norm(x)) - exact).max() < 1e-6


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("num_rows", [1, cpu_norms.MAX_ELEMENTS])
def test_few_elements_of_float32_are_joined_and_no_others(num_rows: int, dtype: mx.Dtype, tmp_path: Path):
    norms = Norms(8)
    norms.norm.weight = mx.ones((8,), dtype)
    cpu_norms.install(norms)
    is_joined = num_rows == 1 and dtype == mx.float32

    normalized = norms.norm(mx.ones((num_rows, 8), dtype))

    mx.export_to_dot(str(tmp_path / "graph.dot"), normalized)
    assert ("Compiled" in (tmp_path / "graph.dot").read_text()) is is_joined
    assert normalized.dtype == dtype


def test_only_norms_change_and_keep_their_name():
    norms = Norms(8)
    cpu_norms.install(norms)
    assert type(norms.norm) is not RMSNorm
    assert type(norms.norm).__name__ == "RMSNorm"
    assert type(norms.other) is Linear


def test_norms_stay_where_mlx_has_simd_or_no_compiler(monkeypatch: pytest.MonkeyPatch):
    norms = Norms(8)
    with monkeypatch.context() as patched:
        patched.setattr(cpu_kernels, "_HAS_SIMD", True)
        cpu_norms.install(norms)
        assert type(norms.norm) is RMSNorm
    cpu_norms.are_compiled.cache_clear()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "")
        cpu_norms.install(norms)
        assert type(norms.norm) is RMSNorm
    cpu_norms.are_compiled.cache_clear()
    cpu_norms.install(norms)
    assert type(norms.norm) is not RMSNorm


def test_processes_that_start_together_compile_one_after_the_other(tmp_path: Path):
    processes = [compile_in_process(tmp_path) for _ in range(3)]
    assert [output_of(process) for process in processes] == ["True"] * 3
    assert len(list(tmp_path.glob("mlx/*/cpu/*.so"))) == 2


def test_a_folder_that_mlx_cannot_write_is_no_error(tmp_path: Path):
    (tmp_path / "mlx").write_text("a file where a folder would be")
    assert output_of(compile_in_process(tmp_path)) == "False"


def test_a_damaged_library_is_no_error(tmp_path: Path):
    assert output_of(compile_in_process(tmp_path)) == "True"
    for library in tmp_path.glob("mlx/*/cpu/*.so"):
        library.write_bytes(library.read_bytes()[:100])
    assert output_of(compile_in_process(tmp_path)) == "False"
