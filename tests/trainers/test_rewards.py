"""vLLM's `/classify`, `/score` and `/rerank`, and OpenRLHF's `/get_reward`, compared with transformers.

The requests are those of verl's `compute_score_disrm`, of slime's and OpenRLHF's remote reward models, and of the
clients of Jina and Cohere.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorepool import Client, wire
from scorepool.api.dialects.openrlhf import rewards
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from survey import reference
from survey.families import FAMILIES
from tests.tiny_classifiers import build, logits_of
from tests.tiny_tokenizer import BOS, EOS, PAD, build_tokenizer

Ask = Callable[..., Any]
TEXTS = ["the cat sat", "x = 1\n", "a", "the cat sat on the mat " * 12, "🙂 é"]
LABELS = {0: "prose", 1: "code", 2: "other"}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
OVERFLOW = 3e38
QWEN_PROMPT = (  # of the model card
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {task}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def build_reranker(folder: Path) -> torch.nn.Module:
    """Write a language model whose tokenizer has the tokens of Qwen3-Reranker's format."""
    config = reference.build_config(FAMILIES["qwen3"].bases()["base"])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.add_bos_token = False
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    return model.eval()


class Served:
    """The stack, transformers' models, and the tokenizers."""

    def __init__(self, stack: Stack, models: dict[str, torch.nn.Module], folders: dict[str, Path]) -> None:
        self.url = stack.url
        self.models = models
        self.tokenizers = {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}

    def logits(self, model: str, text: str, *, add_special_tokens: bool = True) -> list[float]:
        """Return transformers' logits of a text."""
        token_ids = self.tokenizers[model](text, add_special_tokens=add_special_tokens).input_ids
        return logits_of(self.models[model], token_ids)

    def yes_logit(self, query: str, document: str, task: str = TASK) -> float:
        """Return transformers' logit of yes less that of no, after the prompt of the model card."""
        tokenizer = self.tokenizers["reranker"]
        prompt = QWEN_PROMPT.format(task=task, query=query, document=document)
        token_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        with torch.no_grad():
            last = self.models["reranker"](torch.tensor([token_ids])).logits[0, -1]
        no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
        return float(last[yes] - last[no])


def sigmoid(logit: float) -> float:
    return torch.tensor(logit).sigmoid().item()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("rm", "topic", "odd", "reranker")}
    models = {
        "rm": build(folders["rm"], num_labels=1),
        "topic": build(folders["topic"], "qwen3", id2label=LABELS, label2id={name: n for n, name in LABELS.items()}),
        "odd": build(folders["odd"], num_labels=1),
        "reranker": build_reranker(folders["reranker"]),
    }
    models["odd"].score.weight.data[0, 0] = OVERFLOW
    models["odd"].save_pretrained(folders["odd"])
    state = tmp_path_factory.mktemp("stack")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    with Stack([f"{name}={folder}" for name, folder in folders.items()], state=state, environ=environ) as stack:
        yield Served(stack, models, folders)


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.fixture
def ask(http: httpx.Client) -> Ask:
    def ask(path: str, **body: Any) -> Any:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask


def refusal(http: httpx.Client, path: str, **body: Any) -> tuple[int, str | None, str]:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["field"], error["message"]


