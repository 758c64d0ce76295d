"""Work on files, as functions."""

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
from scorepool.files.score_plan import choose_scoring, plan_scores
from scorepool.files.scoring.choices import AnswerIs
from scorepool.files.scoring.columns import PromptColumn
from scorepool.files.scoring.measures import GENERATE_COLUMNS, TOKEN_COLUMNS
from scorepool.files.scoring.tasks import GenerateTask

GENERATE_ROWS_PER_CHUNK = 32  # each row is a job
GENERATE_CHUNKS_IN_FLIGHT = 8


def score_file(
    path: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    text: str | None = None,
    choices: str | None = None,
    answer: str | None = None,
    answer_is: AnswerIs = "auto",
    delimiter: str = "",
    temperature: float = 1.0,
    tokens: bool = False,
    prefix: str = "",
    priority: wire.Priority = "normal",
    **options: Unpack[FileOptions],
) -> Summary:
    """Score each row of a file, and write the rows with the columns of the scores.

    `prompt`, `completion` and `text` name columns: by default `prompt` and `completion`, or `text`. `choices` names a
    column of lists of texts, each of which is scored after the prompt and the delimiter, and `answer` one of the right
    choices, or of their indices (`answer_is` says which, where a text may be both): then `means` of the summary has
    `acc`, `acc_norm` and `acc_bytes`. `-` is stdin or stdout. The same call goes on where another process stopped.
    Raises FileError.
    """

    def plan(first: Values, name: str) -> Plan:
        scoring = choose_scoring(
            first,
            name,
            text=text,
            prompt=prompt,
            completion=completion,
            tokens=tokens,
            choices=choices,
            answer=answer,
            answer_is=answer_is,
            delimiter=delimiter,
        )
        return plan_scores(scoring, temperature=temperature, prefix=prefix, priority=priority)

    source = open_source(fspath(path), options.get("input_format"))
    return run_file(place_of(source, out, model, options), plan)


def generate_file(
    path: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    prompt: str = "prompt",
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: list[str] | None = None,
    tokens: bool = False,
    prefix: str = "",
    priority: wire.Priority = "normal",
    **options: Unpack[FileOptions],
) -> Summary:
    """Continue the prompt of each row of a file, and write the rows with the generated text and its logprobs.

    `prompt` names a column of text, token ids, or lists of chat messages. The rest is as in `score_file`.
    """

    def plan(first: Values, name: str) -> Plan:
        column = PromptColumn.choose(first, name, prompt)
        if max_tokens < 1:
            raise BadInput(f"--max-tokens is {max_tokens}: expected 1 or more")
        new = (*GENERATE_COLUMNS, *(TOKEN_COLUMNS if tokens else ()))
        sampling: wire.SamplingOptions = {
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "stop": stop or [],
        }
        check_options(wire.Generate, max_tokens=max_tokens, priority=priority, **sampling)
        request = partial(wire.Generate, max_tokens=max_tokens, priority=priority, wait_for_model=True, **sampling)

        def check(models: list[Model]) -> dict[str, Any]:
            if max_tokens >= models[0].context_length:
                raise BadInput(
                    f"--max-tokens is {max_tokens}: expected less than {models[0].context_length}, the context of "
                    f"{models[0].name}, which holds the prompt too"
                )
            return {}

        return Plan(
            {
                "the command": "generate",
                "--max-tokens": max_tokens,
                "--prompt": prompt,
                "--priority": priority,
                "--tokens": tokens,
                "--prefix": prefix,
                **sampling,
            },
            tuple(prefix + column for column in new),
            (prompt,),
            lambda client, models, run_id: GenerateTask(
                client, partial(request, model=models[0].name), column, run_id, with_tokens=tokens, prefix=prefix
            ),
            GENERATE_ROWS_PER_CHUNK,
            GENERATE_CHUNKS_IN_FLIGHT,
            lambda values: [column.prompt(values)],
            max_new_tokens=max_tokens,
            options_of=check,
        )

    source = open_source(fspath(path), options.get("input_format"))
    return run_file(place_of(source, out, model, options), plan)
