"""How tokens are written where a client wants strings, and where they stand in a text. Pure."""

import codecs
from collections.abc import Iterable, Sequence

from scorepool.wire import SequenceResult, TokenDelta


def token_text(token_id: int, piece: bytes, as_ids: bool = False) -> str:
    """The token's text; `bytes:\\xe2\\x80` where it is no text by itself, as OpenAI writes it; or `token_id:5`."""
    if as_ids:
        return f"token_id:{token_id}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class IncrementalDetokenizer:
    """Bytes of tokens to characters, as they come. What is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def add(self, pieces: Iterable[bytes]) -> tuple[str, list[int]]:
        """The characters that are now whole, and where each token begins: inside a character, where that does."""
        text, starts = "", []
        for piece in pieces:
            starts.append(self._num_characters)
            added = self._decoder.decode(piece)
            self._num_characters += len(added)
            text += added
        return text, starts

    def end(self) -> str:
        """What stands for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def offsets(pieces: Iterable[bytes]) -> list[int]:
    """In characters: where each token begins in the text of all."""
    return IncrementalDetokenizer().add(pieces)[1]


def pieces_of_text(scored: SequenceResult, prompt: str | None) -> list[bytes]:
    """`token_bytes` as they stand in the text that a client who echoes sees.

    A BOS that we added has none, and neither has the space that sentencepiece puts before a text.
    """
    pieces = told_bytes(scored)
    if not scored.num_reported_prompt_tokens or prompt is None:
        return pieces
    if scored.bos_added:
        pieces[0] = b""
    first = int(scored.bos_added)
    if first < len(pieces) and pieces[first].startswith(b" ") and not prompt.startswith(" "):
        pieces[first] = pieces[first][1:]
    return pieces


def generated_text(scored: SequenceResult) -> str:
    """`text` without the prompt that it may begin with."""
    given = b"".join(scored.token_bytes[: scored.num_reported_prompt_tokens])
    return scored.text[len(given.decode(errors="replace")) :]


def likeliest(
    tokens: Sequence[tuple[int, bytes]], values: Iterable[float | None], as_ids: bool = False
) -> dict[str, float]:
    """Logprobs by string. Where two tokens are written alike, the likelier one's."""
    found: dict[str, float] = {}
    for (token_id, piece), value in zip(tokens, values, strict=True):
        if value is not None:
            name = token_text(token_id, piece, as_ids)
            found[name] = max(value, found.get(name, value))
    return found


def told_bytes(told: SequenceResult | TokenDelta) -> list[bytes]:
    """`token_bytes`, but nothing for tokens that are skipped."""
    first = told.first if isinstance(told, TokenDelta) else -told.num_reported_prompt_tokens
    pieces = list(told.token_bytes)
    for number in told.skipped:
        pieces[number - first] = b""
    return pieces


def content_bytes(scored: SequenceResult) -> list[bytes]:
    """What each token adds to `text`: joined, they are its bytes, also where it ends inside a token."""
    told = told_bytes(scored)
    left = _num_bytes_of(scored.text, told)
    pieces = []
    for piece in told:
        pieces.append(piece[:left])
        left -= len(pieces[-1])
    return pieces


def _num_bytes_of(text: str, pieces: list[bytes]) -> int:
    """Of the tokens' bytes joined: the text ends in the last token that has any, or behind it."""
    whole, written = b"".join(pieces), text.encode()
    if whole.startswith(written):
        return len(written)
    longest = max(map(len, pieces), default=0)
    ends = range(len(whole), len(whole) - longest - 1, -1)  # bytes that are no UTF-8 are U+FFFD in the text
    return next((end for end in ends if whole[:end].decode(errors="replace") == text), len(whole))
