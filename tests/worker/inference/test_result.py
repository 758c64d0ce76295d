"""Sequences become results: no number is moved, dropped or made up."""

import math

import msgspec
import pytest

from scorepool import wire
from scorepool.engine import TokenColumns
from scorepool.engine.sequence import ProposedToken
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.translate import to_sequences
from scorepool.worker.rq.errors import JobError
from tests.worker.fake import FakeChatCodec, FakeEngine, FakeTokenizer, finish
from tests.worker.inference.test_translate import BOS, CODEC, generate, score, translate

PROVENANCE = provenance_of("demo", FakeEngine.model_info)


def result_of(request: wire.Request, prepared: list[PreparedSequence]) -> wire.SequenceResult:
    (only,) = to_result(request, prepared, CODEC, PROVENANCE).sequences
    return only


def test_a_score_jobs_result_reports_its_tokens_logprobs_usage_and_provenance():
    request = score("a", "bc", top_logprobs=2, rank=True, entropy=True)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.columns = TokenColumns(
        logprobs=[-0.5, -1.25],
        top_ids=[[98, 1], [1, 99]],
        top_logprobs=[[-0.5, -2.0], [-1.0, -1.25]],
        ranks=[1, 2],
        entropies=[0.5, 1.0],
    )

    result = to_result(request, prepared, CODEC, PROVENANCE)

    (sequence_result,) = result.sequences
    assert sequence_result.token_ids == list(b"bc")
    assert b"".join(sequence_result.token_bytes) == b"bc"
    assert sequence_result.text == "bc"
    assert sequence_result.logprobs is not None
    assert sequence_result.logprobs.values() == [-0.5, -1.25]
    assert sequence_result.top_ids == [[98, 1], [1, 99]]
    assert sequence_result.top_bytes == [[b"b", b"\x01"], [b"\x01", b"c"]]
    assert sequence_result.top_logprobs is not None
    assert [column.values() for column in sequence_result.top_logprobs] == [[-0.5, -2.0], [-1.0, -1.25]]
    assert (sequence_result.ranks, sequence_result.logprob_sum, sequence_result.is_greedy) == ([1, 2], -1.75, False)
    assert sequence_result.prompt_token_ids == [BOS, 97]
    assert (sequence_result.num_prompt_tokens, sequence_result.bos_added) == (2, True)
    assert sequence_result.num_reported_prompt_tokens == 0
    assert result.usage == wire.Usage(prompt_tokens=2, completion_tokens=2)
    assert result.temperature == 1.0
    assert result.stamp == PROVENANCE
    assert result.stamp.versions.keys() == {"scorepool", "mlx", "mlx-lm"}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_result_names_the_mode_of_its_logprobs(temperature: float):
    request = score("a", "b", temperature=temperature)
    prepared = translate(request)
    prepared[0].sequence.columns = TokenColumns(logprobs=[-0.5])

    result = to_result(request, prepared, CODEC, PROVENANCE)

    expected = "raw_logprobs" if temperature == 1 else "processed_logprobs"
    assert (result.temperature, result.logprobs_mode) == (temperature, expected)


def test_score_all_reports_the_prompt_and_null_for_the_first_token():
    request = score("a", "b", score="all", top_logprobs=1)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.columns = TokenColumns(
        logprobs=[None, -1.0, -0.25], top_ids=[[], [97], [98]], top_logprobs=[[], [-1.0], [-0.25]]
    )

    result = result_of(request, prepared)

    assert sequence.score_from == 0
    assert result.token_ids == [BOS, *b"ab"]
    assert result.logprobs is not None
    assert result.logprobs.values() == [None, -1.0, -0.25]
    assert result.top_ids == [[], [97], [98]]
    assert result.num_reported_prompt_tokens == 2
    assert result.logprob_sum == -0.25  # the completion's alone
    assert result.is_greedy is True


