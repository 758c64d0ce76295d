"""`/v1/messages` as Anthropic's own SDK sees it, on the demo model and on a scripted one that reasons and calls."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import TypeAdapter

from scorepool import wire
from scorepool.api.dialects.anthropic import MESSAGES, messages
from scorepool.api.dialects.openai import chat
from scorepool.api.dialects.openai.chat import ChatRequest
from scorepool.local.stack import Stack
from tests.scripted_model import REASONING

QUESTION: Any = [{"role": "user", "content": "What does os.listdir do?"}]
PLACE: Any = {"type": "object", "properties": {"place": {"type": "string"}}}
LOOK: Any = {"name": "look", "description": "Look somewhere.", "input_schema": PLACE}
FUNCTION = {"type": "function", "function": {"name": "look", "description": "Look somewhere.", "parameters": PLACE}}
ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": "Is it in Zürich?"}], "tools": [LOOK]}
BODY = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def claude(stack: Stack) -> Iterator[Anthropic]:
    with Anthropic(base_url=stack.url, api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def scripted_claude(scripted: Stack) -> Iterator[Anthropic]:
    with Anthropic(base_url=scripted.url, api_key="unused", max_retries=0) as sdk:
        yield sdk


def ask(sdk: Anthropic, **options: Any) -> anthropic.types.Message:
    greedy = {"extra_body": {"temperature": 0} | options.pop("extra_body", {})}
    return sdk.messages.create(**{"model": "demo", "messages": QUESTION, "max_tokens": 12} | greedy | options)


def num_input_tokens(message: anthropic.types.Message) -> int:
    assert message.usage.cache_read_input_tokens is not None
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_an_answer_is_that_of_a_chat(claude: Anthropic, sdk: OpenAI):
    message = ask(claude, system="Answer.", max_tokens=4)
    turns = [{"role": "system", "content": "Answer."}, *QUESTION]
    completion = sdk.chat.completions.create(model="demo", messages=turns, max_tokens=4, temperature=0)

    [choice] = completion.choices
    [block] = message.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == choice.message.content
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "demo",
        "max_tokens",
        None,
    )
    assert completion.usage is not None
    assert num_input_tokens(message) == completion.usage.prompt_tokens
    assert message.usage.output_tokens == completion.usage.completion_tokens == 4
    assert message._request_id is not None


def test_what_was_read_from_a_cache_is_counted_apart(claude: Anthropic, sdk: OpenAI):
    question: Any = [{"role": "user", "content": f"Does the cache hold this? {time.time_ns()}"}]
    first = second = ask(claude, messages=question, max_tokens=3)
    until = time.monotonic() + 120
    while not second.usage.cache_read_input_tokens:  # the result is written to the cache after it was sent
        assert time.monotonic() < until
        second = ask(claude, messages=question, max_tokens=3)
    again = sdk.chat.completions.create(model="demo", messages=question, max_tokens=3, temperature=0)

    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert num_input_tokens(first) == num_input_tokens(second) == again.usage.prompt_tokens
    assert second.usage.cache_read_input_tokens == again.usage.prompt_tokens_details.cached_tokens


def test_the_tokens_of_a_prompt_are_counted_as_the_answer_counts_them(claude: Anthropic, scripted_claude: Anthropic):
    message = ask(claude, system="Answer.")
    assert claude.messages.count_tokens(model="demo", messages=QUESTION, system="Answer.").input_tokens == (
        num_input_tokens(message)
    )
    options: Any = ASKED | {"thinking": {"type": "disabled"}}
    called = ask(scripted_claude, **options)
    assert scripted_claude.messages.count_tokens(**options).input_tokens == num_input_tokens(called)
    assert scripted_claude.messages.count_tokens(**ASKED).input_tokens == num_input_tokens(called) - 1  # </think>


def test_a_stop_sequence_is_named(claude: Anthropic):
    text = ask(claude).content[0].text  # type: ignore[union-attr]
    word = text.split()[1]
    message = ask(claude, stop_sequences=["never", word])

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text.partition(word)[0]  # type: ignore[union-attr]


def test_a_stream_adds_up_to_the_message(claude: Anthropic):
    with claude.messages.stream(
        model="demo", messages=QUESTION, max_tokens=12, extra_body={"temperature": 0}
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()

    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert without_ids(final) == without_ids(ask(claude))
    assert num_input_tokens(final) > 0


def test_a_stream_has_the_events_in_anthropics_order(scripted: Stack):
    body = ASKED | {"max_tokens": 64, "temperature": 0, "stream": True}
    reply = httpx.post(f"{scripted.url}/v1/messages", json=body)
    events = [part.split("\n") for part in reply.text.split("\n\n") if part and not part.startswith(":")]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]

    assert [lines[0] for lines in events] == [f"event: {each['type']}" for each in data]
    kinds = [each["type"] for each in data]
    merged = [kind for index, kind in enumerate(kinds) if kind != "content_block_delta" or kinds[index - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert merged == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    assert [each["index"] for each in data if each["type"] == "content_block_start"] == [0, 1, 2]
    assert data[0]["message"]["content"] == []
    usage = data[-2]["usage"]
    assert data[0]["message"]["usage"]["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"] > 0
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    [text] = [each["content_block"] for each in data if each.get("content_block", {}).get("type") == "text"]
    assert text == {"type": "text", "text": ""}  # the AI SDK refuses `citations` that are null
    *_, last, end = [each for each in data if each.get("index") == 0]
    assert (last["delta"], end["type"]) == ({"type": "signature_delta", "signature": "unsigned"}, "content_block_stop")


def without_ids(message: anthropic.types.Message) -> dict[str, Any]:
    """Return a message without its ids; the tokens that came from a cache count as input tokens."""
    found = message.model_dump(mode="json", exclude={"id"})
    found["usage"]["input_tokens"] += found["usage"].pop("cache_read_input_tokens")
    for block in found["content"]:
        block.pop("id", None)
    return found


def test_reasoning_text_and_calls_are_blocks(scripted_claude: Anthropic):
    message = ask(scripted_claude, **ASKED, max_tokens=64)

    thinking, text, call = message.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert (thinking.thinking, thinking.signature) == ("".join(REASONING), "unsigned")
    assert isinstance(text, anthropic.types.TextBlock)
    assert text.text == "One moment ä"
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.name, call.input) == ("look", {"place": "Zürich"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == len(REASONING)


def test_a_stream_of_reasoning_and_calls_adds_up_to_the_message(scripted_claude: Anthropic):
    whole = ask(scripted_claude, **ASKED, max_tokens=64)
    with scripted_claude.messages.stream(**ASKED, max_tokens=64, extra_body={"temperature": 0}) as stream:
        final = stream.get_final_message()

    assert without_ids(final) == without_ids(whole)


def test_an_answer_and_the_results_of_its_calls_are_sent_back(scripted_claude: Anthropic):
    first = ask(scripted_claude, **ASKED, max_tokens=64)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "Yes."}  # type: ignore[union-attr]
    turns: Any = [*ASKED["messages"], {"role": "assistant", "content": first.content}]
    turns += [{"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]

    second = ask(scripted_claude, **ASKED | {"messages": turns}, max_tokens=64)

    assert num_input_tokens(second) > num_input_tokens(first)
    runs: list[str] = []

    @anthropic.beta_tool
    def look(place: str) -> str:
        """Look somewhere.

        Args:
            place: Where to look.
        """
        runs.append(place)
        return "Yes."

    runner = scripted_claude.beta.messages.tool_runner(
        model="m",
        max_tokens=64,
        max_iterations=3,
        tools=[look],
        messages=ASKED["messages"],
        extra_body={"temperature": 0},
    )
    assert len(list(runner)) == 3
    assert runs[:2] == ["Zürich", "Zürich"]


def test_a_schema_is_followed(claude: Anthropic):
    schema = {"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}
    schema["additionalProperties"] = False
    message = ask(claude, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=200)

    assert set(json.loads(message.content[0].text)) == {"large"}  # type: ignore[union-attr]


def test_the_earlier_name_of_a_schema_is_followed(claude: Anthropic):
    """Inspect sends it, as others do that were written for the beta of structured outputs."""
    schema = {"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    message = ask(claude, extra_body={"output_format": form}, max_tokens=200)

    assert set(json.loads(message.content[0].text)) == {"large"}  # type: ignore[union-attr]
    unclear = {"output_format": form, "output_config": {"format": form}}
    with pytest.raises(anthropic.BadRequestError, match="`output_format` is the earlier name"):
        ask(claude, extra_body=unclear)
    with pytest.raises(anthropic.BadRequestError, match=r"output_format\.schema: "):
        ask(claude, extra_body={"output_format": form | {"schema": {"type": "a"}}})


def to_job(**options: Any) -> wire.Generate:
    return messages.to_request(MESSAGES.parse(json.dumps(BODY | options).encode()), 60)


CALL = {"type": "tool_use", "id": "c1", "name": "look", "input": {"place": "Z"}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Is it ", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Let me look.", "signature": ""},
                                      {"type": "text", "text": "One moment"}, CALL, CALL | {"id": "c2", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": "Yes.", "is_error": False},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "N"},
                                                                 {"type": "text", "text": "o."}]},
        {"type": "text", "text": "So?"}]},
]  # fmt: skip


def called(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Is it "},
    {
        "role": "assistant",
        "content": "One moment",
        "reasoning_content": "Let me look.",
        "tool_calls": [called("c1", '{"place":"Z"}'), called("c2", "{}")],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Yes."},
    {"role": "tool", "tool_call_id": "c2", "content": "No."},
    {"role": "user", "content": "So?"},
]


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)
def test_a_conversation_becomes_the_job_that_the_same_chat_becomes(choice: dict[str, Any], chat_choice: dict[str, Any]):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    job = to_job(
        messages=TURNS,
        system=[{"type": "text", "text": "Answer "}, {"type": "text", "text": "briefly."}],
        tools=[LOOK | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tool_choice=choice,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        metadata={"user_id": "u"},
    )
    body = {
        "model": "m",
        "messages": CHAT,
        "tools": [FUNCTION],
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stream": True,
        "max_tokens": 8,
    }
    assert job == chat.to_request(wire.parse(json.dumps(body | chat_choice).encode(), ChatRequest), 60)
    assert wire.decode_request(wire.encode(job)) == job


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
DOCUMENT: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
CLEAR: Any = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "It is"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}] * 1024, "system": "s"}, "messages"),
        ({"system": [PICTURE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [LOOK]}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [CLEAR]}}, "context_management.edits[0].keep"),
        ({"tools": [LOOK | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers[0]"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_here_is_refused_by_name(changes: dict[str, Any], field: str):
    with pytest.raises(wire.Invalid) as refused:
        to_job(**changes)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: ")


def test_defaults_of_betas_pass():
    passing = {"mcp_servers": [], "context_management": None, "speed": "standard", "service_tier": "auto"}
    assert to_job(**passing) == to_job()
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # what Claude Code sends
    assert to_job(context_management=keep_all) == to_job(context_management={"edits": []}) == to_job()
    assert to_job(tools=[LOOK | {"allowed_callers": ["direct"]}]) == to_job(tools=[LOOK])


def test_errors_are_anthropics(claude: Anthropic, scripted_claude: Anthropic, stack: Stack):
    with pytest.raises(anthropic.NotFoundError) as absent:
        ask(claude, model="none")
    assert absent.value.type == "not_found_error"
    assert absent.value.body["request_id"] == absent.value.request_id  # type: ignore[index]
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type: Expected 'image'"
    ) as refused:
        ask(claude, messages=[{"role": "user", "content": [DOCUMENT]}])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"^Error code: 400 .*thinking: the model's chat template"):
        ask(claude, thinking={"type": "disabled"})
    with pytest.raises(anthropic.BadRequestError, match="tools: the model's chat template does not render tools"):
        claude.messages.count_tokens(model="demo", messages=QUESTION, tools=[LOOK])
    with pytest.raises(anthropic.BadRequestError, match="messages: "):
        ask(scripted_claude, model="m", messages=[{"role": "user", "content": "long " * 2000}])
    for method, path, kind in (
        ("GET", "/v1/messages", "invalid_request_error"),
        ("POST", "/v1/messages/none", "not_found_error"),
        ("POST", "/v1/messages?unknown=1", "invalid_request_error"),
        ("POST", "/v1/messages", "invalid_request_error"),
    ):
        error = httpx.request(method, stack.url + path, content=b"{" if method == "POST" else b"").json()
        assert (error["type"], error["error"]["type"]) == ("error", kind)


def test_beta_clients_are_answered(claude: Anthropic):
    message = claude.beta.messages.create(
        model="demo", messages=QUESTION, max_tokens=4, betas=["context-1m-2025-08-07"], extra_body={"temperature": 0}
    )
    assert message.usage.output_tokens == 4


def test_tools_and_variables_are_tokenized_as_the_chat_has_them(scripted: Stack, scripted_claude: Anthropic):
    body = {"model": "m", "messages": ASKED["messages"], "tools": [FUNCTION]}
    reply = httpx.post(f"{scripted.url}/tokenize", json=body | {"chat_template_kwargs": {"enable_thinking": False}})
    counted = scripted_claude.messages.count_tokens(**ASKED, thinking={"type": "disabled"})
    assert reply.json()["count"] == counted.input_tokens
    refused = httpx.post(f"{scripted.url}/tokenize", json=body | {"chat_template_kwargs": {"none": 1}})
    assert refused.json()["error"]["field"] == "chat_template_kwargs.none"


def test_a_batch_of_messages(claude: Anthropic):
    asked: Any = [
        {"custom_id": f"r{length}", "params": {"model": "demo", "max_tokens": length, "messages": QUESTION}}
        for length in (1, 4)
    ]
    batch = claude.messages.batches.create(requests=asked)
    assert batch.request_counts.processing == 2
    while (batch := claude.messages.batches.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.05)
    lengths = {}
    for result in claude.messages.batches.results(batch.id):
        assert result.result.type == "succeeded"
        lengths[result.custom_id] = result.result.message.usage.output_tokens
    assert lengths == {"r1": 1, "r4": 4}
    assert batch.request_counts.succeeded == 2
    assert batch.id in [each.id for each in claude.messages.batches.list(limit=1)]
    with pytest.raises(anthropic.ConflictError):
        claude.messages.batches.cancel(batch.id)
    assert claude.messages.batches.delete(batch.id).id == batch.id
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(batch.id)


def test_models_have_anthropics_form(stack: Stack, claude: Anthropic, sdk: OpenAI):
    names = [model.id for model in sdk.models.list()]
    pages = claude.models.list(limit=1)
    assert [model.id for model in pages] == names == ["demo", "gpt-4o-mini"]
    assert [model.id for model in claude.models.list(before_id=names[1], limit=1)] == names[:1]
    reply = httpx.get(f"{stack.url}/v1/models/gpt-4o-mini", headers={"anthropic-version": "2023-06-01"})
    model = TypeAdapter(anthropic.types.ModelInfo).validate_json(reply.content, strict=True)
    assert model == claude.models.list().data[1]
    assert (model.display_name, model.lifecycle, model.max_input_tokens) == ("gpt-4o-mini", "active", 2048)
    with pytest.raises(anthropic.NotFoundError, match="no live worker serves 'none'"):
        claude.models.retrieve("none")
    with pytest.raises(anthropic.BadRequestError, match="before_id: expected `before_id` or `after_id`"):
        claude.models.list(before_id="a", after_id="b")
    refused = httpx.get(f"{stack.url}/v1/models?limit=1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
