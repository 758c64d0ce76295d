"""Agents over the streamed chat: ten turns with reasoning and tools, on a scripted model."""

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import agents as openai_agents
import httpx
import httpx2
import pytest
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from anthropic import AsyncAnthropic
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import SecretStr
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, ThinkingPart, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests import scripted_model
from tests.scripted_model import EOS, REASONING, SCRIPT, TEMPLATE

NUM_TURNS = 10
ANSWER = ["Finally: ", "it is in the last room."]
# The generation prompt of the last turn ends with `Finally: `, so the model ends its calls.
LAST_TURN = f"{{% if messages | length >= {2 * NUM_TURNS - 1} %}}</think>{ANSWER[0]}{{% endif %}}"


@pytest.fixture(scope="module")
def agentic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, state = tmp_path_factory.mktemp("agentic"), tmp_path_factory.mktemp("stack")
    template = TEMPLATE.replace("{# tool_call.name #}", LAST_TURN + "{# tool_call.name #}")
    scripted_model.build(folder, SCRIPT, [*ANSWER, EOS], template=template, context_length=4096)
    with Stack([f"m={folder}"], state=state, environ={"SCOREPOOL_PORT": str(free_port())}, logs=state) as stack:
        yield stack


@pytest.mark.anyio
async def test_pydantic_ai_runs_ten_streamed_turns_with_reasoning_and_tools(agentic: Stack):
    places: list[str] = []

    def look(place: str) -> str:
        """Look somewhere."""
        places.append(place)
        return f"Nothing in room {len(places)}."

    num_events = 0
    async with AsyncOpenAI(base_url=f"{agentic.url}/v1", api_key="unused") as sdk:
        model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=sdk))
        agent = Agent(model, tools=[look], model_settings={"temperature": 0.0, "max_tokens": 100})
        async with agent.iter("Is it in Zürich?") as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        num_events += len([event async for event in stream])

    assert run.result is not None
    assert run.result.output == ANSWER[1]
    assert places == ["Zürich"] * (NUM_TURNS - 1)
    *turns, last = [message for message in run.result.all_messages() if isinstance(message, ModelResponse)]
    assert len(turns) == NUM_TURNS - 1
    for turn in turns:
        thinking, *_, call = turn.parts
        assert isinstance(thinking, ThinkingPart)
        assert thinking.content == "".join(REASONING)
        assert turn.text == "One moment ä"
        assert isinstance(call, ToolCallPart)
    assert last.text == ANSWER[1]
    assert num_events > 3 * NUM_TURNS
    assert run.usage.requests == NUM_TURNS


@pytest.mark.anyio
async def test_pydantic_ai_sends_reasoning_back_as_anthropic_has_it(agentic: Stack):
    def look(place: str) -> str:
        """Look somewhere."""
        return f"Nothing in {place}."

    bodies: list[dict[str, Any]] = []

    async def record(request: httpx2.Request) -> None:
        bodies.append(json.loads(request.content))

    async with (
        httpx2.AsyncClient(event_hooks={"request": [record]}, timeout=60) as http,
        AsyncAnthropic(base_url=agentic.url, api_key="unused", http_client=http) as sdk,
    ):
        model = AnthropicModel("m", provider=AnthropicProvider(anthropic_client=sdk))
        agent = Agent(model, tools=[look], model_settings={"max_tokens": 100})
        async with agent.iter("Is it in Zürich?") as run:
            async for node in run:
                if Agent.is_model_request_node(node) and len(bodies) % 2:  # every second turn is streamed
                    async with node.stream(run.ctx) as stream:
                        assert [event async for event in stream]

    assert run.result is not None
    assert run.result.output == ANSWER[1]
    assert len(bodies) == NUM_TURNS
    answers = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "assistant"]
    assert [answer[0].get("thinking") for answer in answers] == ["".join(REASONING)] * (NUM_TURNS - 1)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_openai_agents_runs_ten_streamed_turns(
    agentic: Stack, kind: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]
):
    places: list[str] = []

    @function_tool
    def look(place: str) -> str:
        """Look somewhere."""
        places.append(place)
        return f"Nothing in room {len(places)}."

    async with AsyncOpenAI(base_url=f"{agentic.url}/v1", api_key="unused") as sdk:
        settings = ModelSettings(temperature=0.0, max_tokens=100)
        agent = openai_agents.Agent(name="a", model=kind("m", openai_client=sdk), tools=[look], model_settings=settings)
        config = RunConfig(tracing_disabled=True)
        result = Runner.run_streamed(agent, "Is it in Zürich?", max_turns=NUM_TURNS, run_config=config)
        events = [event async for event in result.stream_events()]

    assert result.final_output == ANSWER[1]
    assert places == ["Zürich"] * (NUM_TURNS - 1)
    assert len(result.raw_responses) == NUM_TURNS
    assert len(events) > 3 * NUM_TURNS


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_runs_ten_streamed_turns(agentic: Stack, use_responses_api: bool):
    @tool
    def look(place: str) -> str:
        """Look somewhere."""
        return f"Nothing in {place}."

    chat = ChatOpenAI(
        model="m",
        base_url=f"{agentic.url}/v1",
        api_key=SecretStr("unused"),
        temperature=0,
        max_completion_tokens=100,
        use_responses_api=use_responses_api,
    ).bind_tools([look])
    messages: list[BaseMessage] = [HumanMessage("Is it in Zürich?")]
    for _ in range(NUM_TURNS):
        chunks = list(chat.stream(messages))
        reply = functools.reduce(operator.add, chunks)
        messages += [reply, *[look.invoke(call) for call in reply.tool_calls]]
        if not reply.tool_calls:
            break

    *_, last = messages
    assert last.text == ANSWER[1]
    assert [message.text for message in messages if isinstance(message, ToolMessage)] == ["Nothing in Zürich."] * 9
    assert len(messages) == 2 * NUM_TURNS


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


