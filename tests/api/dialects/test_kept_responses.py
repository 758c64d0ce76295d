"""Responses that are kept: continued, read, canceled and deleted by their ids, also from the background."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from openai import OpenAI
from openai.types.responses import Response
from redis import Redis
from rq.job import JobStatus

from scorepool import store, wire
from scorepool.api.dialects.openai import RESPONSES
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.http import held_bytes, large_replies
from scorepool.api.routes import dialects
from scorepool.local.stack import Stack
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually
from tests.api.dialects.test_responses import LOOK, QUESTION
from tests.api.fake_worker import COMPLETED, FakeWorker

BODY = {"model": "demo", "input": "a"}
PATH = "/v1/responses"
REFERENCE = {"type": "item_reference"}


@pytest.fixture
def scripted_sdk(scripted: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def respond(sdk: OpenAI, **options: Any) -> Response:
    return sdk.responses.create(
        **{"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 12} | options
    )


def test_a_response_is_read_as_it_was_answered(sdk: OpenAI):
    made = respond(sdk, metadata={"a": "b"}, include=["message.output_text.logprobs"], instructions="Answer.")
    assert made.store is True
    assert sdk.responses.retrieve(made.id) == made
    sdk.responses.delete(made.id)
    for call in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_a_streamed_response_is_kept_too(sdk: OpenAI):
    with sdk.responses.stream(model="demo", input=QUESTION, temperature=0, max_output_tokens=4) as stream:
        [*_, last] = stream
    kept = sdk.responses.retrieve(last.response.id)  # type: ignore[union-attr]
    assert (kept.output_text, kept.status) == (last.response.output_text, "incomplete")  # type: ignore[union-attr]


def test_a_response_that_is_not_stored_is_not_there(sdk: OpenAI):
    made = respond(sdk, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: no such response") as absent:
        respond(sdk, previous_response_id=made.id)
    assert absent.value.code == "previous_response_not_found"


def test_a_continued_response_is_that_of_the_whole_conversation(scripted_sdk: OpenAI):
    options: Any = {"model": "m", "max_output_tokens": None, "tools": [LOOK]}
    first = respond(scripted_sdk, **options, input="Is it in Zürich?", instructions="Answer.")
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Yes."}  # type: ignore[union-attr]
    second = respond(scripted_sdk, **options, input=[output], previous_response_id=first.id)
    third = respond(scripted_sdk, **options, input="Sure?", previous_response_id=second.id)

    items: Any = [{"role": "user", "content": "Is it in Zürich?"}, *first.output, output]
    whole = respond(scripted_sdk, **options, input=items)
    assert second.usage.input_tokens == whole.usage.input_tokens  # type: ignore[union-attr]
    assert second.previous_response_id == first.id
    whole = respond(scripted_sdk, **options, input=[*items, *second.output, {"role": "user", "content": "Sure?"}])
    assert third.usage.input_tokens == whole.usage.input_tokens  # type: ignore[union-attr]

    scripted_sdk.responses.delete(first.id)  # what continues it has it all
    again = respond(scripted_sdk, **options, input="Sure?", previous_response_id=second.id)
    assert again.usage.input_tokens == third.usage.input_tokens  # type: ignore[union-attr]


def test_items_of_kept_responses_may_be_named_by_their_ids(scripted_sdk: OpenAI):
    options: Any = {"model": "m", "max_output_tokens": None, "tools": [LOOK]}  # as the AI SDK's openai() sends them
    first = respond(scripted_sdk, **options, input="Is it in Zürich?")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Yes."}  # type: ignore[union-attr]
    question = scripted_sdk.responses.input_items.list(first.id).data[0]

    def asked(items: list[Any]) -> Any:
        return respond(scripted_sdk, **options, input=[*items, output])

    named = asked([{"type": "item_reference", "id": item.id} for item in [question, *first.output]])
    sent = asked([{"role": "user", "content": "Is it in Zürich?"}, *first.output])

    assert len(first.output) == 3
    assert named.usage.input_tokens == sent.usage.input_tokens
    assert [item.type for item in scripted_sdk.responses.input_items.list(named.id, order="asc")] == [
        item.type for item in scripted_sdk.responses.input_items.list(sent.id, order="asc")
    ]
    again = respond(scripted_sdk, **options, input="Sure?", previous_response_id=named.id)
    assert again.usage.input_tokens == (  # type: ignore[union-attr]
        respond(scripted_sdk, **options, input="Sure?", previous_response_id=sent.id).usage.input_tokens  # type: ignore[union-attr]
    )
    for wrong in (f"msg_{first.id[5:]}_9", f"msg_{'0' * 32}_0", "x", f"resp_{first.id[5:]}"):
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.id: no such") as absent:
            asked([{"type": "item_reference", "id": wrong}])
        assert absent.value.param == "input[0].id"
    with pytest.raises(openai.BadRequestError, match="of at most 256 responses, found 257"):
        asked([{"type": "item_reference", "id": f"msg_{number:032x}_0"} for number in range(257)])


def test_a_response_in_the_background_is_polled(sdk: OpenAI):
    waiting = respond(sdk, background=True)
    assert (waiting.status, waiting.background, waiting.output, waiting.usage) == ("queued", True, [], None)
    while (response := sdk.responses.retrieve(waiting.id)).status in ("queued", "in_progress"):
        time.sleep(0.05)
    assert response.status == "completed" or response.incomplete_details
    assert response.output_text == respond(sdk).output_text
    assert sdk.responses.cancel(waiting.id) == response  # it has ended, so it stays


def test_a_running_response_is_canceled_when_its_cancellation_is_answered(sdk: OpenAI):
    waiting = respond(sdk, background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    canceled = sdk.responses.cancel(waiting.id)
    assert canceled.status not in ("queued", "in_progress")
    assert sdk.responses.retrieve(waiting.id) == canceled


def test_what_a_response_was_asked_is_listed(sdk: OpenAI):
    made = respond(sdk, instructions="Answer.")
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}], "id": "x"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "e"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "f"},
    ]
    second = respond(sdk, input=items, previous_response_id=made.id)

    listed = list(sdk.responses.input_items.list(second.id, order="asc", limit=2))

    shown: list[Any] = [item.model_dump(exclude_none=True) for item in listed]
    assert [item["type"] for item in shown] == [
        "message", "message", "message", "reasoning", "message", "message", "function_call",
        "function_call_output", "function_call_output",
    ]  # fmt: skip
    assert shown[0]["content"] == [{"type": "input_text", "text": QUESTION}]
    assert shown[1]["content"][0]["text"] == made.output_text
    assert [item.get("role") for item in shown[:6]] == [
        "user",
        "assistant",
        "developer",
        None,
        "assistant",
        "assistant",
    ]
    assert shown[3]["content"] == [{"type": "reasoning_text", "text": "c"}]
    assert shown[5]["content"] == [{"type": "refusal", "refusal": "no"}]
    assert (shown[6]["name"], json.loads(shown[6]["arguments"])) == ("look", {"a": 1})
    assert [item["output"] for item in shown[7:]] == [[{"type": "input_text", "text": "e"}], "f"]
    assert list(sdk.responses.input_items.list(second.id)) == listed[::-1]
    with pytest.raises(openai.BadRequestError, match="after: expected the id of an item of this response, found 'x'"):
        sdk.responses.input_items.list(second.id, after="x")


def test_what_is_included_must_be_there(sdk: OpenAI):
    made = respond(sdk)
    both: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    with pytest.raises(openai.BadRequestError, match="expected a response that was made with logprobs"):
        sdk.responses.retrieve(made.id, include=both)
    made = respond(sdk, include=["message.output_text.logprobs"])
    assert sdk.responses.retrieve(made.id, include=both) == made


def test_what_is_kept_is_what_was_asked():
    body = {
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "b"},
        ],
        "tools": [LOOK],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "logit_bias": {"3": 1.5},
    }
    parsed = RESPONSES.parse(json.dumps({"model": "m"} | body).encode())
    assert wire.parse(RESPONSES.kept_body(parsed), ResponseRequest, "msgpack") == parsed


async def in_background(http: Any, body: dict[str, Any] = BODY, **options: Any) -> str:
    reply = await http.post(PATH, json=body | {"background": True}, **options)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


@pytest.mark.anyio
async def test_the_states_of_a_response_in_the_background(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        ids = [await in_background(http) for _ in range(4)]
        jobs = [id_.removeprefix("resp_") for id_ in ids]
        worker.start(jobs[0])
        worker.end(jobs[1], COMPLETED)
        worker.end(jobs[2], wire.Failure(code="too_long", message="too long"), JobStatus.FAILED)
        found = [(await http.get(f"{PATH}/{id_}")).json() for id_ in ids]
        assert [one["status"] for one in found] == ["in_progress", "completed", "failed", "queued"]
        assert found[2]["error"] == {"code": "invalid_prompt", "message": "too long"}
        canceled = (await http.post(f"{PATH}/{ids[3]}/cancel")).json()
        assert (canceled["status"], canceled["error"]) == ("cancelled", None)
        assert (await http.post(f"{PATH}/{ids[3]}/cancel")).json() == canceled
        assert (await http.delete(f"{PATH}/{ids[0]}")).status_code == 409
        refused = await http.post(PATH, json=BODY | {"previous_response_id": ids[0]})
        assert refused.json()["error"]["message"] == (
            "previous_response_id: that response has no answer, it is started"
        )
        assert 0 < redis.ttl(store.Keys.response(jobs[3])) <= 86_400
        assert 86_400 < redis.ttl(store.Keys.response(jobs[0])) <= 30 * 86_400
        for id_ in ids[1:]:
            assert (await http.delete(f"{PATH}/{id_}")).json() == {"id": id_, "object": "response", "deleted": True}
        assert redis.keys(store.Keys.response("*")) == [store.Keys.response(jobs[0]).encode()]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"n":18446744073709551616}', "hold an integer of more than 64 bits"),
        ('{"n":' + "[" * 65 + "]" * 65 + "}", "are nested more than 64 deep"),
        ('{"n":' + "[" * 9999 + "]" * 9999 + "}", "is no JSON object"),
    ],
)
async def test_a_call_that_no_job_can_hold_is_refused_by_name(
    serving: Serving, worker: FakeWorker, arguments: str, says: str
):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    sent_back = BODY | {"input": [{"role": "user", "content": "a"}, call]}
    async with serving() as http:
        for path, body in [
            (PATH, sent_back),
            (PATH, sent_back | {"store": False}),
            (f"{PATH}/input_tokens", sent_back),
        ]:
            error = (await http.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("invalid", "input[1].arguments")
            assert says in error["message"]
        answered = await in_background(http)
        [sequence] = COMPLETED.sequences
        called = wire.ToolCallResult(id="c", name="f", arguments=arguments, entry=0)
        outcome = replace(COMPLETED, sequences=[replace(sequence, tool_calls=[called])])
        worker.end(answered.removeprefix("resp_"), outcome)
        for path in (PATH, f"{PATH}/input_tokens"):
            reply = await http.post(path, json=BODY | {"previous_response_id": answered})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "previous_response_id")
            assert says in error["message"]


@pytest.mark.anyio
async def test_another_owners_response_is_one_that_never_was(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        id_ = await in_background(http, headers=bearer(ALICE))
        worker.end(id_.removeprefix("resp_"), COMPLETED)
        absent = f"resp_{'0' * 32}"
        paths = (("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", ""))
        for method, path in paths:
            replies = [
                await http.request(method, f"{PATH}/{each}{path}", headers=bearer(BOB)) for each in (id_, absent, "x")
            ]
            assert {reply.status_code for reply in replies} == {404}
            assert replies[0].text.replace(id_, absent) == replies[1].text
        texts = {
            (await http.post(PATH, json=BODY | {"previous_response_id": each}, headers=bearer(BOB))).text
            for each in (id_, absent, "x", "")
        }
        assert len(texts) == 1
        texts = {
            (await http.post(PATH, json=BODY | {"input": [REFERENCE | {"id": each}]}, headers=bearer(BOB))).text
            for each in (f"msg_{id_[5:]}_0", f"msg_{absent[5:]}_0", "x")
        }
        assert len(texts) == 1
        assert "no such response" in texts.pop()
        assert (await http.get(f"{PATH}/{id_}", headers=bearer(ALICE))).json()["status"] == "completed"


@pytest.mark.anyio
async def test_a_job_that_is_no_response_is_not_shown_as_one(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        job = {"type": "generate", "model": "demo", "prompt": "a"}
        job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
        assert (await http.get(f"{PATH}/resp_{job_id}")).status_code == 404
        id_ = await in_background(http)
        for damaged in (b"\x80", b""):
            redis.set(store.Keys.response(id_.removeprefix("resp_")), damaged)
            assert (await http.get(f"{PATH}/{id_}")).status_code == 404
        redis.delete(store.Keys.response(id_.removeprefix("resp_")))
        redis.hset(store.Keys.response(id_.removeprefix("resp_")), "a", "b")
        assert (await http.get(f"{PATH}/{id_}")).status_code == 404


@pytest.mark.anyio
async def test_of_many_deletions_one_deletes(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        id_ = await in_background(http)
        worker.end(id_.removeprefix("resp_"), COMPLETED)
        replies = await asyncio.gather(*(http.delete(f"{PATH}/{id_}") for _ in range(8)))
        assert sorted(reply.status_code for reply in replies) == [200] + [404] * 7
        absent = {reply.text for reply in replies if reply.status_code == 404}
        assert absent == {(await http.get(f"{PATH}/{id_}")).text}


@pytest.mark.anyio
async def test_a_refused_response_leaves_nothing(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving(max_queue_depth=1) as http:
        await in_background(http)
        for body in (BODY | {"background": True}, BODY, BODY | {"model": "none", "background": True}):
            assert (await http.post(PATH, json=body)).status_code in (404, 429)
        await eventually(lambda: len(redis.keys(store.Keys.response("*"))) == 1)


@pytest.mark.anyio
async def test_bodies_of_responses_count_as_results_until_they_are_read(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    async with serving() as http:
        ids = [await in_background(http, BODY | {"input": "a" * 10_000}) for _ in range(3)]
        for id_ in ids:
            worker.end(id_.removeprefix("resp_"), COMPLETED)
        body = BODY | {"background": True, "input": [REFERENCE | {"id": f"msg_{id_[5:]}_in0"} for id_ in ids]}
        assert (await http.post(PATH, json=body)).status_code == 200
        monkeypatch.setattr(dialects, "MAX_CONTINUED_BYTES", 15_000)
        refused = await http.post(PATH, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[2].id")
        assert "name fewer" in refused.json()["error"]["message"]

        monkeypatch.setattr(held_bytes, "FREE_BYTES", 500)
        with large_replies.held_results("local") as held:
            held.add(large_replies.MAX_BYTES_OF_OWNER - 1)
            requests = [("GET", f"/{ids[0]}", None), ("GET", f"/{ids[0]}/input_items", None), ("POST", "", body)]
            requests += [("POST", f"/{ids[0]}/cancel", None), ("DELETE", f"/{ids[0]}", None)]
            for method, path, sent in requests:
                assert (await http.request(method, PATH + path, json=sent)).status_code == 429
        assert (await http.get(f"{PATH}/{ids[0]}/input_items")).status_code == 200


@pytest.mark.anyio
async def test_labels_that_have_no_effect_are_short(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        for name in ("user", "prompt_cache_key", "safety_identifier"):
            refused = await http.post(PATH, json=BODY | {name: "a" * 1025})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.anyio
async def test_lines_of_batches_continue_nothing(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        bodies = [
            BODY | {"previous_response_id": "resp_1"},
            BODY | {"background": True},
            BODY | {"input": [REFERENCE | {"id": "x"}]},
        ]
        lines = [{"custom_id": str(i), "method": "POST", "url": PATH, "body": b} for i, b in enumerate(bodies)]
        text = "\n".join(map(json.dumps, lines)).encode()
        file = (await http.post("/v1/files", files={"file": ("a", text)}, data={"purpose": "batch"})).json()["id"]
        create = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
        id_ = (await http.post("/v1/batches", json=create)).json()["id"]
        while (batch := (await http.get(f"/v1/batches/{id_}")).json())["status"] != "completed":
            pass
        errors = (await http.get(f"/v1/files/{batch['error_file_id']}/content")).text
        assert [json.loads(line)["response"]["status_code"] for line in errors.splitlines()] == [400, 400, 400]
        assert "input[0].id: not supported in a line of a batch" in errors
        assert "previous_response_id: not supported in a line of a batch" in errors


def test_the_tokens_of_a_prompt_are_counted_before_it_is_answered(scripted_sdk: OpenAI):
    first = respond(scripted_sdk, model="m", max_output_tokens=None, tools=[LOOK])
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Yes."}  # type: ignore[union-attr]
    bodies: list[dict[str, Any]] = [
        {"input": "Is it in Zürich?"},
        {
            "input": [{"role": "user", "content": "a"}],
            "instructions": "Answer.",
            "tools": [LOOK],
            "tool_choice": "none",
        },
        {"input": "a", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "truncation": "disabled"},
        {"input": [output], "previous_response_id": first.id, "tools": [LOOK], "parallel_tool_calls": False},
    ]
    for body in bodies:
        counted = scripted_sdk.responses.input_tokens.count(model="m", **body)
        answered = respond(scripted_sdk, model="m", max_output_tokens=1, **body)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == answered.usage.input_tokens  # type: ignore[union-attr]
    for wrong, message in (
        ({"tool_choice": "required"}, "`tool_choice` needs `tools`"),
        ({"conversation": "c"}, "conversation: Expected `null`"),
        ({"previous_response_id": "resp_none"}, "previous_response_id: no such response"),
        ({"extra_body": {"temperature": 1}}, "unknown field `temperature`"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            scripted_sdk.responses.input_tokens.count(model="m", input="a", **wrong)  # type: ignore[arg-type]
