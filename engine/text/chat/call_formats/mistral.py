"""Mistral's calls: name[ARGS]{...} where [ARGS] is a token, and a list of objects in older models. No MLX.

mlx-lm reads them.
"""

import re

from scorepool.engine.text.chat.call_formats.call_format import (
    CallFormat,
    ToolCallTag,
    Vocabulary,
    check_name,
    literal,
    marker_rule,
)
from scorepool.engine.text.chat.call_formats.json_calls import list_of_calls

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _tag(start: str, _: str, vocabulary: Vocabulary) -> ToolCallTag:
    if "[ARGS]" not in vocabulary:
        return list_of_calls(f'{start} " "? "["', '"]"')
    args = marker_rule([vocabulary["[ARGS]"]])

    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "letters, digits, _ and -")
        return f"{literal(name)} {args} {arguments}"

    return ToolCallTag(call_of=call_of, one=f"{start} function", several=f"({start} function)+")


MISTRAL = CallFormat(markers=("[TOOL_CALLS]", ""), tag=_tag, mlx_lm="mistral")
