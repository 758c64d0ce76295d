"""Say which jobs keep their finished rows, and convert a row to what Redis keeps of it and back. Pure.

A row is used again only for the same tokens and options, and only under the same version of the same weights, computed
in the same way to the bit: `digest_of` covers all of it. So a result is that of a run without a death.
"""

import hashlib
import struct
from dataclasses import astuple

import msgspec

from scorepool import wire
from scorepool.engine import ModelInfo, Sequence
from scorepool.wire import CheckpointRow
from scorepool.worker.inference.result_cache.digest import DIGEST_BYTES, identity_of, update_digest
from scorepool.worker.inference.result_cache.entry import entry_fields, fill_from_entry

FORMAT = 2  # to be raised when rows get another meaning
_encode = msgspec.msgpack.Encoder().encode


def may_be_kept(request: wire.Request) -> bool:
    """True if the finished rows of a request can be used by its next run: it has several, and none was sent before."""
    if isinstance(request, wire.Generate):
        is_anew = request.stream or request.recompute or request.include_draft_logprobs or request.specprefill
        return request.n > 1 and not is_anew
    return isinstance(request, wire.Score | wire.Classify | wire.Embed) and len(request.items) > 1


def identity_digest(info: ModelInfo) -> bytes:
    """Digest what computes rows: rows of another model, or of another version of it, are not used."""
    return hashlib.blake2b(
        _encode((FORMAT, identity_of(info), info.weights_version)), digest_size=DIGEST_BYTES
    ).digest()


def digest_of(identity: bytes, sequence: Sequence) -> bytes:
    """Digest what is asked of a row, and what computes it."""
    digest = hashlib.blake2b(identity, digest_size=DIGEST_BYTES)
    sampling = None if sequence.sampling is None else astuple(sequence.sampling)
    update_digest(digest, sequence, (sampling, sequence.classify, sequence.pooling, sequence.constraint is not None))
    return digest.digest()


def is_finished(sequence: Sequence) -> bool:
    """True if the engine has computed the whole row, and the job does not fail for it."""
    is_computed = sequence.is_done and sequence.num_computed > 0
    return is_computed and sequence.error is None and sequence.constraint_error is None


def to_row(index: int, identity: bytes, sequence: Sequence) -> CheckpointRow:
    embedding = sequence.embedding
    return CheckpointRow(
        index=index,
        digest=digest_of(identity, sequence),
        class_logits=sequence.class_logits,
        embedding=None if embedding is None else struct.pack(f"<{len(embedding)}d", *embedding),
        num_cached=sequence.num_cached,
        num_proposed=sequence.num_proposed,
        num_accepted=sequence.num_accepted,
        **entry_fields(sequence),
    )


def fill_from_row(sequence: Sequence, row: CheckpointRow, identity: bytes, info: ModelInfo) -> bool:
    """Give a row's values to a sequence that has not begun; return whether they are those of the sequence."""
    if row.digest != digest_of(identity, sequence) or not _is_known(row, info.vocab_size):
        return False
    is_classified, is_embedded = row.class_logits is not None, row.embedding is not None
    if is_classified != sequence.classify or is_embedded != (sequence.pooling is not None):
        return False
    if is_classified and (info.classifier is None or len(row.class_logits or ()) != len(info.classifier.labels)):
        return False
    try:
        embedding = None if row.embedding is None else _floats(row.embedding)
        fill_from_entry(sequence, row, info)
    except (TypeError, ValueError, OverflowError, struct.error):
        return False
    sequence.class_logits, sequence.embedding = row.class_logits, embedding
    sequence.num_cached = row.num_cached
    sequence.num_proposed, sequence.num_accepted = row.num_proposed, row.num_accepted
    return True


def _is_known(row: CheckpointRow, vocab_size: int) -> bool:
    """True if the vocabulary has all tokens of a row: an unknown one would end the job when it is named."""
    return all(not ids or (min(ids) >= 0 and max(ids) < vocab_size) for ids in (row.generated_ids, *row.top_ids))


def _floats(packed: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // 8}d", packed))
