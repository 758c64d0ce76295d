"""What a row may generate: JSON of a schema, token by token. By llguidance; no mlx.

A model that reasons first does so freely: what is constrained begins where its content does.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine.errors import Refused
from engine.reader import Reader


class Constraint:
    """Of one row. To be used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, reader: Reader, end: bytes) -> None:
        """`end` is the mask of the tokens that end a text."""
        self.error: str | None = None  # why no text can be constrained any more: the row ends at once
        self._matcher = matcher
        self._reader = reader
        self._end = end
        self._num_read = 0
        self._is_free = reader.state == "reasoning"

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        """A bit for each token id, the lowest first, of those that may follow; None: any.

        `generated` is all of the row so far: what was given the last time, and what has come since.
        """
        for token_id in generated[self._num_read :]:
            self._read(token_id)
        self._num_read = len(generated)
        if self._is_free:
            return None
        if self.error is None and not self._matcher.is_stopped():
            mask: bytes = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return mask
            self.error = _why(self._matcher)
        return self._end

    def _read(self, token_id: int) -> None:
        if self._is_free:
            self._reader.read(token_id)
            self._is_free = self._reader.state == "reasoning"
        elif self.error is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            self.error = _why(self._matcher)


class Constrainer:
    """Makes the constraints of one tokenizer's rows. On one thread."""

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int]) -> None:
        """`tokenizer` is a Hugging Face one."""
        self._hugging_face = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None  # until somebody asks: it takes a second
        self._last: tuple[str, LLMatcher] | None = None  # a grammar, and how its texts begin: many rows have the same

    def __call__(self, schema: dict[str, Any], reader: Reader) -> Constraint:
        """`reader` has read what the prompt ends with. Raises Refused."""
        if reader.state not in ("content", "reasoning"):
            raise Refused("json_schema: this model's answers are messages with headers, which are not constrained")
        try:  # compact: else a model may write spaces until its tokens are used up
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
        except (ValueError, RecursionError) as error:
            raise Refused(f"json_schema: {error}") from error
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        if self._last is None or self._last[0] != grammar:
            self._last = (grammar, _begin(self._tokenizer, grammar))
        bits = sum(1 << token_id for token_id in self._eos_ids)
        end = bits.to_bytes((self._tokenizer.vocab_size + 31) // 32 * 4, "little")
        return Constraint(self._last[1].deep_copy(), reader, end)

    def _make_tokenizer(self) -> LLTokenizer:
        backend = getattr(self._hugging_face, "backend_tokenizer", None)
        if backend is None:
            raise Refused("json_schema: it needs a tokenizer of the `tokenizers` library, and the model has another")
        return LLTokenizer(backend.to_str(), eos_token=self._eos_ids)


def _begin(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Raises Refused."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some errors are found only then; and the first takes longest
    if matcher.is_error():
        raise Refused(f"json_schema: {_why(matcher)}")
    return matcher


def _why(matcher: LLMatcher) -> str:
    """Its first line: those that follow show the state of the library."""
    return matcher.get_error().partition("\n")[0][:300]
