"""Describe what computed a result's numbers."""

from scorepool.engine import ModelInfo
from scorepool.wire import Provenance
from scorepool.worker.version import VERSION


def provenance_of(model: str, model_info: ModelInfo) -> Provenance:
    return Provenance(
        model=model,
        fingerprint=model_info.fingerprint,
        dtype=model_info.dtype,
        quantization=model_info.quantization,
        adapter=model_info.adapter,
        mode=model_info.mode,
        backend=model_info.backend,
        versions={"scorepool": VERSION, **model_info.versions},
    )
