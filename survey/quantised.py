"""Compare quantised models with MLX's own single forward pass, and with the model before it was quantised.

    python -m survey.quantised [--write]

The models have real layers' widths and drawn weights. `--write` keeps the findings in survey/results/quantised.json,
which docs/numbers.md is made from.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from scorepool.engine import Engine, EngineSettings, Sequence
from survey import reference
from tests.tiny_tokenizer import build_tokenizer

RESULTS = Path(__file__).parent / "results/quantised.json"
TOLERANCE_NATS = 1e-5
LENGTHS = (9, 60, 120)  # tokens of the rows
_HEAD_SCALE = 0.15  # of the drawn head: rounding grows with the logits, to 2.6e-5 at a scale of 1
Config = dict[str, Any]
Quantise = Callable[[Any, Config], tuple[Any, Config]]

_SHAPE: Config = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS: dict[str, Config] = {
    "llama": {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, **_SHAPE},
    "qwen3": {"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024, **_SHAPE},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """How far apart logprobs are, in nats."""

    error: float  # the largest between the engine, in a batch, and MLX's own single forward pass
    rms: float  # root mean square of the difference to the model before it was quantised
    largest: float  # difference to that model


def _plain(bits: int, group_size: int, mode: str = "affine") -> Quantise:
    return lambda model, config: quantize_model(model, config, group_size, bits, mode=mode)


def _mixed(recipe: str) -> Quantise:
    def quantise(model: Any, config: Config) -> tuple[Any, Config]:
        predicate: Any = mixed_quant_predicate_builder(recipe, model)
        return quantize_model(model, config, 64, 4, quant_predicate=predicate)

    return quantise


def _trained(model: Any, config: Config) -> tuple[Any, Config]:
    """Quantise, and move scales and biases away from the range of their group, as DWQ's training does."""
    model, config = quantize_model(model, config, 64, 4)
    mx.random.seed(0)
    for module in model.modules():
        if "scales" in module:
            for name in ("scales", "biases"):
                module[name] = module[name] * (1 + 0.01 * mx.random.normal(module[name].shape))
    return model, config


FORMATS: dict[str, Quantise] = {
    **{f"affine, {bits} bits, groups of 64": _plain(bits, 64) for bits in (2, 3, 4, 5, 6, 8)},
    "affine, 4 bits, groups of 32": _plain(4, 32),
    "affine, 4 bits, groups of 128": _plain(4, 128),
    "affine, 3 and 6 bits (mixed_3_6)": _mixed("mixed_3_6"),
    "affine, 4 bits, scales trained (DWQ)": _trained,
    "mxfp4": _plain(4, 32, "mxfp4"),
    "mxfp8": _plain(8, 32, "mxfp8"),
    "nvfp4": _plain(4, 16, "nvfp4"),
}


def compare(model_name: str, formats: dict[str, Quantise] = FORMATS) -> Iterator[tuple[str, Finding]]:
    """Quantise one model in each format, serve it, and yield the format's name and what was found."""
    rows = draw_rows()
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        model = reference.build_model(reference.build_config(MODELS[model_name]), seed=0)
        model.lm_head.weight.data *= _HEAD_SCALE
        model.save_pretrained(source)
        config = json.loads((source / "config.json").read_text())
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # the name that mlx-lm reads
        (source / "config.json").write_text(json.dumps(config))
        unquantised, _ = load_model(source)
        expected = [_single_forward(unquantised, row) for row in rows]
        for name, quantise in formats.items():
            folder = Path(temporary) / "quantised"
            _write_checkpoint(source, folder, quantise)
            found = _engine_logprobs(folder, rows)
            quantised, _ = load_model(folder)
            single = [_single_forward(quantised, row) for row in rows]
            shutil.rmtree(folder)
            difference = np.concatenate(single) - np.concatenate(expected)
            error = np.abs(np.concatenate(found) - np.concatenate(single)).max()
            yield (
                name,
                Finding(
                    *(
                        float(f"{value:.1e}")
                        for value in (error, np.sqrt((difference**2).mean()), np.abs(difference).max())
                    )
                ),
            )


def draw_rows() -> list[list[int]]:
    draw = Random(0)  # noqa: S311
    return [[0] + [draw.randrange(3, _SHAPE["vocab_size"]) for _ in range(length - 1)] for length in LENGTHS]


def _write_checkpoint(source: Path, folder: Path, quantise: Quantise) -> None:
    """Quantise the model of a folder into another, as mlx-lm's converter does."""
    model, config = load_model(source)
    model, config = quantise(model, config)
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    build_tokenizer().save_pretrained(folder)


def _engine_logprobs(folder: Path, rows: list[list[int]]) -> list[np.ndarray]:
    """Score all rows in one batch."""
    engine = Engine(EngineSettings(model=str(folder), dtype="float32"))
    try:
        sequences = [Sequence(token_ids=list(row), score_from=1) for row in rows]
        engine.add(sequences).result(300)
        return [np.array(sequence.columns.logprobs) for sequence in sequences]
    finally:
        engine.close()


def _single_forward(model: Any, row: list[int]) -> np.ndarray:
    """Return the logprobs of a row's tokens after the first, by mlx-lm's model with float32 scales."""
    model.update(
        tree_map(
            lambda array: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array,
            model.parameters(),
        )
    )
    logits = np.array(model(mx.array([row]))[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen: np.ndarray = logprobs[np.arange(len(row) - 1), row[1:]]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the findings in the repository")
    is_kept = parser.parse_args().write
    findings: dict[str, dict[str, dict[str, float]]] = {}
    for model_name in MODELS:
        for name, found in compare(model_name):
            findings.setdefault(name, {})[model_name] = asdict(found)
            print(f"{model_name:6} {name:40} {found}", flush=True)
    if is_kept:
        RESULTS.write_text(json.dumps(findings, indent=1) + "\n")


if __name__ == "__main__":
    main()
