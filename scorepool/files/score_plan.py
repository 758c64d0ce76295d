"""Plan what is scored of the rows of a file."""

from functools import partial

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.file_run import Plan
from scorepool.files.options import check_options
from scorepool.files.rows import Values
from scorepool.files.scoring.choices import AnswerIs, ChoiceScoring
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.completion import CompletionScoring
from scorepool.files.scoring.scorer import JOBS_IN_FLIGHT, Scorer, sequences_of
from scorepool.files.scoring.tasks import RowScoring, ScoreTask
from scorepool.sdk.splitting import ITEMS_PER_JOB


def choose_scoring(
    first: Values,
    name: str,
    *,
    prompt: str | None,
    completion: str | None,
    text: str | None,
    choices: str | None,
    answer: str | None,
    answer_is: AnswerIs,
    delimiter: str,
    tokens: bool,
) -> RowScoring:
    """Return the scoring that the columns' names ask for. Raises BadInput."""
    if choices is None:
        if answer is not None or answer_is != "auto" or delimiter:
            raise BadInput("--answer, --answer-is and --delimiter belong to choices: expected --choices beside them")
        return CompletionScoring(ScoreColumns.choose(first, name, prompt, completion, text), tokens)
    if completion or text:
        raise BadInput("--choices is given with --completion or --text: expected one or the other")
    return ChoiceScoring.choose(
        first,
        name,
        prompt=prompt,
        choices=choices,
        answer=answer,
        answer_is=answer_is,
        delimiter=delimiter,
        with_tokens=tokens,
    )


def plan_scores(scoring: RowScoring, *, temperature: float, prefix: str, priority: wire.Priority) -> Plan:
    """Return the plan of a scoring under one model. Raises BadInput."""
    check_options(wire.Score, temperature=temperature, priority=priority)
    make_request = partial(wire.Score, temperature=temperature, priority=priority, rank=True, wait_for_model=True)
    return Plan(
        {
            "the command": "score",
            **scoring.options,
            "--temperature": temperature,
            "--prefix": prefix,
            "--priority": priority,
        },
        tuple(prefix + column for column in scoring.new_columns),
        scoring.text_columns,
        lambda client, models, run_id: ScoreTask(
            Scorer(client, models[0].name, make_request, f"{run_id}-0", sequences_of), scoring, prefix=prefix
        ),
        max(1, ITEMS_PER_JOB // scoring.items_per_row),
        JOBS_IN_FLIGHT,
        lambda values: [{"prompt": whole(item)} for item in scoring.items(values)],
    )


def whole(item: wire.ScoreItem) -> str | list[int]:
    """Return what the model reads: a prompt and its completion are of one type."""
    if isinstance(item.prompt, str) and isinstance(item.completion, str):
        return item.prompt + item.completion
    return [*(item.prompt or ()), *item.completion]
