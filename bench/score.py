"""Scoring on the demo model: our engine beside mlx full logits and transformers, alternating, in one process.

    python bench/score.py [--rows 64] [--prompt 96] [--completion 16] [--runs 5]

Prints seconds and ratios (peer / ours: above 1 we are faster), median of the runs, and the largest difference in nats.
Each peer scores the same token ids in one right-padded batch; both normalise in float32.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM

from engine import Engine, EngineSettings, Sequence

MODEL = Path(__file__).parent.parent / "models" / "demo"
Rows = list[list[int]]
Scores = list[list[float]]


def ours(engine: Engine, rows: Rows, prompt: int) -> Scores:
    sequences = [Sequence(token_ids=list(row), score_from=prompt) for row in rows]
    return [[value for value in row.logprobs if value is not None] for row in engine.add(sequences).result()]


def full_logits(rows: Rows, prompt: int) -> Callable[[], Scores]:
    import mlx.core as mx
    from mlx_lm import load

    model, _ = load(str(MODEL))
    model.set_dtype(mx.float32)

    def run() -> Scores:
        token_ids = mx.array(rows)
        logits = model(token_ids[:, :-1]).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1)[:, prompt - 1 :, 0]
        return chosen.tolist()  # type: ignore[return-value]

    return run


def transformers(rows: Rows, prompt: int) -> Callable[[], Scores]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def run() -> Scores:
        token_ids = torch.tensor(rows)
        with torch.no_grad():
            keep = token_ids.shape[1] - prompt + 1
            logits = model(token_ids, use_cache=False, logits_to_keep=keep).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            return logprobs.gather(-1, token_ids[:, prompt:, None])[..., 0].tolist()  # type: ignore[no-any-return]

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--completion", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()

    engine = Engine(EngineSettings(model=str(MODEL), dtype="float32"))
    draw = Random(0)
    length = given.prompt + given.completion
    rows = [[draw.randrange(engine.facts.vocab_size) for _ in range(length)] for _ in range(given.rows)]
    contestants: dict[str, Callable[[], Scores]] = {
        "scorepool engine": lambda: ours(engine, rows, given.prompt),
        "mlx, full logits": full_logits(rows, given.prompt),
        "transformers, logits_to_keep": transformers(rows, given.prompt),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    scores: dict[str, Scores] = {}
    for run in range(given.runs + 1):  # the first warms up
        for name, contestant in contestants.items():
            started = time.perf_counter()
            scores[name] = contestant()
            if run:
                times[name].append(time.perf_counter() - started)
    first = next(iter(contestants))
    print(f"{given.rows} rows of {given.prompt} + {given.completion} tokens, f32, {engine.facts.backend}")
    for name in contestants:
        ratio = statistics.median(peer / own for peer, own in zip(times[name], times[first], strict=True))
        difference = max(
            abs(a - b)
            for row, other in zip(scores[first], scores[name], strict=True)
            for a, b in zip(row, other, strict=True)
        )
        print(f"{name:30} {statistics.median(times[name]):7.3f} s   {ratio:5.2f} x   max difference {difference:.1e}")
    engine.close()


if __name__ == "__main__":
    main()
