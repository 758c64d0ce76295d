"""How far our logprobs are from transformers', and from themselves in other company: the tables of docs/numbers.md.

    python -m bench.agreement [--quick]

Tiny models of many architectures with random, peaked weights; both sides have the same ones. transformers runs on
torch, each row alone, and normalises in float64.
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
from scorepool.engine.model import blas
from tests.engine.oracle import Oracle
from tests.tiny_models import BOS, VOCAB_SIZE, TinyModels

NAMES = [
    *("llama", "llama3", "phi", "gpt_neox", "gpt_bigcode", "starcoder2", "qwen3", "qwen3_28_layers", "qwen3_moe"),
    *("qwen3_next", "gpt_oss", "gemma", "gemma2", "gemma3", "mamba", "mamba2", "lfm2", "granitehybrid", "nemotron_h"),
]
UnpaddedBatchKVCache = list[list[int]]


def draw_rows() -> UnpaddedBatchKVCache:
    """Six of lengths that share no chunk, and eight on one prompt."""
    draw = Random(0)
    tokens = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (99, 60, 33, 7, 120, 180, 80)]
    prompt = tokens.pop()
    alike = [prompt + [draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in range(1, 9)]
    return [[BOS, *row] for row in tokens + alike]


def run(engine: Engine, groups: list[UnpaddedBatchKVCache]) -> list[np.ndarray]:
    """Logprobs of the tokens behind the first 81, which may be shared; of short rows, of all."""
    found = []
    for rows in groups:
        sequences = [Sequence(token_ids=list(row), score_from=first(row)) for row in rows]
        found += [np.array(done.columns.logprobs) for done in engine.add(sequences).result()]
    return found


def first(row: list[int]) -> int:
    return 81 if len(row) > 81 else 1


def expected(oracle: Oracle, rows: UnpaddedBatchKVCache) -> list[np.ndarray]:
    return [oracle.logprobs(row)[np.arange(first(row) - 1, len(row) - 1), row[first(row) :]] for row in rows]


def largest(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def rms(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate([a - b for a, b in zip(one, other, strict=True)]) ** 2)))


def row_of_float32(folder: Path, rows: UnpaddedBatchKVCache) -> str:
    """One line of the first table."""
    right = expected(Oracle(folder), rows)
    cells: list[str] = []
    default = EngineSettings(model=str(folder), dtype="float32", max_batch_tokens=200)
    for settings in (default, replace(default, mode="exact")):
        engine = Engine(settings)
        alone, together = run(engine, [[row] for row in rows]), run(engine, [rows])
        same = largest(alone, together)
        cells += [
            engine.model_info.mode,
            f"{largest(together, right):.1e}",
            "to the bit" if same == 0 else f"{same:.1e}",
        ]
        engine.close()
    return " | ".join(cells)


def row_of_16_bits(folder: Path, rows: UnpaddedBatchKVCache) -> str:
    """One line of the second table."""
    right = expected(Oracle(folder), rows)
    cells: list[str] = []
    dtypes: list[Literal["bfloat16", "float16"]] = ["bfloat16", "float16"]
    for dtype in dtypes:
        theirs = rms(expected(Oracle(folder, getattr(torch, dtype)), rows), right)
        try:
            engine = Engine(EngineSettings(model=str(folder), dtype=dtype))
        except LoadError:
            cells += ["not on a CPU", f"{theirs:.1e}"]
            continue
        cells += [f"{rms(run(engine, [rows]), right):.1e}", f"{theirs:.1e}"]
        engine.close()
    return " | ".join(cells)


def main() -> None:
    logging.getLogger("scorepool.engine").setLevel(logging.CRITICAL)  # what it says of each model stands in the table
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two architectures")
    names = NAMES[:2] if parser.parse_args().quick else NAMES
    rows = draw_rows()
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder))
        print(f"float32, {blas.load()}; nats, the largest of {len(rows)} rows\n")
        print("| model | mode | from transformers | alone or together | mode | from transformers | alone or together |")
        print("|---|---|---|---|---|---|---|")
        for name in names:
            print(f"| {name} | {row_of_float32(models(name), rows)} |", flush=True)
        print("\n16 bits: root mean square of the error, against transformers in float32\n")
        print("| model | bfloat16, ours | transformers | float16, ours | transformers |")
        print("|---|---|---|---|---|")
        for name in names:
            print(f"| {name} | {row_of_16_bits(models(name), rows)} |", flush=True)


if __name__ == "__main__":
    main()
