"""Every result, and the model card, say whether the numbers were compared with transformers'."""

from dataclasses import replace
from types import SimpleNamespace

from scorepool import engine, wire
from scorepool.api.dialects.openai.sampling import system_fingerprint
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.registration import served_model_of
from tests.worker.fake import FakeEngine

VERIFIED = engine.Verification(
    reason=None,
    by="ann",
    at="2026-11-22T10:00:00+00:00",
    max_error_nats=9e-5,
    rms_error_nats=1e-6,
    certificate="f" * 16,
)
MODEL_INFO = replace(FakeEngine.model_info, verification=VERIFIED, surveyed=True)


def test_a_verified_model_says_by_whom_when_and_how_far_off():
    verification = provenance_of("demo", MODEL_INFO).verification

    assert verification == wire.Verification(
        status="verified",
        by="ann",
        at="2026-11-22T10:00:00+00:00",
        max_error_nats=9e-5,
        rms_error_nats=1e-6,
        certificate="f" * 16,
    )


def test_an_unverified_model_says_why():
    unverified = replace(MODEL_INFO, verification=engine.Verification(reason="no certificate"))

    assert provenance_of("demo", unverified).verification == wire.Verification(
        status="unverified", reason="no certificate"
    )


def test_a_model_card_has_the_verification_and_whether_the_settings_were_surveyed():
    codec = SimpleNamespace(
        tokenizer=SimpleNamespace(digest=lambda: "d", bos_token=None, eos_token=None, pad_token=None),
        template=SimpleNamespace(source=None),
    )

    card = served_model_of(provenance_of("demo", MODEL_INFO), MODEL_INFO, codec, "w", [])

    assert card.surveyed is True
    assert card.stamp.verification is not None
    assert card.stamp.verification.by == "ann"


def test_a_certificate_does_not_change_openais_fingerprint():
    verified = provenance_of("demo", MODEL_INFO)
    unverified = provenance_of("demo", FakeEngine.model_info)

    assert verified != unverified
    assert system_fingerprint(verified) == system_fingerprint(unverified)
