"""Answers to chats: which channel each token belongs to, and what functions are called. Pure."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from scorepool import wire
from scorepool.engine import Sequence as Row
from scorepool.engine import Tokenizer
from scorepool.engine.text.chat.output_parser import Channel, Span, as_content
from scorepool.engine.text.chat.tool_parser import Tool

# Nine letters and digits, as Mistral's template insists on, so that every model reads its ids back.
_ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class Chat:
    """What its answers are read with."""

    opening: list[int]  # the end of the prompt, which makes the model answer
    tools: Sequence[Tool]
    keeps_special: bool = False  # special tokens that part no channels are text like others


@dataclass(frozen=True, slots=True)
class Part:
    """Generated tokens from number `first` on, as they were read, and the calls among them."""

    first: int
    channels: list[Channel]
    spans: list[Span]


def read_whole(chat: Chat, row: Row, tokenizer: Tokenizer) -> Part:
    """Of a row that is done."""
    reader = tokenizer.reader(chat.opening, chat.keeps_special)
    for token_id in row.token_ids[row.num_input_tokens :]:
        reader.read(token_id)
    reader.end()
    return Part(0, reader.channels, reader.spans)


def told(
    chat: Chat, row: Row, part: Part, tokenizer: Tokenizer
) -> tuple[list[wire.Channel], list[wire.ToolCallResult]]:
    """A part's channels, and the calls in it. A call that cannot be read is content."""
    channels: list[wire.Channel] = list(part.channels)
    called: list[wire.ToolCallResult] = []
    generated = row.token_ids[row.num_input_tokens :] if part.spans else []
    for span in part.spans:
        calls = tokenizer.calls(span, generated, chat.tools)
        if not calls:
            silent_ids = () if chat.keeps_special else tokenizer.markup.silent_ids
            text = as_content(generated[span.start : span.end], silent_ids)
            channels[span.start - part.first : span.end - part.first] = text
        upto = row.token_ids[: row.num_input_tokens + span.end]
        for place, call in enumerate(calls):
            call_id = call.id or _call_id(upto, place)
            called.append(wire.ToolCallResult(id=call_id, name=call.name, arguments=call.arguments, entry=span.end - 1))
    return channels, called


def _call_id(token_ids: Sequence[int], place: int) -> str:
    """From all tokens up to the call's end: the same when a job runs again, another in another turn of the chat."""
    digest = hashlib.blake2b(array("q", [*token_ids, place]).tobytes(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    letters = []
    for _ in range(_ID_LENGTH):
        number, letter = divmod(number, len(_ID_ALPHABET))
        letters.append(_ID_ALPHABET[letter])
    return "".join(letters)
