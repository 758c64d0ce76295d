"""Parse answers to chats: the channel of each token, and the functions that are called. Pure."""

import hashlib
import json
from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from scorepool import wire
from scorepool.engine import ChatCodec, Sequence
from scorepool.engine.text.chat.output_parser import Channel, OutputParser, Span, content_channels
from scorepool.engine.text.chat.tool_parser import ParsedCall, Tool

# Nine letters and digits, as Mistral's template requires, so that every model can read the ids back.
_CALL_ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CALL_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The parts of a chat's prompt that its answers are parsed with."""

    generation_prompt: list[int]
    tools: Ids[Tool]  # those that the answer may call
    keep_special_tokens: bool = False  # special tokens that are no markers are text

    def output_parser(self, codec: ChatCodec) -> OutputParser:
        return codec.output_parser(self.generation_prompt, self.keep_special_tokens, may_call=bool(self.tools))


@dataclass(frozen=True, slots=True)
class ParsedSlice:
    """Generated tokens from index `first` on: their channels, and the tool calls among them."""

    first: int
    channels: list[Channel]
    spans: list[Span]
    earlier: Ids[Span] = ()  # the calls before them


def parse_answer(prompt: ChatPrompt, sequence: Sequence, codec: ChatCodec) -> ParsedSlice:
    """Parse the whole answer of a sequence that is done."""
    parser = prompt.output_parser(codec)
    for token_id in sequence.token_ids[sequence.num_input_tokens :]:
        parser.read(token_id)
    parser.end()
    return ParsedSlice(0, parser.channels, parser.spans)


def channels_and_calls(
    prompt: ChatPrompt, sequence: Sequence, parsed: ParsedSlice, codec: ChatCodec
) -> tuple[list[wire.Channel], list[wire.ToolCallResult]]:
    """Return the channels of a slice, and the calls in it. A call that cannot be parsed is content."""
    channels: list[wire.Channel] = list(parsed.channels)
    results: list[wire.ToolCallResult] = []
    generated = sequence.token_ids[sequence.num_input_tokens :] if parsed.spans else []
    repeats = Repeats()
    for span in parsed.earlier if parsed.spans and codec.repairs_calls else ():
        repeats.without(span, codec.parse_tool_calls(span, generated, prompt.tools))
    for span in parsed.spans:
        calls = codec.parse_tool_calls(span, generated, prompt.tools)
        if not calls:
            special_token_ids = () if prompt.keep_special_tokens else codec.chat_format.special_token_ids
            content = content_channels(generated[span.start : span.end], special_token_ids)
            channels[span.start - parsed.first : span.end - parsed.first] = content
        preceding = sequence.token_ids[: sequence.num_input_tokens + span.end]
        for index, call in enumerate(repeats.without(span, calls)):
            call_id = call.call_id or _call_id(preceding, index)
            results.append(
                wire.ToolCallResult(id=call_id, name=call.name, arguments=call.arguments, entry=span.end - 1)
            )
    return channels, results


class Repeats:
    """The calls of an answer so far. Calls that are written as text repeat no other call.

    The model's own format alone may hold the same call twice.
    """

    def __init__(self) -> None:
        self._are_text: dict[tuple[str, str], bool] = {}  # of each call: whether a text was one of its writings

    def without(self, span: Span, calls: Ids[ParsedCall]) -> list[ParsedCall]:
        """Return the calls of the next span without those that repeat an earlier one."""
        return [call for call in calls if not self._repeats(span, call)]

    def _repeats(self, span: Span, call: ParsedCall) -> bool:
        key = (call.name, json.dumps(json.loads(call.arguments), sort_keys=True))
        is_known, was_text = key in self._are_text, self._are_text.get(key, False)
        self._are_text[key] = was_text or span.is_text
        return is_known and self._are_text[key]


def _call_id(token_ids: Ids[int], index: int) -> str:
    """Hash all tokens up to the call's end: a job that runs again gets the same id, another turn gets another."""
    digest = hashlib.blake2b(array("q", [*token_ids, index]).tobytes(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    characters = []
    for _ in range(_CALL_ID_LENGTH):
        number, digit = divmod(number, len(_CALL_ID_ALPHABET))
        characters.append(_CALL_ID_ALPHABET[digit])
    return "".join(characters)
