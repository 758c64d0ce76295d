"""Find which tokens a generation must not sample: `allowed_token_ids` and `bad_words` of its request. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from scorepool import wire
from scorepool.engine import Tokenizer
from scorepool.worker.inference.text_lengths import invalid_request

BadWord = tuple[int, ...]


class Exclusions(NamedTuple):
    """What the sampler excludes, in the engine's terms."""

    allowed_bitmask: bytes = b""
    bad_words: tuple[BadWord, ...] = ()


def exclusions_of(request: wire.Generate, tokenizer: Tokenizer) -> Exclusions:
    """Return the exclusions of a request. Raises JobError if some step may have no token left."""
    words = tuple(_bad_words(request.bad_words, tokenizer))
    banned = {word[-1] for word in words}
    if request.min_tokens:
        banned |= tokenizer.eos_ids.union(request.stop_token_ids)
    allowed = request.allowed_token_ids
    is_empty = len(banned) >= tokenizer.vocab_size if allowed is None else banned.issuperset(allowed)
    if is_empty:
        fields = {"allowed_token_ids": allowed, "bad_words": words, "stop_token_ids": True}
        field = next(name for name, is_given in fields.items() if is_given)
        raise invalid_request(
            field,
            "no token is left that can be sampled: expected one that neither ends a word of `bad_words` nor, before "
            "`min_tokens`, the text",
        )
    return Exclusions(b"" if allowed is None else _to_bitmask(allowed), words)


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> Iterable[BadWord]:
    """Yield the token ids of each word: encoded without spaces before it, and with one, as in the middle of a text.

    vLLM takes the second only if it has as many tokens as the first. A word of spaces is encoded as it is.
    """
    for index, word in enumerate(words):
        stripped = word.lstrip(" ")
        alone = tokenizer.encode(stripped or word, add_bos=False)[0]
        if not alone:
            raise invalid_request(f"bad_words[{index}]", "it has no token in this model's vocabulary")
        yield tuple(alone)
        spaced = tokenizer.encode(f" {stripped}", add_bos=False)[0] if stripped else alone
        if spaced != alone:
            yield tuple(spaced)


def _to_bitmask(token_ids: Iterable[int]) -> bytes:
    """Return one bit per token id, lowest id first, in whole words of 32 bits."""
    bits = bytearray(max(token_ids) // 32 * 4 + 4)
    for token_id in token_ids:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)
