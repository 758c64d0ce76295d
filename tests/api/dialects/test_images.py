"""Images through every process: OpenAI's SDK and native jobs, on a tiny model of texts and images."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from scorepool import Client, Image, JobFailed, Message, ScoreItem
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.images import data_url, image_bytes, image_part

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
from tests.tiny_vision import build_mistral3
from tests.vision_oracles import VisionOracle

ONE, OTHER = image_bytes(32, 24), image_bytes(20, 30, shade=50, kind="JPEG")
# A tool returns an image beside a text, in each dialect.
CALL: Any = {"name": "look", "arguments": "{}"}
CHAT: Any = [
    {"role": "user", "content": [{"type": "text", "text": "the fox"}, image_part(ONE)]},
    {"role": "assistant", "content": "a", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "c", "content": [image_part(OTHER), {"type": "text", "text": " jumps"}]},
]
ITEMS: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "the fox"},
            {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
        ],
    },
    {"role": "assistant", "content": "a"},
    {"type": "function_call", "call_id": "c", **CALL},
    {
        "type": "function_call_output",
        "call_id": "c",
        "output": [
            {"type": "input_image", "image_url": data_url(OTHER, "jpeg"), "detail": "auto"},
            {"type": "input_text", "text": " jumps"},
        ],
    },
]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VisionOracle]:
    folder = tmp_path_factory.mktemp("mistral3")
    return folder, build_mistral3(folder)


@pytest.fixture(scope="module")
def seeing(vision: tuple[Path, VisionOracle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_RESULT_CACHE_BYTES": str(2**24)}
    with Stack([f"see={vision[0]}"], state=state, environ=environ, logs=state) as stack:
        yield stack


def test_openais_sdk_shows_images_in_a_chat(seeing: Stack, vision: tuple[Path, VisionOracle]):
    oracle = vision[1]
    parts: list[Any] = [
        {"type": "text", "text": "the fox "},
        image_part(ONE),
        {"type": "text", "text": " and "},
        image_part(OTHER),
        {"type": "text", "text": "?"},
    ]
    with OpenAI(base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0) as sdk:
        listed = sdk.models.list().model_dump()
        assert [model["images"] for model in listed["models"]] == ["mistral3"]
        answer = sdk.chat.completions.create(
            model="see", messages=[{"role": "user", "content": parts}], max_tokens=6, temperature=0, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
            sdk.chat.completions.create(
                model="see", messages=[{"role": "user", "content": [image_part(ONE[:60])]}], max_tokens=1
            )
    prompt = oracle.token_ids("<bos><|user|>\nthe fox [IMG] and [IMG]?<|assistant|>\n", [ONE, OTHER])
    assert answer.usage.prompt_tokens == len(prompt)
    token_ids = answer.choices[0].token_ids
    logprobs = oracle.logprobs([*prompt, *token_ids], [ONE, OTHER])
    assert token_ids == logprobs[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
    for place, entry in enumerate(answer.choices[0].logprobs.content):
        assert abs(entry.logprob - logprobs[len(prompt) - 1 + place, token_ids[place]]) < 1e-4


def test_a_chat_with_images_is_not_rendered_to_token_ids(seeing: Stack):
    messages = [{"role": "user", "content": "the fox"}, {"role": "user", "content": [image_part(ONE)]}]
    reply = httpx.post(f"{seeing.url}/v1/chat/completions/render", json={"model": "see", "messages": messages})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["field"] == "messages[1].content"
    assert "has images, and a rendered chat only token ids" in reply.json()["error"]["message"]


def block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


TURNS: Any = [
    {"role": "user", "content": [{"type": "text", "text": "the fox"}, block(ONE)]},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "look", "input": {}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [block(OTHER, "image/jpeg"), {"type": "text", "text": " jumps"}],
            }
        ],
    },
]
PROMPT = "<bos><|user|>\nthe fox[IMG]<|assistant|>\na<|tool|>\n[IMG] jumps<|assistant|>\n"


def test_the_sdks_show_images_of_the_user_and_of_tools(seeing: Stack, vision: tuple[Path, VisionOracle]):
    prompt = vision[1].token_ids(PROMPT, [ONE, OTHER])
    with (
        OpenAI(base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0) as sdk,
        Anthropic(base_url=seeing.url, api_key="unused", max_retries=0) as claude,
    ):
        answer = sdk.chat.completions.create(model="see", messages=CHAT, max_tokens=5, temperature=0, logprobs=True)
        response = sdk.responses.create(
            model="see", input=ITEMS, max_output_tokens=5, temperature=0, include=["message.output_text.logprobs"]
        )
        more = sdk.responses.create(
            model="see", previous_response_id=response.id, input="and?", max_output_tokens=5, temperature=0
        )
        message = claude.messages.create(model="see", messages=TURNS, max_tokens=5, extra_body={"temperature": 0})
        counted = claude.messages.count_tokens(model="see", messages=TURNS)
        streamed = list(sdk.responses.create(model="see", input=ITEMS, max_output_tokens=5, temperature=0, stream=True))
    assert answer.usage
    assert response.usage
    assert more.usage
    assert answer.usage.prompt_tokens == response.usage.input_tokens == counted.input_tokens == len(prompt)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == len(prompt)
    assert more.usage.input_tokens > len(prompt) + 5
    text = answer.choices[0].message.content
    assert text == response.output_text == message.content[0].text == streamed[-1].response.output_text
    expected = vision[1].logprobs(prompt, [ONE, OTHER])[-1]
    [first, *_] = response.output[-1].content[0].logprobs
    assert abs(first.logprob - expected.max()) < 1e-4
    assert answer.choices[0].logprobs.content[0].logprob == pytest.approx(first.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
        ("/v1/responses", {"input": ITEMS, "max_output_tokens": 3}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 3}),
    ],
)
def test_lines_of_batches_show_images(seeing: Stack, vision: tuple[Path, VisionOracle], path: Any, body: Any):
    line = {"custom_id": "a", "method": "POST", "url": path, "body": {"model": "see", **body}}
    with OpenAI(base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0) as sdk:
        file = sdk.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
        until = time.monotonic() + 60
        while batch.status not in ("completed", "failed"):
            assert time.monotonic() < until
            time.sleep(0.05)
            batch = sdk.batches.retrieve(batch.id)
        assert batch.output_file_id, batch
        output = json.loads(sdk.files.content(batch.output_file_id).text)
    usage = output["response"]["body"]["usage"]
    found = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    assert found == len(vision[1].token_ids(PROMPT, [ONE, OTHER]))


def test_native_jobs_score_texts_given_images(seeing: Stack, vision: tuple[Path, VisionOracle]):
    oracle = vision[1]
    items, one, other = [" jumps", " sleeps"], Image(data=ONE, at=3), Image(data=OTHER, at=3)
    with Client(seeing.url) as client:
        first = client.score("see", items, prompt="It is ", images=[one])
        second = client.score("see", items, prompt="It is ", images=[other])
        asked = (client.score("see", items, prompt="It is ", images=[one]) for _ in range(50))
        third = next(result for result in asked if result.stamp.cached_items == 2)  # once it is written
        item = ScoreItem(prompt="It is ", images=[one], completion=" jumps")
        fourth = client.score("see", [item], cache=False)
        with pytest.raises(JobFailed, match="the text holds the marker itself"):
            client.score("see", ["a"], prompt="[IMG] b", images=[Image(data=ONE)])
    assert not second.stamp.cached_items
    assert fourth.sequences[0].logprobs == pytest.approx(first.sequences[0].logprobs, abs=1e-5)
    for result, image in ((first, ONE), (second, OTHER), (third, ONE)):
        for sequence, word in zip(result.sequences, ("jumps", "sleeps"), strict=True):
            token_ids = oracle.token_ids(f"<bos>It [IMG]is  {word}", [image])
            assert token_ids[-len(sequence.token_ids) :] == sequence.token_ids
            logprobs = oracle.logprobs(token_ids, [image])
            for place in range(1, len(sequence.token_ids) + 1):
                found = sequence.logprobs[len(sequence.token_ids) - place]
                assert abs(found - logprobs[-place - 1, token_ids[-place]]) < 1e-4


def test_native_generations_show_images(seeing: Stack):
    with Client(seeing.url) as client:
        options: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "recompute": True, "ignore_eos": True}
        prompted = client.generate("see", "the [fox", images=[Image(data=ONE, at=4)], **options)
        chat = [Message(role="user", content="the fox", images=[Image(data=ONE, at=4)])]
        answered = client.generate("see", messages=chat, **options)
        for result in (prompted, answered):
            [sequence] = result.sequences
            assert sequence.recomputed_logprobs == pytest.approx(sequence.logprobs, abs=1e-4)
        assert len(client.tokenize("see", messages=chat).token_ids) == answered.usage.prompt_tokens
