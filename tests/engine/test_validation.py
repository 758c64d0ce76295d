"""add() refuses what the model cannot do, and says what would be right."""

from dataclasses import replace
from math import inf, nan

import pytest

from scorepool.engine.errors import ContextLengthExceeded, EngineError, InvalidRequest
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.sequence import Sampling, Sequence
from scorepool.engine.validation import check
from tests.engine.test_engine import MODEL_INFO


def scored(token_ids: list[int] | None = None, score_from: int | None = 1, **options: object) -> Sequence:
    return Sequence(token_ids=[0, 1, 2] if token_ids is None else token_ids, score_from=score_from, **options)


def generating(**options: object) -> Sequence:
    return Sequence(token_ids=[0, 1, 2], sampling=Sampling(**({"max_tokens": 5} | options)))


@pytest.mark.parametrize(
    ("sequence", "error", "message"),
    [
        (scored([]), InvalidRequest, "no tokens"),
        (scored([0, -1]), InvalidRequest, "token id -1 at position 1.* 0 to 49"),
        (scored([0, 49, 50]), InvalidRequest, "token id 50 at position 2"),
        (scored(score_from=None), InvalidRequest, "asks for nothing"),
        (scored(score_from=4), InvalidRequest, "score_from 4; expected 0 to 3"),
        (scored(score_from=-1), InvalidRequest, "score_from -1"),
        (scored(top_logprobs=51), InvalidRequest, "top_logprobs 51; expected 0 to 50"),
        (scored(temperature=0), InvalidRequest, "temperature 0; expected a finite value above 0"),
        (scored(temperature=inf), InvalidRequest, "temperature inf"),
        (scored(temperature=nan), InvalidRequest, "temperature nan"),
        (scored([0] * 101), ContextLengthExceeded, "101 tokens .* context is 100"),
        (generating(max_tokens=98), ContextLengthExceeded, "3 tokens and may generate 98 more"),
        (generating(max_tokens=0), InvalidRequest, "max_tokens 0"),
        (generating(temperature=-1), InvalidRequest, "temperature -1"),
        (generating(temperature=nan), InvalidRequest, "temperature nan"),
        (generating(top_p=0), InvalidRequest, "top_p 0"),
        (generating(top_p=1.1), InvalidRequest, r"top_p 1\.1"),
        (generating(top_k=-1), InvalidRequest, "top_k -1"),
        (generating(min_p=2), InvalidRequest, "min_p 2"),
        (generating(seed=-1), InvalidRequest, "seed -1"),
        (generating(seed=2**64), InvalidRequest, "seed 18446744073709551616"),
        (generating(stop=(b"a", b"")), InvalidRequest, "stop .*without empty strings"),
        (generating(stop_token_ids=(5, 50)), InvalidRequest, r"stop_token_ids \(5, 50\); expected .* from 0 to 49"),
        (generating(min_tokens=6), InvalidRequest, "min_tokens 6; expected min_tokens from 0 to max_tokens, 5"),
        (generating(min_tokens=-1), InvalidRequest, "min_tokens -1"),
        (generating(presence_penalty=nan), InvalidRequest, "presence_penalty nan"),
        (generating(frequency_penalty=inf), InvalidRequest, "frequency_penalty inf"),
        (generating(repetition_penalty=0), InvalidRequest, "repetition_penalty 0"),
        (generating(logit_bias=((50, 1.0),)), InvalidRequest, r"logit_bias \(\(50, 1.0\),\).* from 0 to 49"),
        (generating(allowed_bitmask=bytes(4) + (1 << 18).to_bytes(4, "little")), InvalidRequest, "ids from 0 to 49"),
        (generating(allowed_bitmask=b"\x01"), InvalidRequest, "allowed_bitmask of 32-bit words"),
        (generating(bad_words=((5, 50),)), InvalidRequest, r"bad_words \(\(5, 50\),\).* from 0 to 49"),
        (generating(bad_words=((5,), ())), InvalidRequest, "bad_words of one token id or more"),
        (generating(logit_bias=((5, nan),)), InvalidRequest, "logit_bias .* finite"),
    ],
)
def test_a_sequence_that_cannot_be_run_is_refused(sequence: Sequence, error: type[EngineError], message: str):
    with pytest.raises(error, match=message):
        check([sequence], MODEL_INFO)
    with pytest.raises(error, match="sequence 1 "):
        check([scored(), sequence], MODEL_INFO)


def refusal(sequences: list[Sequence], model_info: ModelInfo = MODEL_INFO) -> str | None:
    """Return the message with which the sequences are refused; None if they are accepted."""
    try:
        check(sequences, model_info)
    except EngineError as error:
        return error.message
    return None


def test_a_sequence_that_just_fits_is_accepted():
    assert refusal([scored([0] * 100, score_from=100), generating(max_tokens=97, seed=2**64 - 1)]) is None


def test_a_sequence_whose_cache_does_not_fit_into_memory_is_refused_with_the_numbers():
    model_info = replace(MODEL_INFO, context_length=10_000, max_cached_tokens=500)

    assert refusal([scored([0] * 500), generating(max_tokens=400)], model_info) is None
    with pytest.raises(ContextLengthExceeded, match=r"has 501 tokens .* memory .* 500 tokens"):
        check([scored([0] * 501)], model_info)


def test_a_group_needs_new_and_different_sequences():
    sequence = scored()
    with pytest.raises(InvalidRequest, match="twice"):
        check([sequence, sequence], MODEL_INFO)
    with pytest.raises(InvalidRequest, match="no sequences"):
        check([], MODEL_INFO)
    sequence.columns.logprobs.append(-1.0)
    with pytest.raises(InvalidRequest, match="run before"):
        check([sequence], MODEL_INFO)
