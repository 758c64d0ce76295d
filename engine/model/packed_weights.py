"""Read the packed integers of AutoAWQ and AutoGPTQ as MLX's affine quantisation. Replaces what mlx-lm does for both.

mlx-lm reads GPTQ's layout as AWQ's, reads every version of AWQ as one, drops the scales of activations, and rounds
scale times zero point, and all other weights, to the scales' dtype.

    AutoAWQ, "gemm"   qweight [in, out / 8]          8 outputs a word, in the order 0 2 4 6 1 3 5 7
    AutoGPTQ          qweight [in * bits / 32, out]  a stream of bits along the inputs, as MLX's is
    both              scales [groups, out], qzeros [groups, out * bits / 32], packed along the outputs

A weight is (q - zero) * scale. AutoGPTQ's first format stores zero - 1.
"""

from typing import Any

import mlx.core as mx

Weights = dict[str, mx.array]
Settings = dict[str, Any]

_AWQ_SHIFTS = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each output within a word
_GROUP_SIZES = (32, 64, 128)  # MLX's
_BITS = {"awq": (4,), "gptq": (2, 4, 8)}
_FORMATS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
_PACKED = ("qweight", "qzeros", "scales", "g_idx")


def unpack(weights: Weights, settings: Settings, *, dtype: mx.Dtype | None) -> tuple[Weights, Settings]:
    """Return the weights in MLX's form, and MLX's settings of quantisation.

    `dtype` is that of scales and biases, None: that of the packed scales. Raises ValueError for what cannot be read.
    """
    method, bits, group_size = settings["quant_method"], settings.get("bits", 4), settings.get("group_size", 128)
    stored_format = _check(settings, method, bits, group_size)
    prefixes = [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]
    packed = {f"{prefix}.{leaf}" for prefix in prefixes for leaf in _PACKED}
    unpacked = {name: weight for name, weight in weights.items() if name not in packed}
    for prefix in prefixes:
        layer = {leaf: weights[f"{prefix}.{leaf}"] for leaf in _PACKED if f"{prefix}.{leaf}" in weights}
        _check_groups(layer.get("g_idx"), group_size, prefix)
        qweight, scales = layer["qweight"].view(mx.uint32), layer["scales"]
        if method == "awq":
            unpacked[f"{prefix}.weight"] = _pack(_unpack_awq(qweight).T)
            zeros = _unpack_awq(layer["qzeros"].view(mx.uint32)) if "qzeros" in layer else mx.array(8)
        else:
            unpacked[f"{prefix}.weight"] = mx.contiguous(qweight.T)
            zeros = _unpack_gptq_zeros(layer, bits, stored_format, prefix)
        biases = -zeros.astype(mx.float32) * scales.astype(mx.float32)
        target = dtype or scales.dtype
        unpacked[f"{prefix}.scales"] = mx.contiguous(scales.T).astype(target)
        unpacked[f"{prefix}.biases"] = mx.contiguous(biases.T).astype(target)
    if dtype is None and prefixes:  # kernels take operands of one dtype
        unpacked = {
            name: weight.astype(target) if mx.issubdtype(weight.dtype, mx.floating) else weight
            for name, weight in unpacked.items()
        }
    return unpacked, {"group_size": group_size, "bits": bits}


def _check(settings: Settings, method: str, bits: int, group_size: int) -> str:
    """Raise ValueError for settings that are not read; return the format."""
    backend = settings.get("backend")  # the others are kernels
    formats = [
        "llm-awq" if backend == "llm-awq" else None,
        *map(settings.get, ("version", "format", "checkpoint_format")),
    ]
    stored_format = str(next(filter(None, formats), _FORMATS[method][0])).lower()
    for name, value, expected in (
        ("bits", bits, _BITS[method]),
        ("group_size", group_size, _GROUP_SIZES),
        ("version" if method == "awq" else "checkpoint_format", stored_format, _FORMATS[method]),
        ("is_marlin_format", bool(settings.get("is_marlin_format")), (False,)),
        ("dynamic", settings.get("dynamic") or None, (None,)),
    ):
        if value not in expected:
            raise ValueError(
                f"quantization_config.{name} is {value!r}, expected {', '.join(map(str, expected))} for {method}: "
                "other weights cannot be read as MLX's"
            )
    return stored_format


def _check_groups(g_idx: mx.array | None, group_size: int, prefix: str) -> None:
    """Raise ValueError if the inputs of a group are not neighbours."""
    if g_idx is not None and not mx.array_equal(g_idx, mx.arange(g_idx.shape[0]) // group_size).item():
        raise ValueError(
            f"{prefix}.g_idx orders inputs by activation (desc_act), expected groups of neighbours: "
            "MLX has no other groups"
        )


def _unpack_awq(words: mx.array) -> mx.array:
    """Return [n, words * 8] integers."""
    shifts = mx.array(_AWQ_SHIFTS, dtype=mx.uint32) * 4
    return ((words[..., None] >> shifts) & 15).reshape(words.shape[0], -1)


def _unpack_gptq_zeros(layer: Weights, bits: int, stored_format: str, prefix: str) -> mx.array:
    """Return [groups, out] zero points."""
    if "qzeros" not in layer:
        return mx.array(1 << (bits - 1))
    largest = (1 << bits) - 1
    words = layer["qzeros"].view(mx.uint32)
    zeros = ((words[..., None] >> mx.arange(0, 32, bits, dtype=mx.uint32)) & largest).reshape(words.shape[0], -1)
    if stored_format == "gptq_v2":
        return zeros
    if mx.any(zeros == largest).item():
        raise ValueError(f"{prefix}.qzeros has {largest}, for a zero point of 0 or of {largest + 1}: it is ambiguous")
    return zeros + 1


def _pack(integers: mx.array) -> mx.array:
    """Pack [out, in] integers of 4 bits into [out, in / 8] words, as MLX does."""
    words = integers.reshape(integers.shape[0], -1, 8) << (mx.arange(8, dtype=mx.uint32) * 4)
    return words.sum(axis=-1).astype(mx.uint32)