def test_a_completion_that_begins_at_position_0_has_no_sum():
    request = score([7], [8], score="all", rank=True)
    prepared = translate(request)
    prepared[0].sequence.columns = TokenColumns(logprobs=[None, -1.0], ranks=[None, 1])
    assert result_of(request, prepared).logprob_sum == -1.0

    alone = PreparedSequence(prepared[0].sequence, num_prompt_tokens=0, is_prompt_text=True, bos_added=False)
    result = result_of(request, [alone])

    assert result.logprob_sum is None
    assert result.is_greedy is None


def test_minus_infinity_is_clamped_and_counted():
    request = score([1], [2, 3], top_logprobs=1)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.columns = TokenColumns(logprobs=[-math.inf, -1.0], top_ids=[[9], [9]], top_logprobs=[[-0.5], [-math.inf]])

    result = result_of(request, prepared)

    assert result.logprobs is not None
    assert result.logprobs.values() == [-9999.0, -1.0]
    assert result.clamped == 2
    assert result.logprob_sum == -10000.0
    assert b"-9999" in wire.encode_json(result)


@pytest.mark.parametrize("column", ["logprobs", "top_logprobs", "sampled_logprobs"])
def test_nan_fails_the_job(column: str):
    request = generate(prompt=[1], top_logprobs=1, top_p=0.5)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.token_ids += [2]
    sequence.columns = TokenColumns(logprobs=[-1.0], top_ids=[[2]], top_logprobs=[[-1.0]], sampled_logprobs=[-1.0])
    setattr(sequence.columns, column, [[math.nan]] if column == "top_logprobs" else [math.nan])

    with pytest.raises(JobError) as raised:
        to_result(request, prepared, CODEC, PROVENANCE)

    assert raised.value.failure.code == "numeric"


def test_columns_of_different_lengths_are_refused():
    request = score([1], [2, 3])
    prepared = translate(request)
    prepared[0].sequence.columns.logprobs = [-1.0]

    with pytest.raises(ValueError, match="1 entries for 2 tokens"):
        to_result(request, prepared, CODEC, PROVENANCE)


def test_a_generate_jobs_result_reports_only_generated_tokens():
    request = generate(prompt="ab", n=2, top_logprobs=1, temperature=0.7)
    prepared = translate(request)
    for each in prepared:
        sequence = each.sequence
        sequence.token_ids += list("né".encode())
        sequence.columns = TokenColumns(
            logprobs=[-1.0, -2.0, -3.0],
            top_ids=[[1]] * 3,
            top_logprobs=[[-0.1]] * 3,
            sampled_logprobs=[-0.5, -1.0, -1.5],
        )
        sequence.finish_reason = "length"
        sequence.num_proposed, sequence.num_accepted = 4, 1
    prepared[0].sequence.text_bytes = b"n"  # cut before a stop string

    result = to_result(request, prepared, CODEC, PROVENANCE)

    cut, whole = result.sequences
    assert (cut.text, whole.text) == ("n", "né")
    assert whole.token_ids == list("né".encode())
    assert whole.sampled_logprobs is not None
    assert whole.sampled_logprobs.values() == [-0.5, -1.0, -1.5]
    assert whole.prompt_token_ids == [BOS, *b"ab"]
    assert (whole.finish_reason, whole.is_greedy, whole.logprob_sum) == ("length", False, -6.0)
    assert result.usage == wire.Usage(prompt_tokens=3, completion_tokens=6, proposed_tokens=8, accepted_tokens=2)
    assert result.temperature == 0.7


def test_sampled_logprobs_of_the_models_own_distribution_are_not_reported():
    request = generate(prompt="a")
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.token_ids += [98]
    sequence.columns = TokenColumns(logprobs=[-1.0], sampled_logprobs=[-1.0000001])

    assert result_of(request, prepared).sampled_logprobs is None


def test_generation_without_logprobs_reports_none():
    request = generate(prompt="a", logprobs=False)
    prepared = translate(request)
    prepared[0].sequence.token_ids += [98]

    result = result_of(request, prepared)

    assert result.logprobs is None
    assert result.token_ids == [98]


