"""Score the choices of each row as completions of its prompt, and pick the likeliest. A RowScoring of tasks.py.

`acc`, `acc_norm` and `acc_bytes` are those of lm-evaluation-harness for multiple choice: the choice of the highest sum
of logprobs, of the highest sum per character, and of the highest sum per byte is the answer. The first of equal ones is
picked. Characters and bytes are those of the choice as the row has it, without the delimiter.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.rows import Values
from scorepool.files.scoring.columns import check_has_columns, text_of
from scorepool.files.scoring.measures import RANKS, TOKEN_COLUMNS, is_scored_whole, score_columns

AnswerIs = Literal["auto", "index", "text"]
MAX_CHOICES = 1024
CHOICE_COLUMNS = (
    "choice_logprob_sum",
    "choice_num_tokens",
    "choice_num_chars",
    "choice_num_bytes",
    "choice_probability",
    "choice_logprob_per_token",
    "choice_logprob_per_char",
    "choice_logprob_per_byte",
    "picked",
    "picked_per_token",
    "picked_per_char",
    "picked_per_byte",
)
ACCURACIES = {"acc": "picked", "acc_norm": "picked_per_char", "acc_bytes": "picked_per_byte"}
_decode_json = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True)
class ChoiceScoring:
    """One item per choice. Equal choices are one item, so that their sums are equal to the last bit."""

    prompt: str
    choices: str
    answer: str | None
    answer_is: AnswerIs
    delimiter: str
    with_tokens: bool
    items_per_row: int = 1

    @classmethod
    def choose(
        cls,
        first: Values,
        name: str,
        *,
        prompt: str | None,
        choices: str,
        answer: str | None,
        answer_is: AnswerIs,
        delimiter: str,
        with_tokens: bool,
    ) -> "ChoiceScoring":
        """Return the scoring by the given columns, and by `prompt` by default. Raises BadInput."""
        chosen = cls(prompt or "prompt", choices, answer, answer_is, delimiter, with_tokens)
        if answer_is not in get_args(AnswerIs):
            raise BadInput(f"--answer-is is {answer_is!r}: expected {', '.join(get_args(AnswerIs))}")
        columns = {"--prompt": chosen.prompt, "--choices": choices, "--answer": answer}
        check_has_columns(first, name, columns)
        with suppress(ValueError):  # of a first row at fault
            return replace(chosen, items_per_row=len(chosen.items(first)))
        return chosen

    @property
    def options(self) -> dict[str, Any]:
        return {
            "--prompt": self.prompt,
            "--choices": self.choices,
            "--answer": self.answer,
            "--answer-is": self.answer_is,
            "--delimiter": self.delimiter,
            "--tokens": self.with_tokens,
        }

    @property
    def averaged(self) -> tuple[str, ...]:
        return tuple(ACCURACIES) if self.answer is not None else ()

    @property
    def text_columns(self) -> tuple[str, ...]:
        return (self.prompt, self.choices)

    @property
    def new_columns(self) -> tuple[str, ...]:
        of_tokens = tuple(f"choice_{name}" for name in (*TOKEN_COLUMNS, RANKS)) if self.with_tokens else ()
        return (*CHOICE_COLUMNS, *self.averaged, *of_tokens)

    def items(self, values: Values) -> list[wire.ScoreItem]:
        prompt = text_of(values, self.prompt)
        choices = self._choices_of(values)
        self._answer_of(values, choices)
        return [wire.ScoreItem(prompt=prompt, completion=self.delimiter + choice) for choice in dict.fromkeys(choices)]

    def columns(self, values: Values, sequences: Sequence[wire.SequenceResult]) -> Values:
        choices = self._choices_of(values)
        of_text = dict(zip(dict.fromkeys(choices), sequences, strict=True))
        scores = [score_columns(of_text[choice], self.with_tokens) for choice in choices]
        if any(not is_scored_whole(sequence) for sequence in sequences):
            raise ValueError(
                f"column {self.prompt!r} is empty and the model's texts begin without BOS, so that the first token of "
                "a choice has no logprob: expected a prompt"
            )
        columns = choice_columns(
            choices, [score["logprob_sum"] for score in scores], [score["num_tokens"] for score in scores]
        )
        answer = self._answer_of(values, choices)
        if answer is not None:
            columns |= {name: float(columns[picked] == answer) for name, picked in ACCURACIES.items()}
        if self.with_tokens:
            columns |= {f"choice_{name}": [score[name] for score in scores] for name in (*TOKEN_COLUMNS, RANKS)}
        return columns

    def _choices_of(self, values: Values) -> list[str]:
        """Return the choices: a list, or a text that is a list in JSON. Raises ValueError."""
        value = values.get(self.choices)
        if isinstance(value, str):
            try:
                value = _decode_json(value)
            except (msgspec.DecodeError, RecursionError):
                value = None
        if not (isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)):
            raise ValueError(
                f"column {self.choices!r} is {wire.quote(values.get(self.choices))}: expected a list of texts that are "
                "not empty; in CSV a list in JSON"
            )
        if len(value) > MAX_CHOICES:
            raise ValueError(f"column {self.choices!r} has {len(value)} choices: expected at most {MAX_CHOICES}")
        return value

    def _answer_of(self, values: Values, choices: list[str]) -> int | None:
        """Return the index of the right choice, which the answer is, or whose text it is. Raises ValueError."""
        if self.answer is None:
            return None
        value = values.get(self.answer)
        place = choices.index(value) if isinstance(value, str) and value in choices else None
        index = _to_index(value, len(choices))
        if self.answer_is != "auto":
            place, index = (None, index) if self.answer_is == "index" else (place, None)
        shown = f"column {self.answer!r} is {wire.quote(value)}"
        if place is not None and index not in (None, place):
            raise ValueError(
                f"{shown}, which is the text of choice {place} and the index of another: expected --answer-is text, or "
                "--answer-is index"
            )
        if place is None and index is None:
            texts, indices = "one of the row's choices", f"an index from 0 to {len(choices) - 1}"
            expected = {"auto": f"{texts}, or {indices}", "text": texts, "index": indices}[self.answer_is]
            raise ValueError(f"{shown}: expected {expected}")
        return index if place is None else place


def _to_index(value: object, num_choices: int) -> int | None:
    """Return the index that a number, or a text of digits, is; None if there is no such choice."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 10:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_choices:
        return value
    return None


def choice_columns(choices: list[str], sums: list[float], num_tokens: list[int]) -> Values:
    """Return CHOICE_COLUMNS, from the sum of logprobs and the number of tokens of each choice."""
    num_chars = [len(choice) for choice in choices]
    num_bytes = [len(choice.encode()) for choice in choices]
    highest = max(sums)
    weights = [math.exp(each - highest) for each in sums]
    per_token, per_char, per_byte = (
        [each / length for each, length in zip(sums, lengths, strict=True)]
        for lengths in (num_tokens, num_chars, num_bytes)
    )
    picked = [max(range(len(scores)), key=scores.__getitem__) for scores in (sums, per_token, per_char, per_byte)]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    columns = (sums, num_tokens, num_chars, num_bytes, probabilities, per_token, per_char, per_byte, *picked)
    return dict(zip(CHOICE_COLUMNS, columns, strict=True))
