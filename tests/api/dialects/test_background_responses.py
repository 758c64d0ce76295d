"""The events of a response in the background: the same for every client, and goes on without them."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from openai import OpenAI
from openai.types.responses import ResponseCompletedEvent, ResponseCreatedEvent
from rq.job import JobStatus

from scorepool import wire
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.responses_kept import KeptResponseEvents
from scorepool.local.stack import Stack
from tests.answered_chat import Run
from tests.api.conftest import Serving, eventually
from tests.api.fake_worker import COMPLETED, FakeWorker
from tests.chat_formats import FORMATS, SAMPLES, chat_codec_of
from tests.scripted_model import CONTENT, REASONING

PATH = "/v1/responses"
BODY = {"model": "demo", "input": "a", "background": True, "stream": True}


@pytest.fixture
def scripted_sdk(scripted: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def events_of(run: Run, deltas: Sequence[wire.TokenDelta], after: int = -1) -> list[dict[str, Any]]:
    body = {"model": "m", "input": "Go.", "background": True, "stream": True}
    parsed = wire.parse(json.dumps(body | {"include": ["message.output_text.logprobs"]}).encode(), ResponseRequest)
    job = wire.Job(id="j", kind="generate", model="m", status="completed", created_at=0.0, result=run.result)
    writer = KeptResponseEvents(parsed, job, after)
    events = [*writer.begin(), *(event for each in (*deltas, job) for event in writer.add(each))]
    return [json.loads(event.partition(b"\ndata: ")[2]) for event in events]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORMATS)
def test_the_events_of_an_answer_do_not_depend_on_how_its_tokens_came(name: str):
    sample, codec = SAMPLES[name], chat_codec_of(name)
    reasoning, content = sample.reasoning, sample.content
    text = f"{reasoning[0]}Hm ä?{reasoning[1]}{content[0]}Ja ✓ nun{content[1]}"
    token_ids = [*codec.tokenizer.encode(text + sample.look, add_bos=False)[0], *sorted(codec.tokenizer.eos_ids)[:1]]
    for options in ({}, {"stop": "ür"}, {"stop": "x"}):
        runs = [Run(codec, token_ids, steps, **options) for steps in ((1,), (2, 7, 1), (10_000,))]

        [whole, *others] = [events_of(run, run.deltas) for run in runs]

        assert others == [whole, whole]
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        for after in (0, 3, len(whole) // 2, len(whole) - 1, len(whole)):
            assert events_of(runs[1], runs[1].deltas, after) == whole[after + 1 :]


def test_a_stream_is_taken_up_where_it_broke_off(scripted_sdk: OpenAI):
    responses = scripted_sdk.responses
    begun = responses.create(model="m", input="Is it in Z\u00fcrich?", background=True, stream=True, temperature=0)
    first = [next(iter(begun)) for _ in range(5)]
    begun.close()
    created = first[0]
    assert isinstance(created, ResponseCreatedEvent)
    assert created.response.status == "queued"

    rest = list(responses.retrieve(created.response.id, stream=True, starting_after=first[-1].sequence_number))

    assert [event.sequence_number for event in [*first, *rest]] == list(range(5 + len(rest)))
    assert list(responses.retrieve(created.response.id, stream=True)) == [*first, *rest]
    assert isinstance(rest[-1], ResponseCompletedEvent)
    assert rest[-1].response == responses.retrieve(created.response.id)
    assert "".join(event.delta for event in rest if event.type == "response.output_text.delta") == (
        rest[-1].response.output_text
    )
    with responses.stream(response_id=created.response.id, starting_after=4) as stream:
        assert stream.get_final_response().output_text.startswith(CONTENT[0])
    assert [event.delta for event in [*first, *rest] if event.type == "response.reasoning_text.delta"] == REASONING


def test_only_what_was_made_to_be_streamed_is_streamed_again(scripted_sdk: OpenAI):
    responses = scripted_sdk.responses
    made = responses.create(model="m", input="a", max_output_tokens=4)
    with pytest.raises(openai.BadRequestError, match="stream: expected a response that was made with `background`"):
        responses.retrieve(made.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after: expected `stream`: true"):
        responses.retrieve(made.id, starting_after=3)  # type: ignore[call-overload]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("last", "text", "stop_reason"), [(b".\n\nQ", "Hi.", "\n\n"), (b".", "Hi", 2)], ids=["stop", "stop_token_ids"]
)
async def test_a_stream_has_no_text_behind_the_end_of_the_answer(
    serving: Serving, worker: FakeWorker, last: bytes, text: str, stop_reason: int | str
):
    sequence = wire.SequenceResult(
        token_ids=[1, 2],
        token_bytes=[b"Hi", last],
        channels=["content", "content"],
        text=text,
        finish_reason="stop",
        stop_reason=stop_reason,
    )
    async with serving() as http:
        streamed = asyncio.create_task(http.post(PATH, json=BODY | {"stop": ["\n\n"], "stop_token_ids": [2]}))
        await eventually(lambda: len(worker.waiting()) == 1)
        [job_id] = worker.waiting()
        worker.end(job_id, replace(COMPLETED, sequences=[sequence]))
        events = [json.loads(line[6:]) for line in (await streamed).text.splitlines() if line.startswith("data: ")]
        kept = (await http.get(f"{PATH}/resp_{job_id}")).json()

    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert events[-1]["response"] == kept
    assert kept["output"][0]["content"][0]["text"] == text


@pytest.mark.anyio
async def test_a_response_without_an_answer_ends_its_stream(serving: Serving, worker: FakeWorker):
    failure = wire.Failure(code="too_long", message="too long")
    async with serving() as http:
        streamed = asyncio.create_task(http.post(PATH, json=BODY))
        await eventually(lambda: len(worker.waiting()) == 1)
        [job_id] = worker.waiting()
        worker.end(job_id, failure, JobStatus.FAILED)
        data = [line[6:] for line in (await streamed).text.splitlines() if line.startswith("data: ")]
        last = json.loads(data[-1])
        assert last["type"] == "response.failed"
        assert last["response"] == (await http.get(f"{PATH}/resp_{job_id}")).json()
        assert last["response"]["error"] == {"code": "invalid_prompt", "message": "too long"}
        again = await http.get(f"{PATH}/resp_{job_id}", params={"stream": "true", "starting_after": len(data) - 2})
        assert again.text.count("event: ") == 1
        assert json.loads(again.text.partition("data: ")[2]) == last
