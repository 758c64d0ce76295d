"""Show which functions take the time of the engine's thread, with Python's profiler.

    python -m bench.profile [--model 0.6b] [--threads 1] [--functions 15]

mlx is lazy, so the time of a computation counts for the line that waits for it: the forward pass shows in the file
that evaluates hidden states, head and logprobs in the file that evaluates those. The profiler slows Python but not mlx,
so Python's shares are upper bounds.
"""

import cProfile
import pstats
from collections import Counter
from pathlib import Path
from random import Random

from bench import models, shared_prefix
from bench.compare import Item, draw_tokens, make_parser, parse_arguments, print_header
from bench.generate import to_generate
from bench.peers import to_sequence
from bench.unique_prompts import draw_items, geometric_lengths
from scorepool.engine import Engine, EngineSettings, Sequence
from scorepool.engine.engine import open_runner
from scorepool.engine.runner import Runner

_WAITING = ("threading.py", "acquire")  # of an engine without work
_Key = tuple[str, int, str]  # file, line, function


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--functions", type=int, default=10, help="how many functions to list")
    arguments = parse_arguments(parser)
    model = models.find(arguments.model)
    rows, longest = (2, 64) if arguments.quick else (8, 512)
    vocab_size, draw = model.vocab_size, Random(0)
    prompts = [Item(draw_tokens(draw, 32, vocab_size), []) for _ in range(rows)]
    workloads = {
        "shared prefix": [to_sequence(item) for item in shared_prefix.draw_items(draw, 128, rows, 16, vocab_size)],
        "unique prompts": [
            to_sequence(item) for item in draw_items(draw, geometric_lengths(32, longest, rows), 16, vocab_size)
        ],
        f"generation of {rows} rows": to_generate(prompts, max_tokens=32),
        f"generation of {rows} rows, top_logprobs 20": to_generate(prompts, max_tokens=32, top_logprobs=20),
    }
    for name, sequences in workloads.items():
        backend, stats = profile(model.folder, sequences)
        print_header(f"Profile of {name}", arguments.model, backend)
        print_profile(stats, arguments.functions)


def profile(folder: Path, sequences: list[Sequence]) -> tuple[str, dict[_Key, tuple[float, float]]]:
    """Return the backend, and (own, cumulative) seconds of every function on the engine's thread."""
    profiler = cProfile.Profile()

    def open_profiled(settings: EngineSettings) -> Runner:
        runner = open_runner(settings)
        profiler.enable()  # profiles this thread, the engine's
        return runner

    engine = Engine(EngineSettings(model=str(folder), dtype="float32"), open_profiled)
    engine.add(sequences).result()
    engine.close()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return engine.model_info.backend, {key: (own, cumulative) for key, (_, _, own, cumulative, _) in stats.items()}


def print_profile(stats: dict[_Key, tuple[float, float]], num_functions: int) -> None:
    own = {
        key: seconds
        for key, (seconds, _) in stats.items()
        if not any(word in "".join(map(str, key)) for word in _WAITING)
    }
    total = sum(own.values())
    by_file: Counter[str] = Counter()
    for (file, _, _), seconds in own.items():
        by_file[short_path(file)] += seconds  # type: ignore[assignment]
    print(f"{total:.3f} s on the engine's thread")
    for file, seconds in by_file.most_common(8):
        print(f"  {seconds / total:6.1%}  {file}")
    for (file, line, function), seconds in sorted(own.items(), key=lambda item: -item[1])[:num_functions]:
        print(f"     {seconds / total:6.1%}  {short_path(file)}:{line} {function}")
    scheduler = {
        function: cumulative
        for (file, _, function), (_, cumulative) in stats.items()
        if short_path(file) == "engine/scheduling/scheduler.py"
    }
    share = sum(scheduler.get(name, 0.0) for name in ("schedule", "commit")) / total
    print(f"scheduler with everything it calls, ratio to the total: {share:.2%}")


def short_path(file: str) -> str:
    """Return the last two parts of the path."""
    return "/".join(Path(file).parts[-2:])


if __name__ == "__main__":
    main()
