"""Compare models on a file, as a function."""

from collections.abc import Callable, Sequence
from functools import partial
from os import fspath
from pathlib import Path
from typing import Any, Unpack

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.file_run import FileOptions, Plan, place_of, run_file
from scorepool.files.formats.registry import open_source
from scorepool.files.options import check_options
from scorepool.files.process import Model, Summary
from scorepool.files.rows import Values
from scorepool.files.score_plan import whole
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.compare_task import CompareTask, read_compared, read_score
from scorepool.files.scoring.comparison import Comparison, ModelItem
from scorepool.files.scoring.scorer import JOBS_IN_FLIGHT, MAX_ITEMS_SIZE, Scorer
from scorepool.sdk import AsyncClient
from scorepool.sdk.comparing import max_size_of
from scorepool.sdk.splitting import ITEMS_PER_JOB
from scorepool.wire.score import DEFAULT_COMPARED


def compare_file(
    path: str | Path,
    out: str | Path,
    *,
    models: list[str],
    prompt: str | None = None,
    completion: str | None = None,
    text: str | None = None,
    temperature: float = 1.0,
    top_logprobs: int = DEFAULT_COMPARED,
    tokens: bool = False,
    priority: wire.Priority = "normal",
    **options: Unpack[FileOptions],
) -> Summary:
    """Score each row of a file under each of the models, and write the rows with the scores and their differences.

    New columns are those of `score_file` after `MODEL_`, and for each model but the first `logprob_sum_difference`,
    `logprob_per_token_difference`, `bits_per_byte_difference` (its value minus the first model's) and `wins` after its
    name. `means` of the summary has their means with standard errors, which are those of paired differences. A
    row that one of the models cannot score fails.

    A model of the same vocabulary as the first also gets `mean_kld_lower`, `mean_kld_upper` and `same_top_p` by compare
    jobs: the divergence from the `top_logprobs` most likely tokens, or from all with -1. `divergences` of the summary
    has those of all tokens, by model. The rest is as in `score_file`. Raises FileError.
    """
    names = tuple(models)
    if len(names) < 2 or len(set(names)) < len(names):
        raise BadInput(
            f"models are {', '.join(names) or 'not given'}: expected at least two different ones, by --model"
        )

    if top_logprobs == 0:
        raise BadInput("--top-logprobs is 0: expected at least 1, or -1 for the whole vocabulary")
    check_options(wire.Compare, base="m", temperature=temperature, priority=priority, top_logprobs=top_logprobs)

    def plan(first: Values, name: str) -> Plan:
        comparison = Comparison(ScoreColumns.choose(first, name, prompt, completion, text), names, tokens)
        options: dict[str, Any] = {"temperature": temperature, "priority": priority}
        return Plan(
            {
                "the command": "compare",
                **comparison.options,
                "--temperature": temperature,
                "--top-logprobs": top_logprobs,
                "--priority": priority,
            },
            comparison.new_columns,
            comparison.text_columns,
            lambda client, models, run_id: CompareTask(
                make_scorers(client, models, run_id, top_logprobs, options), comparison
            ),
            ITEMS_PER_JOB,
            JOBS_IN_FLIGHT,
            lambda values: [{"prompt": whole(item)} for item in comparison.items(values)],
        )

    source = open_source(fspath(path), options.get("input_format"))
    return run_file(place_of(source, out, names, options), plan)


def make_scorers(
    client: AsyncClient, models: Sequence[Model], run_id: str, top_logprobs: int, options: dict[str, Any]
) -> list[Scorer[ModelItem]]:
    """Return what scores each model but the first, and the first one too if no other has its tokens."""
    base, *others = models
    pairs = [each for each in others if each.has_tokens_of(base)]
    alone = [each for each in models if each not in pairs and not (each is base and pairs)]
    options = {**options, "rank": True, "wait_for_model": True}
    score = partial(wire.Score, **options)
    compare = partial(wire.Compare, base=base.name, top_logprobs=top_logprobs, **options)
    max_size = min(MAX_ITEMS_SIZE, max_size_of(top_logprobs, base.vocab_size))

    def scorer(
        model: Model,
        make_request: Callable[..., wire.Score],
        read: Callable[[wire.Result], list[ModelItem]],
        max_size: int,
    ) -> Scorer[ModelItem]:
        key = f"{run_id}-{models.index(model)}"
        return Scorer(client, model.name, make_request, key, read, max_size, is_named=True)

    return [
        *(scorer(each, score, read_score, MAX_ITEMS_SIZE) for each in alone),
        *(scorer(each, compare, read_compared, max_size) for each in pairs),
    ]
