"""The text of a tool call to the functions that it calls, by the parser of the model's format. No mlx."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scorepool.engine.text.chat.chat_format import ChatFormat, recipient

log = logging.getLogger(__name__)

# Parsers take quadratic time for a text that begins calls and arguments and ends none: minutes, where a model was made
# to write one. Longer texts, and those with more beginnings, are no calls.
MAX_CALL_BYTES = 65_536
MAX_SCANNED_BYTES = 2**21  # by the regular expressions, when they look from each beginning to the end
_BEGINNINGS = (
    b"<|open|>",
    b"<|tool_call_begin|>",
    b"<arg_key>",
    b"<atem:",
    b"<function",
    b"<invoke",
    b"<longcat_arg_key>",
    b"<param",
    b"[ARGS]",
    b"call:",
)

Tool = Mapping[str, Any]  # as chat templates read it: {"type": "function", "function": {"name", "parameters", ...}}


@dataclass(frozen=True, slots=True)
class Call:
    id: str | None  # where the format has one
    name: str
    arguments: str  # a JSON object


def read_calls(markup: ChatFormat, header: Sequence[str], text: bytes, tools: Sequence[Tool]) -> list[Call]:
    """Empty where the text is no call, or one of a function that was not offered."""
    if markup.parser is None or not tools or not _is_reasonable(text):
        return []
    try:
        found = markup.parser(text.decode(), list(tools))
        calls = [_call(markup, header, one) for one in (found if isinstance(found, list) else [found])]
    except Exception as error:  # parsers are written for well-formed calls, and raise anything at what a model writes
        log.debug("a tool call cannot be read: %s", type(error).__name__)
        return []
    offered = {tool["function"]["name"] for tool in tools}
    return calls if all(call.name in offered for call in calls) else []


def _is_reasonable(text: bytes) -> bool:
    num_beginnings = sum(text.count(beginning) for beginning in _BEGINNINGS)
    return len(text) <= MAX_CALL_BYTES and num_beginnings * len(text) <= MAX_SCANNED_BYTES


def _call(markup: ChatFormat, header: Sequence[str], found: Any) -> Call:
    """Raises KeyError, TypeError, ValueError."""
    name = (recipient(header) or "").removeprefix("functions.") if markup.names_in_header else found["name"]
    arguments = found["arguments"]
    if isinstance(arguments, str):  # some templates have models write them as JSON in JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    call_id = found.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise TypeError("names and ids are text")
    "".join((name, written, call_id or "")).encode()  # raises for half a surrogate pair, which is no text
    return Call(call_id, name, written)
