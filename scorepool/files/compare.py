"""Compare models on a file, as a function."""

from os import fspath
from pathlib import Path
from typing import Unpack

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.file_run import FileOptions, Plan, place_of, run_file
from scorepool.files.formats.registry import open_source
from scorepool.files.process import Summary
from scorepool.files.rows import Values
from scorepool.files.score_plan import plan_scores
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.comparison import Comparison


def compare_file(
    path: str | Path,
    out: str | Path,
    *,
    models: list[str],
    prompt: str | None = None,
    completion: str | None = None,
    text: str | None = None,
    temperature: float = 1.0,
    tokens: bool = False,
    priority: wire.Priority = "normal",
    **options: Unpack[FileOptions],
) -> Summary:
    """Score each row of a file under each of the models, and write the rows with the scores and their differences.

    New columns are those of `score_file` after `MODEL_`, and for each model but the first `logprob_sum_difference`,
    `logprob_per_token_difference`, `bits_per_byte_difference` (its value minus the first model's) and `wins` after its
    name. `means` of the summary has their means with standard errors, which are those of paired differences. A
    row that one of the models cannot score fails. The rest is as in `score_file`. Raises FileError.
    """
    names = tuple(models)
    if len(names) < 2 or len(set(names)) < len(names):
        raise BadInput(
            f"models are {', '.join(names) or 'not given'}: expected at least two different ones, by --model"
        )

    def plan(first: Values, name: str) -> Plan:
        scoring = Comparison(ScoreColumns.choose(first, name, prompt, completion, text), names, tokens)
        return plan_scores("compare", scoring, temperature=temperature, prefix="", priority=priority)

    source = open_source(fspath(path), options.get("input_format"))
    return run_file(place_of(source, out, names, options), plan)
