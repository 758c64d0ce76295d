"""Say which sequences may be given again, and digest what decides their numbers. Pure.

A score is a function of weights, tokens and options, and so is a greedy generation: that of temperature 0, or of
top_k 1, which leaves one token to choose. Other generations are drawn anew for each job. A constrained one also depends
on its grammar, a classification is one forward of one item, and what a part of a prompt gives is an approximation, so
none of these is kept. What speculation proposed follows from how the tokens were computed, not from what they are.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from operator import attrgetter

import msgspec

from scorepool import wire
from scorepool.engine import ModelInfo, Sampling, Sequence, Targets
from scorepool.wire.packed import pack_ints
from scorepool.worker.inference.result_cache.entry import INPUTS
from scorepool.worker.version import VERSION

FORMAT = 1  # to be raised when entries get another meaning
DIGEST_BYTES = 32

# The inputs of a sequence that decide its values are all but these, so that a new one is not forgotten.
_NOT_OPTIONS = {
    *("token_ids", "targets", "sampling", "images"),  # digested in their own way
    *("constraint", "classify", "pooling", "keep_pct"),  # such a sequence is not kept
    *("share", "fails_alone", "prefix_scope"),  # who waits for it
    *("speculation", "speculation_tokens"),  # they change no number
}
OPTIONS = tuple(name for name in INPUTS if name not in _NOT_OPTIONS)
_options = attrgetter(*OPTIONS)
_sampling = attrgetter(*(each.name for each in fields(Sampling) if each.name != "seed"))
_encode = msgspec.msgpack.Encoder().encode


def may_be_cached(request: wire.Request) -> bool:
    """True if the request allows values that were not computed for it, and has some that may be given again."""
    if isinstance(request, wire.Score):
        return request.cache
    if not isinstance(request, wire.Generate) or not request.cache or request.specprefill:
        return False
    is_greedy = request.temperature == 0 or request.top_k == 1 or request.max_tokens == 0
    is_asked_how = request.stream or request.recompute or request.include_draft_logprobs
    return is_greedy and not is_asked_how


def is_kept(sequence: Sequence) -> bool:
    """True if the sequence may be given again."""
    is_other = sequence.classify or sequence.pooling is not None
    if is_other or sequence.constraint is not None or sequence.reports_proposals or sequence.keep_pct is not None:
        return False
    sampling = sequence.sampling
    return sampling is None or sampling.temperature == 0 or sampling.top_k == 1


def identity_of(info: ModelInfo) -> tuple[object, ...]:
    """Return what of a model decides about its numbers, to the bit."""
    versions = sorted({"scorepool": VERSION, **info.versions}.items())
    names = (info.fingerprint, info.dtype, info.quantization, info.adapter, info.mode, info.backend)
    return (*names, versions)


def digests(
    sequences: Iterable[Sequence], info: ModelInfo, owner: str, cache_salt: str | None
) -> Iterator[bytes | None]:
    """Yield the digest of each sequence that has not begun; None for one that may not be given again."""
    common = hashlib.blake2b(_encode((FORMAT, identity_of(info), owner, cache_salt)), digest_size=DIGEST_BYTES)
    for sequence in sequences:
        if not is_kept(sequence):
            yield None
            continue
        one = common.copy()
        sampling = None if sequence.sampling is None else _sampling(sequence.sampling)
        update_digest(one, sequence, sampling)
        yield one.digest()


def update_digest(digest: "hashlib.blake2b", sequence: Sequence, sampling: object) -> None:
    """Digest what is asked of a sequence; `sampling` is what of its parameters counts."""
    digest.update(_encode((_options(sequence), sampling, sequence.num_input_tokens)))
    digest.update(pack_ints(sequence.token_ids[: sequence.num_input_tokens]))
    for image in sequence.images:
        digest.update(_encode((image.digest, image.start, image.end)))
    for part in _targets(sequence.targets):
        digest.update(part)


def _targets(targets: Targets | None) -> Iterator[bytes | bytearray]:
    if targets is None:
        return
    yield _encode((targets.is_shared, [len(ids) for ids in targets.lists]))
    for ids in targets.lists:
        yield pack_ints(ids)
