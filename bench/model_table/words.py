"""Texts of a known number of tokens, for servers that take no token ids."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

_START = "Ġ"  # a space before a word, in the tokens of byte-level BPE


class Words:
    """The words of a tokenizer that are one token each, whatever stands beside them."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        words = (token[1:] for token in self._tokenizer.get_vocab() if token.startswith(_START))
        self._words = sorted(word for word in words if word.isascii() and word.isalpha())

    def text(self, numbers: Sequence[int]) -> str:
        """Return a text of as many tokens as there are numbers. Raises RuntimeError if it has not."""
        text = "".join(f" {self._words[number % len(self._words)]}" for number in numbers)
        if (count := len(self._tokenizer.encode(text))) != len(numbers):
            raise RuntimeError(f"a text of {len(numbers)} words has {count} tokens")
        return text
