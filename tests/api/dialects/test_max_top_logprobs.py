"""`SCOREPOOL_MAX_TOP_LOGPROBS`: dialects clamp to the cap and say so, native jobs above it are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

CAP = 3
PROMPT = [1209, 274, 312, 885]
COMPLETION = {"model": "demo", "prompt": PROMPT, "max_tokens": 2}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True}
SAMPLING = {"max_tokens": 2}


@pytest.fixture(scope="module")
def http(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    state = tmp_path_factory.mktemp("capped")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_MAX_TOP_LOGPROBS": str(CAP)}
    with (
        Stack([f"demo={demo_folder}"], state=state, environ=environ, logs=state / "logs") as stack,
        httpx.Client(base_url=stack.url, timeout=60) as http,
    ):
        yield http


def post(http: httpx.Client, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    reply = http.post(path, json=body | more)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("k", [CAP + 1, 20])
def test_completions_and_chats_report_as_many_as_the_cap_and_say_so(http: httpx.Client, k: int):
    completion = post(http, "/v1/completions", COMPLETION, logprobs=k)
    chat = post(http, "/v1/chat/completions", CHAT, top_logprobs=k)

    assert (completion["max_top_logprobs"], chat["max_top_logprobs"]) == (CAP, CAP)
    tops = completion["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(top) in (CAP, CAP + 1) for top in tops] == [True, True]  # with the token itself
    assert [len(token["top_logprobs"]) for token in chat["choices"][0]["logprobs"]["content"]] == [CAP, CAP]


@pytest.mark.parametrize("k", [CAP + 1, 1024, -1])
def test_prompt_logprobs_are_clamped_too(http: httpx.Client, k: int):
    completion = post(http, "/v1/completions", COMPLETION, prompt_logprobs=k)
    chat = post(http, "/v1/chat/completions", CHAT, prompt_logprobs=k)
    tokens = {"token_ids": PROMPT, "sampling_params": SAMPLING | {"prompt_logprobs": k, "logprobs": k}}
    generated = post(http, "/inference/v1/generate", tokens)

    for reply in (completion["choices"][0], chat, generated):
        assert {len(entry) for entry in reply["prompt_logprobs"][1:]} <= {CAP, CAP + 1}
    assert [reply["max_top_logprobs"] for reply in (completion, chat, generated)] == [CAP] * 3
    content = generated["choices"][0]["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) in (CAP, CAP + 1) for token in content)


def test_a_response_shows_the_clamped_number_where_openai_has_it(http: httpx.Client):
    body = {"model": "demo", "input": "Hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
    reply = post(http, "/v1/responses", body, top_logprobs=20)

    assert reply["top_logprobs"] == CAP
    assert http.get(f"/v1/responses/{reply['id']}").json()["top_logprobs"] == CAP
    logprobs = reply["output"][0]["content"][0]["logprobs"]
    assert {len(token["top_logprobs"]) for token in logprobs} == {CAP}


def test_sglang_clamps_and_says_so_in_meta_info(http: httpx.Client):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = post(http, "/generate", body, top_logprobs_num=CAP + 1)["meta_info"]

    assert meta["max_top_logprobs"] == CAP
    assert [len(top) for top in meta["output_top_logprobs"]] == [CAP, CAP]
    assert "max_top_logprobs" not in post(http, "/generate", body, top_logprobs_num=CAP)["meta_info"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"logprobs": 20}),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 20}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": SAMPLING | {"logprobs": 1024}}),
    ],
)
def test_a_stream_says_so_in_the_last_chunk_of_a_choice(http: httpx.Client, path: str, body: dict[str, Any]):
    reply = http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]

    assert [chunk.get("max_top_logprobs") for chunk in chunks] == [None] * (len(chunks) - 1) + [CAP]


def test_replies_say_nothing_if_nothing_was_clamped(http: httpx.Client):
    for reply in (
        post(http, "/v1/completions", COMPLETION, logprobs=CAP, prompt_logprobs=0),
        post(http, "/v1/completions", COMPLETION, logprobs=20, logprob_token_ids=[5]),  # no top logprobs
        post(http, "/v1/chat/completions", CHAT, top_logprobs=CAP),
        post(http, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": SAMPLING | {"logprobs": CAP}}),
    ):
        assert "max_top_logprobs" not in reply


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION | {"logprobs": 21}, "logprobs"),
        ("/v1/completions", COMPLETION | {"prompt_logprobs": 1025}, "prompt_logprobs"),
        ("/v1/completions", COMPLETION | {"prompt_logprobs": -2}, "prompt_logprobs"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_the_format_does_not_have_stays_an_error(http: httpx.Client, path: str, body: dict[str, Any], param: str):
    reply = http.post(path, json=body)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("k", [CAP + 1, -1])
def test_native_jobs_and_the_routes_that_have_no_field_for_it_are_refused(http: httpx.Client, k: int):
    generate = {"type": "generate", "model": "demo", "prompt": PROMPT, "top_logprobs": k, "max_tokens": 1}
    items = [{"prompt": PROMPT[:1], "completion": PROMPT[1:]}]
    score = {"type": "score", "model": "demo", "items": items, "top_logprobs": k}
    swift = {"infer_requests": [{"messages": CHAT["messages"]}], "request_config": {"prompt_logprobs": k}}
    for path, body, field in [
        ("/v1/jobs", generate, "top_logprobs"),
        ("/v1/jobs", score, "top_logprobs"),
        ("/infer/", swift, "request_config.prompt_logprobs"),
    ]:
        reply = http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error.get("field", error.get("param")) == field
        assert f"expected 0 to {CAP}, this server's SCOREPOOL_MAX_TOP_LOGPROBS, found {k}" in error["message"]
    assert http.post("/v1/jobs", json=score | {"top_logprobs": CAP}).status_code == 202
