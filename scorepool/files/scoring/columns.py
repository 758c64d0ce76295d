"""Choose the columns that a job needs, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.rows import Values
from scorepool.wire.request_fields import MAX_TOKEN_ID


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """The columns to score: a completion after a prompt, or a text by itself."""

    prompt: str | None
    completion: str

    @classmethod
    def choose(
        cls, first: Values, name: str, prompt: str | None, completion: str | None, text: str | None
    ) -> "ScoreColumns":
        """Return the given columns, or by default `prompt` and `completion`, or `text`. Raises BadInput."""
        if text and (prompt or completion):
            raise BadInput("--text is given with --prompt or --completion: expected one or the other")
        if not (text or prompt or completion) and "text" in first and not {"prompt", "completion"} <= first.keys():
            text = "text"
        chosen = cls(None, text) if text else cls(prompt or "prompt", completion or "completion")
        check_has_columns(
            first,
            name,
            {"--prompt": chosen.prompt, "--completion": chosen.completion},
            "--prompt and --completion, or with --text",
        )
        return chosen

    @property
    def names(self) -> tuple[str, ...]:
        return (self.completion,) if self.prompt is None else (self.prompt, self.completion)

    def item(self, values: Values) -> wire.ScoreItem:
        """Return what is scored. Raises ValueError with a reason."""
        completion = _text_or_ids(values, self.completion)
        if not completion:
            raise ValueError(f"column {self.completion!r} is empty: expected at least one character or token id")
        if self.prompt is not None:
            prompt = _text_or_ids(values, self.prompt)
        else:
            prompt = "" if isinstance(completion, str) else []
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError(f"columns {self.prompt!r} and {self.completion!r} must both be text or both be token ids")
        if not prompt and not isinstance(prompt, str):
            raise ValueError("token ids have nothing before them: expected a prompt of at least one token id")
        return wire.ScoreItem(prompt=prompt, completion=completion)

    def whole_text(self, values: Values) -> str | None:
        """Return the text that is scored, None if a prompt comes before it or it is token ids. Raises ValueError."""
        item = self.item(values)
        return None if item.prompt or not isinstance(item.completion, str) else item.completion


@dataclass(frozen=True, slots=True)
class PromptColumn:
    """The column of prompts to continue: text, token ids, or lists of chat messages."""

    name: str

    @classmethod
    def choose(cls, first: Values, source_name: str, name: str) -> "PromptColumn":
        """Return the column. Raises BadInput if the first row lacks it."""
        check_has_columns(first, source_name, {"--prompt": name})
        return cls(name)

    def prompt(self, values: Values) -> dict[str, Any]:
        """Return the prompt or the messages, as arguments of wire.Generate. Raises ValueError with a reason."""
        value = values.get(self.name)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            try:
                return {"messages": msgspec.convert(list(map(_without_nulls, value)), list[wire.Message])}
            except msgspec.ValidationError as error:
                raise ValueError(f"column {self.name!r} is no list of chat messages: {error}") from None
        return {"prompt": _text_or_ids(values, self.name)}


def _without_nulls(message: object) -> object:
    """Return a message, and its tool calls, without the keys that are null: Arrow gives each the keys of all."""
    if not isinstance(message, dict):
        return message
    given = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := given.get("tool_calls"), list):
        given["tool_calls"] = list(map(_without_nulls, calls))
    return given


def _text_or_ids(values: Values, column: str) -> str | list[int]:
    value = values.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) is int for each in value):
        for token_id in value:
            if not 0 <= token_id <= MAX_TOKEN_ID:
                raise ValueError(f"column {column!r} has the token id {token_id}: expected 0 to {MAX_TOKEN_ID}")
        return value
    if column not in values:
        raise ValueError(f"the row has no column {column!r}")
    raise ValueError(f"column {column!r} is {_shown(value)}: expected text or token ids")


def text_of(values: Values, column: str) -> str:
    """Return the text in a column. Raises ValueError with a reason."""
    value = values.get(column)
    if isinstance(value, str):
        return value
    if column not in values:
        raise ValueError(f"the row has no column {column!r}")
    raise ValueError(f"column {column!r} is {_shown(value)}: expected text")


def _shown(value: object) -> str:
    return "null" if value is None else wire.quote(value)


def check_has_columns(first: Values, name: str, columns: Mapping[str, str | None], options: str = "") -> None:
    """Check that a file has columns, by the options that name them. Raises BadInput."""
    for option, column in columns.items():
        if column is not None and column not in first:
            near = get_close_matches(column, map(str, first), 1)
            raise BadInput(
                f"{name} has no column {column!r}{f' (did you mean {near[0]!r}?)' if near else ''}: it has "
                f"{', '.join(map(repr, first)) or 'none'}; name yours with {options or option}"
            )


def check_new_columns(first: Values, new: tuple[str, ...], name: str, *, has_prefix: bool) -> None:
    """Check that no new column is in the file. Raises BadInput. `has_prefix`: the command has the option --prefix."""
    if doubled := [column for column in new if column in first]:
        remedy = "give --prefix for the new columns" if has_prefix else "rename it"
        raise BadInput(f"{name} has a column {doubled[0]!r}, as the output would: {remedy}")
