"""Every result, and the model card, say whether the numbers were compared with transformers'."""

from dataclasses import replace
from types import SimpleNamespace

from scorepool import engine, wire
from scorepool.api.dialects.openai.sampling import system_fingerprint
from scorepool.worker.inference.provenance import provenance_of, with_approximation
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


def test_a_result_of_an_adapter_is_unverified_because_certificates_compare_the_base():
    stamp = provenance_of("demo", replace(MODEL_INFO, adapter="sql@0123456789abcdef"))

    assert stamp.verification == wire.Verification(
        status="unverified", reason="certificates compare the base model, and the job has an adapter"
    )


def test_a_result_of_sparse_prefill_is_unverified_because_certificates_compare_whole_prompts():
    whole, sparse = SimpleNamespace(num_left_out=0), SimpleNamespace(num_left_out=100)
    verified = provenance_of("demo", MODEL_INFO)

    stamp = with_approximation(verified, [whole, sparse])

    assert with_approximation(verified, [whole]) is verified
    assert stamp.approximate == "specprefill"
    assert stamp.verification == wire.Verification(
        status="unverified", reason="certificates compare whole prompts, and specprefill left tokens out"
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
