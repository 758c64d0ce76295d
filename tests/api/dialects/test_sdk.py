"""OpenAI's SDK beyond plain calls: asynchronous client, stream events, raw responses, parsed answers."""

import asyncio
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from scorepool.local.stack import Stack

ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "What does os.listdir do?"}]}
GREEDY: dict[str, Any] = ASKED | {"temperature": 0, "max_completion_tokens": 400}  # longer than the answer


class Answer(BaseModel, extra="forbid"):
    kind: Literal["file", "folder"]


def test_the_asynchronous_client_gets_the_same_answers(stack: Stack, sdk: OpenAI):
    expected = sdk.chat.completions.create(**GREEDY).choices[0].message.content

    async def ask() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
            calls = [client.chat.completions.create(**GREEDY) for _ in range(8)]
            found = [completion.choices[0].message.content for completion in await asyncio.gather(*calls)]
            deltas = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**GREEDY, stream=True)
            ]
            async with client.chat.completions.stream(**GREEDY) as events:
                final = await events.get_final_completion()
        return [*found, "".join(deltas), final.choices[0].message.content]

    assert asyncio.run(ask()) == [expected] * 10


def test_stream_events_add_up_to_the_answer(sdk: OpenAI):
    options: dict[str, Any] = GREEDY | {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    with sdk.chat.completions.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_completion()

    whole = sdk.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage == whole.usage
    assert "".join(event.delta for event in events if event.type == "content.delta") == whole.choices[0].message.content
    entries = [entry for event in events if event.type == "logprobs.content.delta" for entry in event.content]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in whole.choices[0].logprobs.content], abs=1e-4
    )


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the SDK's own message
def test_parsed_answers_are_streamed_and_accepted_in_the_chat(sdk: OpenAI):
    with sdk.chat.completions.stream(**ASKED, response_format=Answer, seed=1) as stream:
        done = [event for event in stream if event.type == "content.done"]
        message = stream.get_final_completion().choices[0].message

    assert isinstance(message.parsed, Answer)
    assert [event.parsed for event in done] == [message.parsed]
    messages = [*ASKED["messages"], message, {"role": "user", "content": "Sure?"}]
    assert sdk.chat.completions.create(model="demo", messages=messages, max_tokens=1).choices


def test_raw_responses(sdk: OpenAI):
    raw = sdk.chat.completions.with_raw_response.create(**ASKED, max_tokens=1)
    with sdk.completions.with_streaming_response.create(model="demo", prompt="a", max_tokens=3, stream=True) as reply:
        lines = list(reply.iter_lines())

    assert raw.headers["content-type"] == "application/json"
    assert isinstance(raw.parse(), ChatCompletion)
    assert lines[-2:] == ["data: [DONE]", ""]
