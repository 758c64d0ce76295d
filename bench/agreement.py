"""Compare scorepool's logprobs with transformers', and with its own in another batch: the errors in docs/numbers.md.

    python -m bench.agreement [--quick]

The models are tiny, of many architectures, with random, peaked weights; both systems load the same ones. transformers
runs on torch, each row alone, and normalises in float64.
"""

import argparse
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
import torch

from scorepool.engine import Engine, EngineSettings, LoadError, Sequence
from scorepool.engine.model import products
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE, TinyModels
from tests.tiny_tokenizer import BOS

NAMES = [
    *("llama", "llama3", "phi", "gpt_neox", "gpt_bigcode", "starcoder2", "qwen3", "qwen3_28_layers", "qwen3_moe"),
    *("qwen3_next", "gpt_oss", "gemma", "gemma2", "gemma3", "mamba", "mamba2", "lfm2", "granitehybrid", "nemotron_h"),
]
PROMPT_LENGTH = 81  # tokens, BOS included, of the prompt that eight rows share
Rows = list[list[int]]  # token ids


def draw_rows() -> Rows:
    """Draw six rows whose lengths do not end on chunks, and eight rows with one prompt."""
    draw = Random(0)
    tokens = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (99, 60, 33, 7, 120, 180, 80)]
    prompt = tokens.pop()
    sharing = [prompt + [draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in range(1, 9)]
    return [[BOS, *row] for row in tokens + sharing]


def first_scored(row: list[int]) -> int:
    """Return the position of the first scored token: after the prompt that may be shared, or 1 in a short row."""
    return PROMPT_LENGTH if len(row) > PROMPT_LENGTH else 1


def score(engine: Engine, batches: list[Rows]) -> list[np.ndarray]:
    """Score each batch in one call, and return the logprobs of every row."""
    logprobs = []
    for rows in batches:
        sequences = [Sequence(token_ids=list(row), score_from=first_scored(row)) for row in rows]
        logprobs += [np.array(sequence.columns.logprobs) for sequence in engine.add(sequences).result()]
    return logprobs


def score_with_transformers(oracle: Oracle, rows: Rows) -> list[np.ndarray]:
    return [
        oracle.logprobs(row)[np.arange(first_scored(row) - 1, len(row) - 1), row[first_scored(row) :]] for row in rows
    ]


def max_error(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def rms_error(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate([a - b for a, b in zip(one, other, strict=True)]) ** 2)))


def float32_line(folder: Path, rows: Rows) -> str:
    """Return one line of the first table."""
    expected = score_with_transformers(Oracle(folder), rows)
    cells: list[str] = []
    default = EngineSettings(model=str(folder), dtype="float32", max_batch_tokens=200)
    for settings in (default, replace(default, mode="exact")):
        engine = Engine(settings)
        alone, together = score(engine, [[row] for row in rows]), score(engine, [rows])
        batch_error = max_error(alone, together)
        cells += [
            engine.model_info.mode,
            f"{max_error(together, expected):.1e}",
            "to the bit" if batch_error == 0 else f"{batch_error:.1e}",
        ]
        engine.close()
    return " | ".join(cells)


def float16_line(folder: Path, rows: Rows) -> str:
    """Return one line of the second table: bfloat16 and float16."""
    expected = score_with_transformers(Oracle(folder), rows)
    cells: list[str] = []
    dtypes: list[Literal["bfloat16", "float16"]] = ["bfloat16", "float16"]
    for dtype in dtypes:
        peer_error = rms_error(score_with_transformers(Oracle(folder, getattr(torch, dtype)), rows), expected)
        try:
            engine = Engine(EngineSettings(model=str(folder), dtype=dtype))
        except LoadError:
            cells += ["not on a CPU", f"{peer_error:.1e}"]
            continue
        cells += [f"{rms_error(score(engine, [rows]), expected):.1e}", f"{peer_error:.1e}"]
        engine.close()
    return " | ".join(cells)


def main() -> None:
    logging.getLogger("scorepool.engine").setLevel(logging.CRITICAL)  # the table shows what it logs about each model
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two architectures instead of all")
    names = NAMES[:2] if parser.parse_args().quick else NAMES
    rows = draw_rows()
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder))
        print(f"float32, {products.prepare()}; nats, the largest error of {len(rows)} rows\n")
        print("| model | mode | from transformers | alone or together | mode | from transformers | alone or together |")
        print("|---|---|---|---|---|---|---|")
        for name in names:
            print(f"| {name} | {float32_line(models(name), rows)} |", flush=True)
        print("\n16 bits: root mean square of the error, against transformers in float32\n")
        print("| model | bfloat16, scorepool | transformers | float16, scorepool | transformers |")
        print("|---|---|---|---|---|")
        for name in names:
            print(f"| {name} | {float16_line(models(name), rows)} |", flush=True)


if __name__ == "__main__":
    main()
