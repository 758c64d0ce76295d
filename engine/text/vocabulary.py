"""The bytes that each token id stands for, read from the vocabulary rather than from decoded text.

A piece of an emoji decodes to U+FFFD; its bytes do not. Vocabularies write bytes in two ways:

    byte-level      one printable character per byte (GPT-2's table)
    sentencepiece   spaces as U+2581, bytes outside the vocabulary as <0xNN>
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

ToBytes = Callable[[str], bytes]  # a piece of the vocabulary to the bytes it stands for


def read_token_bytes(hf_tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of every id. A special token stands for its own text."""
    piece_to_bytes, added_to_bytes = _decoders_of(hf_tokenizer)
    added = {
        token_id: token.content.encode() if token.special else added_to_bytes(token.content)
        for token_id, token in hf_tokenizer.added_tokens_decoder.items()
    }
    vocabulary: dict[str, int] = hf_tokenizer.get_vocab()
    return {token_id: piece_to_bytes(piece) for piece, token_id in vocabulary.items()} | added


def _decoders_of(hf_tokenizer: Any) -> tuple[ToBytes, ToBytes]:
    """Return how the vocabulary's own pieces and how its added tokens are turned into bytes.

    Gemma's runs of spaces are added tokens that are written as sentencepiece writes them.
    """
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    config = json.loads(backend.to_str()) if backend is not None else {}
    types = set(_types_in({"decoder": config.get("decoder"), "pre_tokenizer": config.get("pre_tokenizer")}))
    if "ByteLevel" in types:
        return _byte_level_to_bytes, str.encode
    if types & {"ByteFallback", "Metaspace", "Replace"} or hasattr(hf_tokenizer, "sp_model"):
        return _sentencepiece_to_bytes, _sentencepiece_to_bytes
    return str.encode, str.encode


def _types_in(node: Any) -> Iterable[str]:
    """Yield every `type` in the tree of a tokenizer.json."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node["type"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _types_in(child)


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's table: a printable byte stands for itself, the others for code points from 256 on, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _byte_level_to_bytes(piece: str) -> bytes:
    """Decode a byte-level piece. One with a character outside the alphabet stands for its own text, as in the
    `tokenizers` library."""
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece_to_bytes(piece: str) -> bytes:
    if byte := _BYTE_FALLBACK.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()
