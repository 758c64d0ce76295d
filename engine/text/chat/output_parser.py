"""Find the channel of each token of an answer: a state machine over token ids, fed one at a time. No MLX.

    id        1    2       3    4     5   6
    token  <think> Hm   </think> Hi  <a  >       "<a>" is a marker of two tokens
    channel markup reasoning markup content markup markup

A token's channel is final when no later token can change it. It is not final for a token that may begin a marker, nor
for the tokens of a tool call that has not ended, because a call that cannot be parsed is content.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from scorepool.engine.text.chat.call_text import CallText
from scorepool.engine.text.chat.chat_format import ChatFormat, State, state_of_message
from scorepool.engine.text.chat.text_calls import TextCalls

MAX_HELD_BYTES = 1024  # of a text that may begin a call; each token is read with all of it
Channel = Literal["content", "reasoning", "tool_call", "markup"]


@dataclass(frozen=True, slots=True)
class Span:
    """A tool call that has ended: its text is tokens [start, end). `header` holds the words of its message's header."""

    start: int
    end: int
    header: tuple[str, ...]
    is_text: bool = False  # it is not in the model's format: see text_calls


def content_channels(token_ids: Iterable[int], special_token_ids: Collection[int]) -> list[Channel]:
    """Return the channels of a call's tokens if the call is content."""
    return ["markup" if token_id in special_token_ids else "content" for token_id in token_ids]


def _read_anyway(call_text: CallText | None, may_call: bool) -> CallText | None:
    """Return the texts that matter to an answer: where it may not call, the headers of content do."""
    return call_text if may_call or (call_text is not None and call_text.has_headers) else None


