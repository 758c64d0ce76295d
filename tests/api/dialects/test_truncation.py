"""`truncate_prompt_tokens` keeps what transformers' tokenizer keeps, and everything reported is of what was kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scorepool import Client
from scorepool.local.stack import Stack

TEXT = "Return the list of all files in a folder, or raise an error if there is none. "
CHAT = [{"role": "user", "content": TEXT * 3}]


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_folder)


def kept_by_transformers(tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int, side: str) -> list[int]:
    tokenizer.truncation_side = side
    token_ids: list[int] = tokenizer(text, truncation=True, max_length=num_tokens)["input_ids"]
    return token_ids


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json={"model": "demo"} | body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_logprobs_of_an_echoed_prompt_are_those_of_what_was_kept(
    http: httpx.Client, native: Client, tokenizer: PreTrainedTokenizerBase, side: str | None, stream: bool
):
    kept = kept_by_transformers(tokenizer, TEXT, 7, side or "left")
    body = {"prompt": TEXT, "max_tokens": 2, "logprobs": 0, "echo": True, "temperature": 0, "return_token_ids": True}
    body |= {"truncate_prompt_tokens": 7, "truncation_side": side}
    if stream:
        events = http.post("/v1/completions", json={"model": "demo", "stream": True} | body).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
        assert chunks[0]["text"] == tokenizer.decode(kept)
        choice = {
            "text": "".join(chunk["text"] for chunk in chunks),
            "prompt_token_ids": chunks[-1]["prompt_token_ids"],
        }
        choice["token_ids"] = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
        logprobs = [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]]
        choice["logprobs"] = {"token_logprobs": logprobs}
    else:
        reply = post(http, "/v1/completions", **body)
        [choice] = reply["choices"]
        assert reply["usage"]["prompt_tokens"] == 7

    [scored] = native.score("demo", [(kept[:1], kept[1:])]).sequences
    assert choice["prompt_token_ids"] == kept
    assert choice["logprobs"]["token_logprobs"][1:7] == pytest.approx(scored.logprobs.values(), abs=1e-5)
    assert choice["text"].startswith(tokenizer.decode(kept))
    [again] = post(http, "/v1/completions", **body | {"prompt": kept, "truncate_prompt_tokens": None})["choices"]
    assert again["token_ids"] == choice["token_ids"]


def test_token_ids_are_cut_as_they_are(http: httpx.Client, native: Client):
    ids = [1209, 274, 312, 885, 16, 305]
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        body = {"prompt": ids, "truncate_prompt_tokens": 4, "truncation_side": side, "max_tokens": 1}
        [choice] = post(http, "/v1/completions", **body, prompt_logprobs=0, return_token_ids=True)["choices"]
        [sequence] = native.generate("demo", ids, truncate=side, truncate_to=4, max_tokens=1).sequences

        assert choice["prompt_token_ids"] == sequence.prompt_token_ids == kept
        assert len(choice["prompt_logprobs"]) == 4
        assert sequence.truncated == 2


def test_a_prompt_without_excess_stays(http: httpx.Client):
    whole = post(http, "/v1/completions", prompt=TEXT, temperature=0, max_tokens=4)
    cut = post(http, "/v1/completions", prompt=TEXT, temperature=0, max_tokens=4, truncate_prompt_tokens=200)

    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]


def test_minus_one_keeps_what_the_context_holds_beside_the_answer(http: httpx.Client):
    context_length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": TEXT * 300, "max_tokens": 3, "truncate_prompt_tokens": -1}

    assert http.post("/v1/completions", json={"model": "demo"} | body | {"truncate_prompt_tokens": None}).is_error
    assert post(http, "/v1/completions", **body)["usage"]["prompt_tokens"] == context_length - 3


def test_a_chat_keeps_its_last_tokens(http: httpx.Client):
    body = {"messages": CHAT, "max_tokens": 2, "return_token_ids": True, "temperature": 0}
    whole = post(http, "/v1/chat/completions", **body)["prompt_token_ids"]

    cut = post(http, "/v1/chat/completions", **body, truncate_prompt_tokens=9)

    assert cut["prompt_token_ids"] == whole[-9:]
    assert cut["usage"]["prompt_tokens"] == 9


def test_an_answer_of_no_stated_length_gets_a_quarter_of_the_context(http: httpx.Client):
    context_length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": TEXT * 300, "truncate_prompt_tokens": -1, "stop_token_ids": [*range(512)], "temperature": 0}

    assert post(http, "/v1/chat/completions", **_as_chat(body))["usage"]["prompt_tokens"] == context_length * 3 // 4
    assert post(http, "/v1/chat/completions", **_as_chat(body | {"prompt": TEXT}))["usage"]["prompt_tokens"] < 60


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.pop("prompt")
    return body | {"messages": [{"role": "user", "content": prompt}]}


def test_a_response_keeps_the_last_tokens_of_a_conversation_that_is_too_long(http: httpx.Client):
    context_length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    conversation = [{"role": "user", "content": TEXT * 300}, {"role": "user", "content": "import"}]
    body = {"input": conversation, "max_output_tokens": 3, "temperature": 0, "store": False}

    refused = http.post("/v1/responses", json={"model": "demo"} | body)
    reply = post(http, "/v1/responses", **body, truncation="auto")

    assert (refused.status_code, "too long" in refused.text or "context" in refused.text) == (400, True), refused.text
    assert reply["usage"]["input_tokens"] == context_length - 3
    assert reply["truncation"] == "auto"
    short = {"input": "import", "max_output_tokens": 3, "temperature": 0, "store": False}
    whole, cut = (post(http, "/v1/responses", **short, truncation=how) for how in ("disabled", "auto"))
    assert whole["output"][0]["content"] == cut["output"][0]["content"]
    assert (whole["truncation"], whole["usage"]["input_tokens"]) == ("disabled", cut["usage"]["input_tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_token_route_keeps_the_last_tokens(http: httpx.Client, native: Client, stream: bool):
    ids = [1209, 274, 312, 885, 16, 305]
    params = {"max_tokens": 2, "truncate_prompt_tokens": 4, "temperature": 0, "logprobs": 0}
    body = {"model": "demo", "token_ids": ids, "sampling_params": params, "return_token_ids": True, "stream": stream}

    reply = http.post("/inference/v1/generate", json=body)

    assert reply.status_code == 200, reply.text
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        token_ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
        prompt_ids = events[-1]["prompt_token_ids"]
    else:
        token_ids, prompt_ids = reply.json()["choices"][0]["token_ids"], reply.json()["prompt_token_ids"]
        assert reply.json()["usage"]["prompt_tokens"] == 4
    [kept] = native.generate("demo", ids[-4:], max_tokens=2, temperature=0).sequences
    assert (prompt_ids, token_ids) == (ids[-4:], kept.token_ids)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_an_embedding_is_that_of_what_was_kept(
    http: httpx.Client, tokenizer: PreTrainedTokenizerBase, side: str | None
):
    kept = kept_by_transformers(tokenizer, TEXT, 5, side or "right")

    cut = post(http, "/v1/embeddings", input=[TEXT, "a"], truncate_prompt_tokens=5, truncation_side=side)
    given = post(http, "/v1/embeddings", input=[kept])

    assert cut["data"][0]["embedding"] == pytest.approx(given["data"][0]["embedding"], abs=1e-6)
    assert post(http, "/v1/embeddings", input=TEXT * 400, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 1000


@pytest.mark.parametrize(
    ("path", "body", "field", "says"),
    [
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
        (
            "/v1/completions",
            {"prompt": "a", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "at least 1, or -1",
        ),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens", "at most"),
        ("/v1/completions", {"prompt": "a", "truncation_side": "top"}, "truncation_side", "left"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "truncate_prompt_tokens": 3, "truncation_side": "right"},
            "truncation_side",
            "the place of the answer",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "truncate_prompt_tokens": -1, "stream": True, "echo": True},
            "truncate_prompt_tokens",
            "cannot be streamed with `echo`",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"truncate_prompt_tokens": 9999}},
            "sampling_params.truncate_prompt_tokens",
            "at most",
        ),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens", "at most"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], field: str, says: str
):
    reply = http.post(path, json={"model": "demo"} | body)

    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert says in error["message"]
