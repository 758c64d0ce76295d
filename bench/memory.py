"""Measure peak memory beside the weights, each system in its own process.

    python -m bench.memory [--model 0.6b] [--long 4096]

`peak` is mlx's own count of live arrays minus the weights. `RSS` is the largest resident size of the process, with
weights, libraries and checkpoint; it is the only figure for torch.
"""

import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from random import Random

import mlx.core as mx

from bench import models, shared_prefix
from bench.compare import (
    Item,
    Scorer,
    Scores,
    describe,
    draw_tokens,
    make_parser,
    max_difference,
    parse_arguments,
    print_header,
)
from bench.models import Model
from bench.peers import Evaluate, FullLogits, ScorepoolEngine, Transformers, load_mlx, open_engine

_HEAD_BYTES = 64 * 2**20  # one chunk of logits
_MIB = 2**20
_SYSTEMS = ("scorepool engine", "mlx_lm.evaluate", "mlx, full logits", "transformers, logits_to_keep")


@dataclass(frozen=True, slots=True)
class Usage:
    weights_bytes: int
    peak_bytes: int | None  # beside the weights; None for torch
    rss_bytes: int
    backend: str
    scores: Scores


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt, all scored but the first")
    parser.add_argument("--system", choices=_SYSTEMS, help="measure only this system, in this process, and print JSON")
    parser.add_argument("--workload", choices=("shared", "long"), help="what --system runs")
    parser.set_defaults(model="wide")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.model = "demo"

    model = models.find(arguments.model)
    if arguments.system:
        print(
            json.dumps(asdict(measure(arguments.system, model, draw_items(arguments.workload, model, arguments.long))))
        )
        return
    for workload in ("shared",) if arguments.quick else ("shared", "long"):
        items = draw_items(workload, model, arguments.long)
        names = _SYSTEMS[:2] if arguments.quick else _SYSTEMS
        usages = {name: _measure_in_process(name, workload, arguments.model, arguments.long) for name in names}
        title = {"shared": "Memory of a shared prefix", "long": "Memory of one long prompt"}[workload]
        scorepool = usages["scorepool engine"]
        print_header(f"{title}, {describe(items)}", arguments.model, scorepool.backend)
        print_usages(usages)
        print_bound(scorepool, model, items)


def draw_items(workload: str, model: Model, length: int) -> list[Item]:
    if workload == "shared":
        return shared_prefix.draw_items(Random(0), prompt=128, completions=8, longest=16, vocab_size=model.vocab_size)
    token_ids = draw_tokens(Random(0), min(length, model.context_length), model.vocab_size)
    return [Item(token_ids[:1], token_ids[1:])]


def measure(name: str, model: Model, items: list[Item]) -> Usage:
    """Measure one system in this process, which has done nothing else. mlx counts arrays of all threads."""
    backend, system = _open(name, model, items)
    mx.clear_cache()
    weights_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    scores = system(items)
    peak_bytes = None if backend == "torch" else mx.get_peak_memory() - weights_bytes
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rss_bytes = rss if sys.platform == "darwin" else rss * 1024
    return Usage(weights_bytes, peak_bytes, rss_bytes, backend, scores)


def _open(name: str, model: Model, items: list[Item]) -> tuple[str, Scorer]:
    if name == "scorepool engine":
        engine = open_engine(model.folder)
        return engine.model_info.backend, ScorepoolEngine(engine)
    if name == "transformers, logits_to_keep":
        return "torch", Transformers.load(model.folder, rows_at_once=len(items))
    mlx_model, _ = load_mlx(model.folder)
    if name == "mlx_lm.evaluate":
        return "mlx", Evaluate(mlx_model)
    return "mlx", FullLogits(mlx_model, rows_at_once=len(items))


def _measure_in_process(name: str, workload: str, model: str, length: int) -> Usage:
    command = [sys.executable, "-m", "bench.memory", "--system", name]
    command += ["--workload", workload, "--model", model, "--long", str(length)]
    return Usage(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def print_usages(usages: dict[str, Usage]) -> None:
    first, *_ = usages.values()
    print(f"{'':30} {'peak MiB':>9} {'ratio':>8} {'RSS MiB':>9} {'ratio':>7}   difference")
    for name, usage in usages.items():
        peak = f"{'-':>9} {'-':>8}"
        if usage.peak_bytes is not None and first.peak_bytes:
            peak = f"{usage.peak_bytes / _MIB:9.0f} {usage.peak_bytes / first.peak_bytes:7.2f}x"
        rss = f"{usage.rss_bytes / _MIB:9.0f} {usage.rss_bytes / first.rss_bytes:6.2f}x"
        print(f"{name:30} {peak} {rss}   {max_difference(first.scores, usage.scores)}")


def print_bound(scorepool: Usage, model: Model, items: list[Item]) -> None:
    """Compare scorepool's peak with 1.25 times what weights, KV cache and one chunk of logits need."""
    num_tokens = sum(len(item.completion) for item in items) + len(items[0].prompt)  # the prompt is shared
    full_logits_bytes = sum(len(item.prompt) + len(item.completion) for item in items) * model.vocab_size * 4
    needed = {
        "weights": scorepool.weights_bytes,
        "KV": num_tokens * model.kv_bytes_per_token,
        "head": _HEAD_BYTES,
    }
    bound, peak = 1.25 * sum(needed.values()), scorepool.weights_bytes + (scorepool.peak_bytes or 0)
    listed = " + ".join(f"{name} {num_bytes / _MIB:.0f}" for name, num_bytes in needed.items())
    print(f"logits of every token in float32: {full_logits_bytes / _MIB:,.0f} MiB")
    print(
        f"scorepool with its weights: {peak / _MIB:,.0f} MiB, {'within' if peak <= bound else 'ABOVE'} "
        f"1.25 x ({listed}) = {bound / _MIB:,.0f} MiB: ratio {peak / bound:.2f}x"
    )


if __name__ == "__main__":
    main()
