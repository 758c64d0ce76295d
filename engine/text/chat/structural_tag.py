"""The spelling of a model's answers to chats: grammar fragments in llguidance's dialect of Lark. No MLX.

    start: (<[151667]> rest_of_reasoning)? calls          grammar.py combines the fragments
    calls: <[151657]> "\\n"? function "\\n"? <[151658]>

Markers are written by their token ids, never as text, so that the output parser recognises exactly what the grammar
means. The spelling of the calls is that of their format, in call_formats/.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from scorepool.engine.text.chat.call_formats.call_format import (
    CallFormat,
    ToolCallTag,
    in_regex,
    literal,
    marker_rule,
)

Marker = tuple[int, ...]  # token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """The spelling of reasoning, content and calls."""

    start_states: tuple[str, ...] = ("content", "reasoning")  # states in which a prompt may leave the output parser
    rules: tuple[str, ...] = ()  # rules that the fragments below refer to
    rest_of_reasoning: str = ""  # the remainder of reasoning that the prompt has opened
    reasoning: str = ""  # reasoning that the model opens itself
    reasoning_quantifier: str = "?"
    content: str = "content"  # the rule `content` is the constrained part
    unconstrained: str = ""  # any text, which may end with `calls`
    tool_call: ToolCallTag | None = None


PLAIN_TEXT = StructuralTag()  # a text without markers


def any_except(token_ids: Iterable[int]) -> str:
    """Match any number of other tokens."""
    excluded = ",".join(map(str, sorted(set(token_ids))))
    return f"<[^{excluded}]>*" if excluded else "<[*]>*"


def tag_structure(
    think: tuple[Marker, Marker] | None,
    call: tuple[Marker, Marker | None] | None,
    call_format: CallFormat | None,
    vocabulary: Mapping[str, int],
    eos_ids: Iterable[int],
) -> StructuralTag:
    """Describe a model that writes <think> ... </think> and <tool_call> ... </tool_call>."""
    tool_call = None if call is None or call_format is None else _tool_call_tag(call, call_format, vocabulary)
    call_start = {call[0][0]} if call is not None and tool_call is not None else set()
    structure = partial(
        StructuralTag,
        start_states=("content", "reasoning", "header"),
        content=_marked("content", call_format, vocabulary),
        unconstrained="text calls?",
        tool_call=tool_call,
    )
    rules = [f"text: {any_except({*eos_ids} | call_start)}"]
    if think is None:
        return structure(rules=tuple(rules))
    start, end = think
    header = f"{marker_rule([vocabulary[token]])}? " if (token := _header(call_format, vocabulary)) else ""
    rules.append(f"rest_of_reasoning: {any_except({*eos_ids, start[0], end[0]} | call_start)} {marker_rule(end)}")
    return structure(
        rules=tuple(rules),
        rest_of_reasoning="rest_of_reasoning",
        reasoning=f"{header}{marker_rule(start)} rest_of_reasoning",
    )


def _marked(content: str, call_format: CallFormat | None, vocabulary: Mapping[str, int]) -> str:
    """Return the fragment of content with the tokens that may stand before and after it."""
    before, after = ((), ()) if call_format is None else call_format.content_marks
    header = _header(call_format, vocabulary)
    fragments = [
        " | ".join(marker_rule([vocabulary[mark]]) for mark in marks if mark in vocabulary and mark != header)
        for marks in (before, after)
    ]
    first, last = (f"({fragment}){{0,2}}" if fragment else "" for fragment in fragments)
    if header and fragments[0]:  # what follows on it alone is no content
        first = f"{marker_rule([vocabulary[header]])}? ({fragments[0]})"
    return f"{first} {content} {last}".strip()


def _header(call_format: CallFormat | None, vocabulary: Mapping[str, int]) -> str:
    """Return the token with which each message of the format begins, if it has one."""
    header = "" if call_format is None else call_format.header_start
    return header if call_format and header in call_format.content_marks[0] and header in vocabulary else ""


def opened_structure(
    think: tuple[Marker, Marker] | None, call_format: CallFormat, vocabulary: Mapping[str, int], eos_ids: Iterable[int]
) -> StructuralTag:
    """Describe a model whose calls begin with a text: after content, or only where an answer begins."""
    tool_call = call_format.tag("", "", vocabulary)
    # All of a text is one regular expression: tokens may lie across its parts.
    if call_format.opens_anywhere and tool_call is not None:
        rules = [
            "other_text: OTHER_TEXT",
            f"OTHER_TEXT: /(.|\\n)+/ & ~/(.|\\n)*{in_regex(call_format.opening)}(.|\\n)*/",
        ]
        rules += tool_call.text_and_opening
        header = tool_call.header
        text = f"{header} text_and_opening rest_of_calls | {header} other_text" + (" | calls" if header else "")
    else:
        header = ""
        rules = [f"other_text: /[ \\t\\r\\n]*[^ \\t\\r\\n{_in_class(call_format.opening[0])}](.|\\n)*/"]
        text = "other_text | calls"
    structure = partial(StructuralTag, content=f"{header} content".lstrip(), tool_call=tool_call)
    if think is None:
        return structure(rules=tuple(rules), unconstrained=f"({text})?")
    start, end = think
    rules.append(f"rest_of_reasoning: {any_except({*eos_ids, start[0], end[0]})} {marker_rule(end)}")
    return structure(
        rules=tuple(rules),
        rest_of_reasoning="rest_of_reasoning",
        reasoning=f"{marker_rule(start)} rest_of_reasoning",
        unconstrained=f"({marker_rule(start)} rest_of_reasoning)? ({text})?",
    )


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "[]^-\\" else character


def harmony_structure(vocabulary: Mapping[str, int], eos_ids: Iterable[int]) -> StructuralTag:
    """Describe gpt-oss's format: an answer is a sequence of messages.

    It holds at most one tool call, because the token that ends a call also ends the turn.
    """
    ids = {name: vocabulary[f"<|{name}|>"] for name in ("start", "channel", "message", "end", "call")}
    channel, message = marker_rule([ids["channel"]]), marker_rule([ids["message"]])
    next_message = f'{marker_rule([ids["end"]])} {marker_rule([ids["start"]])} "assistant"'
    call_ends_turn = ids["call"] in set(eos_ids)
    constrain = marker_rule(vocabulary[token] for token in ("<|constrain|>",) if token in vocabulary)
    call = f"function {'' if call_ends_turn else marker_rule([ids['call']])}"

    def call_of(name: str, arguments: str) -> str:
        """Write a call. The recipient may stand before or after the channel."""
        recipient = literal(f" to=functions.{name}")
        content_type = f'(" " {f"({constrain})?" if constrain else ""} "json")?'
        header = f'({channel} "commentary" {recipient} | {recipient} {channel} "commentary")'
        return f"{header} {content_type} {message} {arguments}"

    return StructuralTag(
        start_states=("header",),
        rules=(
            f"text: {any_except({*eos_ids, *ids.values()})}",
            f'analysis: {channel} "analysis" {message} text {next_message}',
            f'last_message: {channel} ("analysis" | "commentary" | "final") {message} text',
            f"other_message: last_message {next_message}",
        ),
        reasoning="analysis",
        reasoning_quantifier="*",
        content=f'{channel} "final" {message} content',
        unconstrained="other_message* (last_message | calls)",
        tool_call=ToolCallTag(call_of=call_of, one=call, several=call),
    )


def _tool_call_tag(
    call: tuple[Marker, Marker | None], call_format: CallFormat, vocabulary: Mapping[str, int]
) -> ToolCallTag | None:
    """Return None if calls cannot be constrained: their markers are ordinary text."""
    start, end = call
    is_text = call_format.markers is None or not _are_tokens(call_format.markers[0], start, vocabulary)
    if is_text or (end is not None and len(end) != 1):
        return None
    return call_format.tag(marker_rule(start), marker_rule(end or ()), vocabulary)


def _are_tokens(text: str, marker: Marker, vocabulary: Mapping[str, int]) -> bool:
    """True if a marker is one token, or several that are written as <|...|>."""
    names = re.findall(r"<\|[^|]+\|>", text)
    return len(marker) == 1 or ("".join(names) == text and marker == tuple(vocabulary.get(name) for name in names))