def test_classify_gives_each_text_its_label(ask: Ask, served: Served):
    answer = ask("/classify", model="topic", input=TEXTS)

    assert [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
    for text, one in zip(TEXTS, answer["data"], strict=True):
        expected = torch.tensor(served.logits("topic", text))
        assert one["probs"] == pytest.approx(expected.softmax(dim=0).tolist(), abs=1e-4)
        assert (one["label"], one["num_classes"]) == (LABELS[int(expected.argmax())], 3)
    num_tokens = sum(len(served.tokenizers["topic"](text).input_ids) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"], answer["id"][:9]) == ("list", "topic", "classify-")


def test_verl_reads_the_logit_of_a_text(ask: Ask, served: Served):
    answer = ask("/classify", model="rm", input=TEXTS[0], activation=False)

    assert answer["data"][-1]["probs"][-1] == pytest.approx(served.logits("rm", TEXTS[0])[0], abs=1e-4)


def test_more_texts_than_a_job_has_come_back_in_their_order(ask: Ask, served: Served):
    texts = [f"text {number}" for number in range(150)]

    answer = ask("/classify", model="rm", input=texts, use_activation=False)

    assert [one["index"] for one in answer["data"]] == list(range(150))
    for number in (0, 63, 64, 127, 128, 149):
        expected = served.logits("rm", texts[number])
        assert answer["data"][number]["probs"] == pytest.approx(expected, abs=1e-4)


def test_token_ids_and_chats_are_classified(ask: Ask, served: Served):
    tokenizer = served.tokenizers["rm"]
    ids = tokenizer("the cat").input_ids
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)

    one = ask("/classify", model="rm", input=ids, use_activation=False)
    two = ask("/classify", model="rm", input=[ids, ids[:2]], use_activation=False)
    bare = ask("/classify", model="rm", input="the cat", add_special_tokens=False, use_activation=False)
    chats = ask("/classify", model="rm", messages=CHAT, use_activation=False)

    found = [each["probs"] for answer in (one, two, bare, chats) for each in answer["data"]]
    expected = [logits_of(served.models["rm"], each) for each in (ids, ids, ids[:2], ids[1:])]
    expected.append(served.logits("rm", chat, add_special_tokens=False))
    assert found == [pytest.approx(logits, abs=1e-4) for logits in expected]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_a_classifier_scores_pairs(ask: Ask, served: Served, path: str, names: tuple[str, str]):
    first, second = names

    many = ask(path, model="rm", **{first: "a", second: TEXTS})
    pairs = ask(path, model="rm", **{first: TEXTS[:2], second: TEXTS[2:4]}, use_activation=False)

    expected = [sigmoid(served.logits("rm", "a" + text)[0]) for text in TEXTS]
    assert [one["score"] for one in many["data"]] == pytest.approx(expected, abs=1e-4)
    expected = [served.logits("rm", a + b)[0] for a, b in zip(TEXTS[:2], TEXTS[2:4], strict=True)]
    assert [(one["index"], one["object"]) for one in pairs["data"]] == [(0, "score"), (1, "score")]
    assert [one["score"] for one in pairs["data"]] == pytest.approx(expected, abs=1e-4)


def test_sglang_still_finds_its_route_beside_vllms(ask: Ask, served: Served):
    with Client(served.url) as native:
        expected = native.score("reranker", [([5, 6], [7])]).sequences[0].logprob_sum
    answer = ask("/v1/score", model="reranker", query=[5], items=[[6]], label_token_ids=[7])

    assert answer["scores"][0][0] == pytest.approx(torch.tensor(expected).exp().item(), abs=1e-6)


def test_a_reranker_that_says_yes_or_no_scores_pairs(ask: Ask, served: Served):
    raw = ask("/score", model="reranker", text_1="the sun", text_2=TEXTS, use_activation=False)
    answer = ask("/score", model="reranker", text_1="the sun", text_2=TEXTS)
    told = ask("/score", model="reranker", text_1="the sun", text_2=TEXTS[0], instruction="Find code.")

    expected = [served.yes_logit("the sun", text) for text in TEXTS]
    assert [one["score"] for one in raw["data"]] == pytest.approx(expected, abs=1e-4)
    assert [one["score"] for one in answer["data"]] == pytest.approx(list(map(sigmoid, expected)), abs=1e-4)
    expected = [sigmoid(served.yes_logit("the sun", TEXTS[0], "Find code."))]
    assert [one["score"] for one in told["data"]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["rm", "reranker"])
def test_documents_are_ordered_by_their_scores(ask: Ask, path: str, model: str):
    scores = [one["score"] for one in ask("/score", model=model, text_1="a", text_2=TEXTS)["data"]]
    documents: list[Any] = [{"text": text} if index % 2 else text for index, text in enumerate(TEXTS)]

    answer = ask(path, model=model, query="a", documents=documents)
    best = ask(path, model=model, query="a", documents=documents, top_n=2, return_documents=False)

    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(sorted(scores, reverse=True))
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-6)
        assert one["document"] == {"text": TEXTS[one["index"]]}
    assert [one["index"] for one in best["results"]] == [one["index"] for one in answer["results"][:2]]
    assert all("document" not in one for one in best["results"])


