"""Streams of chat and completions with OpenAI's SDK: the joined chunks equal the answer that is not streamed."""

import json
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from scorepool.local.stack import Stack

PROMPTS = ["import", "If the file does not exist,", "x = '🙂"]
CHAT = [{"role": "user", "content": "What does os.listdir do?"}]
NO_END = {"0": -100, "2": -100}  # bans both end tokens
SHORT = {"temperature": 0, "max_tokens": 8, "logprobs": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "import"} | SHORT,
        {"prompt": PROMPTS, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 12, "logprobs": 2},
        {"prompt": PROMPTS, "temperature": 1.5, "seed": 2, "max_tokens": 40, "logprobs": 0},  # parts of characters
        {"prompt": "If the file does not exist,", "stop": ["the v", "an obj", "is n", "\n"], "max_tokens": 40} | SHORT,
        {"prompt": "import", "logit_bias": {"2": 100}} | SHORT,  # ends at once
        {"prompt": "import", "max_tokens": 5},
        {"prompt": "import", "logit_bias": {"1": 9}, "temperature": 1, "seed": 4, "logprobs": 0, "n": 2}
        | {
            "extra_body": {"ignore_eos": True, "min_tokens": 9, "stop_token_ids": [274, 1209]}
        },  # some of them special tokens
        {"prompt": "import", "stop": ["the v", "an obj", " o"], "extra_body": {"include_stop_str_in_output": True}}
        | SHORT,
        {"prompt": "import", "echo": True} | SHORT,
        {"prompt": "If the file does not exist,", "echo": True, "stop": ["the v", "an obj", "\n"]} | SHORT,
        {"prompt": [1000, 17, 5], "echo": True, "max_tokens": 8, "temperature": 0},
        {"prompt": PROMPTS, "echo": True, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 12, "logprobs": 2},
        {"prompt": PROMPTS, "echo": True} | SHORT | {"max_tokens": 0},
    ],
)
def test_a_streamed_completion_equals_the_whole_one(sdk: OpenAI, options: dict[str, Any]):
    options = {"model": "demo"} | options
    whole = sdk.completions.create(**options)

    chunks = list(sdk.completions.create(**options, stream=True, stream_options={"include_usage": True}))

    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    texts: dict[int, str] = defaultdict(str)
    columns: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[int, str] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            for name, column in choice.logprobs.model_dump().items():
                columns[choice.index][name] += column
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    if options.get("seed") is None and options.get("temperature") != 0:
        return  # another sample: only its form can be compared
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert ends[choice.index] == choice.finish_reason
        if choice.logprobs is None:
            continue
        found, expected = columns[choice.index], choice.logprobs.model_dump()
        assert (found["tokens"], found["text_offset"]) == (expected["tokens"], expected["text_offset"])
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
        tops = [[top and set(top) for top in each["top_logprobs"]] for each in (found, expected)]
        assert tops[0] == tops[1]


@pytest.mark.parametrize("options", [{}, {"n": 3, "seed": 1, "temperature": 1}, {"stop": "of the"}])
def test_a_streamed_chat_equals_the_whole_one(sdk: OpenAI, options: dict[str, Any]):
    options = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 10, "logprobs": True} | options
    whole = sdk.chat.completions.create(**options, top_logprobs=1)

    chunks = list(sdk.chat.completions.create(**options, top_logprobs=1, stream=True))

    contents: dict[int, str] = defaultdict(str)
    entries: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk.choices
        contents[choice.index] += choice.delta.content
        entries[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert [chunk.choices[0].delta.role for chunk in chunks[: len(whole.choices)]] == ["assistant"] * len(whole.choices)
    for choice in whole.choices:
        assert contents[choice.index] == choice.message.content
        found = entries[choice.index]
        assert [entry.token for entry in found] == [entry.token for entry in choice.logprobs.content]
        assert b"".join(bytes(entry.bytes) for entry in found) == choice.message.content.encode()
    assert chunks[-1].usage is None


@pytest.mark.parametrize("include_usage", [True, None])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_usage_so_far_is_in_every_chunk(sdk: OpenAI, kind: str, include_usage: bool | None):
    options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 60, "n": 2}
    create = sdk.chat.completions.create if kind == "chat" else sdk.completions.create
    options |= {"messages": CHAT} if kind == "chat" else {"prompt": "import"}
    usage = create(**options).usage

    stream_options = {"include_usage": include_usage, "continuous_usage_stats": True}
    chunks = list(create(**options, extra_body={"return_token_ids": True}, stream=True, stream_options=stream_options))

    assert chunks[-1].usage == usage
    num_sent = 0
    for chunk in chunks:
        num_sent += sum(len(getattr(choice, "token_ids", ())) for choice in chunk.choices)
        assert chunk.usage.prompt_tokens == usage.prompt_tokens
        assert num_sent <= chunk.usage.completion_tokens <= usage.completion_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
    assert num_sent == usage.completion_tokens
    assert chunks[0].usage.completion_tokens < usage.completion_tokens


