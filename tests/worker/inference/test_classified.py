"""Logits of a classifier become labels and probabilities as its configuration says."""

from dataclasses import replace

import pytest
import torch

from scorepool import wire
from scorepool.engine import Classifier
from scorepool.engine.model_info import Activation
from scorepool.worker.inference.prepared import share_equal, to_run
from scorepool.worker.inference.result import to_result
from scorepool.worker.rq.errors import JobError
from tests.worker.fake import FakeEngine
from tests.worker.inference.test_result import PROVENANCE
from tests.worker.inference.test_translate import BOS, CODEC, translate


def classify(*items: wire.ClassifyItem, **options: bool) -> wire.Classify:
    return wire.Classify(model="demo", items=list(items), **options)


def classified(logits: list[float], activation: Activation) -> wire.Classification:
    """Return what the result says about one item with these logits."""
    request = classify(wire.ClassifyItem(prompt="ab"))
    [prepared] = translate(request)
    labels = tuple("abcdefg"[: len(logits)])
    classifier = Classifier(labels=labels, activation=activation, pad_id=None)
    prepared.sequence.class_logits = logits
    prepared.sequence.model_info = replace(FakeEngine.model_info, classifier=classifier)
    result = to_result(request, [prepared], CODEC, PROVENANCE)
    assert result.labels == list(labels)
    return result.classifications[0]


@pytest.mark.parametrize("logits", [[0.5, -1.0, 2.0], [800.0, -800.0, 0.0], [-1000.0, -999.0, -1001.0]])
def test_probabilities_are_torchs_softmax_or_sigmoid(logits: list[float]):
    softmax, sigmoid = classified(logits, "softmax"), classified(logits, "sigmoid")

    exact = torch.tensor(logits, dtype=torch.float64)
    assert list(softmax.probs or ()) == pytest.approx(exact.softmax(dim=0).tolist(), abs=1e-6)
    assert list(sigmoid.probs or ()) == pytest.approx(exact.sigmoid().tolist(), abs=1e-6)
    assert softmax.label == sigmoid.label == "abc"[int(exact.argmax())]
    assert list(softmax.logits) == logits


def test_a_regression_has_no_probabilities():
    found = classified([1.5], "none")

    assert (found.probs, list(found.logits), found.num_tokens) == (None, [1.5], 3)


def test_items_are_encoded_alone_and_named_in_errors():
    texts = classify(wire.ClassifyItem(prompt="ab"), wire.ClassifyItem(prompt=[5, 6]))
    bare = classify(wire.ClassifyItem(prompt="ab"), add_special_tokens=False)
    empty = classify(wire.ClassifyItem(prompt="a"), wire.ClassifyItem(prompt=""), add_special_tokens=False)

    assert [each.sequence.token_ids for each in translate(texts)] == [[BOS, *b"ab"], [5, 6]]
    assert [each.sequence.token_ids for each in translate(bare)] == [[*b"ab"]]
    assert all(each.sequence.classify for each in translate(texts))
    with pytest.raises(JobError) as refused:
        translate(empty)
    assert refused.value.failure.field == "items[1].prompt"


def test_items_with_the_same_tokens_are_computed_once():
    texts = ["ab", "b", "ab", [BOS, *b"ab"], "b"]
    prepared = translate(classify(*(wire.ClassifyItem(prompt=text) for text in texts)))
    prepared[1] = replace(prepared[1], is_restored=True)  # an earlier run of the job has computed it

    shared = share_equal(prepared)

    first, other = shared[0].sequence, shared[4].sequence
    assert [each.sequence is first for each in shared] == [True, False, True, True, False]
    assert to_run(shared) == [first, other]
    assert shared[1].sequence is prepared[1].sequence
    assert [each.num_prompt_tokens for each in shared] == [3, 2, 3, 3, 2]
