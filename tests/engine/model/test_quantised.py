"""A quantised model computes what MLX's own single forward pass of it does, in every format."""

import pytest

from survey import quantised

IN_MAKE_TEST = [
    *("affine, 2 bits, groups of 64", "affine, 3 bits, groups of 64", "affine, 5 bits, groups of 64"),
    *("affine, 3 and 6 bits (mixed_3_6)", "affine, 4 bits, scales trained (DWQ)", "mxfp4", "mxfp8", "nvfp4"),
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
