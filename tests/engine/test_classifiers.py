"""The logits of classifiers equal those of transformers with the same weights; other checkpoints are refused."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, InvalidRequest, LoadError, NonFiniteLogits, Sampling, Sequence
from scorepool.engine.model.classifier import _PREFIXES
from scorepool.engine.model_info import Classifier
from tests.tiny_classifiers import build, edit_config, logits_of
from tests.tiny_models import TinyModels
from tests.tiny_tokenizer import BOS, PAD

Open = Callable[..., Engine]
SMALLEST_VOCABULARY = 256
# Those that rewards and classes are mostly trained on, and one for each other way to run; `make soak` runs the others.
COMMON = (
    *("gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("gpt2", "jamba", "phi"),
)


def tokens(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [BOS] + [draw.randrange(4, SMALLEST_VOCABULARY) for _ in range(length - 1)]


def classify(engine: Engine, *texts: list[int]) -> list[list[float]]:
    """Classify texts in one group."""
    sequences = [Sequence(token_ids=text, classify=True) for text in texts]
    engine.add(sequences).result(60)
    return [sequence.class_logits for sequence in sequences]


def assert_near(found: list[list[float]], model: torch.nn.Module, texts: list[list[int]]) -> None:
    for logits, text in zip(found, texts, strict=True):
        assert logits == pytest.approx(logits_of(model, text), rel=1e-5, abs=1e-4), len(text)


def test_a_draft_of_a_model_that_generates_nothing_is_refused(
    tmp_path: Path, open_engine: Open, folder_of: Callable[[str], Path]
):
    build(tmp_path, "llama", num_labels=3)
    with pytest.raises(LoadError, match="the model is a classifier, which generates nothing: expected none"):
        open_engine(tmp_path, speculation="draft", draft=str(folder_of("llama")))


@pytest.mark.parametrize(
    "family", [each if each in COMMON else pytest.param(each, marks=pytest.mark.soak) for each in _PREFIXES]
)
def test_logits_equal_transformers_alone_and_in_a_mixed_batch(family: str, tmp_path: Path, open_engine: Open):
    model = build(tmp_path, family, num_labels=3)
    engine = open_engine(tmp_path, max_batch_tokens=64)
    shared = tokens(40, 1)
    texts = [
        *(tokens(length, length) for length in (1, 5, 17)),
        tokens(90, 90),  # longer than a step, so in chunks
        *(shared + ending for ending in ([], [7, 8], [9], [7, 8, 5, 6])),  # on a shared prefix
        shared,
        [*tokens(12, 12), PAD, PAD],
        [*tokens(3, 3), PAD, *tokens(4, 4)],
        [PAD, PAD],
    ]

    assert_near(classify(engine, *texts), model, texts)
    for text in texts[:4]:
        assert_near(classify(engine, text), model, [text])


@pytest.mark.parametrize("num_labels", [1, 40])
def test_a_head_has_any_number_of_labels(num_labels: int, tmp_path: Path, open_engine: Open):
    model = build(tmp_path, num_labels=num_labels)
    texts = [tokens(20, 1), tokens(7, 2)]

    assert_near(classify(open_engine(tmp_path), *texts), model, texts)


def test_without_a_pad_token_the_last_token_is_classified(tmp_path: Path, open_engine: Open):
    model = build(tmp_path, pad_token_id=None)
    text = [*tokens(9, 1), PAD, PAD]

    assert_near(classify(open_engine(tmp_path), text), model, [text])


def test_exact_mode_gives_the_same_bits_in_any_batch(tmp_path: Path, open_engine: Open):
    model = build(tmp_path)
    engine = open_engine(tmp_path, mode="exact")
    texts = [tokens(length, length) for length in (3, 30, 70, 11)]

    together = classify(engine, *texts)

    assert_near(together, model, texts)
    assert together == [classify(engine, text)[0] for text in texts]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Classifier(labels=("LABEL_0", "LABEL_1"), activation="softmax", pad_id=PAD)),
        ({"num_labels": 1}, Classifier(labels=("LABEL_0",), activation="sigmoid", pad_id=PAD)),
        (
            {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}},
            Classifier(labels=("bad", "good"), activation="softmax", pad_id=PAD),
        ),
        (
            {"num_labels": 1, "problem_type": "regression"},
            Classifier(labels=("LABEL_0",), activation="none", pad_id=PAD),
        ),
        (
            {"problem_type": "multi_label_classification"},
            Classifier(labels=("LABEL_0", "LABEL_1"), activation="sigmoid", pad_id=PAD),
        ),
    ],
)
def test_the_configuration_decides_about_labels_and_probabilities(
    settings: dict[str, Any], expected: Classifier, tmp_path: Path, open_engine: Open
):
    build(tmp_path, **settings)

    assert open_engine(tmp_path).model_info.classifier == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"]}, r"expected \['LlamaForSequenceClassification'\]"),
        ({"architectures": ["LlamaForSequenceClassification", "LlamaForCausalLM"]}, "where model_type is llama"),
        ({"model_type": "granite", "architectures": ["GraniteForSequenceClassification"]}, "with the body of granite"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, r"score.weight has the shape \(2, 64\), expected 3 rows"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label is .* expected the name of each label by its number"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking', expected regression"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    values: dict[str, object], message: str, tmp_path: Path, open_engine: Open
):
    build(tmp_path)
    edit_config(tmp_path, **values)

    with pytest.raises(LoadError, match=message):
        open_engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("score.weight"), r"has the tensors \[\], expected \['score.weight'\]"),
        (lambda weights: weights.update({"score.bias": torch.ones(2)}), r"\['score.bias', 'score.weight'\]"),
        (lambda weights: weights["score.weight"][1].zero_(), "has a row of zeros"),
        (lambda weights: weights["score.weight"][1, 3].fill_(torch.nan), "numbers that are not finite"),
        (lambda weights: weights.update({"score.weight": torch.ones(2, 63)}), "score.weight does not fit the model"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path, open_engine: Open
):
    build(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(LoadError, match=message):
        open_engine(tmp_path)


def test_a_classifier_gives_no_logprobs_and_a_language_model_classifies_nothing(
    tmp_path: Path, open_engine: Open, tiny_models: TinyModels
):
    build(tmp_path)
    classifier, language_model = open_engine(tmp_path), open_engine(tiny_models("llama"))

    for asked in ({"score_from": 1}, {"sampling": Sampling(max_tokens=1)}):
        with pytest.raises(InvalidRequest, match="asks for logprobs; expected to be classified"):
            classifier.add([Sequence(token_ids=[BOS, 5], **asked)])
        with pytest.raises(InvalidRequest, match="expected no score_from, no sampling"):
            classifier.add([Sequence(token_ids=[BOS, 5], classify=True, **asked)])
    with pytest.raises(InvalidRequest, match="is to be classified; expected logprobs"):
        language_model.add([Sequence(token_ids=[BOS, 5], classify=True)])


def test_a_text_without_finite_logits_fails_by_its_place(tmp_path: Path, open_engine: Open):
    model = build(tmp_path)
    head = torch.zeros(2, 64)
    head[0, 0], head[1, 1] = 3e38, 1.0  # of two texts, the one whose hidden state is larger there overflows
    model.score.weight.data = head
    model.save_pretrained(tmp_path)
    engine = open_engine(tmp_path)
    overflows = {torch.tensor(logits_of(model, [BOS, token])).isfinite().all().item(): token for token in range(4, 60)}

    with pytest.raises(NonFiniteLogits, match=r"logit of label 0 is -?inf") as failed:
        classify(engine, [BOS, overflows[True]], [BOS, overflows[False]], [BOS, overflows[True]])

    assert failed.value.index == 1
    assert_near(classify(engine, [BOS, overflows[True]]), model, [[BOS, overflows[True]]])


def test_dropped_weights_are_loaded_again(tmp_path: Path, open_engine: Open):
    model = build(tmp_path)
    engine = open_engine(tmp_path)
    engine.drop_weights().result(60)

    assert not engine.is_loaded
    assert_near(classify(engine, tokens(9, 1)), model, [tokens(9, 1)])
