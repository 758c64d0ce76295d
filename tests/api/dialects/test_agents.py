"""Agents over the streamed chat: ten turns with reasoning and tools, on a scripted model."""

from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests import scripted_model
from tests.scripted_model import EOS, REASONING, SCRIPT, TEMPLATE

NUM_TURNS = 10
ANSWER = ["Finally: ", "it is in the last room."]
# The generation prompt of the last turn ends with `Finally: `, so the model ends its calls.
LAST_TURN = f"{{% if messages | length == {2 * NUM_TURNS - 1} %}}</think>{ANSWER[0]}{{% endif %}}"


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
