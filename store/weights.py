"""Versions of a model's weights in Redis: who may move when, without a coordinator.

    push ──► pending ──every live worker has loaded and checked it──► committed ──► each worker moves between two steps
                └──one refuses it──► failed; all go on with the committed version

A worker that starts joins, loads what is committed, and moves before it claims a job. From when it has joined, nothing
is committed without it.

The fields of the hash Keys.weights:

    version, source, fingerprint, at       the committed version; none: all serve the model's own weights, version 0
    pending, pending_source,
    pending_fingerprint, ack:<worker>      the version that is being loaded, and who has loaded it
    failed, error                          the last version that was refused
    label                                  of the committed version, if it was changed
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from scorepool.wire import Invalid, WeightsSource, parse

CHUNK_BYTES = 4 * 2**20  # of weights that were sent
UPLOAD_TTL_S = 600  # of an upload, unless its version becomes pending


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """What Redis knows of the versions of a model."""

    version: int = 0
    source: WeightsSource | None = None  # None for version 0
    fingerprint: str | None = None
    pending: int | None = None
    pending_source: WeightsSource | None = None
    failed: int | None = None
    error: str | None = None
    label: str | None = None

    @classmethod
    def parse(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Read the hash Keys.weights. Values that cannot be read count as missing."""
        source, pending_source = _source(fields.get(b"source")), _source(fields.get(b"pending_source"))
        pending, failed = _integer(fields.get(b"pending")), _integer(fields.get(b"failed"))
        return cls(
            version=(_integer(fields.get(b"version")) or 0) if source else 0,
            source=source,
            fingerprint=_text(fields.get(b"fingerprint")) if source else None,
            pending=pending if pending_source else None,
            pending_source=pending_source if pending else None,
            failed=failed,
            label=_text(fields.get(b"label")),
            error=_text(fields.get(b"error")) if failed else None,
        )


def _integer(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() and len(value) <= 16 else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _source(value: bytes | None) -> WeightsSource | None:
    try:
        return None if value is None else parse(value, WeightsSource, "msgpack")
    except Invalid:
        return None
