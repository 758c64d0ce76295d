"""`/v1/responses` as OpenAI's own SDK sees it, on the demo model and on a scripted one that reasons and calls."""

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from scorepool import wire
from scorepool.api.dialects.openai import chat, responses
from scorepool.api.dialects.openai.chat import ChatRequest
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.local.stack import Stack
from tests.scripted_model import REASONING

LOGPROBS = ["message.output_text.logprobs"]
QUESTION = "What does os.listdir do?"
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}


class City(BaseModel):
    name: Literal["Bern", "Oslo"]
    is_large: bool


@pytest.fixture
def scripted_sdk(scripted: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def respond(sdk: OpenAI, **options: Any) -> Response:
    return sdk.responses.create(
        **{"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 12} | options
    )


def called(sdk: OpenAI, **options: Any) -> Response:
    asked = {"model": "m", "input": "Is it in Zürich?", "tools": [LOOK], "max_output_tokens": None}
    return respond(sdk, **asked | options)


def test_an_answer_is_that_of_a_chat(sdk: OpenAI):
    options: Any = {"instructions": "Answer.", "include": LOGPROBS, "top_logprobs": 3, "metadata": {"a": "b"}}
    response = respond(sdk, max_output_tokens=4, **options)
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": QUESTION}]
    options = {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    completion = sdk.chat.completions.create(model="demo", messages=messages, **options)  # type: ignore[arg-type]

    [choice] = completion.choices
    assert response.output_text == choice.message.content
    [part] = response.output[0].content
    assert part.type == "output_text"
    assert [one.model_dump() for one in part.logprobs] == [
        one.model_dump() for one in choice.logprobs.content if one.channel == "content"
    ]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == completion.usage.prompt_tokens
    assert response.usage.output_tokens == completion.usage.completion_tokens == 4
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Answer.", {"a": "b"}, 4)
    assert [response.error, response.previous_response_id, response.background, response.store] == [
        None,
        None,
        False,
        True,
    ]


def test_an_answer_that_ends_by_itself_is_complete(sdk: OpenAI):
    response = respond(sdk, include=LOGPROBS, extra_body={"logit_bias": {"2": 100}})

    assert (response.status, response.output_text, response.incomplete_details) == ("completed", "", None)
    assert response.output[0].content[0].logprobs == []  # the end token is no part of the text


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_a_stream_adds_up_to_the_response(sdk: OpenAI, has_logprobs: bool):
    options: Any = {"include": LOGPROBS if has_logprobs else [], "max_output_tokens": 6}
    with sdk.responses.stream(model="demo", input=QUESTION, temperature=0, **options) as stream:
        events = list(stream)
    whole = respond(sdk, **options)

    last = events[-1]
    assert last.type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert without_ids(last.response) == without_ids(whole)
    logprobs = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert len(logprobs) == (6 if has_logprobs else 0)


def without_ids(response: Any) -> dict[str, Any]:
    found = response.model_dump(mode="json", warnings=False)
    for one in (found, *found["output"]):
        del one["id"]
        one.pop("parsed_arguments", None)
        for part in one.get("content") or ():
            if isinstance(part, dict):
                part.pop("parsed", None)
    del found["created_at"]
    return found


def test_the_callers_token_ids_at_a_temperature(sdk: OpenAI):
    chosen = {"logprob_token_ids": [40, 50], "logprobs_mode": "processed_logprobs", "seed": 1}
    response = respond(sdk, include=LOGPROBS, temperature=0.5, extra_body=chosen, max_output_tokens=4)
    messages: Any = [{"role": "user", "content": QUESTION}]
    completion = sdk.chat.completions.create(
        model="demo", messages=messages, logprobs=True, temperature=0.5, max_tokens=4, extra_body=chosen
    )

    assert response.model_extra["logprobs_mode"] == completion.model_extra["logprobs_mode"] == "processed_logprobs"
    shown = [[top.logprob for top in one.top_logprobs] for one in response.output[0].content[0].logprobs]
    assert shown == [[top.logprob for top in one.top_logprobs] for one in completion.choices[0].logprobs.content]
    assert {len(values) for values in shown} == {2}


def test_a_schema_is_parsed(sdk: OpenAI):
    response = sdk.responses.parse(model="demo", input="Name a city.", text_format=City, max_output_tokens=500)

    city = response.output_parsed
    assert isinstance(city, City)
    assert response.text.format.type == "json_schema"


def test_reasoning_text_and_calls_are_items(scripted_sdk: OpenAI):
    response = called(scripted_sdk, include=LOGPROBS)

    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "".join(REASONING), [])
    assert (message.type, response.output_text, message.status) == ("message", "One moment ä", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"place": "Zürich"})
    assert response.status == "completed"
    assert response.usage.output_tokens_details.reasoning_tokens == len(REASONING)
    assert b"".join(bytes(one.bytes) for one in message.content[0].logprobs) == "One moment ä".encode()
    assert response.tools[0].name == "look"


# What the specification Open Responses requires of a response, and of a tool in it.
REQUIRED = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error "
    "tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs "
    "temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata "
    "safety_identifier prompt_cache_key"
)
REQUIRED_OF_TOOLS = "type name description parameters strict"