def test_documents_with_one_score_keep_their_order(ask: Ask):
    documents = ["b" * (1 + index % 7 // 6) for index in range(50)]  # rounding depends on a row's place in the batch

    answer = ask("/rerank", model="rm", query="a", documents=documents)

    of_text = [[one["index"] for one in answer["results"] if documents[one["index"]] == text] for text in ("b", "bb")]
    assert of_text == [sorted(indexes) for indexes in of_text]
    assert len({one["relevance_score"] for one in answer["results"]}) == 2


@pytest.fixture
def only_rm(served: Served, tmp_path: Path) -> Iterator[str]:
    """Serve one model, since OpenRLHF's client names none."""
    folder = tmp_path / "rm"
    build(folder, num_labels=1)
    with Stack([f"rm={folder}"], state=tmp_path, environ={"SCOREPOOL_PORT": str(free_port())}) as stack:
        yield stack.url


def test_openrlhf_reads_the_reward_of_each_text(only_rm: str, served: Served):
    texts = [f"<pad><pad><bos>{TEXTS[0]}<eos>", f"<bos>{TEXTS[1]}", f"<bos>{TEXTS[3]}<eos><pad><pad>"]
    body = {"query": texts, "prompts": ["a", "b", "c"], "labels": [None, None, None]}

    answer = httpx.post(f"{only_rm}/get_reward", json=body, timeout=60).json()

    bare = [f"<bos>{TEXTS[0]}<eos>", f"<bos>{TEXTS[1]}", f"<bos>{TEXTS[3]}<eos>"]  # the second was cut
    expected = [served.logits("rm", text, add_special_tokens=False)[0] for text in bare]
    ids = served.tokenizers["rm"](bare[0], add_special_tokens=False).input_ids
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert PAD not in ids
    assert answer["rewards"] == pytest.approx(expected, abs=1e-4)
    assert answer["scores"] == answer["rewards"]
    assert answer["extra_logs"] == {}


@pytest.mark.parametrize(
    ("text", "pad", "expected"),
    [
        ("<p><p>a<e><p>", "<p>", "a<e>"),
        ("<e><e>a<e><e>", "<e>", "a<e>"),  # padded with the end token, of which one is the text's own
        ("<e>a", "<e>", "a"),
        ("<p>a<e>", None, "<p>a<e>"),
        ("<e>" * 4, "<e>", "<e>"),
        # Each step of a quadratic search would copy 6 MB.
        pytest.param("<p>" * 10**6 + "a" + "<p>" * 10**6, "<p>", "a", id="long"),
    ],
)
def test_padding_around_a_text_is_left_out(text: str, pad: str | None, expected: str):
    tokenizer = wire.TokenizerInfo(bos_token=None, eos_token="<e>", pad_token=pad, chat_template=None)

    assert rewards._without_padding(text, tokenizer) == expected


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_texts_are_cut_as_transformers_cuts_them(ask: Ask, served: Served, side: str | None):
    text, tokenizer = TEXTS[3], served.tokenizers["rm"]
    tokenizer.truncation_side = side or "right"
    cut = {"truncate_prompt_tokens": 6, "truncation_side": side, "model": "rm"}

    classified = ask("/classify", input=[text, "a"], use_activation=False, **cut)
    [ranked] = ask("/rerank", query=text[:9], documents=[text[9:]], use_activation=False, **cut)["results"]
    [scored] = ask("/score", text_1=text[:9], text_2=[text[9:]], use_activation=False, **cut)["data"]

    [expected] = logits_of(served.models["rm"], tokenizer(text, truncation=True, max_length=6).input_ids)
    assert classified["data"][0]["probs"] == pytest.approx([expected], abs=1e-4)
    assert [ranked["relevance_score"], scored["score"]] == pytest.approx([expected] * 2, abs=1e-4)
    assert ask("/classify", input="ab " * 9000, truncate_prompt_tokens=-1, model="rm")["usage"]["prompt_tokens"] > 100


@pytest.mark.parametrize(
    ("path", "body", "field", "says"),
    [
        ("/classify", {}, None, "exactly one of `input` and `messages`"),
        ("/classify", {"input": []}, "input", "length >= 1"),
        ("/classify", {"input": ["a", [1]]}, "input", "a list of token ids"),
        ("/classify", {"input": "a", "messages": CHAT}, None, "exactly one"),
        ("/classify", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens", "expected false"),
        ("/classify", {"messages": CHAT, "add_generation_prompt": True}, "add_generation_prompt", "expected false"),
        ("/classify", {"input": [1, 99_999]}, "input[1]", "input[1]: expected a token id below 512, found 99999"),
        ("/classify", {"input": [[1], [1, 99_999]]}, "input[1][1]", "input[1][1]: expected a token id below 512"),
        ("/classify", {"input": ["a", "ab " * 9000]}, "input[1]", "input[1] has"),
        ("/classify", {"input": ["a"] * 100 + [""], "add_special_tokens": False}, "input[100]", "it has no token"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 99_999}, "truncate_prompt_tokens", "expected at most"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 5, "model": "reranker"},
            "truncate_prompt_tokens",
            "would cut the format",
        ),
        ("/classify", {"input": "a", "model": "reranker"}, "model", "is a language model"),
        ("/score", {"text_1": "a"}, None, "give two lists"),
        ("/score", {"text_1": "a", "documents": ["b"]}, None, "give two lists"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "`text_1` has 2 texts; expected 1, or 3"),
        ("/score", {"text_1": "a", "text_2": ["b"], "model": "topic"}, "model", "found 'topic', which has 3"),
        ("/score", {"text_1": "a", "text_2": ["b"], "instruction": "c"}, "instruction", "a classifier reads none"),
        ("/score", {"text_1": "a", "text_2": ["b", "ab " * 9000]}, "text_2[1]", "text_2[1] has"),
        ("/score", {"text_1": "a" * 2_000_000, "text_2": ["b"] * 20}, "text_2", "expected pairs of at most 33554432"),
        ("/v1/score", {"queries": "a", "documents": "ab " * 9000}, "documents", "documents has"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "length >= 1"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ">= 0"),
        ("/rerank", {"query": "a", "documents": ["b", "ab " * 9000]}, "documents[1]", "documents[1] has"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", "ab " * 9000], "model": "reranker"},
            "documents[1]",
            "documents[1]",
        ),
        ("/get_reward", {"query": ["a"], "model": "topic"}, "model", "found 'topic', which has 3"),
        ("/get_reward", {"query": ["a"], "model": "reranker"}, "model", "which is a language model"),
        ("/get_reward", {"query": ["a", "ab " * 9000]}, "query[1]", "query[1] has"),
        ("/get_reward", {"query": "a"}, "query", "Expected"),
    ],
)
def test_bad_input_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], field: str | None, says: str
):
    status, found, message = refusal(http, path, **({"model": "rm"} | body))

    assert (status, found) == (400, field), message
    assert says in message


def test_a_model_that_knows_no_reranker_format_scores_no_pairs(only_rm: str, root: Path, tmp_path: Path):
    model = f"demo={root / 'scorepool' / 'models' / 'demo'}"
    state = tmp_path / "demo"
    with Stack([model], state=state, environ={"SCOREPOOL_PORT": str(free_port())}) as stack:
        answer = httpx.post(f"{stack.url}/rerank", json={"query": "a", "documents": ["b"]}, timeout=60)

    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "model")
    assert "in the format of Qwen3-Reranker, found 'demo'" in answer.json()["error"]["message"]


def test_a_text_that_cannot_be_scored_fails_the_request_by_name(http: httpx.Client, served: Served):
    texts = [[BOS, token_id] for token_id in range(4, 100)]
    is_finite = [torch.tensor(logits_of(served.models["odd"], text)).isfinite().all().item() for text in texts]
    bad = is_finite.index(False)

    status, found, message = refusal(http, "/classify", model="odd", input=texts[: bad + 1])

    assert (status, found) == (500, f"input[{bad}]")
    assert message.startswith(f"input[{bad}]: the model's logit of label 0 is")
