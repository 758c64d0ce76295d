"""Certificates: how far one checkpoint's numbers are from transformers', in one dtype and mode and in certain versions.

`scorepool certify` measures and writes them; a load looks for one that fits. The verdict is not taken from the file: it
follows from the errors in it. The digest finds a file that was changed after it was written. It is no signature:
whoever can write the folder of certificates can write one, just as whoever can write a checkpoint can change it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from sys import float_info
from typing import Any

from scorepool.engine.model_info import Verification

FLOAT32_NATS = 1e-4  # the largest error
DEEP_FLOAT32_NATS = 1e-3  # of a model with more than DEEP_LAYERS layers, each of which rounds
DEEP_LAYERS = 16
PEER_RMS_RATIO = 1.5  # in 16 bits: the error's root mean square, relative to transformers' own in that dtype
PEER_MAX_RATIO = 2.0  # in 16 bits: the largest error; the largest of a few hundred is random
MIN_TOKENS = 256
NO_CERTIFICATE = "no certificate; `scorepool certify` makes one"
_LARGEST = float_info.max
_DIGEST_LENGTH = 16  # hex digits that a result repeats


class CertificateError(ValueError):
    """A file that is no certificate. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a certificate is valid for."""

    fingerprint: str
    dtype: str
    mode: str
    backend: str  # the kind: see backend_kind
    versions: Mapping[str, str]  # of scorepool, mlx and mlx-lm

    def difference(self, other: "Identity") -> tuple[int, str] | None:
        """Name the first field in which `other`, the served model, differs, with its number; None if it is equal."""
        if self.fingerprint != other.fingerprint:
            return (
                0,
                f"of other weights: their fingerprint is {self.fingerprint:.16}, the model's {other.fingerprint:.16}",
            )
        for number, name in enumerate(("dtype", "mode", "backend"), 1):
            if getattr(self, name) != getattr(other, name):
                return number, f"for {name} {getattr(self, name)}, and the model is served in {getattr(other, name)}"
        for name, version in other.versions.items():
            if self.versions.get(name) != version:
                return 4, f"for {name} {self.versions.get(name)}, and the model is served by {version}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One comparison with transformers. Errors are in nats, over the given tokens and the most likely ones."""

    model: str  # as it was named to `scorepool certify`
    fingerprint: str
    dtype: str
    mode: str
    quantization: str | None
    backend: str  # e.g. "cpu (x86_64, openblas Haswell, 2 threads, numpy 2.4.6)"
    versions: dict[str, str]  # scorepool, mlx, mlx-lm; beside them torch and transformers, the reference
    by: str
    at: str  # UTC, ISO 8601
    num_layers: int
    rows: int
    tokens: int
    longest_row: int
    max_error_nats: float
    rms_error_nats: float
    peer_max_error_nats: float | None = None  # transformers' own in this dtype; None in float32
    peer_rms_error_nats: float | None = None

    @property
    def digest(self) -> str:
        """The sha256 of the content."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def identity(self) -> Identity:
        """What the certificate is valid for."""
        kind = backend_kind(self.backend)
        return Identity(
            fingerprint=self.fingerprint, dtype=self.dtype, mode=self.mode, backend=kind, versions=self.versions
        )

    def fault(self) -> str | None:
        """Return why the numbers do not count as transformers', or None."""
        if self.tokens < MIN_TOKENS:
            return f"it compares {self.tokens} tokens, expected at least {MIN_TOKENS}"
        if self.dtype == "float32":
            limit = DEEP_FLOAT32_NATS if self.num_layers > DEEP_LAYERS else FLOAT32_NATS
            return _excess("largest", self.max_error_nats, limit)
        if self.peer_max_error_nats is None or self.peer_rms_error_nats is None:
            return f"it has no error of transformers in {self.dtype}"
        return _excess("root mean square", self.rms_error_nats, PEER_RMS_RATIO * self.peer_rms_error_nats) or _excess(
            "largest", self.max_error_nats, PEER_MAX_RATIO * self.peer_max_error_nats
        )

    def to_json(self) -> str:
        """Return the file's content."""
        verdict = {"verified": self.fault() is None, "digest": self.digest}
        return json.dumps(asdict(self) | verdict, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Certificate":
        """Read a file's content. Raises CertificateError."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CertificateError(f"not JSON: {error}") from None
        if not isinstance(content, dict):
            raise CertificateError("not a JSON object")
        digest, _ = content.pop("digest", None), content.pop("verified", None)
        names = {field.name for field in fields(cls)}
        if unknown := sorted(content.keys() ^ names):
            raise CertificateError(f"{unknown[0]} is {'missing' if unknown[0] in names else 'unknown'}")
        for field in fields(cls):
            _check(field.name, content[field.name], field.type)
        if not _is_time(content["at"]):
            raise CertificateError(f"at is {content['at']!r:.80}, expected a time as in 2026-01-31T12:00:00+00:00")
        certificate = cls(**content)
        if certificate.digest != digest:
            raise CertificateError("changed after it was written: the digest is not that of the content")
        return certificate


def backend_kind(backend: str) -> str:
    """Return the first word of a backend: "metal", "cpu" or "cuda"; with "-tf32" where float32 products are rounded."""
    kind = backend.partition(" ")[0]
    return f"{kind}-tf32" if ", tf32" in backend else kind


def file_name(served: Identity) -> str:
    """Return the name of a certificate's file, which begins with that of all certificates of the same weights."""
    mode = served.mode.replace(" ", "-")
    return f"{served.fingerprint[:16]}-{served.dtype}-{mode}-{served.backend}-mlx-{served.versions['mlx']}.json"


def candidates(folder: Path | None, checkpoint: Path, fingerprint: str) -> list[Path]:
    """Return the files that may hold a certificate: beside the checkpoint, and in the folder of certificates."""
    beside = sorted(checkpoint.glob("certificate*.json"))
    return beside + (sorted(folder.glob(f"{fingerprint[:16]}*.json")) if folder else [])


def verify(served: Identity, files: Iterable[Path]) -> Verification:
    """Return the verification by the newest certificate that fits, or the reason why the closest one does not."""
    fitting: list[Certificate] = []
    reasons = [(-2, NO_CERTIFICATE)]
    for file in files:
        try:
            certificate = Certificate.from_json(file.read_text())
        except (CertificateError, OSError, UnicodeDecodeError) as error:
            reasons.append((-1, f"{file.name} is no certificate: {error}"))
            continue
        if difference := certificate.identity.difference(served):
            reasons.append((difference[0], f"{file.name} is {difference[1]}"))
        elif fault := certificate.fault():
            reasons.append((5, f"{file.name}: {fault}"))
        else:
            fitting.append(certificate)
    if not fitting:
        return Verification(reason=" ".join(max(reasons)[1].encode(errors="replace").decode().split()))
    newest = max(fitting, key=lambda certificate: certificate.at)
    return Verification(
        reason=None,
        by=newest.by,
        at=newest.at,
        max_error_nats=newest.max_error_nats,
        rms_error_nats=newest.rms_error_nats,
        certificate=newest.digest[:_DIGEST_LENGTH],
    )


def _excess(what: str, error: float, limit: float) -> str | None:
    if error <= limit:
        return None
    return f"its {what} error is {error:.2g} nats, expected at most {limit:.2g}"


def _check(name: str, value: Any, kind: Any) -> None:
    """Raise CertificateError if a value is not of its field's type. Numbers are finite and not negative."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST
    is_right: dict[Any, bool] = {
        str: _is_text(value),
        str | None: value is None or _is_text(value),
        int: is_number and isinstance(value, int),
        float: is_number,
        float | None: is_number or value is None,
        dict[str, str]: isinstance(value, dict) and all(map(_is_text, value.values())),
    }
    if not is_right[kind]:
        raise CertificateError(f"{name} is {value!r:.80}, expected {getattr(kind, '__name__', kind)}")


def _is_text(value: object) -> bool:
    """True for text that every format can hold: JSON can spell half a pair of UTF-16."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
