"""Tokenizers of a served model."""

from collections.abc import Sequence
from typing import Any, Protocol

from transformers import AutoTokenizer

from scorepool import wire


class Tokenizer(Protocol):
    """What ScorepoolLM needs of a tokenizer. lm_eval reads `chat_template`."""

    name: str
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None

    def token(self, token_id: int) -> str:
        """Return the text of a token."""

    def encode(self, texts: Sequence[str], add_bos: Sequence[bool]) -> list[list[int]]:
        """Return the token ids of each text, with the tokenizer's BOS before it where `add_bos` says so."""

    def decode(self, generated: wire.SequenceResult) -> str:
        """Return a generated text without special tokens."""

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        """Return the prompt of a chat. Raises jinja2.TemplateError."""


class LocalTokenizer:
    """A tokenizer that transformers loads, from a folder or the hub."""

    def __init__(self, name: str, **options: Any) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(name, **options)
        self.name = name
        self.bos_token_id: int | None = self._tokenizer.bos_token_id
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.chat_template: str | dict[str, str] | None = self._tokenizer.chat_template

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode(token_id))

    def encode(self, texts: Sequence[str], add_bos: Sequence[bool]) -> list[list[int]]:
        return [
            list(self._tokenizer.encode(text, add_special_tokens=add)) for text, add in zip(texts, add_bos, strict=True)
        ]

    def decode(self, generated: wire.SequenceResult) -> str:
        """Decode as the HF model does: some tokenizers strip the first space of a text."""
        return str(self._tokenizer.decode(generated.token_ids, skip_special_tokens=True))

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
