"""Where the engine's thread spends a step, by Python's profiler, seen from outside.

    python -m bench.profile [--model 0.6b] [--threads 1] [--functions 15]

mlx is lazy and its calls are no Python functions: what is computed counts for the line that waits for it, so the
forward shows in the file that evaluates hidden states, head and logprobs in the one that evaluates those. The
profiler slows Python and not mlx, so that Python's shares are upper bounds.
"""

import cProfile
import pstats
from collections import Counter
from pathlib import Path
from random import Random

from bench import models, shared_prefix
from bench.generate import to_generate
from bench.race import Row, announce, draw_tokens, options, parse
from bench.unique_prompts import draw_rows, spread
from scorepool.engine import Engine, EngineSettings, Sequence
from scorepool.engine.engine import Runner, open_runner

_WAITING = ("threading.py", "acquire")  # of an engine without work
_Key = tuple[str, int, str]  # file, line, function


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--functions", type=int, default=10, help="how many to list")
    given = parse(parser)
    model = models.find(given.model)
    rows, longest = (2, 64) if given.quick else (8, 512)
    vocab_size, draw = model.vocab_size, Random(0)
    prompts = [Row(draw_tokens(draw, 32, vocab_size), []) for _ in range(rows)]
    works = {
        "shared prefix": to_score(shared_prefix.draw_rows(draw, 128, rows, 16, vocab_size)),
        "unique prompts": to_score(draw_rows(draw, spread(32, longest, rows), 16, vocab_size)),
        f"generation of {rows} rows": to_generate(prompts, max_tokens=32),
        f"generation of {rows} rows, top_logprobs 20": to_generate(prompts, max_tokens=32, top_logprobs=20),
    }
    for name, sequences in works.items():
        backend, stats = profile(model.folder, sequences)
        announce(f"Profile of {name}", given.model, backend)
        report(stats, given.functions)


def to_score(rows: list[Row]) -> list[Sequence]:
    return [Sequence(token_ids=row.prompt + row.completion, score_from=len(row.prompt)) for row in rows]


def profile(folder: Path, sequences: list[Sequence]) -> tuple[str, dict[_Key, tuple[float, float]]]:
    """The backend, and (own, cumulative) seconds of every function on the engine's thread, after a warm-up."""
    profiler = cProfile.Profile()

    def open_and_watch(settings: EngineSettings) -> Runner:
        runner = open_runner(settings)
        profiler.enable()  # of this thread, the engine's
        return runner

    engine = Engine(EngineSettings(model=str(folder), dtype="float32"), open_and_watch)
    engine.add(sequences).result()
    engine.close()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return engine.model_info.backend, {key: (own, cumulative) for key, (_, _, own, cumulative, _) in stats.items()}


def report(stats: dict[_Key, tuple[float, float]], num_functions: int) -> None:
    own = {
        key: seconds
        for key, (seconds, _) in stats.items()
        if not any(word in "".join(map(str, key)) for word in _WAITING)
    }
    total = sum(own.values())
    by_file: Counter[str] = Counter()
    for (file, _, _), seconds in own.items():
        by_file[short(file)] += seconds  # type: ignore[assignment]
    print(f"{total:.3f} s on the engine's thread")
    for file, seconds in by_file.most_common(8):
        print(f"  {seconds / total:6.1%}  {file}")
    for (file, line, function), seconds in sorted(own.items(), key=lambda item: -item[1])[:num_functions]:
        print(f"     {seconds / total:6.1%}  {short(file)}:{line} {function}")
    scheduler = {
        function: cumulative
        for (file, _, function), (_, cumulative) in stats.items()
        if short(file) == "engine/scheduling/scheduler.py"
    }
    share = sum(scheduler.get(name, 0.0) for name in ("plan", "advance")) / total
    print(f"scheduler, with all that it calls: ratio to the whole {share:.2%}")


def short(file: str) -> str:
    """Its last two parts."""
    return "/".join(Path(file).parts[-2:])


if __name__ == "__main__":
    main()
