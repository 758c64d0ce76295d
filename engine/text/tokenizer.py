"""Text to token ids and back, exact to the byte. No mlx; safe from any thread.

Ids that a caller gives pass untouched. Text gets the model's own prefix (BOS for most) exactly once, and
never a suffix. A token's bytes come from the vocabulary, not from decoded text: a piece of an emoji decodes
to U+FFFD, its bytes do not.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.sequence import Constraint
from scorepool.engine.text.chat.chat_format import ChatFormat, Tags, chat_format_of
from scorepool.engine.text.chat.grammar import StructuredOutputSpec, why_not
from scorepool.engine.text.chat.output_parser import OutputParser, Span
from scorepool.engine.text.chat.template import NO_VARIABLES, ChatTemplate, Message, Variables
from scorepool.engine.text.chat.tool_parser import Call, Tool, read_calls

Constrain = Callable[
    [StructuredOutputSpec, OutputParser], Constraint
]  # of an answer that the reader will read. Raises InvalidRequest

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's


class Tokenizer:
    markup: ChatFormat  # of the model's answers to chats

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Iterable[int],
        tags: Tags | None = None,
        constrainer: Callable[[Any, ChatFormat], Constrain] | None = None,
    ) -> None:
        """`tokenizer` is a Hugging Face one that nobody else uses."""
        self._tokenizer = tokenizer
        self._lock = Lock()  # Hugging Face's tokenizers change their own state while they encode
        self.eos_ids = frozenset(eos_ids)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.bos_token: str | None = tokenizer.bos_token
        self.eos_token: str | None = tokenizer.eos_token
        self.pad_token: str | None = tokenizer.pad_token
        self.chat_template: str | None = _only_template(tokenizer.chat_template)
        self.vocab_size = len(tokenizer)
        self._prefix = self._find_prefix()
        self._bytes = self._read_vocabulary()
        self.longest_token_bytes = max(map(len, self._bytes.values()))
        self._template = ChatTemplate(tokenizer, self._lock)
        special = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.markup = chat_format_of(tags or Tags(), tokenizer.get_vocab(), self._plain, special, self.eos_ids)
        self._constrain = None if constrainer is None else constrainer(tokenizer, self.markup)

    def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
        """Token ids, and whether BOS was added: it is when the model wants it and the text has it not."""
        ids = self._plain(text)
        if not add_bos or not self._prefix or ids[: len(self._prefix)] == self._prefix:
            return ids, False
        return self._prefix + ids, True

    def encode_pair(self, prompt: str, completion: str) -> tuple[list[int], int, bool]:
        """Token ids of both together, how many of them are the prompt's, and whether BOS was added.

        As lm-evaluation-harness does: whitespace that ends the prompt moves into the completion, and the
        prompt's share is what the prompt takes alone. At least one token is the completion's. Raises InvalidRequest
        if there is none.
        """
        kept = prompt.rstrip()
        completion = prompt[len(kept) :] + completion
        ids, bos_added = self.encode(kept + completion)
        if not self._plain(completion):
            raise InvalidRequest(
                "the completion is no token in this model's vocabulary; give text that is at least one"
            )
        num_prompt_tokens = len(self.encode(kept)[0])
        return ids, min(num_prompt_tokens, len(ids) - 1), bos_added

    def why_no_tools(self, may_call: bool = True) -> str | None:
        """Why the model cannot be shown tools, or cannot call them; None: it can. Raises InvalidRequest."""
        if not self._template.knows_tools:
            return "the model's chat template has no place for them"
        if may_call and self.markup.parser is None:
            return "no format is known in which this model calls functions"
        return None

    def knows_variable(self, name: str) -> bool:
        """Whether the chat template reads it, and a caller may say what it is."""
        return self._template.knows(name)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), variables: Variables = NO_VARIABLES
    ) -> tuple[list[int], list[int]]:
        """The chat template's text with the generation prompt, and no BOS but its own; and the ids at its end that
        are the generation prompt. Raises InvalidRequest."""
        text, opening = self._template.render(messages, tools, variables)
        ids = self._plain(text)
        start, num_bytes = len(ids), len(opening.encode())
        while start and num_bytes > 0:
            start -= 1
            num_bytes -= len(self.token_bytes(ids[start]))
        return ids, ids[start:]

    def reader(self, opening: Sequence[int], keeps_special: bool = False) -> OutputParser:
        """Of an answer to a chat whose generation prompt is `opening`."""
        return OutputParser(self.markup, self.token_bytes, opening, keeps_special)

    def calls(self, span: Span, token_ids: Sequence[int], tools: Sequence[Tool]) -> list[Call]:
        """Those in a span of an answer. Empty where it cannot be read, or calls what was not offered."""
        text = b"".join(map(self.token_bytes, token_ids[span.start : span.end]))
        return read_calls(self.markup, span.header, text, tools)

    def why_not_constrained(self, calls: bool) -> str | None:
        """Why answers to chats cannot be constrained, or what they call; None: they can."""
        return why_not(self.markup.form, calls)

    def constraint(self, wanted: StructuredOutputSpec, opening: Sequence[int] | None) -> Constraint:
        """Of an answer to a chat whose prompt ends with `opening`; None: of a text. Raises InvalidRequest."""
        if self._constrain is None:
            raise InvalidRequest("nothing is constrained here")
        reader = OutputParser(ChatFormat(moves={}), self.token_bytes) if opening is None else self.reader(opening)
        return self._constrain(wanted, reader)

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for an id that the model has and the vocabulary has not (padding of the embedding)."""
        return self._bytes.get(token_id, b"")

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens' bytes, joined; what is not UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def _plain(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_prefix(self) -> list[int]:
        """What the tokenizer puts before every text: mostly [BOS] or nothing."""
        with_special = list(self._tokenizer.encode("a"))
        plain = self._plain("a")
        for start in range(len(with_special) - len(plain) + 1):
            if with_special[start : start + len(plain)] == plain:
                return with_special[:start]
        return []

    def _read_vocabulary(self) -> dict[int, bytes]:
        """Bytes of every id. An added token stands for its own text."""
        spelling, added_spelling = _spellings(self._tokenizer)
        added = {
            token_id: token.content.encode() if token.special else added_spelling(token.content)
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
        }
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return {token_id: spelling(piece) for piece, token_id in vocabulary.items()} | added


def _spellings(tokenizer: Any) -> tuple[Callable[[str], bytes], Callable[[str], bytes]]:
    """How this vocabulary writes bytes: from a piece to its bytes, for its own pieces and for added tokens.

    Gemma's runs of spaces are added tokens that are written as sentencepiece's are.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend is not None else {}
    kinds = set(_kinds({"decoder": parts.get("decoder"), "pre_tokenizer": parts.get("pre_tokenizer")}))
    if "ByteLevel" in kinds:
        return _from_byte_level, str.encode
    if kinds & {"ByteFallback", "Metaspace", "Replace"} or hasattr(tokenizer, "sp_model"):
        return _from_sentencepiece, _from_sentencepiece
    return str.encode, str.encode


def _only_template(templates: str | dict[str, str] | None) -> str | None:
    """A tokenizer may have several by name; `default` is the one that is used when no other is asked for."""
    return templates.get("default") if isinstance(templates, dict) else templates


def _kinds(part: Any) -> Iterable[str]:
    """Every `type` in a tokenizer.json's tree."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _kinds(inner)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: a printable byte stands for itself, the others for code points from 256 on, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _from_byte_level(piece: str) -> bytes:
    """A piece with a character outside the alphabet stands for its own text, as in the `tokenizers` library."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _from_sentencepiece(piece: str) -> bytes:
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE, " ").encode()
