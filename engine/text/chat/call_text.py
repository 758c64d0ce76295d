"""Find the calls of an answer that begin with a text without a token of its own. No MLX.

    {"name": "look", ...                                at the beginning of an answer
    I look. <function_calls>look(x=1)</function_calls>  anywhere

A text may begin inside a token, behind other characters. That token is the call's if the text is one.
"""

import re
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["content", "held", "header", "header_and_content", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """The texts with which calls begin and end."""

    opening: bytes
    closing: bytes = b""  # empty if only the end of the turn ends them
    # The call's text matches it while it grows. Its group `opened` matches when the text is a call; `header`, if it has
    # one, when it is none but the header of content.
    growing: re.Pattern[bytes] | None = None
    is_anywhere: bool = False

    @property
    def has_headers(self) -> bool:
        return self.growing is not None and "header" in self.growing.groupindex

    def verdict(self, text: bytes, num_first: int, is_blank: bool) -> Verdict:
        """Say what a text is whose first token has `num_first` bytes. `is_blank`: only spaces stand before it.

        content    no call begins in the first token
        held       what follows decides
        header     it is the header of content
        header_and_content   as well, and its last token holds content behind it
        call       it is a call, up to its closing
        """
        if not self.is_anywhere:
            return self._verdict(text.lstrip()) if is_blank else "content"
        at = text.find(self.opening[:1])
        while 0 <= at < num_first:
            if (found := self._verdict(text[at:])) != "content":
                return found
            at = text.find(self.opening[:1], at + 1)
        return "content"

    def _verdict(self, text: bytes) -> Verdict:
        if len(text) < len(self.opening):
            return "held" if self.opening.startswith(text) else "content"
        if not text.startswith(self.opening):
            return "content"
        if self.growing is None:
            return "call"
        found = self.growing.match(text)
        if found is None:
            return "content"
        if found["opened"] is not None:
            return "call"
        if not self.has_headers or found["header"] is None:
            return "held"
        return "header_and_content" if text[found.end("header") :].strip() else "header"

    def ends(self, tail: bytes) -> bool:
        """True if a call ends with the last token of this text. Nothing but spaces may follow in that token."""
        return tail.rstrip().endswith(self.closing)
