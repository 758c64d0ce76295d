"""Compare two computations of the same tokens: the tolerance of each mode, and the first token that differs.

The only definition of the tolerances; docs/numbers.md ("Modes") repeats them.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from scorepool.wire.codec import encode
from scorepool.wire.columns import Floats
from scorepool.wire.provenance import Provenance

# Nats by dtype: about ten times what rounding alone does (docs/numbers.md, "Modes").
ROUNDING_NATS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.8}

RANK = "rank"

# Results that differ in one of these are not of the same model; in another field of the stamp, only their rounding may
# differ.
_OF_THE_MODEL = ("fingerprint", "dtype", "quantization", "adapter")
_OF_THE_ROUNDING = ("mode", "backend")  # and the versions


class ScoredSequence(Struct, frozen=True, kw_only=True):
    """Hold the values of one sequence that a second computation must confirm.

    Entry j of each column belongs to `token_ids[first + j]`; a column that was not asked for is None.
    """

    token_ids: list[int]  # from the first token of the prompt on
    first: int
    logprobs: Floats
    top_ids: list[list[int]] | None = None
    top_logprobs: list[Floats] | None = None
    ranks: list[int | None] | None = None
    entropies: Floats | None = None

    @property
    def has_columns(self) -> list[bool]:
        """True for each optional column that the sequence has."""
        return [column is not None for column in (self.top_ids, self.top_logprobs, self.ranks, self.entropies)]


class TokenDifference(Struct, frozen=True, kw_only=True):
    """Name a token whose values differ by more than the tolerance."""

    sequence: int
    position: int  # in the sequence, prompt included
    token_id: int
    column: str
    one: float | None
    other: float | None

    def __str__(self) -> str:
        place = f"sequence {self.sequence}, position {self.position}, token {self.token_id}"
        one, other = ("null" if value is None else f"{value:.9g}" for value in (self.one, self.other))
        return f"{place}: {self.column} {one} and {other}"


class Comparison(Struct, frozen=True, kw_only=True):
    """Say how far two computations of the same tokens are apart."""

    tolerance: float  # nats
    num_tokens: int
    num_different: int  # tokens that differ by more than the tolerance
    largest: float  # nats, the largest difference of a logprob; inf if a value is missing on one side
    is_equal: bool  # to the bit, in every column
    first: TokenDifference | None  # that differs by more than the tolerance


def tolerance_nats(one: Provenance, other: Provenance, temperature: float = 1.0) -> float:
    """Return how far apart logprobs of the same tokens may be, in nats.

    Exact mode promises equal bits wherever kernels and device are the same. Everywhere else sums are rounded in another
    order.
    """
    if one.mode == other.mode == "exact" and (one.backend, one.versions) == (other.backend, other.versions):
        return 0.0
    return rounding_nats(one, other, temperature)


def rounding_nats(one: Provenance, other: Provenance, temperature: float = 1.0) -> float:
    """Return how far apart rounding alone may take logprobs of the same tokens, in nats.

    A temperature below 1 enlarges the rounding of the logits that it divides.
    """
    by_dtype = (ROUNDING_NATS.get(stamp.dtype, max(ROUNDING_NATS.values())) for stamp in (one, other))
    return max(by_dtype) / min(1.0, temperature)


def are_of_one_model(one: Provenance, other: Provenance) -> bool:
    """True if two results must agree: the same weights, tokenizer, dtype, quantisation and adapter."""
    return all(getattr(one, name) == getattr(other, name) for name in _OF_THE_MODEL)


def stamp_differences(one: Provenance, other: Provenance) -> list[str]:
    """Return what differs between two stamps, apart from the model's name, as `field 'value' and 'value'`."""
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in (*_OF_THE_MODEL, *_OF_THE_ROUNDING)]
    names = dict.fromkeys((*one.versions, *other.versions))
    pairs += [(f"version of {name}", one.versions.get(name), other.versions.get(name)) for name in names]
    return [f"{name} {before!r} and {after!r}" for name, before, after in pairs if before != after]


