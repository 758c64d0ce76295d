"""SGLang's `/generate` and `/v1/score`, compared with native jobs and with transformers."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorepool import Client
from scorepool.local.stack import Stack

Ask = Callable[..., httpx.Response]
PROMPT = [1209, 274, 312, 885]
GREEDY = {"max_new_tokens": 6, "temperature": 0}


@pytest.fixture
def ask(stack: Stack) -> Iterator[Ask]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield lambda path, **body: http.post(path, json=body)


@pytest.mark.parametrize("start", [-1, 0, 2])
@pytest.mark.parametrize("k", [0, 3])
def test_generate_reports_the_logprobs_of_a_generate_job(ask: Ask, native: Client, start: int, k: int):
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": k}
    answer = ask("/generate", **body, logprob_start_len=start).json()

    job = native.generate("demo", PROMPT, max_tokens=6, temperature=0.0, prompt_logprobs=True, top_logprobs=k)
    [scored] = job.sequences
    meta = answer["meta_info"]
    first = start if start >= 0 else len(PROMPT) - 1
    entries = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [token_id for _, token_id, _ in entries] == scored.token_ids[first:]
    assert [value for value, _, _ in entries[1:]] == pytest.approx(scored.logprobs.values()[first + 1 :], abs=1e-5)
    assert entries[0] == [None, PROMPT[first], None]
    assert len(meta["input_token_logprobs"]) == len(PROMPT) - first
    assert answer["output_ids"] == scored.token_ids[len(PROMPT) :]
    assert answer["text"] == b"".join(scored.token_bytes[len(PROMPT) :]).decode()
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert ("input_top_logprobs" in meta) == ("output_top_logprobs" in meta) == (k > 0)
    if k:
        tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
        assert tops[0] is None
        for entry, top in enumerate(tops[1:], start=first + 1):
            assert [token_id for _, token_id, _ in top] == scored.top_ids[entry]
            assert [value for value, _, _ in top] == pytest.approx(scored.top_logprobs[entry].values(), abs=1e-5)


def test_a_text_is_scored_without_generating(ask: Ask, native: Client):
    text = "import os"
    params = {"max_new_tokens": 0}
    body = {"text": text, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    answer = ask("/generate", **body, return_text_in_logprobs=True).json()

    [scored] = native.generate("demo", text, max_tokens=0, prompt_logprobs=True).sequences
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == scored.token_ids
    assert "".join(token for _, _, token in meta["input_token_logprobs"]) == text
    found = [value for value, _, _ in meta["input_token_logprobs"]]
    assert found == pytest.approx(scored.logprobs.values(), abs=1e-5)


def test_several_sequences_are_a_list_in_order(ask: Ask):
    texts = ["import", "return"]
    answers = ask("/generate", text=texts, sampling_params=GREEDY).json()
    alone = [ask("/generate", text=text, sampling_params=GREEDY).json() for text in texts]
    sampled = ask("/generate", text="import", sampling_params={"max_new_tokens": 3, "n": 3, "sampling_seed": 1}).json()
    one = ask("/generate", input_ids=[PROMPT], sampling_params=GREEDY | {"stop": ["\n"]}).json()

    assert [answer["text"] for answer in answers] == [answer["text"] for answer in alone]
    assert len({answer["meta_info"]["id"] for answer in answers}) == 2
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    assert len(sampled) == 3
    assert len(one) == 1
    assert "\n" not in one[0]["text"]


@pytest.mark.parametrize("apply_softmax", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
def test_label_scores_equal_those_of_transformers(ask: Ask, demo_folder: Path, apply_softmax: bool, item_first: bool):
    query, items, labels = "If the file does not exist,", [" an error", " return"], [305, 885, 16]
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    body = {"model": "demo", "label_token_ids": labels, "apply_softmax": apply_softmax, "item_first": item_first}

    found = ask("/v1/score", **body, query=query, items=items).json()

    prompts = [tokenizer(item + query if item_first else query + item)["input_ids"] for item in items]
    for prompt, scores in zip(prompts, found["scores"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        expected = logits[labels].softmax(-1) if apply_softmax else logits.softmax(-1)[labels]
        assert scores == pytest.approx(expected.tolist(), rel=1e-4)
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    first, second = prompts[0][:2], prompts[0][2:]
    ids = {"query": second, "items": [first]} if item_first else {"query": first, "items": [second]}
    [scores] = ask("/v1/score", **body, **ids).json()["scores"]
    assert scores == pytest.approx(found["scores"][0], rel=1e-4)


def test_an_error_names_the_field_of_the_body(ask: Ask):
    long, score = "import " * 3000, {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [5]}
    for path, body, param in [
        ("/generate", {"input_ids": [[5], [5, 99_999]]}, "input_ids[1][1]"),
        ("/generate", {"input_ids": [5, 99_999]}, "input_ids[1]"),
        ("/generate", {"text": ["a", ""]}, "text[1]"),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"max_new_tokens": 3000}},
            "sampling_params.max_new_tokens",
        ),
        ("/v1/score", score | {"items": ["b", long]}, "items[1]"),
        ("/v1/score", score | {"items": long}, "items[0]"),
        ("/v1/score", score | {"label_token_ids": [5, 99_999]}, "label_token_ids[1]"),
    ]:
        error = ask(path, **body).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/generate", {"input_ids": PROMPT}, "exactly one of `text` and `input_ids`"),
        (
            "/generate",
            {"stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 4097}},
            "at most 4096",
        ),
        (
            "/generate",
            {
                "stream": True,
                "return_logprob": True,
                "top_logprobs_num": 15,
                "sampling_params": {"max_new_tokens": 1025},
            },
            "at most 1024",
        ),
        ("/generate", {"stream": True, "sampling_params": {"max_new_tokens": 32_769}}, "at most 32768"),
        ("/generate", {"stream": True, "sampling_params": {"max_new_tokens": 16_385, "n": 4}}, "at most 16384"),
        (
            "/generate",
            {"stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 2049, "n": 4}},
            "at most 2048",
        ),
        ("/generate", {"token_ids_logprob": [1]}, "token_ids_logprob"),
        ("/generate", {"lora_path": "a"}, "lora_path"),
        ("/generate", {"logprob_start_len": 5, "return_logprob": True}, "logprob_start_len: expected below"),
        ("/generate", {"sampling_params": {"ignore_eos": True, "stop_token_ids": [1]}}, "ignore `stop_token_ids` too"),
        ("/generate", {"sampling_params": {"max_new_tokens": 3, "min_new_tokens": 4}}, "at most `max_new_tokens`, 3"),
        ("/generate", {"sampling_params": {"stop_token_ids": [99_999]}}, "sampling_params.stop_token_ids: expected"),
        ("/generate", {"sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
        (
            "/generate",
            {"sampling_params": {"json_schema": f'{{"enum": [{"1," * 2**19}1]}}'}},
            "json_schema.*1048576 bytes",
        ),
        ("/generate", {"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ("/v1/score", {"items": [[1]]}, "both be text or both be token ids"),
        ("/v1/score", {"query": "", "items": ["a", ""]}, r"items\[1\]: expected a token"),
        ("/v1/score", {"label_token_ids": []}, "label_token_ids"),
        ("/v1/score", {"label_token_ids": [99_999]}, "below"),
        ("/v1/score", {"dimensions": 1}, "dimensions"),
    ],
)
def test_unsupported_values_are_refused_by_name(ask: Ask, path: str, change: dict[str, Any], message: str):
    good = {
        "/generate": {"text": "import"},
        "/v1/score": {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [5]},
    }

    reply = ask(path, **good[path] | change)

    assert reply.status_code == 400
    assert re.search(message, reply.json()["error"]["message"])


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line for line in reply.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def without_id(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"meta_info": {name: value for name, value in answer["meta_info"].items() if name != "id"}}


@pytest.mark.parametrize("prompt", [{"text": "import"}, {"input_ids": PROMPT}])
@pytest.mark.parametrize("start", [-1, 0])
def test_each_event_of_a_stream_repeats_the_output_and_the_last_is_the_whole_answer(
    ask: Ask, prompt: dict[str, Any], start: int
):
    params = {"max_new_tokens": 300, "temperature": 0.8, "sampling_seed": 3}  # tokens that come together are one event
    body = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": start}
    body |= {"token_ids_logprob": [5, 6], "return_text_in_logprobs": True} | prompt

    events = events_of(ask("/generate", **body, stream=True))
    whole = ask("/generate", **body).json()

    assert without_id(events[-1]) == without_id(whole)
    assert len({event["meta_info"]["id"] for event in events}) == 1
    assert len(events) > 1
    for earlier, event in itertools.pairwise(events):
        assert event["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
        assert earlier["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    for event in events:
        num = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == whole["output_ids"][:num]
        for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert event["meta_info"][name] == whole["meta_info"][name][:num]


def test_several_outputs_are_streamed_with_their_places(ask: Ask):
    body = {"text": ["import", "return"], "sampling_params": GREEDY | {"n": 2, "temperature": 1, "sampling_seed": 1}}

    events = events_of(ask("/generate", **body, stream=True))
    whole = ask("/generate", **body).json()

    last = {event["index"]: event for event in events}
    assert [last[index]["text"] for index in range(4)] == [answer["text"] for answer in whole]
    assert [last[index]["output_ids"] for index in range(4)] == [answer["output_ids"] for answer in whole]
    assert "output_token_logprobs" not in events[0]["meta_info"]


def test_a_stream_that_generates_nothing_reports_its_input(ask: Ask):
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 0},
    }

    [event] = events_of(ask("/generate", **body, stream=True))

    assert without_id(event) == without_id(ask("/generate", **body).json())


def test_a_start_behind_a_text_ends_its_stream_with_an_error(ask: Ask):
    body = {"text": "a", "return_logprob": True, "logprob_start_len": 90, "sampling_params": GREEDY, "stream": True}

    *_, last = [line for line in ask("/generate", **body).text.split("\n\n") if line]

    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "logprob_start_len"
