"""Compare a prompt whose KV cache is in a file, after a restart, with one that is computed.

    python -m bench.prefix_store [--model 0.6b] [--threads 1] [--prompt 4096]

A run opens an engine twice. The first one computes the prompt twice, for a score and for the cache that is kept; the
second one, which knows the files alone, scores another token after the same prompt.
"""

import statistics
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from bench import models
from bench.compare import draw_tokens, make_parser, parse_arguments, print_header
from bench.peers import open_engine
from scorepool.engine import Engine, Sequence


def main() -> None:
    parser = make_parser(__doc__, runs=3)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt, fewer if the model holds fewer")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.prompt, arguments.runs = 512, 1

    model = models.find(arguments.model)
    length = min(arguments.prompt, model.context_length - 2)
    computed, loaded = [], []
    backend = ""
    with TemporaryDirectory() as folder:
        for run in range(arguments.runs):
            prompt = draw_tokens(Random(run), length, model.vocab_size)
            settings = {"prefix_disk_bytes": 2**34, "prefix_folder": folder, "prefix_cache_bytes": 2**32}
            engine = open_engine(model.folder, **settings)
            computed.append(score(engine, prompt, 3))
            score(engine, prompt, 4)
            backend = engine.model_info.backend
            engine.close()
            engine = open_engine(model.folder, **settings)
            loaded.append(score(engine, prompt, 5))
            engine.close()
        num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    print_header(f"A prompt of {length} tokens after a restart", model.name, backend)
    ratio = statistics.median(one / other for one, other in zip(computed, loaded, strict=True))
    print(
        f"computed {statistics.median(computed):.3f} s   loaded {statistics.median(loaded):.3f} s   ratio {ratio:.2f}x"
    )
    print(f"a file has {num_bytes / arguments.runs / 2**20:.0f} MiB")


def score(engine: Engine, prompt: list[int], token_id: int) -> float:
    """Score one token after the prompt; return the seconds."""
    started = time.perf_counter()
    engine.add([Sequence(token_ids=[*prompt, token_id], score_from=len(prompt))]).result()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