def test_prompt_token_ids_are_in_the_last_chunk(sdk: OpenAI):
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 3, "temperature": 0}
    asked |= {"extra_body": {"return_token_ids": True}}
    expected = [choice.prompt_token_ids for choice in sdk.completions.create(prompt=PROMPTS, **asked).choices]

    for prompts in (PROMPTS, expected):
        chunks = list(sdk.completions.create(prompt=prompts, stream=True, **asked))
        choices = [chunk.choices[0] for chunk in chunks]
        found = {choice.index: choice.prompt_token_ids for choice in choices if choice.finish_reason}
        assert [found[index] for index in range(len(PROMPTS))] == expected
        assert not any("prompt_token_ids" in choice.model_extra for choice in choices if not choice.finish_reason)

    whole = sdk.chat.completions.create(messages=CHAT, **asked)
    chunks = list(sdk.chat.completions.create(messages=CHAT, stream=True, **asked))
    assert chunks[-1].prompt_token_ids == whole.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[:-1])


def test_tokens_are_sent_while_others_are_computed(sdk: OpenAI, stack: Stack):
    """The first token is sent seconds before the last."""
    known = set(jobs(stack))
    asked: dict[str, Any] = {"model": "demo", "prompt": "import", "max_tokens": 2000, "logit_bias": NO_END}

    with sdk.completions.create(**asked, stream=True, logprobs=0) as chunks:
        first = next(iter(chunks))
        [status] = [status for id_, status in jobs(stack).items() if id_ not in known]

    assert 0 < len(first.choices[0].logprobs.tokens) < 1000
    assert status == "started"


def test_a_refused_request_gets_no_stream(sdk: OpenAI):
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="other", prompt="a", stream=True)
    with pytest.raises(openai.BadRequestError, match="best_of"):
        sdk.completions.create(model="demo", prompt="a", stream=True, best_of=2)
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        sdk.completions.create(model="demo", prompt="a", stream_options={"include_usage": True})


@pytest.mark.parametrize("echo", [True, False])
def test_a_stream_that_the_worker_refuses_has_the_status_of_its_error(sdk: OpenAI, echo: bool):
    """The worker's tokenizer finds that the text is longer than the context."""
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.completions.create(model="demo", prompt="import " * 3000, max_tokens=2, stream=True, echo=echo)

    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")


def test_a_streamed_chat_that_the_worker_refuses_has_the_status_of_its_error(sdk: OpenAI):
    long = [{"role": "user", "content": "import " * 3000}]
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.chat.completions.create(model="demo", messages=long, stream=True)
    assert raised.value.code == "context_length_exceeded"

    unknown = {"chat_template_kwargs": {"no_such_variable": True}}
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        sdk.chat.completions.create(model="demo", messages=CHAT, stream=True, extra_body=unknown)


def test_the_error_names_the_prompt_that_is_too_long(sdk: OpenAI):
    asked: dict[str, Any] = {"model": "demo", "prompt": ["import", "import " * 3000], "max_tokens": 2}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: ") as raised:
            sdk.completions.create(**asked, stream=stream)
        assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt[1]")


