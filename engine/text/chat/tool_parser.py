"""Parse the text of a tool call into the functions that it calls, with the parser of the model's format. No MLX."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import ToolParser
from scorepool.engine.text.chat.chat_format import ChatFormat, recipient_of
from scorepool.engine.text.chat.text_calls import parse_text_calls

log = logging.getLogger(__name__)

MAX_CALL_BYTES = 2**18  # longer texts are not parsed
# Parsers of mlx-lm take quadratic time for a text that begins many calls and arguments and ends none: minutes, if a
# model was made to write one. To them texts are given only up to these limits.
MAX_FOREIGN_BYTES = 65_536
MAX_SCANNED_BYTES = 2**21  # by the regular expressions, which scan from each beginning to the end
_BEGINNINGS = (b"<|open|>", b"<atem:", b"[ARGS]")

_TEXT_FORMAT = ChatFormat(transitions={}, tool_parser=parse_text_calls)
Tool = Mapping[str, Any]  # as chat templates read it: {"type": "function", "function": {"name", "parameters", ...}}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    call_id: str | None  # None if the format has no ids
    name: str
    arguments: str  # a JSON object


def parse_tool_calls(
    chat_format: ChatFormat, header: Sequence[str], text: bytes, tools: Sequence[Tool]
) -> list[ParsedCall]:
    """Return the calls in the text, or none if it cannot be parsed or calls a function that was not offered."""
    if chat_format.tool_parser is None or not tools or not _is_cheap_to_parse(chat_format.tool_parser, text):
        return []
    try:
        parsed = chat_format.tool_parser(text.decode(), list(tools))
        calls = [_to_call(chat_format, header, item) for item in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception as error:  # parsers expect well-formed calls and raise anything at a model's text
        log.debug("cannot parse a tool call: %s", type(error).__name__)
        return []
    offered = {tool["function"]["name"] for tool in tools}
    return calls if all(call.name in offered for call in calls) else []


def parse_text(text: bytes, tools: Sequence[Tool]) -> list[ParsedCall]:
    """Return the calls that are written as text, or none if they call a function that was not offered."""
    return parse_tool_calls(_TEXT_FORMAT, (), text, tools)


def _is_cheap_to_parse(parser: ToolParser, text: bytes) -> bool:
    if not getattr(parser, "__module__", "").startswith("mlx_lm"):
        return len(text) <= MAX_CALL_BYTES
    num_beginnings = sum(text.count(beginning) for beginning in _BEGINNINGS)
    return len(text) <= MAX_FOREIGN_BYTES and num_beginnings * len(text) <= MAX_SCANNED_BYTES


def _to_call(chat_format: ChatFormat, header: Sequence[str], parsed: Any) -> ParsedCall:
    """Check one parsed call. Raises KeyError, TypeError, ValueError."""
    name = (recipient_of(header) or "").removeprefix("functions.") if chat_format.names_in_header else parsed["name"]
    arguments = parsed["arguments"]
    if isinstance(arguments, str):  # some templates make models write JSON in JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("arguments must be an object")
    arguments_json = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    call_id = parsed.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise TypeError("names and ids must be strings")
    "".join((name, arguments_json, call_id or "")).encode()  # raises for half a surrogate pair, which is no text
    return ParsedCall(call_id, name, arguments_json)
