"""Peak memory beside the weights, each contestant in a process of its own.

    python -m bench.memory [--model 0.6b] [--long 4096]

`peak` is mlx's own count of live arrays less the weights; `RSS` is the process's high-water mark, weights, libraries
and checkpoint included, and all that is known of torch.
"""

import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from random import Random

import mlx.core as mx

from bench import models, shared_prefix
from bench.models import Model
from bench.peers import Evaluate, FullLogits, Ours, Transformers, load_mlx, open_engine
from bench.race import Row, Scorer, Scores, announce, describe, draw_tokens, nats, options, parse

_HEAD_BYTES = 64 * 2**20  # one chunk of logits
_MIB = 2**20
_CONTESTANTS = ("scorepool engine", "mlx_lm.evaluate", "mlx, full logits", "transformers, logits_to_keep")


@dataclass(frozen=True, slots=True)
class Usage:
    weights_bytes: int
    peak_bytes: int | None  # beside the weights; torch does not say
    rss_bytes: int
    backend: str
    scores: Scores


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt, all but the first scored")
    parser.add_argument("--contestant", choices=_CONTESTANTS, help="measure this one here, and print JSON")
    parser.add_argument("--workload", choices=("shared", "long"))
    parser.set_defaults(model="wide")
    given = parse(parser)
    if given.quick:
        given.model = "demo"

    model = models.find(given.model)
    if given.contestant:
        print(json.dumps(asdict(measure(given.contestant, model, draw_rows(given.workload, model, given.long)))))
        return
    for workload in ("shared",) if given.quick else ("shared", "long"):
        rows = draw_rows(workload, model, given.long)
        names = _CONTESTANTS[:2] if given.quick else _CONTESTANTS
        found = {name: _in_a_process(name, workload, given.model, given.long) for name in names}
        title = {"shared": "Memory of a shared prefix", "long": "Memory of one long prompt"}[workload]
        ours = found["scorepool engine"]
        announce(f"{title}, {describe(rows)}", given.model, ours.backend)
        report(found)
        report_bound(ours, model, rows)


def draw_rows(workload: str, model: Model, length: int) -> list[Row]:
    if workload == "shared":
        return shared_prefix.draw_rows(Random(0), prompt=128, completions=8, longest=16, vocab_size=model.vocab_size)
    token_ids = draw_tokens(Random(0), min(length, model.context_length), model.vocab_size)
    return [Row(token_ids[:1], token_ids[1:])]


def measure(name: str, model: Model, rows: list[Row]) -> Usage:
    """In this process, which has done nothing else. mlx counts arrays of all threads."""
    backend, contestant = _open(name, model, rows)
    mx.clear_cache()
    weights_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    scores = contestant(rows)
    peak_bytes = None if backend == "torch" else mx.get_peak_memory() - weights_bytes
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rss_bytes = rss if sys.platform == "darwin" else rss * 1024
    return Usage(weights_bytes, peak_bytes, rss_bytes, backend, scores)


def _open(name: str, model: Model, rows: list[Row]) -> tuple[str, Scorer]:
    if name == "scorepool engine":
        engine = open_engine(model.folder)
        return engine.model_info.backend, Ours(engine)
    if name == "transformers, logits_to_keep":
        return "torch", Transformers.load(model.folder, rows_at_once=len(rows))
    mlx_model, _ = load_mlx(model.folder)
    if name == "mlx_lm.evaluate":
        return "mlx", Evaluate(mlx_model)
    return "mlx", FullLogits(mlx_model, rows_at_once=len(rows))


def _in_a_process(name: str, workload: str, model: str, length: int) -> Usage:
    command = [sys.executable, "-m", "bench.memory", "--contestant", name]
    command += ["--workload", workload, "--model", model, "--long", str(length)]
    return Usage(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def report(found: dict[str, Usage]) -> None:
    ours, *_ = found.values()
    print(f"{'':30} {'peak MiB':>9} {'ratio':>8} {'RSS MiB':>9} {'ratio':>7}   differs by")
    for name, usage in found.items():
        peak = f"{'-':>9} {'-':>8}"
        if usage.peak_bytes is not None and ours.peak_bytes:
            peak = f"{usage.peak_bytes / _MIB:9.0f} {usage.peak_bytes / ours.peak_bytes:7.2f}x"
        rss = f"{usage.rss_bytes / _MIB:9.0f} {usage.rss_bytes / ours.rss_bytes:6.2f}x"
        print(f"{name:30} {peak} {rss}   {nats(ours.scores, usage.scores)}")


def report_bound(ours: Usage, model: Model, rows: list[Row]) -> None:
    num_tokens = sum(len(row.completion) for row in rows) + len(rows[0].prompt)  # each once: the prompt is shared
    naive_bytes = sum(len(row.prompt) + len(row.completion) for row in rows) * model.vocab_size * 4
    parts = {"weights": ours.weights_bytes, "KV": num_tokens * model.kv_bytes_per_token, "head": _HEAD_BYTES}
    bound, peak = 1.25 * sum(parts.values()), ours.weights_bytes + (ours.peak_bytes or 0)
    listed = " + ".join(f"{name} {num_bytes / _MIB:.0f}" for name, num_bytes in parts.items())
    print(f"logits of every token in float32: {naive_bytes / _MIB:,.0f} MiB")
    print(
        f"ours with its weights: {peak / _MIB:,.0f} MiB, {'within' if peak <= bound else 'ABOVE'} "
        f"1.25 x ({listed}) = {bound / _MIB:,.0f} MiB: ratio {peak / bound:.2f}x"
    )


if __name__ == "__main__":
    main()