def test_an_unknown_model_has_openais_code_and_the_names_that_are_served(sdk: OpenAI, stack: Stack):
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="demo, gpt-4o-mini") as raised:
            sdk.chat.completions.create(model="other", messages=CHAT, stream=stream)
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")

    native = httpx.post(f"{stack.url}/v1/jobs", json={"type": "generate", "model": "other", "prompt": "a"})
    assert native.json()["error"]["code"] == "model_not_served"


def test_param_is_there_if_it_is_null(stack: Stack):
    error = httpx.post(f"{stack.url}/v1/chat/completions", json=[]).json()["error"]

    assert error["param"] is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_jobs(stack: Stack, stream: bool):
    body = {"model": "demo", "prompt": ["import"] * 3, "max_tokens": 2000, "stream": stream, "logit_bias": NO_END}
    content = json.dumps(body).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    known = set(jobs(stack))

    def statuses() -> list[str]:
        return [status for id_, status in jobs(stack).items() if id_ not in known]

    with socket.create_connection(("127.0.0.1", stack.settings.port), timeout=60) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + content)
        wait_for(lambda: len(statuses()) == 3)
        if stream:
            assert connection.recv(1) == b"H"

    wait_for(lambda: "finished" in statuses() or set(statuses()) == {"canceled"})
    assert statuses() == ["canceled"] * 3


def test_a_client_that_goes_away_before_the_first_token_cancels_its_jobs(stack: Stack):
    """Nothing was sent yet: the status waits for the first token, which a stopped worker does not compute."""
    content = json.dumps({"model": "demo", "prompt": "import", "max_tokens": 2000, "stream": True}).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    small = {"type": "generate", "model": "demo", "prompt": "import", "max_tokens": 1}
    worker = stack.pid("worker demo")
    os.kill(worker, signal.SIGSTOP)
    try:
        # Redis leases the stopped worker some of these, so the worker waits for no other job.
        httpx.post(f"{stack.url}/v1/jobs/bulk", json=[small] * 5, timeout=30).raise_for_status()
        known = set(jobs(stack))
        with socket.create_connection(("127.0.0.1", stack.settings.port), timeout=0.2) as connection:
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + content)
            wait_for(lambda: bool(set(jobs(stack)) - known))
            with pytest.raises(TimeoutError):
                connection.recv(1)
        [job_id] = set(jobs(stack)) - known
        wait_for(lambda: jobs(stack)[job_id] == "canceled")
    finally:
        os.kill(worker, signal.SIGCONT)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def jobs(stack: Stack) -> dict[str, str]:
    page = httpx.get(f"{stack.url}/v1/jobs", params={"limit": 20}, timeout=30).json()
    return {job["id"]: job["status"] for job in page["jobs"]}


def test_a_stream_continues_after_its_worker_was_killed(stack: Stack, sdk: OpenAI):
    """A job without a seed keeps a seed of its own, so that its second run samples the same tokens."""
    asked: dict[str, Any] = {"model": "demo", "prompt": "import", "max_tokens": 400, "logprobs": 0}
    asked |= {"logit_bias": NO_END, "extra_body": {"return_token_ids": True}}
    chunks = []
    for chunk in sdk.completions.create(**asked, stream=True, timeout=120):
        chunks.append(chunk)
        if len(chunks) == 5:
            os.kill(stack.pid("worker demo"), signal.SIGKILL)
            revive(stack)

    choices = [chunk.choices[0] for chunk in chunks]
    assert sum(len(choice.token_ids) for choice in choices) == 400
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= sum(len(choice.text) for choice in choices)
    assert choices[-1].finish_reason == "length"


def revive(stack: Stack) -> None:
    killed = stack.pid("worker demo")

    def is_another() -> bool:
        stack.restart_dead()
        return stack.pid("worker demo") != killed

    wait_for(is_another)