def test_a_result_survives_encoding_and_decoding():
    request = score("a", "b", top_logprobs=1)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.columns = TokenColumns(logprobs=[-0.1], top_ids=[[98]], top_logprobs=[[-0.1]])
    result = to_result(request, prepared, CODEC, PROVENANCE)

    assert wire.decode_outcome(wire.encode(result)) == result
    assert msgspec.json.decode(wire.encode_json(result))["sequences"][0]["top_ids"] == [[98]]


@pytest.mark.parametrize(("token_id", "rank"), [(2, 1), (3, 2)])
def test_of_two_equally_likely_tokens_the_smaller_id_is_greedy(token_id: int, rank: int):
    """lm-evaluation-harness compares with the argmax; is_greedy must not depend on the flags."""
    request = score([1], [token_id], top_logprobs=2)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.columns = TokenColumns(logprobs=[-0.75], top_ids=[[2, 3]], top_logprobs=[[-0.75, -0.75]])
    ranked = score([1], [token_id], rank=True)
    ranked_prepared = translate(ranked)
    ranked_prepared[0].sequence.columns = TokenColumns(logprobs=[-0.75], ranks=[rank])

    assert result_of(request, prepared).is_greedy is (rank == 1)
    assert result_of(ranked, ranked_prepared).is_greedy is (rank == 1)


def test_a_generate_job_reports_its_prompts_tokens_when_requested():
    request = generate(prompt="ab", max_tokens=1, prompt_logprobs=True, top_logprobs=1, rank=True)
    prepared = translate(request)
    sequence = prepared[0].sequence
    assert (sequence.score_from, sequence.top_logprobs, sequence.rank) == (0, 1, True)
    sequence.columns = TokenColumns(
        logprobs=[None, -1.0, -2.0, -3.0],
        top_ids=[[], [97], [1], [1]],
        top_logprobs=[[], [-1.0], [-0.5], [-0.5]],
        ranks=[None, 1, 2, 3],
    )
    sequence.token_ids.append(ord("c"))
    sequence.text_bytes, sequence.finish_reason = b"c", "length"

    result = result_of(request, prepared)

    assert result.token_ids == [BOS, *b"abc"]
    assert (result.num_prompt_tokens, result.num_reported_prompt_tokens) == (3, 3)
    assert result.text == "abc"
    assert result.logprobs is not None
    assert result.logprobs.values() == [None, -1.0, -2.0, -3.0]
    assert (result.logprob_sum, result.is_greedy) == (-3.0, False)


def test_a_generate_job_of_no_tokens_only_scores_its_prompt():
    request = generate(prompt="ab", max_tokens=0, prompt_logprobs=True, add_bos=False)
    prepared = translate(request)
    sequence = prepared[0].sequence
    assert (sequence.sampling, sequence.score_from, sequence.token_ids) == (None, 0, [*b"ab"])
    sequence.columns.logprobs = [None, -1.0]

    result = result_of(request, prepared)

    assert (result.token_ids, result.text, result.finish_reason) == ([*b"ab"], "ab", None)


def test_a_generate_job_of_no_tokens_has_no_proposed_ones():
    request = generate(prompt="ab", max_tokens=0, prompt_logprobs=True, add_bos=False, include_draft_logprobs=True)
    prepared = translate(request)
    prepared[0].sequence.columns.logprobs = [None, -1.0]

    assert result_of(request, prepared).draft_logprobs == []


def test_a_proposed_token_without_a_distribution_is_left_out():
    """After a rejected token the model's logits may be NaN, and JSON has none."""
    request = generate(prompt="a", max_tokens=2, include_draft_logprobs=True)
    prepared = translate(request)
    sequence = prepared[0].sequence
    sequence.token_ids += [98, 99]
    sequence.columns.logprobs = [-1.0, -2.0]
    sequence.finish_reason = "length"
    sequence.proposals = [
        ProposedToken(0, 98, math.nan, -1.0, True),
        ProposedToken(1, 97, -math.inf, -math.inf, False),
        ProposedToken(2, 96, -0.5, math.nan, False),
    ]

    proposed = result_of(request, prepared).draft_logprobs

    values = [(one.position, one.draft_logprob, one.logprob) for one in proposed]
    assert values == [(0, -9999.0, -1.0), (1, -9999.0, -9999.0)]


