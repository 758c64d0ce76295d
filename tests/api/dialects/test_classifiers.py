"""Classify jobs through the running stack agree with transformers on the same weights and texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from scorepool import Client, JobFailed, Message, ScorepoolError
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.tiny_classifiers import build, logits_of
from tests.tiny_tokenizer import BOS

TEXTS = ["the cat sat", "x = 1\n", "a", "the cat sat on the mat " * 12, "🙂 é"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
LABELS = {0: "prose", 1: "code", 2: "other"}
IDS = {name: number for number, name in LABELS.items()}
OVERFLOW = 3e38


class Served:
    """The stack, transformers' models, and the tokenizer that they share."""

    def __init__(self, stack: Stack, models: dict[str, torch.nn.Module], folder: Path) -> None:
        self.url = stack.url
        self.models = models
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def logits(self, model: str, text: str | list[int]) -> list[float]:
        """Return transformers' logits of a text alone, with its special tokens."""
        token_ids = self.tokenizer(text).input_ids if isinstance(text, str) else text
        return logits_of(self.models[model], token_ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a reward model, one of three labels, and one whose logits overflow for some texts."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("rm", "topic", "odd")}
    models = {
        "rm": build(folders["rm"], num_labels=1),
        "topic": build(folders["topic"], "qwen3", id2label=LABELS, label2id=IDS),
        "odd": build(folders["odd"]),
    }
    models["odd"].score.weight.data[0, 0] = OVERFLOW
    models["odd"].save_pretrained(folders["odd"])
    state = tmp_path_factory.mktemp("stack")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    with Stack([f"{name}={folder}" for name, folder in folders.items()], state=state, environ=environ) as stack:
        yield Served(stack, models, folders["rm"])


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client


def test_a_reward_model_gives_each_text_its_reward(client: Client, served: Served):
    result = client.classify("rm", TEXTS)

    assert (result.labels, result.sequences) == (["LABEL_0"], [])
    for text, one in zip(TEXTS, result.classifications, strict=True):
        (expected,) = served.logits("rm", text)
        assert list(one.logits) == pytest.approx([expected], abs=1e-4)
        assert list(one.probs) == pytest.approx([torch.tensor(expected).sigmoid().item()], abs=1e-4)
        assert one.num_tokens == len(served.tokenizer(text).input_ids)
    assert result.usage.prompt_tokens == sum(one.num_tokens for one in result.classifications)
    assert result.to_arrow().column_names == ["label", "logits", "probs", "num_tokens", "truncated", "failure"]


def test_labels_have_their_names_and_probabilities(client: Client, served: Served):
    result = client.classify("topic", TEXTS)

    assert result.labels == list(LABELS.values())
    for text, one in zip(TEXTS, result.classifications, strict=True):
        expected = torch.tensor(served.logits("topic", text))
        assert list(one.logits) == pytest.approx(expected.tolist(), abs=1e-4)
        assert list(one.probs) == pytest.approx(expected.softmax(dim=0).tolist(), abs=1e-4)
        assert one.label == LABELS[int(expected.argmax())]


def test_token_ids_and_chats_are_classified_as_they_are(client: Client, served: Served):
    token_ids = served.tokenizer("the cat").input_ids
    chat = served.tokenizer.apply_chat_template(CHAT, tokenize=False)
    chat_ids = served.tokenizer(chat, add_special_tokens=False).input_ids

    result = client.classify("rm", [token_ids, CHAT, [Message(**message) for message in CHAT]])
    bare = client.classify("rm", ["the cat"], add_special_tokens=False)

    found = [list(one.logits) for one in (*result.classifications, *bare.classifications)]
    expected = [served.logits("rm", ids) for ids in (token_ids, chat_ids, chat_ids, token_ids[1:])]
    assert found == [pytest.approx(logits, abs=1e-4) for logits in expected]


def overflowing(served: Served) -> tuple[list[int], list[int]]:
    """Return a text whose logits are finite, and one whose logits are not."""
    texts = [[BOS, token] for token in range(4, 60)]
    found = {torch.tensor(served.logits("odd", text)).isfinite().all().item(): text for text in texts}
    return found[True], found[False]


def test_a_row_that_fails_is_an_error_that_names_it(client: Client, served: Served):
    good, bad = overflowing(served)

    with pytest.raises(JobFailed, match=r"items\[2\]: the model's logit of label 0 is -?inf") as failed:
        client.classify("odd", [good, good, bad, good])

    assert (failed.value.failure.code, failed.value.failure.field) == ("numeric", "items[2]")
    assert list(client.classify("odd", [good]).classifications[0].logits) == pytest.approx(
        served.logits("odd", good), rel=1e-5
    )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a", [1, 99_999]], r"items\[1\].prompt\[1\]: expected a token id below 512, found 99999"),
        (["a", [5] * 600], r"items\[1\].prompt: expected at most 512 token ids"),
    ],
)
def test_an_item_that_cannot_be_classified_is_refused_by_name(client: Client, items: list[Any], message: str):
    with pytest.raises(ScorepoolError, match=message):
        client.classify("rm", items)


def test_a_text_that_is_too_long_or_empty_is_refused_by_name(client: Client):
    with pytest.raises(JobFailed, match=r"items\[1\] has .* characters, of which"):
        client.classify("rm", ["a", "ab " * 9000])
    with pytest.raises(JobFailed, match=r"items\[1\].prompt: it has no token"):
        client.classify("rm", ["a", ""], add_special_tokens=False)


def test_a_classifier_takes_no_other_jobs(client: Client):
    expected = "model: 'rm' is a classifier, which has no logprobs; expected a classify job, found"
    with pytest.raises(ScorepoolError, match=f"{expected} score"):
        client.score("rm", [("a", "b")])
    with pytest.raises(ScorepoolError, match=f"{expected} generate"):
        client.generate("rm", "a")
    assert client.tokenize("rm", "a").token_ids


def test_the_list_of_models_shows_what_they_classify(client: Client):
    shown = {model.id: model.classifier for model in client.models()}

    assert (shown["topic"].labels, shown["topic"].activation) == (["prose", "code", "other"], "softmax")
    assert (shown["rm"].labels, shown["rm"].activation) == (["LABEL_0"], "sigmoid")
