"""Train the demo model: `python -m scorepool.models.train [--out FOLDER] [--tokens N] [--seed N]`.

Takes about half an hour on one core and needs the `dev` extra (torch, transformers). The same seed, Python, torch and
processor give the same weights. On another processor rounding differs, so the weights do too; their quality does not.
"""

import argparse
import math
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from scorepool.models import DEMO, corpus
from scorepool.models import tokenizer as vocabulary
from scorepool.models.card import heldout_passages, write_card
from scorepool.models.corpus import Document, Kind
from scorepool.models.muon import Muon

VOCAB_SIZE = 3072
CONTEXT_LENGTH = 2048
EPOCHS: dict[Kind, int] = {
    "prose": 3,
    "code": 1,
    "chat": 1,
}  # how often each document is seen if all tokens are used
BATCH_TOKENS = 2048  # small: the data is short, and more steps learn more of it
PHASES = [
    (0.70, 256),
    (0.20, 512),
    (0.10, CONTEXT_LENGTH),
]  # (share of the tokens, length of a row): short rows are cheap
MIN_TOKENS = 25_000  # so that the last phase, a tenth, has a row of CONTEXT_LENGTH
WARMUP_STEPS = 60
MATRIX_LR, OTHER_LR = 0.025, 1e-2


def architecture() -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[2, 0],  # <|im_end|> ends a turn, <|endoftext|> ends a text
        pad_token_id=0,
    )


def stream(documents: list[Document], tokenizer: Tokenizer, rng: random.Random) -> Tensor:
    """Return [num_tokens] int64: all documents, EPOCHS times each, shuffled, each after an <|endoftext|>."""
    ids = [e.ids for e in tokenizer.encode_batch([d.text for d in documents])]
    order = [i for i, d in enumerate(documents) for _ in range(EPOCHS[d.kind])]
    rng.shuffle(order)
    end_of_text = tokenizer.token_to_id(vocabulary.END_OF_TEXT)
    return torch.tensor([token for i in order for token in (end_of_text, *ids[i])])


def batches(tokens: Tensor, rng: random.Random) -> Iterator[Tensor]:
    """Yield [rows, length + 1] int64: inputs and, one to the right, targets. Each phase reads its own share."""
    start = 0
    for share, length in PHASES:
        end = start + int(share * len(tokens))
        rows = list(tokens[start:end].unfold(0, length + 1, length))
        rng.shuffle(rows)
        rows_per_batch = BATCH_TOKENS // length
        for i in range(0, len(rows) - rows_per_batch + 1, rows_per_batch):
            yield torch.stack(rows[i : i + rows_per_batch])
        start = end


def train(model: Qwen3ForCausalLM, tokens: Tensor, rng: random.Random) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=MATRIX_LR, weight_decay=0.1),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    num_steps = sum(1 for _ in batches(tokens, random.Random(0)))

    def schedule(step: int) -> float:
        """Return the factor of the learning rate: linear warmup, then a cosine to zero."""
        return min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * step / num_steps)) / 2

    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in optimizers]
    started = time.monotonic()
    recent: list[float] = []
    model.train()
    for step, batch in enumerate(batches(tokens, rng), start=1):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(others, 1.0)  # Muon's update does not depend on the gradient's size
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if len(recent) == 20 or step == num_steps:
            elapsed_s = time.monotonic() - started
            print(
                f"step {step:5} of {num_steps}  loss {sum(recent) / len(recent):.3f}  {elapsed_s:6.0f} s",
                flush=True,
            )
            recent.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO, help="folder to write (default: the shipped model's)")
    parser.add_argument(
        "--tokens", type=int, default=4_500_000, help="tokens to train on, at most (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.tokens < MIN_TOKENS:
        parser.error(f"--tokens is {arguments.tokens}, and must be at least {MIN_TOKENS}: one row of each length")
    started = time.monotonic()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)

    documents, held_out = corpus.split(corpus.read_documents())
    tokenizer = vocabulary.learn((d.text for d in documents if d.kind != "code"), VOCAB_SIZE)
    vocabulary.save(tokenizer, arguments.out, CONTEXT_LENGTH)
    tokens = stream(documents, tokenizer, rng)[: arguments.tokens]
    print(f"{len(documents)} documents, {len(tokens)} tokens, Python {platform.python_version()}", flush=True)

    model = Qwen3ForCausalLM(architecture())
    train(model, tokens, rng)
    model.bfloat16().save_pretrained(arguments.out)
    ends = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)  # type: ignore[no-untyped-call]
    ends.save_pretrained(arguments.out)
    minutes = (time.monotonic() - started) / 60
    write_card(arguments.out, heldout_passages(held_out), len(tokens), arguments.seed, minutes)


if __name__ == "__main__":
    main()
