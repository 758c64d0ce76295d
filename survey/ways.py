"""Compare every way in which the engine runs the rows of a family with transformers, and write what was found.

    python -m survey.ways [FAMILY ...] [--seed 0] [--write]

Rows run alone, in batches, with shared prompts and generated, in default and in exact mode, in float32 and, where MLX
on a CPU can, in 16 bits. `--write` keeps the findings in survey/results/ways.json, which docs/numbers.md is made from.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from survey import reference
from survey.engine_rows import EngineProcess, Row, Served
from survey.families import FAMILIES
from survey.families.family import Family
from tests.tiny_tokenizer import build_tokenizer

RESULTS = Path(__file__).parent / "results/ways.json"
TOLERANCE_NATS = 1e-4  # float32, the largest error of all tokens
MAX_RATIO_16_BITS = 1.5  # root mean square of the error, relative to transformers' own in 16 bits
_CRASHES = "crashes: "
_DTYPES_OF_16_BITS = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a configuration is served. Errors are in nats, by way and, with "exact ", in exact mode."""

    mode: str  # "default", "one row at a time"; "" if it is not served
    note: str = ""  # the outcome of the self-test if it is not "passed"; why it is refused; how it crashed
    errors: dict[str, float] = field(default_factory=dict)  # float32, the largest error
    ratios: dict[str, float] = field(default_factory=dict)  # by dtype of 16 bits: of two root mean squares
    replaced: list[str] = field(default_factory=list)  # classes of mlx-lm whose code the engine replaces or wraps

    @property
    def is_right(self) -> bool:
        """True if it is served within the tolerances, or refused with a reason."""
        if self.note.startswith(_CRASHES):
            return False
        within = all(error <= TOLERANCE_NATS for error in self.errors.values())
        return within and all(ratio <= MAX_RATIO_16_BITS for ratio in self.ratios.values())


def compare(family: Family, base: str, seed: int, process: EngineProcess, *, in_16_bits: bool) -> Outcome:
    """Serve one base configuration of a family in every way."""
    folder = Path(tempfile.mkdtemp(prefix="ways-"))
    try:
        model = reference.build_model(reference.build_config(family.bases()[base]), seed)
        model.save_pretrained(folder)
        if in_16_bits:
            model.save_pretrained(folder / "transformers")
        family.convert(folder)
        build_tokenizer().save_pretrained(folder)
        oracle = _Oracle(model)
        served = process.serve(folder, seed, dtype="float32")
        exact = process.serve(folder, seed, dtype="float32", mode="exact")
        if reason := failure(served) or failure(exact, "exact mode: "):
            return Outcome("", reason.replace(str(folder), "the checkpoint"))
        errors = oracle.largest_errors(served.rows) | {
            f"exact {way}": error for way, error in oracle.largest_errors(exact.rows).items()
        }
        ratios = _ratios_in_16_bits(folder, model, oracle, seed, process) if in_16_bits else {}
        note = "" if served.self_test == "passed" else served.self_test
        return Outcome(served.mode, note, errors, ratios, served.replaced)
    finally:
        shutil.rmtree(folder)


def failure(served: Served, where: str = "") -> str:
    """Say why rows were not served; "" if they were."""
    if served.crash:
        return f"{_CRASHES}{where}{served.crash}"
    return f"{where}{served.refusal}" if served.refusal else ""


def _ratios_in_16_bits(
    folder: Path, model: Any, oracle: "_Oracle", seed: int, process: EngineProcess
) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for dtype in _DTYPES_OF_16_BITS:
        served = process.serve(folder, seed, dtype=dtype)
        if failure(served):
            if "multiplies experts" not in served.refusal:  # MLX on a CPU cannot
                ratios[dtype] = float("inf")
            continue
        loaded = type(model).from_pretrained(
            folder / "transformers", dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        rows = [row for row in served.rows if row.way in ("batch", "alone")]
        peer = _Oracle(loaded.eval())
        own = np.concatenate([row.logprobs - oracle.of(row) for row in rows])
        others = np.concatenate([peer.of(row) - oracle.of(row) for row in rows])
        ratios[dtype] = round(float(np.sqrt((own**2).mean() / (others**2).mean())), 2)
    return ratios


class _Oracle:
    """transformers' logprobs of whole rows, each computed once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def of(self, row: Row) -> np.ndarray:
        """Return the logprobs of the reported tokens of a row."""
        key = tuple(row.token_ids)
        if key not in self._known:
            logprobs = reference.logprobs(self._model, row.token_ids)
            self._known[key] = logprobs[np.arange(len(key) - 1), key[1:]]
        return self._known[key][row.first - 1 :]

    def largest_errors(self, rows: list[Row]) -> dict[str, float]:
        errors: dict[str, float] = {}
        for row in rows:
            found, expected = np.array(row.logprobs), self.of(row)
            error = np.abs(np.where(found == expected, 0, found - expected)).max(initial=0.0)
            errors[row.way] = float(np.maximum(errors.get(row.way, 0.0), error))  # NaN if either is
        return {way: float(f"{error:.1e}") for way, error in errors.items()}


def write(name: str, outcomes: dict[str, Outcome]) -> None:
    """Replace the findings of one family."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = {
        base: {key: value for key, value in asdict(found).items() if value} for base, found in outcomes.items()
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(_one_line_per_base(dict(sorted(known.items()))))


def _one_line_per_base(findings: dict[str, dict[str, Any]]) -> str:
    families = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(base)}: {json.dumps(found)}" for base, found in bases.items())
        + "\n }"
        for name, bases in findings.items()
    ]
    return "{\n" + ",\n".join(families) + "\n}\n"


def _line(name: str, base: str, outcome: Outcome) -> str:
    verdict = "right" if outcome.is_right else "WRONG"
    worst = max(outcome.errors.values(), default=0.0)
    mode = outcome.mode or "refused"
    return f"{verdict} {name:18} {base:12} {mode:18} {worst:.0e} {outcome.ratios or ''} {outcome.note:.230}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the findings in the repository")
    arguments = parser.parse_args()
    with EngineProcess() as process:
        for name in arguments.families or FAMILIES:
            started_at, outcomes = time.monotonic(), {}
            for base in FAMILIES[name].bases():
                in_16_bits = base == "base"
                outcome = compare(FAMILIES[name], base, arguments.seed, process, in_16_bits=in_16_bits)
                outcomes[base] = outcome
                print(_line(name, base, outcome))
                if not outcome.is_right:
                    print(f"      {outcome.errors}")
            if arguments.write:
                write(name, outcomes)
            print(f"{name}: {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    main()