def test_a_response_has_every_field_that_open_responses_requires(scripted: Stack):
    body = {"model": "m", "input": "a", "max_output_tokens": 1, "tools": [{"type": "function", "name": "look"}]}
    response = httpx.post(f"{scripted.url}/v1/responses", json=body | {"presence_penalty": 0.5}).json()
    assert set(REQUIRED.split()) - response.keys() == set()
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0)
    assert [tool.keys() for tool in response["tools"]] == [set(REQUIRED_OF_TOOLS.split())]


def test_a_stream_of_reasoning_and_calls_adds_up_to_the_response(scripted_sdk: OpenAI):
    whole = [called(scripted_sdk, include=LOGPROBS) for _ in range(2)][-1]  # the second computes the prompt to share
    asked: Any = {"model": "m", "input": "Is it in Zürich?", "tools": [LOOK], "include": LOGPROBS}
    with scripted_sdk.responses.stream(**asked, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert final.usage.input_tokens_details.cached_tokens == final.usage.input_tokens  # of the calls before
    for response in (final, whole):
        response.usage.input_tokens_details.cached_tokens = 0
    assert without_ids(final) == without_ids(whole)
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        "reasoning",
        "message",
        "function_call",
    ]
    joined = {"reasoning_text": "".join(REASONING), "output_text": "One moment ä"}
    for name, text in joined.items():
        assert "".join(event.delta for event in events if event.type == f"response.{name}.delta") == text
    [arguments] = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(arguments) == {"place": "Zürich"}
    assert {item.id for item in final.output} == {
        event.item.id for event in events if event.type == "response.output_item.added"
    }


def test_the_items_of_an_answer_are_sent_back(scripted_sdk: OpenAI):
    first = called(scripted_sdk)
    call = first.output[-1]
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "Yes."}
    items = [{"role": "user", "content": "Is it in Zürich?"}, *first.output, told]

    second = called(scripted_sdk, input=items)

    assert second.usage.input_tokens > first.usage.input_tokens
    chosen = scripted_sdk.responses.create(model="m", input="Look.", tools=[LOOK], tool_choice="none", temperature=0)
    assert "function_call" not in [item.type for item in chosen.output]


CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"place":"Z"}'}
PARTS = [{"type": "input_text", "text": "Is it "}, {"type": "input_text", "text": "there?"}]
SAID = {"type": "output_text", "text": "One moment", "annotations": []}
FILE = {"type": "input_file", "file_id": "x"}
ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {
        "type": "message",
        "role": "user",
        "content": PARTS,
    },
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Let me look."}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [SAID],
    },
    CALL | {"id": "fc_1"},
    {"type": "function_call", "call_id": "c2", "name": "look", "arguments": ""},
    {"type": "function_call_output", "call_id": "c1", "output": "Yes."},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "No."}]},
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"role": "assistant", "content": "It is."},
    {"role": "assistant", "content": "I think."},
    {"role": "user", "content": "Sure?"},
]
MESSAGES = [
    {"role": "system", "content": "Answer."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Is it there?"},
    {
        "role": "assistant",
        "content": "One moment",
        "reasoning_content": "Let me look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place":"Z"}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Yes."},
    {"role": "tool", "tool_call_id": "c2", "content": "No."},
    {"role": "assistant", "content": "It is.", "reasoning_content": "Hm."},
    {"role": "assistant", "content": "I think."},
    {"role": "user", "content": "Sure?"},
]


def answered_item(kind: str, item_id: str | None, text: str = "") -> dict[str, Any]:
    """Return an item of an answer, as a client sends it back."""
    if kind == "function_call":
        return CALL | {"id": item_id}
    content = [{"type": "reasoning_text" if kind == "reasoning" else "output_text", "text": text}]
    role = {"role": "assistant"} if kind == "message" else {}
    return {"type": kind, "id": item_id, "content": content} | role


def messages_of(*items: dict[str, Any]) -> list[tuple[str | None, str, int]]:
    """Return the reasoning, the content and the number of calls of each message."""
    body = wire.parse(json.dumps({"model": "m", "input": items}).encode(), ResponseRequest)
    return [(each.reasoning_content, each.content, len(each.tool_calls)) for each in responses.to_messages(body)]


def test_the_items_of_one_answer_become_one_message_in_whatever_order():
    one, other = (f"{digit * 32}_" for digit in "01")
    output = {"type": "function_call_output", "call_id": "c1", "output": "Yes."}
    parts = [answered_item("reasoning", f"rs_{one}0", "A"), answered_item("message", f"msg_{one}1", "B")]
    again = [answered_item("reasoning", f"rs_{one}2", "C"), answered_item("function_call", f"fc_{one}3")]
    following = [answered_item("reasoning", f"rs_{other}0", "D"), answered_item("message", f"msg_{other}1", "E")]

    assert messages_of(*parts, *again, output) == [("AC", "B", 1), (None, "Yes.", 0)]
    assert messages_of(*parts, *following) == [("A", "B", 0), ("D", "E", 0)]
    assert messages_of(answered_item("function_call", None), answered_item("message", None, "B"), output) == [
        (None, "B", 1),
        (None, "Yes.", 0),
    ]


def test_many_items_of_one_answer_take_linear_time():
    """They took four seconds. A second is twenty times what they take."""
    text = "a" * 8000
    items = [
        {"type": "message", "id": f"msg_{'0' * 32}_{number}", "role": "assistant", "content": text}
        for number in range(responses.MAX_ITEMS)
    ]
    body = wire.parse(json.dumps({"model": "demo", "input": items}).encode(), ResponseRequest)
    started_at = time.process_time()
    [message] = responses.to_messages(body)
    assert time.process_time() - started_at < 1
    assert message.content == text * len(items)


def test_items_become_the_job_that_the_same_chat_becomes():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    common = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "top_logprobs": 4,
        "parallel_tool_calls": False,
    }
    function = {name: value for name, value in LOOK.items() if name != "type"}
    as_chat = common | {
        "messages": MESSAGES,
        "logprobs": True,
        "max_completion_tokens": 50,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]},
        },
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "reasoning_effort": "low",
    }
    as_response = common | {
        "instructions": "Answer.",
        "input": ITEMS,
        "include": LOGPROBS,
        "max_output_tokens": 50,
        "tools": [LOOK],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "service_tier": "flex",
    }
    expected = chat.to_request(wire.parse(json.dumps(as_chat).encode(), ChatRequest), 60)
    assert responses.to_request(wire.parse(json.dumps(as_response).encode(), ResponseRequest), 60) == expected


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"conversation": "conv_1"}, "conversation", "null"),
        ({"background": True, "store": False}, "store", "`store` must be true with `background`"),
        ({"previous_response_id": "resp_" * 20}, "previous_response_id", "length <= 64"),
        ({"input": [{"role": "user", "content": "a"}] * 1025}, "input", "at most 1024 messages, found 1025"),
        ({"truncation": "left"}, "truncation", "left"),
        ({"n": 2}, "", "`n` is not supported here, expected 1"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [{"role": "user"}]}, "input[0]", "an item of type 'message' needs `content`"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "no such response"),
        (
            {"input": [{"role": "user", "content": [FILE]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        (
            {"input": [CALL | {"arguments": "[1]"}]},
            "input[0].arguments",
            "no JSON object",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tool_choice": "required"}, "", "`tool_choice` needs `tools`"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [LOOK]}, "", "none of the `tools`"),
        ({"top_logprobs": 3}, "", "`top_logprobs` needs"),
        ({"include": ["file_search_call.results"]}, "include[0]", "file_search_call.results"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "tokens"),
        ({"nonsense": 1}, "", "nonsense"),
        ({"input": [CALL] * 1025}, "", "`input` has 1025 tool calls in all; expected at most 1024"),
    ],
)
def test_what_is_not_there_is_refused_by_name(sdk: OpenAI, changes: dict[str, Any], field: str, says: str):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(sdk, extra_body={"max_output_tokens": 5} | changes)

    assert says in caught.value.message
    if field:
        assert caught.value.param == field


def test_a_batch_of_responses(sdk: OpenAI):
    body = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    file = sdk.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        batch = sdk.batches.retrieve(batch.id)
    [answer] = map(json.loads, sdk.files.content(batch.output_file_id).text.splitlines())

    found = Response.model_validate(answer["response"]["body"])
    assert found.output_text == respond(sdk).output_text


def test_a_client_that_does_not_stream_gets_json(stack: Stack):
    reply = httpx.post(
        f"{stack.url}/v1/responses", json={"model": "demo", "input": "a", "max_output_tokens": 1}, timeout=60
    )
    assert (reply.status_code, reply.json()["object"]) == (200, "response")
