"""A certificate counts only for the weights, dtype, mode and versions it was made for, and by the errors in it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scorepool.engine import Engine, EngineSettings, LoadError, ModelInfo
from scorepool.engine.certificate import (
    NO_CERTIFICATE,
    Certificate,
    CertificateError,
    Identity,
    candidates,
    file_name,
    verify,
)
from scorepool.engine.model import surveyed
from scorepool.engine.versions import installed_version
from tests.tiny_models import TinyModels

VERSIONS = {"scorepool": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}
CERTIFICATE = Certificate(
    model="/models/m",
    fingerprint="ab" * 32,
    dtype="float32",
    mode="default",
    quantization=None,
    backend="metal (Apple M2 Ultra)",
    versions={**VERSIONS, "torch": "2.13.0", "transformers": "5.23.0"},
    by="ann@mac",
    at="2026-11-22T10:00:00+00:00",
    num_layers=4,
    rows=12,
    tokens=2048,
    longest_row=1024,
    max_error_nats=9e-5,
    rms_error_nats=1e-6,
)
SERVED = Identity(fingerprint="ab" * 32, dtype="float32", mode="default", backend="metal", versions=VERSIONS)
IN_16_BITS = replace(
    CERTIFICATE,
    dtype="bfloat16",
    max_error_nats=0.4,
    rms_error_nats=0.03,
    peer_max_error_nats=0.3,
    peer_rms_error_nats=0.02,
)


def written(folder: Path, certificate: Certificate, name: str = "certificate.json") -> Path:
    (folder / name).write_text(certificate.to_json())
    return folder / name


def test_a_certificate_that_fits_says_by_whom_when_and_how_far_off(tmp_path: Path):
    found = verify(SERVED, [written(tmp_path, CERTIFICATE)])

    assert (found.reason, found.by, found.at) == (None, "ann@mac", "2026-11-22T10:00:00+00:00")
    assert (found.max_error_nats, found.rms_error_nats) == (9e-5, 1e-6)
    assert found.certificate == CERTIFICATE.digest[:16]


def test_the_newest_certificate_that_fits_counts(tmp_path: Path):
    older = written(tmp_path, CERTIFICATE, "certificate-1.json")
    newer = written(tmp_path, replace(CERTIFICATE, at="2026-11-23T10:00:00+00:00", by="bob@mac"), "certificate-2.json")

    assert verify(SERVED, [newer, older]).by == verify(SERVED, [older, newer]).by == "bob@mac"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "cd" * 32}, f"is of other weights: their fingerprint is {'ab' * 8}, the model's {'cd' * 8}"),
        ({"dtype": "float16"}, "is for dtype float32, and the model is served in float16"),
        ({"mode": "exact"}, "is for mode default, and the model is served in exact"),
        ({"backend": "cpu"}, "is for backend metal, and the model is served in cpu"),
        ({"versions": VERSIONS | {"mlx": "0.32.9"}}, "is for mlx 0.32.4, and the model is served by 0.32.9"),
        ({"versions": VERSIONS | {"scorepool": "0.2.0"}}, "is for scorepool 0.1.0, and the model is served by 0.2.0"),
    ],
)
def test_a_certificate_for_something_else_does_not_count(tmp_path: Path, changes: dict[str, object], reason: str):
    found = verify(replace(SERVED, **changes), [written(tmp_path, CERTIFICATE)])

    assert found.reason == f"certificate.json {reason}"
    assert found.by is None


def test_a_certificate_of_products_in_full_does_not_count_where_they_are_rounded_to_tf32(tmp_path: Path):
    in_full, rounded = (replace(CERTIFICATE, backend=f"cuda (NVIDIA H200{end})") for end in ("", ", tf32"))

    found = verify(rounded.identity, [written(tmp_path, in_full)])

    assert found.reason == "certificate.json is for backend cuda, and the model is served in cuda-tf32"
    assert verify(in_full.identity, [written(tmp_path, in_full)]).by == "ann@mac"


def test_the_reason_is_that_of_the_closest_certificate(tmp_path: Path):
    (tmp_path / "certificate-0.json").write_text("{")
    files = [
        tmp_path / "certificate-0.json",
        written(tmp_path, replace(CERTIFICATE, versions=VERSIONS | {"mlx": "0.31.0"}), "certificate-1.json"),
        written(tmp_path, replace(CERTIFICATE, fingerprint="cd" * 32), "certificate-2.json"),
    ]

    assert verify(SERVED, files).reason == "certificate-1.json is for mlx 0.31.0, and the model is served by 0.32.4"
    assert verify(SERVED, []).reason == NO_CERTIFICATE


@pytest.mark.parametrize(
    ("certificate", "fault"),
    [
        (CERTIFICATE, None),
        (replace(CERTIFICATE, max_error_nats=1.1e-4), "its largest error is 0.00011 nats, expected at most 0.0001"),
        (replace(CERTIFICATE, max_error_nats=9e-4, num_layers=28), None),
        (replace(CERTIFICATE, num_layers=28, max_error_nats=9), "its largest error is 9 nats, expected at most 0.001"),
        (replace(CERTIFICATE, tokens=100), "it compares 100 tokens, expected at least 256"),
        (IN_16_BITS, None),
        (replace(IN_16_BITS, rms_error_nats=0.031), "its root mean square error is 0.031 nats, expected at most 0.03"),
        (replace(IN_16_BITS, max_error_nats=0.61), "its largest error is 0.61 nats, expected at most 0.6"),
        (replace(IN_16_BITS, peer_rms_error_nats=None), "it has no error of transformers in bfloat16"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_errors(tmp_path: Path, certificate: Certificate, fault: str | None):
    assert certificate.fault() == fault
    assert json.loads(certificate.to_json())["verified"] == (fault is None)
    expected = None if fault is None else f"certificate.json: {fault}"
    assert verify(replace(SERVED, dtype=certificate.dtype), [written(tmp_path, certificate)]).reason == expected


CONTENT = json.loads(CERTIFICATE.to_json())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("[]", "not a JSON object"),
        ("{}", "at is missing"),
        (json.dumps(CONTENT | {"extra": 1}), "extra is unknown"),
        (json.dumps(CONTENT | {"max_error_nats": "small"}), "max_error_nats is 'small', expected float"),
        (json.dumps(CONTENT | {"max_error_nats": float("nan")}), "max_error_nats is nan, expected float"),
        (json.dumps(CONTENT | {"max_error_nats": -1.0}), "max_error_nats is -1.0, expected float"),
        (json.dumps(CONTENT | {"max_error_nats": 10**400}), "max_error_nats is 1000"),
        (json.dumps(CONTENT | {"by": "\ud800"}), "by is '\\ud800', expected str"),
        (json.dumps(CONTENT | {"at": "yesterday"}), "at is 'yesterday', expected a time as in 2026-01-31T12:00:00+00"),
        (json.dumps(CONTENT | {"a\n\ud800": 1}), "a ? is unknown"),
        (json.dumps(CONTENT | {"tokens": True}), "tokens is True, expected int"),
        (json.dumps(CONTENT | {"versions": ["mlx"]}), "versions is ['mlx'], expected dict"),
        (json.dumps(CONTENT | {"max_error_nats": 1e-6}), "changed after it was written"),
        (json.dumps(CONTENT | {"by": "somebody else"}), "changed after it was written"),
        (json.dumps(CONTENT | {"digest": "0" * 64}), "changed after it was written"),
    ],
)
def test_a_garbled_or_changed_certificate_is_named_in_one_sentence(tmp_path: Path, text: str, reason: str):
    (tmp_path / "certificate.json").write_text(text)

    found = verify(SERVED, [tmp_path / "certificate.json"]).reason

    assert found is not None
    assert found.startswith(f"certificate.json is no certificate: {reason}")
    assert "\n" not in found


def test_bytes_that_are_no_text_and_a_folder_are_no_certificates(tmp_path: Path):
    (tmp_path / "certificate.json").write_bytes(b"\xff")
    (tmp_path / "certificate-2.json").mkdir()

    for file in tmp_path.iterdir():
        assert f"{file.name} is no certificate" in (verify(SERVED, [file]).reason or "")


def test_a_certificate_is_the_same_after_its_file():
    assert Certificate.from_json(CERTIFICATE.to_json()) == CERTIFICATE
    assert Certificate.from_json(IN_16_BITS.to_json()) == IN_16_BITS
    with pytest.raises(CertificateError, match="by is missing"):
        Certificate.from_json(json.dumps({name: value for name, value in CONTENT.items() if name != "by"}))


def test_certificates_are_looked_for_beside_the_checkpoint_and_by_fingerprint_in_the_folder(tmp_path: Path):
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "certificates"
    checkpoint.mkdir(), folder.mkdir()
    own = written(folder, CERTIFICATE, file_name(SERVED))
    written(folder, CERTIFICATE, file_name(replace(SERVED, fingerprint="cd" * 32)))
    beside = written(checkpoint, CERTIFICATE, "certificate-mac.json")
    written(checkpoint, CERTIFICATE, "other.json")

    assert candidates(folder, checkpoint, SERVED.fingerprint) == [beside, own]
    assert candidates(tmp_path / "gone", checkpoint, SERVED.fingerprint) == [beside]
    assert candidates(None, checkpoint, SERVED.fingerprint) == [beside]


# A load.


@pytest.fixture
def folder(tiny_models: TinyModels, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models("llama"), tmp_path / "model"))


@pytest.fixture
def certified(folder: Path) -> Callable[..., None]:
    """Write a certificate of the model beside it."""

    def certify(**changes: object) -> None:
        engine = Engine(EngineSettings(model=str(folder)))
        engine.close()
        info: ModelInfo = engine.model_info
        identity = {name: getattr(info, name) for name in ("fingerprint", "dtype", "mode", "backend")}
        versions = {"scorepool": installed_version("scorepool"), **info.versions}
        written(folder, Certificate(**asdict(CERTIFICATE) | identity | {"versions": versions} | changes))

    return certify


def open_engine(folder: Path, **settings: object) -> ModelInfo:
    engine = Engine(EngineSettings(model=str(folder), **settings))
    engine.close()
    return engine.model_info


def test_a_load_finds_the_certificate_that_fits(folder: Path, certified: Callable[..., None], tmp_path: Path):
    assert open_engine(folder).verification.reason == NO_CERTIFICATE
    certified()
    assert open_engine(folder, require_certificate=True).verification.by == "ann@mac"
    assert "for mode default, and" in (open_engine(folder, mode="exact").verification.reason or "")

    (tmp_path / "certificates").mkdir()
    fingerprint = open_engine(folder).fingerprint
    (folder / "certificate.json").rename(tmp_path / "certificates" / f"{fingerprint[:16]}.json")

    assert open_engine(folder).verification.reason == NO_CERTIFICATE
    assert open_engine(folder, certificates=str(tmp_path / "certificates")).verification.by == "ann@mac"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, NO_CERTIFICATE),
        ({"fingerprint": "cd" * 32}, "certificate.json is of other weights"),
        (
            {"versions": {name: installed_version(name) for name in VERSIONS} | {"mlx": "0.1"}},
            "certificate.json is for mlx 0.1",
        ),
        ({"max_error_nats": 0.5}, "its largest error is 0.5 nats"),
    ],
)
def test_without_a_certificate_that_fits_a_model_is_refused_if_one_is_required(
    folder: Path, certified: Callable[..., None], changes: dict[str, object] | None, reason: str
):
    if changes is not None:
        certified(**changes)
    with pytest.raises(LoadError) as caught:
        open_engine(folder, require_certificate=True)
    message = caught.value.message
    assert message.startswith(f"require_certificate is set, and '{folder}' is unverified: ")
    assert reason in message


def test_the_certificate_of_a_changed_checkpoint_is_of_other_weights(folder: Path, certified: Callable[..., None]):
    certified()
    (folder / "generation_config.json").write_text("{}")

    assert "is of other weights" in (open_engine(folder).verification.reason or "")


def test_a_model_says_whether_its_settings_were_surveyed(engine_of: Callable[..., Engine]):
    table = json.loads((surveyed._FOLDER / "llama.json").read_text())
    has_version = table["versions"]["mlx-lm"] == installed_version("mlx-lm")
    assert engine_of("llama").model_info.surveyed == has_version
