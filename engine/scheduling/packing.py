"""Pack slices into forward passes: rectangles of rows, padded to the longest."""

from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import Slice

MIN_FORWARD_TOKENS = 256  # a smaller forward pass leaves the machine idle: it takes slices at any padding
MIN_SHARED_TOKENS = 64  # fewer tokens on one cached prefix run beside slices on other prefixes
MAX_PADDING = 1 / 8  # of the longest row, in a forward pass of MIN_FORWARD_TOKENS or more
MAX_KEYS = 16_384  # rows times tokens in a forward pass on cached prefixes: a layer holds the keys of all of them


def pack_forwards(decode: list[Slice], resumed: list[Slice], prefill: list[Slice]) -> list[list[Slice]]:
    """Group slices into forward passes: of one kind, of similar length, and on one cached prefix if they are many.

    Decoding comes first, before other sequences join its cache. A prefix comes before the slices that continue from
    it. An empty slice belongs to a sequence whose whole prompt is its cached prefix.
    """
    forwards = [one for one in (decode, resumed) if one]
    forwards += [[slice_] for slice_ in prefill if slice_.runs_alone]
    together = [slice_ for slice_ in prefill if not slice_.runs_alone]
    for keeps_cache in (False, True):
        if empty := [one for one in together if not one.num_tokens and one.keeps_cache is keeps_cache]:
            forwards.append(empty)
    whole = [slice_ for slice_ in together if slice_.num_tokens]
    forwards += _pack_prefixed([one for one in whole if one.cached_prefix and not one.keeps_cache])
    forwards += _pack_by_length([one for one in whole if not one.cached_prefix and not one.keeps_cache])
    forwards += _pack_by_length([one for one in whole if one.keeps_cache])
    return forwards


def _pack_prefixed(slices: list[Slice]) -> list[list[Slice]]:
    """Give each cached prefix forward passes of its own, unless few tokens continue from it."""
    by_prefix: dict[Prefix, list[Slice]] = {}
    for slice_ in slices:
        if slice_.cached_prefix:
            by_prefix.setdefault(slice_.cached_prefix, []).append(slice_)
    forwards: list[list[Slice]] = []
    few: list[Slice] = []
    for group in by_prefix.values():
        if sum(slice_.num_tokens for slice_ in group) < MIN_SHARED_TOKENS:
            few += group
        else:
            forwards += _pack_by_length(group)
    return forwards + _pack_by_length(few)


def _pack_by_length(slices: list[Slice]) -> list[list[Slice]]:
    """Pack slices of similar length together, longest first."""
    forwards: list[list[Slice]] = []
    for slice_ in sorted(slices, key=lambda slice_: -slice_.num_tokens):
        if forwards and _fits(slice_, forwards[-1]):
            forwards[-1].append(slice_)
        else:
            forwards.append([slice_])
    return forwards


def _fits(slice_: Slice, forward: list[Slice]) -> bool:
    """True if the slice may join the forward pass, whose first slice is the longest."""
    longest = forward[0].num_tokens
    padding = longest - slice_.num_tokens
    if longest * len(forward) >= MIN_FORWARD_TOKENS and padding > MAX_PADDING * longest:
        return False
    num_keys = max(other.end for other in [*forward, slice_])
    return not slice_.cached_prefix or num_keys * (len(forward) + 1) <= MAX_KEYS
