"""How a model marks what in its answers is reasoning, what a tool call and what content: by token ids. No mlx.

    tags      <think> ... </think>, <tool_call> ... </tool_call>: what mlx-lm knows of a tokenizer
    headers   <|start|>assistant<|channel|>analysis<|message|> ... <|end|>: each message says in its header what it is

To add a format that mlx-lm does not know: its vocabulary, its moves and its parser, beside HARMONY's below.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from scorepool.engine.text.chat.structural_tag import PLAIN, Marker, StructuralTag, harmony_form, tag_form

State = Literal["content", "reasoning", "tool_call", "header"]
Moves = dict[State, dict[Marker, State | None]]
Parser = Callable[[str, Any], Any]  # a call's text and the tools, to what mlx-lm makes of them. Raises anything
Encode = Callable[[str], list[int]]

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")  # of gpt-oss, which mlx-lm does not know
MUSE_SPARK = ("<|start|>", "<|message|>", "<|eom|>")
_TO_USER = ("user", "commentary", "all")  # recipients whose messages are content


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What mlx-lm found out about a tokenizer. Of a kind that the model does not write there is None."""

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None  # the second is empty where only the turn's end ends a call
    dropped: tuple[str, ...] = ()  # markers around content
    parser: Parser | None = None
    call_format: str | None = None  # mlx-lm's name for what the parser reads

    @classmethod
    def of(cls, wrapper: Any) -> "Tags":
        """`wrapper` is mlx-lm's TokenizerWrapper."""
        return cls(
            think=(wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None,
            call=(wrapper.tool_call_start, wrapper.tool_call_end) if wrapper.has_tool_calling else None,
            dropped=tuple(wrapper.structural_markers),
            parser=wrapper.tool_parser,
            call_format=wrapper.tool_parser.__module__.rpartition(".")[2] if wrapper.has_tool_calling else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """`moves[state][marker]` is the state behind the marker; None: what the header that it ends says."""

    moves: Moves
    silent_ids: frozenset[int] = frozenset()  # special tokens: no text of any channel
    eos_ids: frozenset[int] = frozenset()
    parser: Parser | None = None
    names_in_header: bool = False  # the header says which function is called, the text holds its arguments
    form: StructuralTag | None = PLAIN  # None: answers in this form are not constrained

    @property
    def marker_ids(self) -> frozenset[int]:
        """Tokens that are markers alone."""
        return frozenset(marker[0] for moves in self.moves.values() for marker in moves if len(marker) == 1)


def chat_format_of(
    tags: Tags, vocabulary: Mapping[str, int], encode: Encode, silent_ids: Collection[int], eos_ids: Collection[int]
) -> ChatFormat:
    known = partial(ChatFormat, silent_ids=frozenset(silent_ids), eos_ids=frozenset(eos_ids))
    if all(token in vocabulary for token in HARMONY):
        moves = _header_moves(vocabulary, ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|call|>"))
        form = harmony_form(vocabulary, eos_ids)
        return known(moves=moves, parser=_arguments_alone, names_in_header=True, form=form)
    if tags.parser is not None and all(token in vocabulary for token in MUSE_SPARK):
        moves = _header_moves(vocabulary, ("<|start|>",), "<|message|>", ("<|eom|>",))
        return known(moves=moves, parser=tags.parser, form=None)

    def marker(text: str) -> Marker:
        """Its own token. One that is ordinary text is recognised where the model writes it as the tokenizer does."""
        return (vocabulary[text],) if text in vocabulary else tuple(encode(text))

    think = None if tags.think is None else (marker(tags.think[0]), marker(tags.think[1]))
    call = None if tags.call is None else (marker(tags.call[0]), marker(tags.call[1]) if tags.call[1] else None)
    form = tag_form(think, call, tags.call_format, vocabulary, eos_ids)
    return known(moves=_tag_moves(tags, marker), parser=tags.parser, form=form)


def addressed(words: Sequence[str]) -> State:
    """What a message is, by the words of its header: "assistant", "analysis", "to=functions.f"."""
    to = recipient(words)
    if to is not None and to != "self" and to not in _TO_USER:
        return "tool_call"
    return "reasoning" if to == "self" or "analysis" in words else "content"


def recipient(words: Sequence[str]) -> str | None:
    return next((word.removeprefix("to=") for word in words if word.startswith("to=")), None)


def _header_moves(vocabulary: Mapping[str, int], opens: Collection[str], ends: str, over: Collection[str]) -> Moves:
    """A header begins at one of `opens` and ends at `ends`; the message ends at one of `over`, or at a header."""
    leave: dict[Marker, State | None] = {(vocabulary[token],): "content" for token in over}
    leave |= {(vocabulary[token],): "header" for token in opens}
    header: dict[Marker, State | None] = {(vocabulary[ends],): None}
    return {"content": leave, "reasoning": leave, "tool_call": leave, "header": header}


def _tag_moves(tags: Tags, marker: Callable[[str], Marker]) -> Moves:
    """A closing tag without an opening one is a marker too: what a template opened in the prompt ends with it."""
    content: dict[Marker, State | None] = {marker(text): "content" for text in tags.dropped}
    reasoning: dict[Marker, State | None] = {}
    call: dict[Marker, State | None] = {}
    if tags.think is not None:
        begin, end = map(marker, tags.think)
        content |= {begin: "reasoning", end: "content"}
        reasoning |= {begin: "reasoning", end: "content"}
    if tags.call is not None:
        begin = marker(tags.call[0])
        call[begin] = "tool_call"
        if tags.call[1]:
            call[marker(tags.call[1])] = content[marker(tags.call[1])] = "content"
        content[begin] = reasoning[begin] = "tool_call"
    return {"content": content, "reasoning": reasoning, "tool_call": call}


def _arguments_alone(text: str, _: Any) -> Any:
    return {"arguments": json.loads(text)}
