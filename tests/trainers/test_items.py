"""Items that cannot be answered fail alone, where the request says so, and items that are too long are cut."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from scorepool import Client, JobFailed, ScorepoolError, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.tiny_classifiers import build, logits_of
from tests.tiny_tokenizer import BOS

CONTEXT = 2048
GOOD = ([5, 6], [7, 8])
OVERFLOW = 3e38
REPORT: dict[str, Any] = {"on_item_error": "report"}


def test_one_bad_row_of_a_thousand_fails_alone(native: Client):
    pairs = [([5 + row % 50], [7, 8]) for row in range(1000)]
    expected = native.score("demo", pairs[:500])
    pairs[500] = ([5, 10**6], [7])
    pairs[700] = ([5], [7] * (CONTEXT + 1))

    result = native.score("demo", pairs, **REPORT)

    failures = {place: each.failure for place, each in enumerate(result.sequences) if each.failure}
    assert failures.keys() == {500, 700}
    assert (failures[500].code, failures[500].field) == ("invalid", "items[500]")
    assert "has token id 1000000 at position 1; expected ids from 0 to" in failures[500].message
    assert failures[700].code == "too_long"
    assert f"has {CONTEXT + 2} tokens; at most {CONTEXT} fit" in failures[700].message
    assert all(each.token_ids == [7, 8] for place, each in enumerate(result.sequences) if place not in failures)
    for one, other in zip(result.sequences[:500], expected.sequences, strict=True):
        assert one.logprobs.values() == pytest.approx(other.logprobs.values(), abs=1e-4)
    assert result.sequences[500].logprobs is None
    assert result.usage.completion_tokens == 2 * 998
    with pytest.raises(ScorepoolError, match=r"items\[500\]"):
        native.score("demo", pairs)


def test_targets_that_do_not_fit_an_item_fail_alone(native: Client, http: httpx.Client):
    items = [
        wire.ScoreItem(prompt=[5], completion=[7, 8], targets=[[1, 2], [3]]),
        wire.ScoreItem(prompt=[5], completion=[7, 8], targets=[[1]]),
        wire.ScoreItem(prompt=[5], completion=[7, 8], targets=[[1], [10**6]]),
        wire.ScoreItem(prompt=[5], completion=[7, 8], targets=[10**6]),
    ]
    result = native.submit(wire.Score(model="demo", items=items, **REPORT)).result()

    good, *bad = result.sequences
    assert [len(each) for each in good.target_logprobs] == [2, 1]
    reasons = ["has 1 lists of targets; expected one for each of its 2", "target 1000000 in list 1", "target 1000000"]
    for place, (one, reason) in enumerate(zip(bad, reasons, strict=True), start=1):
        assert (one.failure.code, one.failure.field) == ("invalid", f"items[{place}]")
        assert reason in one.failure.message
    short = {"prompt": [5], "completion": [7, 8], "targets": [[1]]}
    refused = http.post("/v1/jobs", json={"type": "score", "model": "demo", "items": [short]})
    assert refused.json()["error"]["field"] == "items[0].targets"


@pytest.mark.parametrize("packed", [False, True])
def test_a_job_of_bad_rows_alone_has_their_failures(native: Client, packed: bool):
    result = native.score("demo", [([5], [10**6]), ([10**6], [5])], packed=packed, **REPORT)

    assert [each.failure.code for each in result.sequences] == ["invalid", "invalid"]
    assert result.usage == wire.Usage(prompt_tokens=0, completion_tokens=0)


def test_a_packed_result_has_no_tokens_of_a_bad_row(native: Client):
    result = native.score("demo", [GOOD, ([5], [10**6]), GOOD], packed=True, top_logprobs=2, **REPORT)
    arrays = result.arrays()

    assert arrays["lengths"].tolist() == [2, 0, 2]
    assert (arrays["token_ids"][1] == -1).all()
    assert [each.failure is None for each in result.unpacked().sequences] == [True, False, True]
    bad = [([5], [10**6])] * 256  # a job of its own
    two_jobs = native.score("demo", [*bad, GOOD], packed=True, top_logprobs=2, **REPORT)
    assert two_jobs.arrays()["top_ids"].shape == (257, 2, 2)
    assert two_jobs.sequences[255].failure.field == "items[255]"


def test_texts_that_cannot_be_read_fail_alone(native: Client):
    result = native.score("demo", [("a", " b"), ("a", " b" * 9000), ("a", " c")], **REPORT)

    assert [each.failure and each.failure.code for each in result.sequences] == [None, "too_long", None]
    [alone] = native.score("demo", [("a", " c")]).sequences
    assert result.sequences[2].logprobs.values() == pytest.approx(alone.logprobs.values(), abs=1e-4)


@pytest.mark.parametrize(("truncate", "prompt", "completion"), [("left", 3000, 10), ("right", 10, 3000)])
@pytest.mark.parametrize("score", ["completion", "all"])
def test_rows_that_are_too_long_are_cut(native: Client, truncate: Any, prompt: int, completion: int, score: Any):
    ids = [5 + place % 300 for place in range(prompt + completion)]
    kept = ids[-CONTEXT:] if truncate == "left" else ids[:CONTEXT]
    kept_prompt = CONTEXT - completion if truncate == "left" else prompt

    result = native.score("demo", [GOOD, (ids[:prompt], ids[prompt:])], truncate=truncate, score=score)
    [expected] = native.score("demo", [(kept[:kept_prompt], kept[kept_prompt:])], score=score).sequences

    [good, cut] = result.sequences
    assert (good.truncated, cut.truncated) == (0, prompt + completion - CONTEXT)
    assert cut.token_ids == expected.token_ids
    assert cut.num_prompt_tokens == kept_prompt
    assert cut.logprobs.values() == pytest.approx(expected.logprobs.values(), abs=1e-4, nan_ok=True)


def test_a_text_that_is_too_long_is_cut(native: Client):
    prompt = "the file does not exist, " * 2000
    [cut] = native.score("demo", [(prompt, "and so on")], truncate="left").sequences
    whole = native.tokenize("demo", prompt).token_ids

    assert cut.text == " and so on"
    assert cut.num_prompt_tokens + len(cut.token_ids) == CONTEXT
    assert cut.prompt_token_ids[-50:] == whole[-51:-1]
    assert cut.truncated > 0
    assert not cut.bos_added


def test_what_cannot_be_cut_is_named(native: Client):
    long = [5] * (CONTEXT + 1)
    with pytest.raises(JobFailed, match=r"items\[0\]: its completion alone has too many tokens"):
        native.score("demo", [([5], long)], truncate="left")
    with pytest.raises(JobFailed, match=r"items\[0\]: its prompt alone has too many tokens"):
        native.score("demo", [(long, [5])], truncate="right")
    result = native.score("demo", [(long, [5]), GOOD], truncate="right", **REPORT)
    assert [each.failure and each.failure.code for each in result.sequences] == ["too_long", None]


def test_lists_of_targets_and_truncation_exclude_each_other(http: httpx.Client):
    item = {"prompt": [5], "completion": [6], "targets": [[1]]}
    answer = http.post("/v1/jobs", json={"type": "score", "model": "demo", "items": [item], "truncate": "left"})
    assert answer.status_code == 400
    assert (
        "`items[0].targets` with a list for each token does not go with `truncate`" in answer.json()["error"]["message"]
    )


def test_classified_texts_fail_alone_and_are_cut(tmp_path: Path):
    model = build(tmp_path, num_labels=1)
    model.score.weight.data[0, 0] = OVERFLOW
    model.save_pretrained(tmp_path)
    texts = [[BOS, token_id] for token_id in range(4, 100)]
    is_finite = [torch.tensor(logits_of(model, text)).isfinite().all().item() for text in texts]
    good, bad = texts[is_finite.index(True)], texts[is_finite.index(False)]
    long = good + [good[1]] * 600
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    with Stack([f"rm={tmp_path}"], state=tmp_path / "state", environ=environ) as stack, Client(stack.url) as client:
        items = [good, bad, [1, 99_999], good, long]
        result = client.classify("rm", items, **REPORT)
        left = client.classify("rm", [[5] * 600 + good], truncate="left")
        right = client.classify("rm", [good * 300], truncate="right", **REPORT)
        only_bad = client.classify("rm", [bad, bad], **REPORT)

    codes = [one.failure and one.failure.code for one in result.classifications]
    assert codes == [None, "numeric", "invalid", None, "too_long"]
    for one in result.classifications:
        expected = [] if one.failure else logits_of(model, good)
        assert list(one.logits) == pytest.approx(expected, rel=1e-4)
    assert result.classifications[1].failure.message.startswith("items[1]: the model's logit of label 0 is")
    assert result.labels == ["LABEL_0"]
    assert [one.failure.code for one in only_bad.classifications] == ["numeric", "numeric"]
    assert left.classifications[0].truncated == 600 + len(good) - 512
    assert right.classifications[0].num_tokens == 512
