"""How tokens are written where a client wants strings, and where they stand in a text. Pure."""

import codecs
from collections.abc import Iterable, Sequence

from wire import Scored


def spelled(token_id: int, piece: bytes, as_ids: bool = False) -> str:
    """The token's text; `bytes:\\xe2\\x80` where it is no text by itself, as OpenAI writes it; or `token_id:5`."""
    if as_ids:
        return f"token_id:{token_id}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def offsets(pieces: Iterable[bytes]) -> list[int]:
    """In characters: where each token begins in the text of all. One inside a character begins where that does."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, num_characters = [], 0
    for piece in pieces:
        starts.append(num_characters)
        num_characters += len(decoder.decode(piece))
    return starts


def pieces_of_text(scored: Scored, prompt: str | None) -> list[bytes]:
    """`token_bytes` as they stand in the text that a client who echoes sees.

    A BOS that we added has none, and neither has the space that sentencepiece puts before a text.
    """
    pieces = list(scored.token_bytes)
    if not scored.num_reported_prompt_tokens or prompt is None:
        return pieces
    if scored.bos_added:
        pieces[0] = b""
    first = int(scored.bos_added)
    if first < len(pieces) and pieces[first].startswith(b" ") and not prompt.startswith(" "):
        pieces[first] = pieces[first][1:]
    return pieces


def generated_text(scored: Scored) -> str:
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
            name = spelled(token_id, piece, as_ids)
            found[name] = max(value, found.get(name, value))
    return found
