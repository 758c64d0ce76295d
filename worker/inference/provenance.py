"""Describe what computed a result's numbers."""

from collections.abc import Iterable

from msgspec.structs import replace

from scorepool import engine
from scorepool.engine import ModelInfo, Sequence
from scorepool.wire import Provenance, Verification
from scorepool.wire.provenance import with_adapter
from scorepool.worker.version import VERSION


def provenance_of(model: str, model_info: ModelInfo) -> Provenance:
    stamp = Provenance(
        model=model,
        fingerprint=model_info.fingerprint,
        dtype=model_info.dtype,
        quantization=model_info.quantization,
        adapter=model_info.adapter,
        mode=model_info.mode,
        backend=model_info.backend,
        versions={"scorepool": VERSION, **model_info.versions},
        weights_version=model_info.weights_version,
        verification=_verification_of(model_info.verification),
    )
    return stamp if model_info.adapter is None else with_adapter(stamp, model_info.adapter)


def with_images(stamp: Provenance, sequences: Iterable[Sequence]) -> Provenance:
    """Return the stamp of a result of these sequences, which may show images."""
    if not any(sequence.images for sequence in sequences):
        return stamp
    return _unverified(stamp, "certificates compare texts, and the job shows images")


def with_approximation(stamp: Provenance, sequences: Iterable[Sequence]) -> Provenance:
    """Return the stamp of a result of these sequences, whose prompts may not have been computed whole."""
    if not any(sequence.num_left_out for sequence in sequences):
        return stamp
    reason = "certificates compare whole prompts, and specprefill left tokens out"
    return replace(_unverified(stamp, reason), approximate="specprefill")


def with_cached(stamp: Provenance, cached: Iterable[bool]) -> Provenance:
    """Return the stamp of a result, given for each sequence whether its values were not computed for this job."""
    flags = list(cached)
    return replace(stamp, cached=all(flags), cached_items=sum(flags)) if any(flags) else stamp


def _unverified(stamp: Provenance, reason: str) -> Provenance:
    return replace(stamp, verification=Verification(status="unverified", reason=reason))


def _verification_of(found: engine.Verification) -> Verification:
    return Verification(
        status="verified" if found.reason is None else "unverified",
        reason=found.reason,
        by=found.by,
        at=found.at,
        max_error_nats=found.max_error_nats,
        rms_error_nats=found.rms_error_nats,
        certificate=found.certificate,
    )