class OutputParser:
    """The parser of one answer. `channels` has one entry per token read.

    All tokens of a tool call that has ended are in the channel `tool_call`.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        token_bytes: Callable[[int], bytes],
        generation_prompt: Iterable[int] = (),
        keep_special_tokens: bool = False,
        may_call: bool = True,
        repairs_calls: bool = False,
    ) -> None:
        """Read the generation prompt, which ends the prompt and may open a channel.

        With `keep_special_tokens`, special tokens that are no markers are in the channel where they stand. Without
        `may_call`, the format's opening is text: JSON is what a caller may have asked for. With `repairs_calls`, calls
        that are written as text are found too.
        """
        self.channels: list[Channel] = []
        self.spans: list[Span] = []
        self.has_reasoned = False  # in the generation prompt
        self.chat_format = chat_format
        self._special_token_ids: Collection[int] = () if keep_special_tokens else chat_format.special_token_ids
        self._eos_channel: Channel = "content" if keep_special_tokens else "markup"
        self._token_bytes = token_bytes
        self._state: State = "content"
        self._token_ids: list[int] = []
        self._held: list[int] = []  # the last tokens, which may begin a marker or be the format's opening
        self._may_call = may_call
        self._call_text = _read_anyway(chat_format.call_text, may_call)
        self._before = b""  # the end of the generation prompt, if it may begin a call
        self._tail: bytes | None = None  # of the text of a call that began with a text; None in other calls
        self._is_blank = True  # the content has only spaces so far: the opening may follow
        self._follows_call = False  # the content does
        self._header: list[int] = []
        self._call_start = 0
        self._text_calls: TextCalls | None = None
        self._text_start = 0  # of the tokens that it holds
        for token_id in generation_prompt:
            self.read(token_id)
            self.has_reasoned |= self.state == "reasoning"
        self._before = b"".join(map(token_bytes, self._held))
        self.channels, self.spans, self._token_ids = [], [], []
        self._held, self._call_start, self._is_blank, self._follows_call = [], 0, True, False
        if repairs_calls and may_call:
            self._text_calls = TextCalls()

    @property
    def state(self) -> State:
        """The state in which the next token will be read."""
        return self._state

    @property
    def num_final(self) -> int:
        """The number of leading tokens whose channel is final."""
        if self._state == "tool_call":
            return self._call_start
        num_held = 0 if self._text_calls is None else self._text_calls.num_held
        return len(self.channels) - len(self._held) - num_held

    def read(self, token_id: int) -> None:
        """Read the next token of the answer."""
        self.channels.append("markup")  # until it is known
        self._token_ids.append(token_id)
        self._held.append(token_id)
        if token_id in self.chat_format.eos_ids:
            self._release(len(self._held) - 1)
            self._held.clear()
            self._end_text_calls(is_last=True)
            self._enter("content", num_marker_tokens=1)
            self.channels[-1] = self._eos_channel
            return
        while self._held:
            transitions = self.chat_format.transitions.get(self._state, {})
            held = tuple(self._held)
            if held in transitions:
                self._held.clear()
                self._enter(transitions[held], num_marker_tokens=len(held))
            elif any(marker[: len(held)] == held for marker in transitions):
                return
            elif self._state == "content" and self._call_text is not None:
                if not self._read_call_text(self._call_text):
                    return
            else:
                first = self._held[0]
                self._release(1)
                self._end_at_closing(first)

    def _read_call_text(self, call_text: CallText) -> bool:
        """Assign held tokens as far as it is known whether a call begins with them. False if nothing is known yet."""
        texts = [*map(self._token_bytes, self._held)]
        texts[0] = self._before + texts[0]
        text = b"".join(texts)
        match call_text.verdict(text, len(texts[0]), self._is_blank):
            case "held" if len(text) <= MAX_HELD_BYTES:
                return False
            case "held":
                self._release(len(self._held))
            case "header" | "header_and_content" as found:
                self._held = self._held[-1:] if found == "header_and_content" else []
                self._enter("content", num_marker_tokens=0)
            case "call" if self._may_call:
                self._call_start = len(self.channels) - len(self._held)
                self._state, self._tail = "tool_call", b""
                self._release(len(self._held))
            case _:
                self._release(1)
        self._before = b""
        return True

    def _end_at_closing(self, token_id: int) -> None:
        """End a call that began with a text if this token completes the text with which it ends."""
        if self._tail is None or self._call_text is None or not self._call_text.closing:
            return
        token = self._token_bytes(token_id)
        self._tail = self._tail[-len(self._call_text.closing) :] + token
        if self._call_text.ends(self._tail):
            self._enter("content", num_marker_tokens=0)

    def end(self) -> None:
        """Finish after the last token. A call that has not ended was cut off and is content."""
        self._release(len(self._held))
        self._end_text_calls(is_last=False)
        if self._state == "tool_call":
            cut_off = self._token_ids[self._call_start :]
            self.channels[self._call_start :] = content_channels(cut_off, self._special_token_ids)
            self._state = "content"

    def _release(self, num_tokens: int) -> None:
        """Assign the first held tokens to the current channel: they begin no marker."""
        for _ in range(num_tokens):
            index = len(self.channels) - len(self._held)
            token_id = self._held.pop(0)
            if self._state == "header":
                self._header.append(token_id)
            elif self._state == "tool_call" or token_id not in self._special_token_ids:
                self._is_blank &= not self._token_bytes(token_id).strip()
                if self._follows_call and self._is_blank:
                    continue  # templates write spaces between calls: they are in no channel
                if self._state == "content" and self._text_calls is not None:
                    self._read_content(self._text_calls, index, token_id)
                else:
                    self.channels[index] = self._state
            else:
                self._end_text_calls(is_last=False)

    def _read_content(self, text_calls: TextCalls, index: int, token_id: int) -> None:
        """Assign a token of the content to its channel, unless it may belong to a call that is written as text."""
        if not text_calls.num_held:
            self._text_start = index
        match text_calls.read(self._token_bytes(token_id)):
            case "calls":
                self._take_text_calls(text_calls)
            case "content" | "released":
                self.channels[self._text_start : index + 1] = ["content"] * (index + 1 - self._text_start)
            case "held":
                pass

    def _end_text_calls(self, is_last: bool) -> None:
        """Assign the tokens that may belong to calls that are written as text: nothing more of the content follows."""
        text_calls = self._text_calls
        if text_calls is None:
            return
        if text_calls.end(is_last) == "calls":
            self._take_text_calls(text_calls)
        end = self._text_start + text_calls.num_held
        self.channels[self._text_start : end] = ["content"] * (end - self._text_start)
        text_calls.restart()

    def _take_text_calls(self, text_calls: TextCalls) -> None:
        """Take the calls that are complete. Spaces after them are in no channel."""
        for start, end in text_calls.complete:
            span = Span(self._text_start + start, self._text_start + end, (), is_text=True)
            self.spans.append(span)
            self.channels[span.start : span.end] = ["tool_call"] * (end - start)
        text_calls.restart()

    def _enter(self, state: State | None, num_marker_tokens: int) -> None:
        self._end_text_calls(is_last=False)
        end = len(self.channels) - num_marker_tokens
        self._follows_call = False
        if self._state == "tool_call" and end > self._call_start:
            self.spans.append(Span(self._call_start, end, self._header_words()))
            self._follows_call = state == "content" and self._may_call
        if state is None:
            state = state_of_message(self._header_words())
        elif state == "header":
            self._header.clear()
        self._state = state
        self._call_start = len(self.channels)
        self._is_blank, self._tail = True, None

    def _header_words(self) -> tuple[str, ...]:
        """Return the words of the last header. Special tokens separate words."""
        special = self.chat_format.special_token_ids
        pieces = [b" " if token_id in special else self._token_bytes(token_id) for token_id in self._header]
        return tuple(b"".join(pieces).decode(errors="replace").split())
