"""The type of a format of function calls, and what the grammars of formats share. No MLX."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scorepool.engine.errors import InvalidRequest

Call = dict[str, Any]
Schema = Mapping[str, Any]
Vocabulary = Mapping[str, int]
ToolParser = Callable[[str, Any], Any]  # (text of a call, tools) to one call or a list. May raise anything

COMPACT: dict[str, Any] = {"whitespace_flexible": False}  # else a model may write spaces until it has no tokens left
_TEMPLATE_SPACING = COMPACT | {"item_separator": ", ?", "key_separator": ": ?"}  # templates put spaces in calls
_LENIENT = {"lenient": True, "coerce_one_of": True}


def json_arguments(rule: str, parameters: Schema, strict: bool) -> list[str]:
    """Return the grammar of arguments that are a JSON object. Raises InvalidRequest."""
    options = _TEMPLATE_SPACING if strict else _TEMPLATE_SPACING | _LENIENT
    return [f"{rule}: {json_rule({**parameters, 'type': 'object'}, options)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTag:
    """The spelling of function calls, as fragments of a grammar."""

    call_of: Callable[[str, str], str]  # (name, rule of its arguments) to the text of a call. Raises InvalidRequest
    one: str  # one call; the rule `function` is any call that is allowed
    several: str
    arguments: Callable[[str, Schema, bool], list[str]] = json_arguments  # (rule, parameters, strict) to its rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    markers    <｜tool▁calls▁begin｜> ... <｜tool▁calls▁end｜>: tokens, anywhere in the answer
    opening    {"name": ...}: text without a token of its own, only at the beginning of an answer or after its reasoning
    """

    markers: tuple[str, str] | None = None  # the second is empty if only the end of the turn ends a call
    opening: str = ""  # the text with which an answer begins that is a call
    opening_pattern: re.Pattern[bytes] | None = (
        None  # that such an answer matches while it grows; `opened` when it is one
    )
    optional_markers: tuple[str, str] | None = None  # tokens around an opened call, where the vocabulary has them
    parse: ToolParser | None = None  # None: mlx-lm's
    mlx_lm: str | None = None  # mlx-lm's name of the format, if it knows it
    tag: Callable[[str, str, Vocabulary], ToolCallTag | None] = lambda *_: None  # rules of the markers to the grammar
    delimiters: Collection[str] = ()  # texts inside a call that may be tokens, and then are in no value
    tells: Collection[str] = ()  # texts of a chat template; a template that has all of them makes a model write so


def literal(text: str) -> str:
    return json.dumps(text)


def marker_rule(token_ids: Iterable[int]) -> str:
    return " ".join(f"<[{token_id}]>" for token_id in token_ids)


def delimiter_rule(text: str, vocabulary: Vocabulary) -> str:
    """Return the rule of a delimiter: its token if it has one, else its text."""
    return marker_rule([vocabulary[text]]) if text in vocabulary else literal(text)


def json_rule(schema: Schema, options: Mapping[str, Any]) -> str:
    """Return the rule of JSON that follows the schema. Raises InvalidRequest."""
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    except RecursionError:
        raise InvalidRequest("a schema is nested too deeply") from None


def check_name(name: str, allowed: re.Pattern[str], characters: str) -> None:
    """Raise InvalidRequest if this format cannot write the name."""
    if not allowed.fullmatch(name):
        raise InvalidRequest(f"this model can only call with names of {characters}; found {name!r}")
