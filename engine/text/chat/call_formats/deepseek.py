"""DeepSeek's calls: of V3 and R1 with the type and a fence around the arguments, of V3.1 without. No MLX."""

import json
import re
from functools import partial
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    ToolCallTag,
    Vocabulary,
    literal,
    marker_rule,
)

_MARKERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = re.compile(
    r"\s*+<｜tool▁call▁begin｜>(?>(?P<head>.*?)<｜tool▁sep｜>)(?P<rest>.*?)<｜tool▁call▁end｜>"
    r"(?=\s*+(?:<｜tool▁call▁begin｜>|$))",
    re.DOTALL,
)
_FENCED = re.compile(r"(?P<name>\S+)\n```json\n(?P<arguments>.*)\n```", re.DOTALL)


def parse(text: str, _: Any) -> list[Call]:
    """Return the calls of either version. Raises ValueError."""
    calls, at = list[Call](), 0
    while call := _CALL.match(text, at):
        calls.append(_to_call(call["head"].strip(), call["rest"]))
        at = call.end()
    if not calls or text[at:].strip():
        raise ValueError("this is not a list of calls")
    return calls


def _to_call(head: str, rest: str) -> Call:
    fenced = _FENCED.fullmatch(rest.strip())
    name, arguments = (fenced["name"], fenced["arguments"]) if fenced else (head, rest)
    return {"name": name, "arguments": json.loads(arguments)}


def _tag(start: str, end: str, vocabulary: Vocabulary, *, is_fenced: bool) -> ToolCallTag | None:
    token_ids = [vocabulary.get(f"<｜tool▁{name}｜>") for name in ("call▁begin", "sep", "call▁end")]
    if None in token_ids:
        return None
    call_start, separator, call_end = (marker_rule([token]) for token in token_ids if token is not None)

    def call_of(name: str, arguments: str) -> str:
        if not is_fenced:
            return f"{literal(name)} {separator} {arguments}"
        fence = literal(f"{name}\n```json\n")
        return f'"function" {separator} {fence} {arguments} "\\n```"'

    call = f"{call_start} function {call_end}"
    return ToolCallTag(call_of=call_of, one=f"{start} {call} {end}", several=f'{start} {call} ("\\n"? {call})* {end}')


_TELL = "<｜tool▁calls▁begin｜>"
V3 = CallFormat(markers=_MARKERS, parse=parse, tag=partial(_tag, is_fenced=True), tells=(_TELL, "```json"))
V31 = CallFormat(markers=_MARKERS, parse=parse, tag=partial(_tag, is_fenced=False), tells=(_TELL,))
