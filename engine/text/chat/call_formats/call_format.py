"""The type of a format of function calls, and what the grammars of formats share. No MLX."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def inside(text: str, tools: Any, opening: str, closing: str, parse: ToolParser) -> Any:
    """Parse what stands between two texts. The last token of a text may have put characters before the first."""
    _, found, body = text.partition(opening)
    if not found:
        raise ValueError(f"expected {opening!r}")
    return parse(body.rstrip().removesuffix(closing), tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTag:
    """The spelling of function calls, as fragments of a grammar."""

    call_of: Callable[[str, str], str]  # (name, rule of its arguments) to the text of a call. Raises InvalidRequest
    one: str  # one call; the rule `function` is any call that is allowed
    several: str
    opening: str = ""  # before `one` or `several`, where calls may follow content
    text_and_opening: Sequence[str] = ()  # the rules of `text_and_opening`: content and the opening behind it
    header: str = ""  # before content
    arguments: Callable[[str, Schema, bool], list[str]] = json_arguments  # (rule, parameters, strict) to its rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    markers    <｜tool▁calls▁begin｜> ... <｜tool▁calls▁end｜>: tokens, anywhere in the answer
    opening    {"name": ...}: text without a token of its own, at the beginning of an answer or after its reasoning, or
               anywhere
    """

    markers: tuple[str, str] | None = None  # the second is empty if only the end of the turn ends a call
    opening: str = ""  # the text with which calls begin
    opening_pattern: re.Pattern[bytes] | None = None  # that the text matches while it grows; see CallText
    opens_anywhere: bool = False  # not only at the beginning of an answer
    closing: str = ""  # the text with which calls end; only the end of the turn if there is none
    content_marks: tuple[Collection[str], Collection[str]] = ((), ())  # tokens before and after content, if there are
    header_start: str = ""  # a token behind which a name may stand, up to the next marker
    mistaken_for: str = ""  # the format that mlx-lm takes it for
    needed_tokens: Collection[str] = ()  # without which a model does not write so, beside the markers
    optional_markers: tuple[str, str] | None = None  # tokens around an opened call, where the vocabulary has them
    parse: ToolParser | None = None  # None: mlx-lm's
    mlx_lm: str | None = None  # mlx-lm's name of the format, if it knows it
    tag: Callable[[str, str, Vocabulary], ToolCallTag | None] = lambda *_: None  # rules of the markers to the grammar
    delimiters: Collection[str] = ()  # texts inside a call that may be tokens, and then are in no value
    tells: Collection[str] = ()  # texts of a chat template; a template that has all of them makes a model write so


def literal(text: str) -> str:
    return json.dumps(text)


def opening_followed_by(opening: str, first: str) -> re.Pattern[bytes]:
    """Return the pattern of calls that begin with a text and, behind spaces, a character of this class."""
    return re.compile(rf"{re.escape(opening)}\s*($|(?P<opened>{first}))".encode())


def marker_rule(token_ids: Iterable[int]) -> str:
    return " ".join(f"<[{token_id}]>" for token_id in token_ids)


def delimiter_rule(text: str, vocabulary: Vocabulary) -> str:
    """Return the rule of a delimiter: its token if it has one, else its text."""
    return marker_rule([vocabulary[text]]) if text in vocabulary else literal(text)


def delimited(text: str, delimiters: Collection[str], vocabulary: Vocabulary) -> str:
    """Return the rule of a text: the delimiters in it that are tokens are written by their ids."""
    parts = _parts(text, delimiters, vocabulary)
    return " ".join(delimiter_rule(part, vocabulary) if part in delimiters else literal(part) for part in parts)


def text_and_opening(opening: str, delimiters: Collection[str], vocabulary: Vocabulary) -> list[str]:
    """Return the rules of any text and the opening of calls behind it."""
    first = _parts(opening, delimiters, vocabulary)[0]
    first = "" if first in delimiters and first in vocabulary else first
    rest = opening.removeprefix(first)
    lazy = "" if rest else "[lazy]"  # a token ends the text, or the opening does
    return [
        f"text_and_opening: text_before {delimited(rest, delimiters, vocabulary) if rest else ''}",
        f"text_before{lazy}: TEXT_BEFORE",
        f"TEXT_BEFORE: /(.|\\n)*{in_regex(first)}/",
    ]


def _parts(text: str, delimiters: Collection[str], vocabulary: Vocabulary) -> list[str]:
    """Divide a text into the delimiters that are tokens, and what stands between them."""
    tokens = [re.escape(each) for each in delimiters if each in vocabulary]
    return [part for part in re.split(f"({'|'.join(tokens)})", text) if part] if tokens else [text]


def in_regex(text: str) -> str:
    """Return a text as a part of a regular expression."""
    return re.sub(r"([!-/:;=?@\[-`{-~])", r"\\\1", text).replace("\n", "\\n")


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