def stream_chat(stack: Stack, **body: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Stream an answer and put it together, as clients do: message, reason of its end, usage."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason, usage = "", {}
    headers = {"authorization": "Bearer unused", "accept": "text/event-stream"}
    options = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
    url = f"{stack.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=options | body, headers=headers, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for chunk in map(json.loads, lines[:-1]):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta, finish_reason = choice["delta"], choice["finish_reason"] or finish_reason
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                if part["index"] not in calls:  # the first part of a call names it
                    assert part["id"]
                    function = {"name": part["function"]["name"], "arguments": ""}
                    calls[part["index"]] = {"id": part["id"], "type": "function", "function": function}
                calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, finish_reason, usage


@pytest.mark.parametrize("sends_reasoning", [False, True])
def test_a_coding_agent_with_tools_runs_ten_streamed_turns(agentic: Stack, sends_reasoning: bool):
    """Requests as opencode's: a system message, content in parts, `tool_choice` auto, reasoning sent back or not."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": [{"type": "text", "text": "Is it in Zürich?"}]},
    ]
    ids: set[str] = set()
    prompt_tokens = [0]
    for _ in range(NUM_TURNS - 1):
        message, finish_reason, usage = stream_chat(
            agentic, messages=messages, tools=[LOOK], tool_choice="auto", temperature=0, top_p=1
        )
        assert finish_reason == "tool_calls"
        assert message["reasoning_content"] == "".join(REASONING)
        assert message["content"] == "One moment ä"
        [call] = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"place": "Zürich"})
        ids.add(call["id"])
        prompt_tokens.append(usage["prompt_tokens"])
        if not sends_reasoning:
            del message["reasoning_content"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "Nothing there."}]
    last, finish_reason, _ = stream_chat(agentic, messages=messages, tools=[LOOK], tool_choice="auto", temperature=0)

    assert (last["content"], finish_reason) == (ANSWER[1], "stop")
    assert "tool_calls" not in last
    assert prompt_tokens == sorted(set(prompt_tokens))
    assert len(messages) == 2 * NUM_TURNS


def test_a_coding_agent_that_reads_edits_from_the_text_runs_ten_streamed_turns(agentic: Stack):
    """Requests as aider's: no tools, the whole conversation each time, reasoning shown and not sent back."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer with edits."}]
    for turn in range(1, NUM_TURNS + 1):
        messages.append({"role": "user", "content": f"Edit number {turn}."})
        message, finish_reason, usage = stream_chat(agentic, messages=messages, temperature=0, tools=None)
        assert finish_reason == "stop"
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if turn < NUM_TURNS:
            assert message["reasoning_content"] == "".join(REASONING)
            assert message["content"].startswith("One moment ä")
            assert "<think>" not in message["content"]
        messages.append({"role": "assistant", "content": message["content"]})
    assert messages[-1]["content"] == ANSWER[1]