def join_stamps(stamps: Sequence[Provenance]) -> Provenance:
    """Return the stamp of several results together, which differ in what was cached at most."""
    cached_items = sum(stamp.cached_items for stamp in stamps)
    return replace(stamps[0], cached=all(stamp.cached for stamp in stamps), cached_items=cached_items)


def compare(one: Sequence[ScoredSequence], other: Sequence[ScoredSequence], tolerance: float) -> Comparison:
    """Compare two computations token by token.

    Raises ValueError if they are not of the same tokens or do not have the same columns.
    """
    num_tokens = num_different = 0
    largest = 0.0
    first: TokenDifference | None = None
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if (left.token_ids, left.first) != (right.token_ids, right.first):
            raise ValueError(f"the tokens of sequence {index} are not the same in both computations")
        for position, values in enumerate(_token_values(left, right, tolerance), left.first):
            num_tokens += 1
            largest = max(largest, *(value.difference for value in values if value.column != RANK))
            beyond = next((value for value in values if value.difference > value.limit), None)
            if beyond is not None:
                num_different += 1
                first = first or TokenDifference(
                    sequence=index,
                    position=position,
                    token_id=left.token_ids[position],
                    column=beyond.column,
                    one=beyond.one,
                    other=beyond.other,
                )
    return Comparison(
        tolerance=tolerance,
        num_tokens=num_tokens,
        num_different=num_different,
        largest=largest,
        is_equal=encode([*one]) == encode([*other]),
        first=first,
    )


class _Value(Struct):
    """Hold one value of one token in both computations."""

    column: str
    one: float | None
    other: float | None
    difference: float
    limit: float


def _token_values(left: ScoredSequence, right: ScoredSequence, tolerance: float) -> Iterator[list[_Value]]:
    """Yield the values of each token."""
    if left.has_columns != right.has_columns:
        raise ValueError("the two computations do not have the same columns")
    tops = zip(_top_tokens(left), _top_tokens(right), strict=True)
    ranks = zip(left.ranks or (), right.ranks or (), strict=True)
    entropies = zip((left.entropies or Floats()).values(), (right.entropies or Floats()).values(), strict=True)
    for a, b in zip(left.logprobs.values(), right.logprobs.values(), strict=True):
        values = [_Value("logprob", a, b, _difference(a, b), tolerance)]
        for one, other in islice(tops, 1):
            values += _top_values(one, other, tolerance)
        for one_entropy, other_entropy in islice(entropies, 1):  # an error of the logits grows with the entropy
            limit = tolerance * max(1.0, one_entropy or 0.0)
            difference = _difference(one_entropy, other_entropy)
            values.append(_Value("entropy", one_entropy, other_entropy, difference, limit))
        for rank, other_rank in islice(ranks, 1):  # rounding may change a rank, so it counts only where bits are equal
            limit = inf if tolerance else 0.0
            values.append(_Value(RANK, rank, other_rank, _difference(rank, other_rank), limit))
        yield values


def _top_tokens(sequence: ScoredSequence) -> Iterator[dict[int, float]]:
    """Yield the top logprobs of each token by token id."""
    for ids, logprobs in zip(sequence.top_ids or (), sequence.top_logprobs or (), strict=True):
        yield dict(zip(ids, logprobs, strict=True))


def _top_values(one: dict[int, float], other: dict[int, float], tolerance: float) -> list[_Value]:
    """Compare top logprobs by token id. A token that one side alone lists is at most as likely as the other's last."""
    values = []
    for token_id in one | other:
        a, b = one.get(token_id), other.get(token_id)
        if a is None or b is None:
            last = min((other if b is None else one).values()) if len(one) == len(other) else -inf
            difference = max((a if b is None else b) - last, sys.float_info.min)  # type: ignore[operator]
        else:
            difference = _difference(a, b)
        values.append(_Value(f"top logprob of token {token_id}", a, b, difference, tolerance))
    return values


def _difference(a: float | None, b: float | None) -> float:
    """Return how far two values are apart; inf if one is missing."""
    if a is None or b is None:
        return 0.0 if a is b else inf
    return abs(a - b)
