"""The markers, as token ids, by which a model separates reasoning, tool calls and content. No MLX.

    tags      <think> ... </think>, <tool_call> ... </tool_call>: mlx-lm finds them for a tokenizer
    headers   <|start|>assistant<|channel|>analysis<|message|> ... <|end|>: each message's header says what it is

To add a format that mlx-lm does not know, add its vocabulary, transitions and tool parser beside HARMONY's below.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from scorepool.engine.text.chat.structural_tag import (
    PLAIN_TEXT,
    Marker,
    StructuralTag,
    harmony_structure,
    tag_structure,
)
from scorepool.engine.text.tokenizer import Tokenizer

State = Literal["content", "reasoning", "tool_call", "header"]
Transitions = dict[State, dict[Marker, State | None]]
ToolParser = Callable[[str, Any], Any]  # mlx-lm's: (text of a call, tools) to the call. May raise anything

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")  # gpt-oss; mlx-lm does not know it
MUSE_SPARK = ("<|start|>", "<|message|>", "<|eom|>")
_USER_RECIPIENTS = ("user", "commentary", "all")  # messages to these recipients are content


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTags:
    """The markers that mlx-lm found for a tokenizer. None where the model does not write that kind."""

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None  # the second is empty if only the end of the turn ends a call
    ignored: tuple[str, ...] = ()  # markers around content
    tool_parser: ToolParser | None = None
    call_format: str | None = None  # mlx-lm's name for what the tool parser reads

    @classmethod
    def from_mlx_lm(cls, wrapper: Any) -> "ChatTags":
        """Read the markers from mlx-lm's TokenizerWrapper."""
        return cls(
            think=(wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None,
            call=(wrapper.tool_call_start, wrapper.tool_call_end) if wrapper.has_tool_calling else None,
            ignored=tuple(wrapper.structural_markers),
            tool_parser=wrapper.tool_parser,
            call_format=wrapper.tool_parser.__module__.rpartition(".")[2] if wrapper.has_tool_calling else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The format of a model's answers.

    `transitions[state][marker]` is the state after the marker. None means that the header before the marker decides.
    """

    transitions: Transitions
    special_token_ids: frozenset[int] = frozenset()  # they add no text to any channel
    eos_ids: frozenset[int] = frozenset()
    tool_parser: ToolParser | None = None
    names_in_header: bool = False  # the header names the called function and the text holds its arguments
    structural_tag: StructuralTag | None = PLAIN_TEXT  # None: answers in this format cannot be constrained

    @property
    def marker_ids(self) -> frozenset[int]:
        """The tokens that are a marker on their own."""
        return frozenset(marker[0] for after in self.transitions.values() for marker in after if len(marker) == 1)


PLAIN_TEXT_FORMAT = ChatFormat(transitions={})


def detect_chat_format(tags: ChatTags, tokenizer: Tokenizer) -> ChatFormat:
    vocabulary: dict[str, int] = tokenizer.hf_tokenizer.get_vocab()
    chat_format = partial(ChatFormat, special_token_ids=tokenizer.special_token_ids, eos_ids=tokenizer.eos_ids)
    if all(token in vocabulary for token in HARMONY):
        return chat_format(
            transitions=_header_transitions(
                vocabulary, ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|call|>")
            ),
            tool_parser=_parse_arguments,
            names_in_header=True,
            structural_tag=harmony_structure(vocabulary, tokenizer.eos_ids),
        )
    if tags.tool_parser is not None and all(token in vocabulary for token in MUSE_SPARK):
        transitions = _header_transitions(vocabulary, ("<|start|>",), "<|message|>", ("<|eom|>",))
        return chat_format(transitions=transitions, tool_parser=tags.tool_parser, structural_tag=None)

    def marker(text: str) -> Marker:
        """Return the text's own token, else the tokens in which the tokenizer writes it."""
        return (vocabulary[text],) if text in vocabulary else tuple(tokenizer.encode(text, add_bos=False)[0])

    think = None if tags.think is None else (marker(tags.think[0]), marker(tags.think[1]))
    call = None if tags.call is None else (marker(tags.call[0]), marker(tags.call[1]) if tags.call[1] else None)
    return chat_format(
        transitions=_tag_transitions(think, call, [marker(text) for text in tags.ignored]),
        tool_parser=tags.tool_parser,
        structural_tag=tag_structure(think, call, tags.call_format, vocabulary, tokenizer.eos_ids),
    )


def state_of_message(header: Sequence[str]) -> State:
    """Return the state that a message's header announces, e.g. "assistant", "analysis", "to=functions.f"."""
    recipient = recipient_of(header)
    if recipient is not None and recipient != "self" and recipient not in _USER_RECIPIENTS:
        return "tool_call"
    return "reasoning" if recipient == "self" or "analysis" in header else "content"


def recipient_of(header: Sequence[str]) -> str | None:
    return next((word.removeprefix("to=") for word in header if word.startswith("to=")), None)


def _header_transitions(
    vocabulary: Mapping[str, int], header_starts: Collection[str], header_end: str, message_ends: Collection[str]
) -> Transitions:
    """Return the transitions of messages with headers. A message ends at its end marker or at the next header."""
    after_message: dict[Marker, State | None] = {(vocabulary[token],): "content" for token in message_ends}
    after_message |= {(vocabulary[token],): "header" for token in header_starts}
    after_header: dict[Marker, State | None] = {(vocabulary[header_end],): None}
    return {
        "content": after_message,
        "reasoning": after_message,
        "tool_call": after_message,
        "header": after_header,
    }


def _tag_transitions(
    think: tuple[Marker, Marker] | None, call: tuple[Marker, Marker | None] | None, ignored: Collection[Marker]
) -> Transitions:
    """Return the transitions of tags. A closing tag also counts without an opening one, which the prompt may hold."""
    content: dict[Marker, State | None] = dict.fromkeys(ignored, "content")
    reasoning: dict[Marker, State | None] = {}
    tool_call: dict[Marker, State | None] = {}
    if think is not None:
        think_start, think_end = think
        content |= {think_start: "reasoning", think_end: "content"}
        reasoning |= {think_start: "reasoning", think_end: "content"}
    if call is not None:
        call_start, call_end = call
        tool_call[call_start] = "tool_call"
        if call_end is not None:
            tool_call[call_end] = content[call_end] = "content"
        content[call_start] = reasoning[call_start] = "tool_call"
    return {"content": content, "reasoning": reasoning, "tool_call": tool_call}


def _parse_arguments(text: str, _: Any) -> Any:
    return {"arguments": json.loads(text)}
