"""Structured outputs: say which tokens may follow at each step. Grammars run in processes of their own. No MLX."""

import json
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat import grammar_errors
from scorepool.engine.text.chat.chat_format import PLAIN_TEXT_FORMAT, ChatFormat
from scorepool.engine.text.chat.grammar import (
    StructuredOutputSpec,
    build_grammar,
    unsupported_reason,
)
from scorepool.engine.text.chat.grammar_process.fork_server_link import tokenizer_message
from scorepool.engine.text.chat.grammar_process.grammar_process import GrammarProcess, Reply
from scorepool.engine.text.chat.grammar_process.grammars import Grammars
from scorepool.engine.text.chat.output_parser import OutputParser
from scorepool.engine.text.tokenizer import Tokenizer

MAX_GRAMMAR_CHARACTERS = 2**20
_numbers = count()  # of sequences


class GrammarConstraint:
    """The constraint of one sequence: it holds how far the sequence has come. One thread at a time uses it."""

    def __init__(self, compiler: "GrammarCompiler", grammar: GrammarProcess, eos_bitmask: bytes) -> None:
        self.error: str | None = None  # why no token can follow any more: the sequence ends at once
        self.number = next(_numbers)
        self.generated: Sequence[int] = ()
        self.proposed: Sequence[int] = ()
        self.num_consumed = 0
        self.run = 0
        self.reply: Reply | None = None
        self._compiler = compiler
        self._grammar = grammar
        self._eos_bitmask = eos_bitmask
        self._num_asked = -1  # generated tokens
        weakref.finalize(self, grammar.forgotten.append, self.number)

    def compile(self) -> Future[None]:
        """Have the grammar compiled, for all sequences that have it. The future gets InvalidRequest if it cannot be."""
        return self._compiler.grammars.compile(self._grammar)

    @property
    def num_foreseen(self) -> int:
        """The number of proposed tokens after which it is known what may follow: the leading ones."""
        return len(self.reply.bitmasks) - 1 if self.error is None and self.reply is not None else 0

    def prepare(self, generated: Sequence[int], proposed: Sequence[int] = ()) -> None:
        """Have the bitmask found for what follows these tokens: those of the last call and those since.

        Also those for what follows each of the proposed tokens after them, as far as these may follow.
        """
        if self._num_asked == len(generated):
            return
        self._num_asked, self.generated, self.proposed = len(generated), generated, proposed
        self.reply = self._grammar.first_reply if not generated and not proposed else None
        if self.error is None and self.reply is None:
            self._compiler.grammars.ask(self._grammar, self)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the bitmask. Return False if it is not there in time."""
        changed = self._compiler.grammars.changed
        with changed:
            return changed.wait_for(lambda: self.reply is not None or self.error is not None, timeout_s)

    def restarted(self) -> "GrammarConstraint":
        """Return a constraint with the same grammar, before any token."""
        return GrammarConstraint(self._compiler, self._grammar, self._eos_bitmask)

    def token_bitmask(self, generated: Sequence[int], num_proposed: int = 0) -> bytes:
        """Return one bit per token id, the lowest first: 1 if the token may follow. Waits for it.

        What follows is meant to follow as many of the proposed tokens; more than `num_foreseen` cannot all be accepted.
        """
        self.prepare(generated)
        self.wait(None)
        if self.error is None and self.reply is not None and self.reply.error is not None:
            self.error = self.reply.error
        if self.error is not None or self.reply is None:
            return self._eos_bitmask
        bitmasks = self.reply.bitmasks
        return bitmasks[min(num_proposed, len(bitmasks) - 1)] or self._eos_bitmask


class GrammarCompiler:
    """Make the constraints of one model's sequences. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
        """Start nothing yet. The grammars end with the compiler and its constraints."""
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self.grammars = Grammars(partial(_write_tokenizer, tokenizer, chat_format))
        weakref.finalize(self, self.grammars.close)  # which must not know the compiler

    def unsupported_reason(self, has_functions: bool) -> str | None:
        """Return why answers to chats, or the calls in them, cannot be constrained. None if they can."""
        return unsupported_reason(self._chat_format.structural_tag, has_functions)

    def constraints(
        self, spec: StructuredOutputSpec, generation_prompt: Sequence[int] | None, owner: str = "", num: int = 1
    ) -> list[GrammarConstraint]:
        """Return constraints for answers to one chat, or for plain texts if there is no generation prompt.

        Owners take turns to have grammars compiled. Raises InvalidRequest.
        """
        chat_format = PLAIN_TEXT_FORMAT if generation_prompt is None else self._chat_format
        text = build_grammar(spec, OutputParser(chat_format, self._tokenizer.token_bytes, generation_prompt or ()))
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"it is too large: its grammar has {len(text)} characters, and the limit is {MAX_GRAMMAR_CHARACTERS}"
            )
        self._check_tokenizer()
        explain = partial(grammar_errors.explain, spec)
        grammar = self.grammars.get(text, owner, explain)
        bits = sum(1 << token_id for token_id in self._chat_format.eos_ids)
        eos_bitmask = bits.to_bytes((bits.bit_length() + 31) // 32 * 4, "little")
        return [GrammarConstraint(self, grammar, eos_bitmask) for _ in range(num)]

    def _check_tokenizer(self) -> None:
        if getattr(self._tokenizer.hf_tokenizer, "backend_tokenizer", None) is None:
            raise InvalidRequest("it needs a tokenizer of the `tokenizers` library, and the model has another")
        if not self._tokenizer.eos_ids_with_text:
            raise InvalidRequest("it needs an end token, and the model has none that its tokenizer knows")


def _write_tokenizer(tokenizer: Tokenizer, chat_format: ChatFormat) -> bytes:
    """Write a tokenizer in which markers are special tokens, so that constrained text contains none."""
    config = json.loads(tokenizer.hf_tokenizer.backend_tokenizer.to_str())
    special = chat_format.marker_ids | chat_format.delimiter_ids
    for token in config["added_tokens"]:
        token["special"] = token["special"] or token["id"] in special
    return tokenizer_message(config, sorted(tokenizer.eos_ids_with_text))
