"""Text to token ids and back, exact to the byte. No MLX; safe from any thread.

Ids that a caller gives pass untouched. Text gets the model's own prefix (BOS for most) exactly once, and
a suffix only as a whole text to be classified. Chats are in chat/codec.py.
"""

import hashlib
from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any, Literal

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.vocabulary import read_token_bytes

# The modules of transformers whose `encode` only passes a text on to the backend.
_OF_ALL_MODELS = {"transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"}

# Words, numbers, spaces, code and scripts, which tokenizers divide differently.
_SAMPLE = (
    "The quick brown fox couldn't jump over 1234567 lazy dogs;  größer, naïve, 你好世界, привет, こんにちは, 🙂👍🏽\n\n"
    "def f(x_1: int) -> str:\n\treturn f'{x_1:>8}'  # a comment\r\n    <b>HTML</b> https://example.com/?a=b 1e-10"
)


class Tokenizer:
    def __init__(self, hf_tokenizer: Any, eos_ids: Iterable[int]) -> None:
        """Take over a Hugging Face tokenizer that nothing else uses."""
        self.hf_tokenizer = hf_tokenizer
        self._lock = Lock()  # a tokenizer without a backend may change its own state while it encodes
        self.eos_ids = frozenset(eos_ids)
        self.bos_id: int | None = hf_tokenizer.bos_token_id
        self.bos_token: str | None = hf_tokenizer.bos_token
        self.eos_token: str | None = hf_tokenizer.eos_token
        self.pad_token: str | None = hf_tokenizer.pad_token
        self.special_token_ids = frozenset(
            token_id for token_id, token in hf_tokenizer.added_tokens_decoder.items() if token.special
        )
        self.vocab_size = len(hf_tokenizer)
        self._backend = _thread_safe_backend(hf_tokenizer)
        self._prefix, self._suffix = self._find_affixes()
        self._token_bytes = read_token_bytes(hf_tokenizer)
        # A checkpoint may name end tokens that its tokenizer lacks.
        self.eos_ids_with_text = frozenset(token_id for token_id in self.eos_ids if token_id in self._token_bytes)
        self.max_token_bytes = max(map(len, self._token_bytes.values()))

    def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
        """Return token ids and whether BOS was added. It is added if the model wants it and the text lacks it."""
        ids = self._encode_without_prefix(text)
        if not add_bos or not self._prefix or ids[: len(self._prefix)] == self._prefix:
            return ids, False
        return self._prefix + ids, True

    def encode_whole(self, text: str) -> list[int]:
        """Return the token ids of a text that nothing follows, with all that the tokenizer puts around it."""
        ids, _ = self.encode(text)
        is_ended = bool(self._suffix) and ids[-len(self._suffix) :] == self._suffix
        return ids if is_ended else ids + self._suffix

    def cut(self, ids: list[int], num_tokens: int, side: Literal["left", "right"], *, is_text: bool) -> list[int]:
        """Cut ids at a side. As in transformers, what the tokenizer has put before and after a text stays."""
        if len(ids) <= num_tokens:
            return ids
        start = len(self._prefix) if is_text and ids[: len(self._prefix)] == self._prefix else 0
        has_suffix = is_text and bool(self._suffix) and ids[-len(self._suffix) :] == self._suffix
        stop = len(ids) - len(self._suffix) if has_suffix else len(ids)
        num_kept = max(0, num_tokens - start - (len(ids) - stop))
        kept = ids[stop - num_kept : stop] if side == "left" else ids[start : start + num_kept]
        return (ids[:start] + kept + ids[stop:])[:num_tokens]

    def encode_pair(self, prompt: str, completion: str, num_fixed: int = 0) -> tuple[list[int], int, bool]:
        """Return the token ids of both together, how many of them are the prompt's, and whether BOS was added.

        The split follows lm-evaluation-harness: whitespace at the end of the prompt moves into the completion, and
        the prompt has as many tokens as it has alone. At least one token belongs to the completion. The prompt's first
        `num_fixed` characters stay: the text around an image may end with whitespace. Raises InvalidRequest if the
        completion has no token.
        """
        stripped = prompt[:num_fixed] + prompt[num_fixed:].rstrip()
        completion = prompt[len(stripped) :] + completion
        ids, bos_added = self.encode(stripped + completion)
        if not (self._encode_without_prefix(completion[:64]) or self._encode_without_prefix(completion)):
            raise InvalidRequest(
                "the completion has no token in this model's vocabulary; give text that has at least one"
            )
        num_prompt_tokens = len(self.encode(stripped)[0])
        return ids, min(num_prompt_tokens, len(ids) - 1), bos_added

    def head_sizes(self, num_characters: int, max_tokens: int) -> Iterator[int]:
        """Yield how many characters `is_longer` should be given of a text that long, one size after the other.

        None if the text may fit by its length. The last one is at most half of the text: to encode the whole text then
        takes about as long.
        """
        size = 2 * (max_tokens + self._max_joint_tokens)
        while 2 * size <= num_characters:
            yield size
            size *= 4

    def is_longer(self, head: str, max_tokens: int) -> bool:
        """True if every text that begins with `head` has more than `max_tokens` tokens.

        What follows changes the last tokens of a head, and they may become as few as one. Spaces at its end are not
        counted, because a token that strips the spaces before it may follow.
        """
        return len(self.encode(head.rstrip(), add_bos=False)[0]) > max_tokens + self._max_joint_tokens

    @property
    def _max_joint_tokens(self) -> int:
        """Most tokens of a head that a text with this head may not have."""
        return 1024 + self.max_token_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes: none for an id that pads the embedding and is not in the vocabulary."""
        return self._token_bytes.get(token_id, b"")

    def bytes_of(self, token_ids: Iterable[int]) -> list[bytes]:
        """Return each token's bytes."""
        find = self._token_bytes.get
        return [find(token_id, b"") for token_id in token_ids]

    @property
    def token_ids(self) -> Iterable[int]:
        """The ids of the vocabulary, added tokens included."""
        return self._token_bytes.keys()

    def find_difference(self, other: "Tokenizer") -> str | None:
        """Describe the first token id that stands for other bytes in another tokenizer; None if there is none."""
        for token_id in sorted(self._token_bytes.keys() | other._token_bytes.keys()):
            mine, its = self._token_bytes.get(token_id), other._token_bytes.get(token_id)
            if mine != its:
                return f"token {token_id} is {mine!r} in the model's and {its!r} in the draft's"
        return None

    def digest(self) -> str:
        """Return a digest of the bytes of all ids, of the prefix of texts, and of how a sample is divided into tokens.

        Two tokenizers of one digest give texts the same ids, and ids the same bytes.
        """
        found = hashlib.blake2b(digest_size=16)
        for token_id in sorted(self._token_bytes):
            token = self._token_bytes[token_id]
            found.update(b"%d %d " % (token_id, len(token)) + token)
        found.update(repr((self._prefix, self._encode_without_prefix(_SAMPLE))).encode())
        return found.hexdigest()

    def decode(self, ids: Iterable[int]) -> str:
        """Decode the tokens' joined bytes. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.bytes_of(ids)).decode("utf-8", errors="replace")

    def _encode_without_prefix(self, text: str) -> list[int]:
        if self._backend is not None:
            encode = self._backend.encode_batch_fast  # without the offsets, which take half of the time of a long text
            return list(encode([text], add_special_tokens=False)[0].ids)
        with self._lock:
            return list(self.hf_tokenizer.encode(text, add_special_tokens=False))

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before every text, mostly [BOS] or nothing, and those after it."""
        with_special = list(self.hf_tokenizer.encode("a"))
        plain = self._encode_without_prefix("a")
        for start in range(len(with_special) - len(plain) + 1):
            if with_special[start : start + len(plain)] == plain:
                return with_special[:start], with_special[start + len(plain) :]
        return [], []


def _thread_safe_backend(hf_tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` that does all the encoding, or None if a model's own Python code takes part.

    It encodes on several threads at once, without the GIL, as long as none of its settings changes.
    """
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    modules = {_module_of(type(hf_tokenizer), name) for name in ("encode", "_encode_plus")}
    if backend is None or not modules <= _OF_ALL_MODELS or hf_tokenizer.split_special_tokens:
        return None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _module_of(kind: type, method: str) -> str | None:
    """Return the module of the class that defines the method; None if no class does."""
    return next((base.__module__ for base in kind.__mro__ if method in vars(base)), None)
