"""How a model spells an answer to a chat: pieces of a grammar, in llguidance's dialect of Lark. No mlx.

    start: (<[151667]> rest)? calls          grammar.py puts the pieces together
    calls: <[151657]> "\\n"? function "\\n"? <[151658]>

Tokens that mark something stand here by their ids, never as text: so the reader finds what the grammar means.
To add a format in which functions are called with JSON: its pieces in `_CALL_FORMS`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from scorepool.engine.errors import InvalidRequest

Marker = tuple[int, ...]  # token ids
_PARSED_BY_MISTRALS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallTag:
    function: Callable[[str, str], str]  # a name and the rule of its arguments, to a call of it. Raises InvalidRequest
    one: str  # `function` is any of those that may be called
    several: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    begins: tuple[str, ...] = ("content", "reasoning")  # states in which the prompt may leave the reader
    rules: tuple[str, ...] = ()  # what the pieces refer to
    rest: str = ""  # of reasoning that the prompt has opened
    reasoning: str = ""  # that the model opens, and how often it may
    times: str = "?"
    content: str = "content"  # with `content`, which is what is constrained
    free: str = ""  # whatever the model likes, with `calls` at its end if it likes
    calls: ToolCallTag | None = None


PLAIN = StructuralTag()  # of a text in which nothing is marked


def literal(text: str) -> str:
    return json.dumps(text)


def marker(token_ids: Iterable[int]) -> str:
    return " ".join(f"<[{token_id}]>" for token_id in token_ids)


def any_but(token_ids: Iterable[int]) -> str:
    """Any number of other tokens."""
    listed = ",".join(map(str, sorted(set(token_ids))))
    return f"<[^{listed}]>*" if listed else "<[*]>*"


def tag_form(
    think: tuple[Marker, Marker] | None,
    call: tuple[Marker, Marker | None] | None,
    call_format: str | None,
    vocabulary: Mapping[str, int],
    eos_ids: Iterable[int],
) -> StructuralTag:
    """Of a model that writes <think> ... </think> and <tool_call> ... </tool_call>."""
    calls = None if call is None else _call_form(call, call_format, vocabulary)
    opens_call = {call[0][0]} if call is not None and calls is not None else set()
    rules = [f"text: {any_but({*eos_ids} | opens_call)}"]
    if think is None:
        return StructuralTag(rules=tuple(rules), free="text calls?", calls=calls)
    begin, end = think
    rules.append(f"rest: {any_but({*eos_ids, begin[0], end[0]} | opens_call)} {marker(end)}")
    return StructuralTag(
        rules=tuple(rules),
        rest="rest",
        reasoning=f"{marker(begin)} rest",
        free="text calls?",
        calls=calls,
    )


def harmony_form(vocabulary: Mapping[str, int], eos_ids: Iterable[int]) -> StructuralTag:
    """Of gpt-oss, whose answer is a row of messages. Its calls are one, for the token that ends it ends the turn."""
    ids = {name: vocabulary[f"<|{name}|>"] for name in ("start", "channel", "message", "end", "call")}
    channel, message = marker([ids["channel"]]), marker([ids["message"]])
    over = f'{marker([ids["end"]])} {marker([ids["start"]])} "assistant"'
    is_end = ids["call"] in set(eos_ids)
    constrain = marker(vocabulary[token] for token in ("<|constrain|>",) if token in vocabulary)
    call = f"function {'' if is_end else marker([ids['call']])}"

    def function(name: str, arguments: str) -> str:
        """To whom a message is may stand before its channel or behind it."""
        to = literal(f" to=functions.{name}")
        kind = f'(" " {f"({constrain})?" if constrain else ""} "json")?'
        return f'({channel} "commentary" {to} | {to} {channel} "commentary") {kind} {message} {arguments}'

    return StructuralTag(
        begins=("header",),
        rules=(
            f"text: {any_but({*eos_ids, *ids.values()})}",
            f'analysis: {channel} "analysis" {message} text {over}',
            f'last: {channel} ("analysis" | "commentary" | "final") {message} text',
            f"other: last {over}",
        ),
        reasoning="analysis",
        times="*",
        content=f'{channel} "final" {message} content',
        free="other* (last | calls)",
        calls=ToolCallTag(function=function, one=call, several=call),
    )


def _call_form(
    call: tuple[Marker, Marker | None], call_format: str | None, vocabulary: Mapping[str, int]
) -> ToolCallTag | None:
    """None where calls cannot be constrained: of another format, or marked by what anybody may write."""
    begin, end = call
    if call_format not in _CALL_FORMS or len(begin) != 1 or (end is not None and len(end) != 1):
        return None
    return _CALL_FORMS[call_format](marker(begin), marker(end or ()), vocabulary)


def _json_tools(begin: str, end: str, _: Mapping[str, int]) -> ToolCallTag:
    call = f'{begin} "\\n"? function "\\n"? {end}'
    return ToolCallTag(function=_named_json, one=call, several=f"({call})+")


def _mistral(begin: str, _: str, vocabulary: Mapping[str, int]) -> ToolCallTag:
    """Those with a token [ARGS] write name[ARGS]{...}, and older ones a list of objects."""
    if "[ARGS]" not in vocabulary:
        before, after = f'{begin} " "? "["', '"]"'
        return ToolCallTag(
            function=_named_json,
            one=f"{before} function {after}",
            several=f"{before} function (/, ?/ function)* {after}",
        )
    args = marker([vocabulary["[ARGS]"]])

    def function(name: str, arguments: str) -> str:
        if not _PARSED_BY_MISTRALS.issuperset(name):
            raise InvalidRequest(
                f"this model's calls name functions by letters, digits, _ and -, which {name!r} is not"
            )
        return f"{literal(name)} {args} {arguments}"

    return ToolCallTag(function=function, one=f"{begin} function", several=f"({begin} function)+")


def _kimi_k2(begin: str, end: str, vocabulary: Mapping[str, int]) -> ToolCallTag | None:
    tokens = [vocabulary.get(f"<|tool_call_{part}|>") for part in ("begin", "argument_begin", "end")]
    if None in tokens:
        return None
    opens, parts, closes = (marker([token]) for token in tokens if token is not None)

    def function(name: str, arguments: str) -> str:
        return f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {parts} {arguments}"

    call = f"{opens} function {closes}"
    return ToolCallTag(function=function, one=f"{begin} {call} {end}", several=f"{begin} ({call})+ {end}")


def _named_json(name: str, arguments: str) -> str:
    before = '{"name": ' + json.dumps(name) + ', "arguments": '
    return f'{literal(before)} {arguments} "}}"'


_CALL_FORMS = {"json_tools": _json_tools, "mistral": _mistral, "kimi_k2": _kimi_k2}
