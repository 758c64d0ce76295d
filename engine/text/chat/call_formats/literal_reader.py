"""Read nested values that are not JSON: Python's, and Gemma's, whose strings stand between tokens. No MLX.

{"a": ['it\\'s', True, None]}           Python
{a:[<|"|>it's<|"|>,true,null]}         Gemma
"""

import json
import re
from collections.abc import Sequence
from typing import Any

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^,\[\]{}()]*")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_AFTER_STRING = re.compile(r"\s*(?:[,\]})=:]|$)")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_SELF_ESCAPED = "\\'\"/"


class LiteralReader:
    """A text and how far it was read. All methods raise ValueError at a text that is none of what they read."""

    def __init__(self, text: str, quotes: Sequence[str], has_escapes: bool) -> None:
        """Strings begin and end with one of the quotes. Without escapes, a word without quotes is a string too."""
        self.text = text
        self.at = 0
        self._quotes = quotes
        self._has_escapes = has_escapes

    def take(self, text: str) -> bool:
        """Read this text, after spaces, if it comes next."""
        at = self._after_spaces()
        if not self.text.startswith(text, at):
            return False
        self.at = at + len(text)
        return True

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise ValueError(f"expected {text!r}")

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what matches the pattern, after spaces."""
        found = pattern.match(self.text, self._after_spaces())
        if found is None:
            raise ValueError(f"expected {pattern.pattern}")
        self.at = found.end()
        return found[0]

    @property
    def is_at_end(self) -> bool:
        return self._after_spaces() == len(self.text)

    def value(self) -> Any:
        for quote in self._quotes:
            if self.take(quote):
                return self._string(quote)
        for opening in "[(":
            if self.take(opening):
                return self._list(_CLOSING[opening])
        return self.mapping("}") if self.take("{") else self._word()

    def mapping(self, closing: str, colon: str = ":") -> dict[str, Any]:
        """Read keys and values up to the closing bracket. The opening one was read."""
        found: dict[str, Any] = {}
        while not self.take(closing):
            key = self._key(colon)
            self.expect(colon)
            found[key] = self.value()
            if not self.take(","):
                self.expect(closing)
                break
        return found

    def _after_spaces(self) -> int:
        found = _SPACE.match(self.text, self.at)
        return self.at if found is None else found.end()

    def _key(self, colon: str) -> str:
        for quote in self._quotes:
            if self.take(quote):
                return self._string(quote)
        start = self._after_spaces()
        self.at = self.text.find(colon, start)
        if self.at <= start:
            raise ValueError("expected a key")
        return self.text[start : self.at].rstrip()

    def _list(self, closing: str) -> list[Any]:
        found: list[Any] = []
        while not self.take(closing):
            found.append(self.value())
            if not self.take(","):
                self.expect(closing)
                break
        return found

    def _word(self) -> Any:
        word = self.match(_WORD).rstrip()
        if word in _WORDS:
            return _WORDS[word]
        if _NUMBER.fullmatch(word):
            try:
                return json.loads(word)
            except ValueError:
                return float(word)
        if self._has_escapes or not word:
            raise ValueError("expected a value")
        return word

    def _string(self, quote: str) -> str:
        """Read a string up to its closing quote: one behind which a value may end. Models forget to escape others."""
        start = self.at
        while (end := self.text.find(quote, self.at)) >= 0:
            self.at = end + len(quote)
            if self._is_escaped(start, end) or not _AFTER_STRING.match(self.text, self.at):
                continue
            found = self.text[start:end]
            return unescape(found) if self._has_escapes else found
        raise ValueError("a string has no end")

    def _is_escaped(self, start: int, end: int) -> bool:
        if not self._has_escapes:
            return False
        at = end
        while at > start and self.text[at - 1] == "\\":
            at -= 1
        return (end - at) % 2 == 1


def unescape(text: str) -> str:
    """Return the text with Python's and JSON's escapes replaced. An unknown one is the two characters."""

    def character(escape: re.Match[str]) -> str:
        short, long, byte, other = escape.groups()
        if code := short or long or byte:
            return chr(int(code, 16))
        return _ESCAPED.get(other, other if other in _SELF_ESCAPED else escape[0])

    found = _ESCAPE.sub(character, text)
    return found.encode("utf-16", "surrogatepass").decode("utf-16")  # two halves of a pair are one character
