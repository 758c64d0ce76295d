"""Which channel each token of an answer belongs to: a state machine over token ids, fed one at a time. No mlx.

    id        1    2       3    4     5   6
    token  <think> Hm   </think> Hi  <a  >       "<a>" being a marker of two tokens
    channel markup reasoning markup content markup markup

A token is settled when no later one can change what it is: one that may begin a marker is not, and neither is one of
a tool call that has not ended, for a call that cannot be read is content.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from scorepool.engine.text.chat.chat_format import ChatFormat, State, addressed

Channel = Literal["content", "reasoning", "tool_call", "markup"]


@dataclass(frozen=True, slots=True)
class Span:
    """A tool call that has ended: its text is tokens [start, end). `header` holds the words of its message's."""

    start: int
    end: int
    header: tuple[str, ...]


def as_content(token_ids: Iterable[int], silent_ids: Collection[int]) -> list[Channel]:
    """Of tokens in a call that is none."""
    return ["markup" if token_id in silent_ids else "content" for token_id in token_ids]


class OutputParser:
    """`channels` has one entry a token read. Those of a call that ended say `tool_call`, whatever is in it."""

    def __init__(
        self,
        markup: ChatFormat,
        token_bytes: Callable[[int], bytes],
        opening: Iterable[int] = (),
        keeps_special: bool = False,
    ) -> None:
        """`opening` is what the prompt ends with to make the model answer, in which a channel may be opened.

        With `keeps_special` special tokens that part no channels are in the channel where they stand.
        """
        self.channels: list[Channel] = []
        self.spans: list[Span] = []
        self.has_reasoned = False  # in the opening
        self.markup = markup
        self._silent_ids: Collection[int] = () if keeps_special else markup.silent_ids
        self._end_channel: Channel = "content" if keeps_special else "markup"
        self._token_bytes = token_bytes
        self._state: State = "content"
        self._token_ids: list[int] = []
        self._held: list[int] = []  # those at the end that may begin a marker
        self._header: list[int] = []
        self._call_start = 0
        for token_id in opening:
            self.read(token_id)
            self.has_reasoned |= self.state == "reasoning"
        self.channels, self.spans, self._token_ids = [], [], []
        self._held, self._call_start = [], 0

    @property
    def state(self) -> State:
        """Where the next token will be."""
        return self._state

    @property
    def num_settled(self) -> int:
        return self._call_start if self._state == "tool_call" else len(self.channels) - len(self._held)

    def read(self, token_id: int) -> None:
        self.channels.append("markup")  # until it is known
        self._token_ids.append(token_id)
        self._held.append(token_id)
        if token_id in self.markup.eos_ids:
            self._settle(len(self._held) - 1)
            self._held.clear()
            self._move("content", num_marker_tokens=1)
            self.channels[-1] = self._end_channel
            return
        while self._held:
            moves = self.markup.moves.get(self._state, {})
            held = tuple(self._held)
            if held in moves:
                self._held.clear()
                self._move(moves[held], num_marker_tokens=len(held))
            elif any(marker[: len(held)] == held for marker in moves):
                return
            else:
                self._settle(1)

    def end(self) -> None:
        """There are no more. A call that has not ended is none: it was cut off."""
        self._settle(len(self._held))
        if self._state == "tool_call":
            cut_off = self._token_ids[self._call_start :]
            self.channels[self._call_start :] = as_content(cut_off, self._silent_ids)
            self._state = "content"

    def _settle(self, num_tokens: int) -> None:
        """The first of those that are held begin no marker."""
        for _ in range(num_tokens):
            place = len(self.channels) - len(self._held)
            token_id = self._held.pop(0)
            if self._state == "header":
                self._header.append(token_id)
            elif self._state == "tool_call" or token_id not in self._silent_ids:
                self.channels[place] = self._state

    def _move(self, state: State | None, num_marker_tokens: int) -> None:
        end = len(self.channels) - num_marker_tokens
        if self._state == "tool_call" and end > self._call_start:
            self.spans.append(Span(self._call_start, end, self._words()))
        if state is None:
            state = addressed(self._words())
        elif state == "header":
            self._header.clear()
        self._state = state
        self._call_start = len(self.channels)

    def _words(self) -> tuple[str, ...]:
        """Of the last header; special tokens part words."""
        silent = self.markup.silent_ids
        spelled = [b" " if token_id in silent else self._token_bytes(token_id) for token_id in self._header]
        return tuple(b"".join(spelled).decode(errors="replace").split())
