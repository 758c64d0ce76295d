"""Compare generation with mlx_lm.batch_generate, with top_logprobs, and while the engine also scores.

    python -m bench.generate [--model 0.6b] [--threads 1] [--tokens 64] [--rows 1 8 32]

All systems decode greedily, so that their tokens can be compared.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from mlx_lm.generate import batch_generate

from bench import llama_cpp, models
from bench.compare import (
    Item,
    compare,
    draw_tokens,
    make_parser,
    parse_arguments,
    print_comparison,
    print_header,
)
from bench.llama_cpp import LlamaCpp
from bench.peers import load_mlx, open_engine
from scorepool.engine import Engine, Sampling, Sequence

_SCORES_IN_FLIGHT = 4
_SCORED_TOKENS = 128  # of each scoring job
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class ScorepoolGenerate:
    engine: Engine
    max_tokens: int
    top_logprobs: int = 0

    def __call__(self, items: list[Item]) -> Tokens:
        sequences = to_generate(items, self.max_tokens, self.top_logprobs)
        self.engine.add(sequences).result()
        return [generated(sequence) for sequence in sequences]


@dataclass(frozen=True, slots=True)
class BatchGenerate:
    model: Any
    tokenizer: Any
    max_tokens: int

    def __call__(self, items: list[Item]) -> Tokens:
        prompts = [item.prompt for item in items]
        answer = batch_generate(self.model, self.tokenizer, prompts, max_tokens=self.max_tokens, return_token_ids=True)
        return answer.token_ids or []


@dataclass(frozen=True, slots=True)
class LlamaCppGenerate:
    model: LlamaCpp
    max_tokens: int

    def __call__(self, items: list[Item]) -> Tokens:
        return self.model.generate([item.prompt for item in items], self.max_tokens)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of each row, at most")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.rows, arguments.tokens, arguments.runs = [2], 8, 1

    model = models.find(arguments.model)
    engine = open_engine(model.folder)
    mlx_model, tokenizer = load_mlx(model.folder)

    def draw(count: int, random: Random) -> list[Item]:
        return [Item(draw_tokens(random, arguments.prompt, model.vocab_size), []) for _ in range(count)]

    systems: dict[str, Callable[[list[Item]], Tokens]] = {
        "scorepool engine": ScorepoolGenerate(engine, arguments.tokens),
        "scorepool engine, top_logprobs 20": ScorepoolGenerate(engine, arguments.tokens, top_logprobs=20),
        "mlx_lm.batch_generate": BatchGenerate(mlx_model, tokenizer, arguments.tokens),
    }
    if llama_cpp.IS_INSTALLED:
        systems["llama.cpp"] = LlamaCppGenerate(LlamaCpp(model.folder, max(arguments.rows)), arguments.tokens)
    if arguments.exact:
        systems["scorepool engine, exact"] = ScorepoolGenerate(
            open_engine(model.folder, mode="exact"), arguments.tokens
        )
    for count in arguments.rows:
        title = f"Generation, {count} rows of {arguments.prompt} prompt tokens and at most {arguments.tokens} generated"
        print_header(title, arguments.model, engine.model_info.backend)
        measurements = compare(systems, partial(draw, count), arguments.runs)
        num_tokens = sum(map(len, measurements["scorepool engine"].results)) // arguments.runs
        print_comparison(measurements, count_differing_rows, num_tokens)
    compare_with_scoring(engine, partial(draw, max(arguments.rows)), arguments.tokens, arguments.runs)
    engine.close()


def to_generate(items: list[Item], max_tokens: int, top_logprobs: int = 0) -> list[Sequence]:
    sampling = Sampling(max_tokens=max_tokens, temperature=0)
    return [Sequence(token_ids=list(item.prompt), top_logprobs=top_logprobs, sampling=sampling) for item in items]


def generated(sequence: Sequence) -> list[int]:
    """Return the generated tokens without the end-of-sequence token, which mlx_lm does not report."""
    return sequence.token_ids[sequence.num_input_tokens : -1 if sequence.finish_reason == "stop" else None]


def count_differing_rows(rows: Tokens, others: Tokens) -> str:
    count = sum(row != other for row, other in zip(rows, others, strict=True))
    return f"{count} of {len(rows)} rows"


def compare_with_scoring(engine: Engine, draw: Callable[[Random], list[Item]], max_tokens: int, runs: int) -> None:
    """Measure the rates of generation and of a steady stream of scoring, each alone and both together."""
    random = Random(0)
    generated_alone, generated_together, scored_alone, scored_together, gaps = [], [], [], [], []
    for _ in range(runs):
        wall_s, num_generated, _ = generate(engine, draw(random), max_tokens)
        generated_alone.append(num_generated / wall_s)
        with ScoringStream(engine, random) as stream:
            time.sleep(wall_s)
        scored_alone.append(stream.rate)
        with ScoringStream(engine, random) as stream:
            wall_s, num_generated, gap_s = generate(engine, draw(random), max_tokens)
        generated_together.append(num_generated / wall_s)
        scored_together.append(stream.rate)
        gaps.append(gap_s)
    print(
        f"\n{len(draw(random))} generating rows while {_SCORES_IN_FLIGHT} scoring jobs of {_SCORED_TOKENS} tokens "
        "are always in flight"
    )
    rates = (("generated", generated_alone, generated_together), ("scored", scored_alone, scored_together))
    for name, alone, together in rates:
        before, after = statistics.median(alone), statistics.median(together)
        print(f"{name:10} tokens/s alone {before:9,.0f}   together {after:9,.0f}   ratio {after / before:.2f}x")
    print(f"longest gap between two tokens of a row: {statistics.median(gaps) * 1e3:.0f} ms")


def generate(engine: Engine, items: list[Item], max_tokens: int) -> tuple[float, int, float]:
    """Return the seconds, the generated tokens, and the longest time in seconds between two tokens of a row."""
    sequences = to_generate(items, max_tokens)
    started = time.perf_counter()
    future = engine.add(sequences)
    lengths = [len(sequence.token_ids) for sequence in sequences]
    last_seen_at: dict[int, float] = {}  # by row: when a new token was last seen
    longest = 0.0
    while not future.done():
        time.sleep(0.001)
        now = time.perf_counter()
        for row, sequence in enumerate(sequences):
            if len(sequence.token_ids) > lengths[row]:
                longest = max(longest, now - last_seen_at.get(row, now))
                last_seen_at[row], lengths[row] = now, len(sequence.token_ids)
    wall_s = time.perf_counter() - started
    return wall_s, sum(sequence.num_generated for sequence in future.result()), longest


class ScoringStream:
    """A context manager that keeps some scoring jobs in flight, each with new tokens."""

    def __init__(self, engine: Engine, draw: Random) -> None:
        self.rate = 0.0  # scored tokens per second, set at exit
        self._engine, self._draw = engine, draw
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "ScoringStream":
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        in_flight = deque(self._add() for _ in range(_SCORES_IN_FLIGHT))
        num_scored = 0
        while not self._stop.is_set():
            num_scored += sum(len(sequence.columns.logprobs) for sequence in in_flight.popleft().result())
            in_flight.append(self._add())
        self.rate = num_scored / (time.perf_counter() - self._started)
        for future in in_flight:
            future.result()

    def _add(self) -> "Future[list[Sequence]]":
        token_ids = draw_tokens(self._draw, _SCORED_TOKENS, self._engine.model_info.vocab_size)
        return self._engine.add([Sequence(token_ids=token_ids, score_from=1)])


if __name__ == "__main__":
    main()
