"""Structured outputs: compile a grammar, and say which tokens may follow at each step. Uses llguidance; no MLX."""

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.chat_format import PLAIN_TEXT_FORMAT, ChatFormat
from scorepool.engine.text.chat.grammar import StructuredOutputSpec, build_grammar, function_of_rule, unsupported_reason
from scorepool.engine.text.chat.output_parser import OutputParser
from scorepool.engine.text.tokenizer import Tokenizer

# The time to make a matcher grows with the square of the grammar's symbols: two seconds at this limit.
_LIMITS = LLParserLimits(max_grammar_size=20_000)
_ERROR_AT_LINE = re.compile(r"at (?P<line>\d+)\(\d+\): (?P<message>.*)")
_ERROR_IN_PATTERN = re.compile(r"(?P<where>.*):\n(?P<pattern>(?:.*\n)+?)error: (?P<message>.*)")  # carets below it
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class GrammarConstraint:
    """The constraint of one sequence: it holds how far the sequence has come. One thread at a time uses it."""

    def __init__(self, matcher: LLMatcher, eos_bitmask: bytes) -> None:
        self.error: str | None = None  # why no token can follow any more: the sequence ends at once
        self._matcher = matcher
        self._eos_bitmask = eos_bitmask
        self._num_consumed = 0

    def token_bitmask(self, generated: Sequence[int]) -> bytes:
        """Return one bit per token id, the lowest first: 1 if the token may follow.

        `generated` holds all generated tokens of the sequence: those of the last call and those since.
        """
        for token_id in generated[self._num_consumed :]:
            if self.error is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
                self.error = _error_of(self._matcher)
        self._num_consumed = len(generated)
        if self.error is None and not self._matcher.is_stopped():
            bitmask: bytes = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return bitmask
            self.error = _error_of(self._matcher)
        return self._eos_bitmask


class GrammarCompiler:
    """Make the constraints of one model's sequences. One thread uses it."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._ll_tokenizer: LLTokenizer | None = None  # made on first use: it takes a second
        self._cached: tuple[str, LLMatcher] | None = None  # the last grammar: sequences of a job share it

    def unsupported_reason(self, has_functions: bool) -> str | None:
        """Return why answers to chats, or the calls in them, cannot be constrained. None if they can."""
        return unsupported_reason(self._chat_format.structural_tag, has_functions)

    def compile(self, spec: StructuredOutputSpec, generation_prompt: Sequence[int] | None) -> GrammarConstraint:
        """Return the constraint of one answer to a chat, or of a plain text if there is no generation prompt.

        Raises InvalidRequest.
        """
        chat_format = PLAIN_TEXT_FORMAT if generation_prompt is None else self._chat_format
        grammar = build_grammar(spec, OutputParser(chat_format, self._tokenizer.token_bytes, generation_prompt or ()))
        if self._ll_tokenizer is None:
            self._ll_tokenizer = self._make_tokenizer()
        if self._cached is None or self._cached[0] != grammar:
            self._cached = (grammar, _compile(self._ll_tokenizer, grammar, spec))
        bits = sum(1 << token_id for token_id in self._chat_format.eos_ids)
        eos_bitmask = bits.to_bytes((self._ll_tokenizer.vocab_size + 31) // 32 * 4, "little")
        return GrammarConstraint(self._cached[1].deep_copy(), eos_bitmask)

    def _make_tokenizer(self) -> LLTokenizer:
        """Return a tokenizer in which markers are special tokens, so that constrained text contains none."""
        backend = getattr(self._tokenizer.hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequest("it needs a tokenizer of the `tokenizers` library, and the model has another")
        config = json.loads(backend.to_str())
        for token in config["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self._chat_format.marker_ids
        return LLTokenizer(json.dumps(config), eos_token=sorted(self._chat_format.eos_ids))


def _compile(tokenizer: LLTokenizer, grammar: str, spec: StructuredOutputSpec) -> LLMatcher:
    """Return a matcher at the start of the grammar. Raises InvalidRequest."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # it finds some errors only now, and the first bitmask takes longest
    if matcher.is_error():
        message = _error_of(matcher)
        if at_line := _ERROR_AT_LINE.fullmatch(message):
            function = function_of_rule(spec, grammar.split("\n")[int(at_line["line"]) - 1])
            message = at_line["message"]
            if function is not None:
                message = f"the parameters of {function.name!r}: {message}"
        raise InvalidRequest(message)
    return matcher


def _error_of(matcher: LLMatcher) -> str:
    """Return the error in one line: the first, and the pattern that is wrong. The rest is the library's state."""
    error = matcher.get_error()
    if found := _ERROR_IN_PATTERN.match(error):
        error = f"{found['where']}: {found['message']}: {' '.join(found['pattern'].split()).rstrip('^ ')}"
    return error.partition("\n")[0].replace(_ONE_OF, "oneOf whose choices may overlap: use anyOf")[:300]
