"""Convert tokens to strings, and compute the position of each token in a text. Pure."""

import codecs
from collections.abc import Iterable, Sequence

from scorepool.wire import SequenceResult, TokenDelta


def token_text(token_id: int, token_bytes: bytes, as_ids: bool = False) -> str:
    """Return the token's text, `bytes:\\xe2\\x80` (as OpenAI does) if it is not UTF-8, or `token_id:5`."""
    if as_ids:
        return f"token_id:{token_id}"
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class IncrementalDetokenizer:
    """Decode the bytes of tokens as they come. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def add(self, tokens: Iterable[bytes]) -> tuple[str, list[int]]:
        """Return the characters that are now whole, and the position of each token in characters.

        A token that begins inside a character has the position of that character.
        """
        text, offsets = "", []
        for token in tokens:
            offsets.append(self._num_characters)
            added = self._decoder.decode(token)
            self._num_characters += len(added)
            text += added
        return text, offsets

    def end(self) -> str:
        """Return U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def text_offsets(tokens: Iterable[bytes]) -> list[int]:
    """Return the position of each token, in characters, in the text of all."""
    return IncrementalDetokenizer().add(tokens)[1]


def echoed_bytes(sequence: SequenceResult, prompt: str | None) -> list[bytes]:
    """Return the emitted bytes of each token as they appear in an echoed text.

    A BOS that the server added contributes nothing, and neither does the space that sentencepiece puts before a text.
    `prompt` is None for a prompt of token ids.
    """
    tokens = emitted_bytes(sequence)
    if not sequence.num_reported_prompt_tokens or prompt is None:
        return tokens
    if sequence.bos_added:
        tokens[0] = b""
    first = int(sequence.bos_added)
    if first < sequence.num_reported_prompt_tokens and tokens[first].startswith(b" ") and not prompt.startswith(" "):
        tokens[first] = tokens[first][1:]
    return tokens


def generated_text(sequence: SequenceResult) -> str:
    """Return `text` without the prompt that it may begin with, which may end inside a character."""
    if not sequence.num_reported_prompt_tokens:
        return sequence.text
    return b"".join(content_bytes(sequence)[sequence.num_reported_prompt_tokens :]).decode(errors="replace")


def top_tokens(sequence: SequenceResult, entry: int) -> list[tuple[int, bytes, float | None]]:
    """Return the ids, bytes and logprobs of an entry's most likely tokens, most likely first; empty if not reported."""
    if sequence.top_ids is None or sequence.top_bytes is None or sequence.top_logprobs is None:
        return []
    columns = (sequence.top_ids[entry], sequence.top_bytes[entry], sequence.top_logprobs[entry].values())
    return list(zip(*columns, strict=True))


def target_tokens(
    sequence: SequenceResult, entry: int, target_ids: Sequence[int]
) -> list[tuple[int, bytes, float | None]]:
    """Return the ids, bytes and logprobs of the targets at an entry, in their order; empty if not reported."""
    if sequence.target_bytes is None or sequence.target_logprobs is None or not sequence.target_logprobs[entry]:
        return []
    columns = (target_ids, sequence.target_bytes, sequence.target_logprobs[entry].values())
    return list(zip(*columns, strict=True))


def logprobs_by_text(tokens: Iterable[tuple[int, bytes, float | None]], as_ids: bool = False) -> dict[str, float]:
    """Return logprobs by token text. If two tokens have the same text, the larger logprob is kept."""
    by_text: dict[str, float] = {}
    for token_id, token_bytes, logprob in tokens:
        if logprob is not None:
            text = token_text(token_id, token_bytes, as_ids)
            by_text[text] = max(logprob, by_text.get(text, logprob))
    return by_text


def emitted_bytes(tokens: SequenceResult | TokenDelta) -> list[bytes]:
    """Return `token_bytes`, with nothing for tokens that are skipped."""
    first = tokens.first if isinstance(tokens, TokenDelta) else -tokens.num_reported_prompt_tokens
    emitted = list(tokens.token_bytes)
    for number in tokens.skipped:
        emitted[number - first] = b""
    return emitted


def content_bytes(sequence: SequenceResult) -> list[bytes]:
    """Return what each token adds to `text`. Joined, they are its bytes, even if `text` ends inside a token."""
    emitted = emitted_bytes(sequence)
    num_left = _num_bytes_of(sequence.text, emitted)
    contents = []
    for token in emitted:
        contents.append(token[:num_left])
        num_left -= len(contents[-1])
    return contents


def _num_bytes_of(text: str, tokens: list[bytes]) -> int:
    """Return how many of the tokens' joined bytes `text` covers: it ends in the last token that has any, or after."""
    joined, encoded = b"".join(tokens), text.encode()
    if joined.startswith(encoded):
        return len(encoded)
    longest = max(map(len, tokens), default=0)
    ends = range(len(joined), len(joined) - longest - 1, -1)  # bytes that are not UTF-8 are U+FFFD in the text
    return next((end for end in ends if joined[:end].decode(errors="replace") == text), len(joined))
