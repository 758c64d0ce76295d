"""Kimi K2's calls: functions.name:0, and JSON after a token of its own. mlx-lm reads those of Kimi K3. No MLX."""

import json
import re
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    ToolCallTag,
    Vocabulary,
    literal,
    marker_rule,
)

_HEAD = re.compile(
    r"\s*+(?:<\|tool_call_begin\|>)?\s*+(?P<id>(?:functions\.)?(?P<name>[^<>:{}]++):\d++)\s*+"
    r"<\|tool_call_argument_begin\|>\s*+"
)
_END = re.compile(r"\s*+<\|tool_call_end\|>")


def parse(text: str, _: Any) -> list[Call]:
    """Return the calls with the model's ids. Raises ValueError."""
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while head := _HEAD.match(text, at):
        arguments, at = decoder.raw_decode(text, head.end())
        calls.append({"id": head["id"], "name": head["name"], "arguments": arguments})
        if end := _END.match(text, at):
            at = end.end()
    if text[at:].strip():
        raise ValueError("a text stands where a call was expected")
    return calls


def _tag(start: str, end: str, vocabulary: Vocabulary) -> ToolCallTag | None:
    token_ids = [vocabulary.get(f"<|tool_call_{name}|>") for name in ("begin", "argument_begin", "end")]
    if None in token_ids:
        return None
    call_start, arguments_start, call_end = (marker_rule([token]) for token in token_ids if token is not None)

    def call_of(name: str, arguments: str) -> str:
        return f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {arguments_start} {arguments}"

    call = f"{call_start} function {call_end}"
    return ToolCallTag(call_of=call_of, one=f"{start} {call} {end}", several=f"{start} ({call})+ {end}")


K2 = CallFormat(
    markers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), parse=parse, tag=_tag, mlx_lm="kimi_k2"
)
K3 = CallFormat(
    markers=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"), needed_tokens=("<|close|>", "<|sep|>"), mlx_lm="kimi_k3"
)