def test_a_biased_sequence_reports_the_distribution_that_it_sampled_from():
    request = generate(prompt="a", logit_bias={98: -100.0}, max_tokens=1)
    prepared = translate(request)
    prepared[0].sequence.token_ids.append(ord("c"))
    prepared[0].sequence.columns = TokenColumns(logprobs=[-3.0], sampled_logprobs=[-0.5])

    result = result_of(request, prepared)

    assert result.sampled_logprobs is not None
    assert result.sampled_logprobs.values() == [-0.5]


def test_a_sequence_with_min_tokens_reports_the_distribution_that_it_sampled_from():
    request = generate(prompt="a", min_tokens=1, max_tokens=1)
    prepared = translate(request)
    prepared[0].sequence.token_ids.append(ord("c"))
    prepared[0].sequence.columns = TokenColumns(logprobs=[-3.0], sampled_logprobs=[-0.5])

    assert result_of(request, prepared).sampled_logprobs.values() == [-0.5]


class TokenizerWithSpecialTokens(FakeTokenizer):
    special_token_ids = frozenset({ord("<"), 256})


@pytest.mark.parametrize(
    ("generated", "text_bytes", "skip", "text", "skipped"),
    [
        (b"a<b<", b"a<b<", True, "ab", [1, 3]),
        (b"a<b<", b"a<b<", False, "a<b<", []),
        (b"<abc", b"<ab", True, "ab", [0]),  # a stop string begins after "b"
        (b"<<", b"<", True, "", [0, 1]),
        (b"<\xc3<\xa9", b"<\xc3<\xa9", True, "é", [0, 2]),
    ],
)
def test_special_tokens_are_skipped_on_request(
    generated: bytes, text_bytes: bytes, skip: bool, text: str, skipped: list[int]
):
    """Special tokens of the prompt are always in the text."""
    request = generate(prompt="<p", skip_special_tokens=skip, prompt_logprobs=True)
    codec = FakeChatCodec(TokenizerWithSpecialTokens())
    prepared = finish(to_sequences(request, codec, 100))
    sequence = prepared[0].sequence
    sequence.token_ids += generated
    sequence.columns.logprobs = [None, *[-1.0] * (len(sequence.token_ids) - 1)]
    sequence.text_bytes, sequence.finish_reason, sequence.stop_reason = text_bytes, "stop", b"lo"

    (result,) = to_result(request, prepared, codec, PROVENANCE).sequences

    assert (result.text, result.skipped, result.stop_reason) == ("<p" + text, skipped, "lo")
    assert result.token_bytes[3:] == [bytes([byte]) for byte in generated]


@pytest.mark.parametrize(("max_tokens", "score_from"), [(5, None), (0, 2)])
def test_a_prompt_that_is_reported_without_logprobs_is_not_scored(max_tokens: int, score_from: int | None):
    request = generate(prompt="ab", max_tokens=max_tokens, prompt_logprobs=True, logprobs=False)
    (each,) = prepared = translate(request)
    sequence = each.sequence
    if max_tokens:
        sequence.token_ids.append(ord("c"))
        sequence.columns.logprobs, sequence.text_bytes, sequence.finish_reason = [-0.5], b"c", "length"
    else:
        sequence.columns.logprobs = [-0.5]

    result = result_of(request, prepared)

    assert sequence.score_from == score_from
    assert result.token_ids == [BOS, *b"ab", *(b"c" if max_tokens else b"")]
    assert (result.num_reported_prompt_tokens, result.logprobs) == (3, None)
    assert result.text == ("abc" if max_tokens else "ab")
