"""A body from which no request can be built is refused with a 400 in the body's words, also as a line of a batch."""

import json
from typing import Any

import pytest

from scorepool import wire
from scorepool.api.batches.lines import ended_line, job_id_of
from scorepool.api.http.errors import BadRequest
from tests.api.batches.test_batches import has, lines_of, start, until
from tests.api.conftest import Serving, eventually
from tests.api.fake_worker import COMPLETED, FakeWorker
from tests.api.test_classify import CLASSIFIER

pytestmark = pytest.mark.anyio

RESPONSE: dict[str, Any] = {"model": "demo", "input": "a", "max_output_tokens": 4}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
TOO_LARGE = {"minimum": 2**64}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def line(number: int, body: dict[str, Any]) -> bytes:
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}).encode()


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    grammar = {"type": "json_schema", "value": {"schema": schema}}
    return {"inputs": "a", "parameters": {"max_new_tokens": 4, "grammar": grammar}}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/responses", RESPONSE | {"min_tokens": 5}, "min_tokens: must be at most `max_output_tokens`"),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 600}] * 2},
            "messages: has 1200 tool calls in all; expected at most 1024",
        ),
        ("/generate_stream", with_schema(TOO_LARGE), "parameters.grammar: `grammar`: the values of the schema hold an"),
        (
            "/generate_stream",
            with_schema(nested(65)),
            "parameters.grammar: `grammar`: the values of the schema are nes",
        ),
        (
            "/api/v1/asample",
            {
                "base_model": "demo",
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                "sampling_params": {"max_tokens": 0},
            },
            "sampling_params.max_tokens: 0 generates nothing: set `prompt_logprobs` to true",
        ),
    ],
)
async def test_what_the_type_of_a_request_refuses_is_a_bad_request(
    serving: Serving, worker: FakeWorker, path: str, body: dict[str, Any], says: str
):
    async with serving() as http:
        reply = await http.post(path, json=body)
    assert reply.status_code == 400
    assert says in reply.text


async def test_a_classifier_is_shown_no_images(serving: Serving, worker: FakeWorker):
    worker.register(classifier=CLASSIFIER)
    async with serving() as http:
        reply = await http.post("/classify", json={"messages": [{"role": "user", "content": [IMAGE]}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"


async def test_a_line_of_which_no_request_can_be_built_ends_and_the_others_run(serving: Serving, worker: FakeWorker):
    bodies = [RESPONSE, RESPONSE | {"min_tokens": 5}, RESPONSE]
    text = b"\n".join(line(number, body) for number, body in enumerate(bodies, 1))
    async with serving() as http:
        batch_id = await start(http, text, endpoint="/v1/responses")
        await eventually(lambda: len(worker.waiting()) == 2)
        for number in (1, 3):
            worker.end(job_id_of(batch_id, number, 0), COMPLETED)
        batch = await until(http, batch_id, has("completed"))
        errors = await lines_of(http, batch["error_file_id"])
    assert batch["request_counts"] | {"total": 3, "completed": 2, "failed": 1} == batch["request_counts"]
    assert errors["2"]["response"]["status_code"] == 400
    assert errors["2"]["response"]["body"]["error"]["param"] == "min_tokens"


def test_a_line_that_another_version_accepted_is_refused_when_its_job_has_failed():
    batch = wire.Batch(
        id="b",
        endpoint="/v1/responses",
        input_file_id="f",
        completion_window="24h",
        status="in_progress",
        created_at=1,
        expires_at=2,
        request_counts=wire.RequestCounts(total=1, completed=0, failed=0),
    )
    failure = wire.Failure(code="invalid", message="no")
    failed = wire.Job(id="j", kind="generate", model="demo", status="failed", created_at=1.0, failure=failure)
    with pytest.raises(BadRequest, match="`max_output_tokens`"):
        ended_line(line(1, RESPONSE | {"min_tokens": 5}), batch, [failed], None)
