"""What a row may generate: texts of a grammar, token by token. By llguidance; no mlx."""

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.engine.text.chat.grammar import StructuredOutputSpec, function_at, grammar_of
from scorepool.engine.text.chat.output_parser import OutputParser

# Of symbols. It takes a time that grows with the square of it to make a matcher: here two seconds at most.
_LIMITS = LLParserLimits(max_grammar_size=20_000)
_PLACE = re.compile(r"at (?P<line>\d+)\(\d+\): (?P<why>.*)")
_PATTERN = re.compile(r"(?P<what>.*):\n(?P<pattern>(?:.*\n)+?)error: (?P<why>.*)")  # carets under it
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class Constraint:
    """Of one row. To be used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, end: bytes) -> None:
        """`end` is the mask of the tokens that end a text."""
        self.error: str | None = None  # why no text can be constrained any more: the row ends at once
        self._matcher = matcher
        self._end = end
        self._num_read = 0

    def token_bitmask(self, generated: Sequence[int]) -> bytes:
        """A bit for each token id, the lowest first, of those that may follow.

        `generated` is all of the row so far: what was given the last time, and what has come since.
        """
        for token_id in generated[self._num_read :]:
            if self.error is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
                self.error = _why(self._matcher)
        self._num_read = len(generated)
        if self.error is None and not self._matcher.is_stopped():
            mask: bytes = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return mask
            self.error = _why(self._matcher)
        return self._end


class Constrainer:
    """Makes the constraints of one tokenizer's rows. On one thread."""

    def __init__(self, tokenizer: Any, markup: ChatFormat) -> None:
        """`tokenizer` is a Hugging Face one, `markup` what its model writes."""
        self._hugging_face = tokenizer
        self._markup = markup
        self._tokenizer: LLTokenizer | None = None  # until somebody asks: it takes a second
        self._last: tuple[str, LLMatcher] | None = None  # a grammar, and how its texts begin: many rows have the same

    def __call__(self, wanted: StructuredOutputSpec, reader: OutputParser) -> Constraint:
        """`reader` has read what the prompt ends with. Raises InvalidRequest."""
        grammar = grammar_of(wanted, reader)
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        if self._last is None or self._last[0] != grammar:
            self._last = (grammar, _begin(self._tokenizer, grammar, wanted))
        bits = sum(1 << token_id for token_id in self._markup.eos_ids)
        end = bits.to_bytes((self._tokenizer.vocab_size + 31) // 32 * 4, "little")
        return Constraint(self._last[1].deep_copy(), end)

    def _make_tokenizer(self) -> LLTokenizer:
        """One in which markers are no text: what is constrained to text has none in it."""
        backend = getattr(self._hugging_face, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequest("it needs a tokenizer of the `tokenizers` library, and the model has another")
        parts = json.loads(backend.to_str())
        for token in parts["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self._markup.marker_ids
        return LLTokenizer(json.dumps(parts), eos_token=sorted(self._markup.eos_ids))


def _begin(tokenizer: LLTokenizer, grammar: str, wanted: StructuredOutputSpec) -> LLMatcher:
    """Raises InvalidRequest."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some errors are found only then; and the first takes longest
    if matcher.is_error():
        why = _why(matcher)
        if place := _PLACE.fullmatch(why):
            function = function_at(wanted, grammar.split("\n")[int(place["line"]) - 1])
            why = place["why"] if function is None else f"the parameters of {function.name!r}: {place['why']}"
        raise InvalidRequest(why)
    return matcher


def _why(matcher: LLMatcher) -> str:
    """In a line: the first, for those that follow show the state of the library, but what is wrong with a pattern."""
    error = matcher.get_error()
    if found := _PATTERN.match(error):
        error = f"{found['what']}: {found['why']}: {' '.join(found['pattern'].split()).rstrip('^ ')}"
    return error.partition("\n")[0].replace(_ONE_OF, "oneOf whose choices may overlap: say anyOf")[:300]
