"""The markers, as token ids, by which a model separates reasoning, tool calls and content. No MLX.

    tags      <think> ... </think>, <tool_call> ... </tool_call>: mlx-lm finds them for a tokenizer
    headers   <|start|>assistant<|channel|>analysis<|message|> ... <|end|>: each message's header says what it is

The formats of the calls themselves are in call_formats/.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

from scorepool.engine.text.chat.call_formats.call_format import CallFormat, ToolParser
from scorepool.engine.text.chat.call_formats.formats import FORMATS, format_of_mlx_lm, format_of_template
from scorepool.engine.text.chat.call_text import CallText
from scorepool.engine.text.chat.structural_tag import (
    PLAIN_TEXT,
    Marker,
    StructuralTag,
    harmony_structure,
    opened_structure,
    tag_structure,
)
from scorepool.engine.text.tokenizer import Tokenizer

State = Literal["content", "reasoning", "tool_call", "header"]
Transitions = dict[State, dict[Marker, State | None]]

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")  # gpt-oss; mlx-lm does not know it
MUSE_SPARK = ("<|start|>", "<|message|>", "<|eom|>")
# Mistral, Seed, Cohere, MiniMax M3, Apertus; mlx-lm has others
_MORE_THINK_TAGS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>", "</mm:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|content_thinking|>", "<|end_message|>"),
)
_USER_RECIPIENTS = ("user", "commentary", "all")  # messages to these recipients are content


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTags:
    """The markers that mlx-lm found for a tokenizer. None where the model does not write that kind."""

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None  # the second is empty if only the end of the turn ends a call
    ignored: tuple[str, ...] = ()  # markers around content
    tool_parser: ToolParser | None = None
    call_format: str | None = None  # the name of what the tool parser reads, one of FORMATS; None: mlx-lm alone knows

    @classmethod
    def from_mlx_lm(cls, wrapper: Any) -> "ChatTags":
        """Read the markers from mlx-lm's TokenizerWrapper; those of formats that it does not know from call_formats."""
        think = (wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else _think_tags(wrapper.get_vocab())
        tags = cls(think=think, ignored=tuple(wrapper.structural_markers))
        if not wrapper.has_tool_calling:
            name = format_of_template(_template_text(wrapper.chat_template))
            return tags if name is None else tags.with_call_format(name)
        call = (wrapper.tool_call_start, wrapper.tool_call_end)
        name = format_of_mlx_lm(wrapper.tool_parser.__module__.rpartition(".")[2])
        told = format_of_template(_template_text(wrapper.chat_template))
        if name is not None and told is not None and FORMATS[told].mistaken_for == name:
            return tags.with_call_format(told)
        if name is not None and FORMATS[name].markers is None:
            return tags.with_call_format(name)
        if name is None:
            return replace(tags, call=call, tool_parser=wrapper.tool_parser)
        parser = FORMATS[name].parse or wrapper.tool_parser
        return replace(tags, call=call, tool_parser=parser, call_format=name)

    def with_call_format(self, name: str, mlx_lm_parser: ToolParser | None = None) -> "ChatTags":
        """Return the same markers with a format of FORMATS; mlx-lm's parser reads those without one of their own."""
        found = FORMATS[name]
        return replace(self, call=found.markers, tool_parser=found.parse or mlx_lm_parser, call_format=name)

    def check_fit(self, vocabulary: Mapping[str, int]) -> None:
        """Raise ValueError if the model does not write these markers: its tokenizer has no tokens for them."""
        if all(token in vocabulary for token in HARMONY):
            raise ValueError("its answers are messages with headers, as gpt-oss writes them")
        for marker in (*(self.think or ()), *(self.call or ())):
            first = re.match(r"<\|.*?>|", marker)  # gemma4's is a token and a word
            if marker and marker not in vocabulary and not (first and first[0] in vocabulary):
                raise ValueError(f"the tokenizer has no token {marker!r}")
        for token in () if self.call_format is None else FORMATS[self.call_format].needed_tokens:
            if token not in vocabulary and token not in map(str.strip, vocabulary):
                raise ValueError(f"the tokenizer has no token {token!r}")


def _template_text(template: str | Mapping[str, str] | None) -> str:
    """Return the text of a chat template, or of all of them: a tokenizer may have several, by their names."""
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


def _think_tags(vocabulary: Mapping[str, int]) -> tuple[str, str] | None:
    return next((tags for tags in _MORE_THINK_TAGS if set(tags) <= vocabulary.keys()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The format of a model's answers.

    `transitions[state][marker]` is the state after the marker. None means that the header before the marker decides.
    """

    transitions: Transitions
    special_token_ids: frozenset[int] = frozenset()  # they add no text to any channel
    eos_ids: frozenset[int] = frozenset()
    tool_parser: ToolParser | None = None
    call_text: CallText | None = None  # calls that begin with a text without a token of its own
    names_in_header: bool = False  # the header names the called function and the text holds its arguments
    delimiter_ids: frozenset[int] = frozenset()  # tokens inside calls that are in no value
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
            structural_tag=harmony_structure(vocabulary, tokenizer.eos_ids_with_text),
        )
    if tags.tool_parser is not None and all(token in vocabulary for token in MUSE_SPARK):
        transitions = _header_transitions(vocabulary, ("<|start|>",), "<|message|>", ("<|eom|>",))
        return chat_format(transitions=transitions, tool_parser=tags.tool_parser, structural_tag=None)

    def marker(text: str) -> Marker:
        """Return the text's own token, else the tokens in which the tokenizer writes it."""
        return (vocabulary[text],) if text in vocabulary else tuple(tokenizer.encode(text, add_bos=False)[0])

    think = None if tags.think is None else (marker(tags.think[0]), marker(tags.think[1]))
    call = None if tags.call is None else (marker(tags.call[0]), marker(tags.call[1]) if tags.call[1] else None)
    call_format = None if tags.call_format is None else FORMATS[tags.call_format]
    marks = () if call_format is None else chain(*call_format.content_marks)
    transitions = _tag_transitions(
        think, call, [marker(text) for text in (*tags.ignored, *(mark for mark in marks if mark in vocabulary))]
    )
    if call_format is not None and call_format.header_start in vocabulary:
        _add_headers(transitions, vocabulary[call_format.header_start])
    if call_format is None or not call_format.opening:
        structure = tag_structure(think, call, call_format, vocabulary, tokenizer.eos_ids_with_text)
    else:
        structure = opened_structure(think, call_format, vocabulary, tokenizer.eos_ids_with_text)
        _add_optional_markers(transitions, call_format.optional_markers, vocabulary)
    return chat_format(
        transitions=transitions,
        tool_parser=tags.tool_parser,
        call_text=None if call_format is None else _call_text(call_format),
        delimiter_ids=_ids_of(() if call_format is None else call_format.delimiters, vocabulary),
        structural_tag=structure,
    )


def _call_text(call_format: CallFormat) -> CallText | None:
    if not call_format.opening:
        return None
    return CallText(
        opening=call_format.opening.encode(),
        closing=call_format.closing.encode(),
        growing=call_format.opening_pattern,
        is_anywhere=call_format.opens_anywhere,
    )


def _ids_of(texts: Collection[str], vocabulary: Mapping[str, int]) -> frozenset[int]:
    return frozenset(vocabulary[text] for text in texts if text in vocabulary)


def _add_optional_markers(
    transitions: Transitions, markers: tuple[str, str] | None, vocabulary: Mapping[str, int]
) -> None:
    """Let calls that begin with a text stand between these tokens too, where the vocabulary has them."""
    if markers is None or markers[0] not in vocabulary:
        return
    start, end = markers
    transitions["content"][vocabulary[start],] = "tool_call"
    if end in vocabulary:
        transitions["content"][vocabulary[end],] = transitions["tool_call"][vocabulary[end],] = "content"


def _add_headers(transitions: Transitions, header_start: int) -> None:
    """Let what stands between this token and the next marker be no content."""
    transitions["header"] = dict(transitions["content"])
    transitions["content"][header_start,] = transitions["header"][header_start,] = "header"


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
