"""Measure the trained model on held-out passages, and write them and the model card (README.md)."""

import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorepool.models.corpus import Document, Kind

MAX_PASSAGE_CHARS = 1200
MIN_PASSAGE_CHARS = 400
MAX_PASSAGES: dict[Kind, int] = {"prose": 40, "code": 8}
HELDOUT = "heldout.jsonl"  # shipped, so that the perplexity can be checked under any Python


@dataclass(frozen=True)
class Passage:
    source: str
    kind: Kind
    text: str


def heldout_passages(held_out: list[Document]) -> list[Passage]:
    """Select the beginning of each source's longest held-out document, cut after a whole line. Deterministic."""
    passages = []
    for kind, max_passages in MAX_PASSAGES.items():
        by_length = sorted((d for d in held_out if d.kind == kind), key=lambda d: len(d.text))
        longest = {document.source: document for document in by_length}  # the last document of a source is its longest
        texts = {source: _beginning(document.text) for source, document in sorted(longest.items())}
        long_enough = [Passage(s, kind, t) for s, t in texts.items() if len(t) >= MIN_PASSAGE_CHARS]
        passages += long_enough[:max_passages]
    return passages


def _beginning(text: str) -> str:
    return text[: text.rfind("\n", 0, MAX_PASSAGE_CHARS) + 1]


def read_heldout(folder: Path) -> list[Passage]:
    return [Passage(**json.loads(line)) for line in (folder / HELDOUT).read_text("utf-8").splitlines()]


def perplexity(folder: Path, passages: list[Passage]) -> float:
    """Return exp(mean of -log p(token | passage before it)) over all tokens but each passage's first, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in evaluation mode
    logprobs = []
    with torch.no_grad():
        for passage in passages:
            ids = torch.tensor([tokenizer.encode(passage.text)])
            rows = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            logprobs.append(rows.gather(1, ids[0, 1:, None])[:, 0])
    return math.exp(-torch.cat(logprobs).mean().item())


def write_card(folder: Path, passages: list[Passage], num_tokens: int, seed: int, minutes: float) -> None:
    """Write heldout.jsonl and README.md beside the weights that are already in `folder`."""
    lines = [json.dumps(vars(passage), ensure_ascii=False) for passage in passages]
    (folder / HELDOUT).write_text("\n".join(lines) + "\n", "utf-8")
    config = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = "\n".join(
        f"| {label} | {perplexity(folder, chosen):.2f} | {len(chosen)} |"
        for label, chosen in [
            ("all", passages),
            ("prose", [p for p in passages if p.kind == "prose"]),
            ("code", [p for p in passages if p.kind == "code"]),
        ]
    )
    card = CARD.format(
        parameters=f"{model.num_parameters():,}",
        seed=seed,
        num_tokens=f"{num_tokens:,}",
        num_tokens_plain=num_tokens,
        minutes=round(minutes),
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        rows=rows,
        **config,
    )
    (folder / "README.md").write_text(card, "utf-8")


CARD = """\
---
license: psf-2.0
language: en
library_name: mlx
tags: [text-generation, demo]
---
# scorepool's demo model

A language model small enough to ship in a source tree, trained so that demo and tests see a real, peaked
distribution instead of noise. It has read Python's documentation and nothing else: it is for trying out scorepool,
not for use.

| | |
|---|---|
| parameters | {parameters}, stored in bfloat16 |
| shape | Qwen3: {num_hidden_layers} layers of width {hidden_size}, {num_attention_heads} heads over \
{num_key_value_heads} key-value heads, MLP {intermediate_size}, tied embeddings |
| context | {max_position_embeddings} tokens |
| tokenizer | byte-level BPE, {vocab_size} tokens, no normaliser, no BOS; ChatML template |
| ends | `<|im_end|>` (a turn) and `<|endoftext|>` (a text), ids 2 and 0 |

## Held-out perplexity

On `heldout.jsonl` beside this file: the beginnings of sources that training never saw, nor any paragraph of them.
exp of the mean negative logprob of every token but each passage's first, float32.
Three of them (distutils/msvc9compiler, sysconfig and lib2to3/fixes/fix_map) have siblings in the library that share
longer runs of words.

| passages | perplexity per token | number |
|---|---|---|
{rows}

## Training

    python -m scorepool.models.train --seed {seed} --tokens {num_tokens_plain}

{num_tokens} tokens in {minutes} minutes on one x86-64 core, torch {torch}. The seed fixes the initial weights and the
order. The same Python, torch and processor give these weights again; elsewhere rounding differs, and with another
Python the text does. The Python must have its whole standard library (some distributions put idlelib, lib2to3 and
tkinter into packages of their own). Hidden matrices are trained with Muon, the rest with AdamW, both on a cosine to
zero.

## Data and licence

The standard library of Python {python}: documentation strings and longer comments as prose (three times), `help()`
topics, the documentation of compiled modules, the source files, and questions with the first sentence of a
documentation string as the answer. One source in twenty, chosen by the hash of its name, is held out
(`scorepool/models/corpus.py`). Tests, tables, generated files and installed packages are left out.

That text is under the PSF License Agreement version 2 (PSF-2.0), © Python Software Foundation. Weights, vocabulary and
`heldout.jsonl` are derived from it and are distributed under the same licence.
"""
