"""`/v1/files` and `/v1/batches` on the real stack, as OpenAI's own SDK sees them."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch, BatchUsage, Completion, FileObject
from openai.types.chat import ChatCompletion

from scorepool import Client, ScorepoolError
from scorepool.local.stack import Stack
from tests.worker.receiver import receiver

ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": f"import {number}", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def chat_line(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": f"Hi {number}"}], "max_tokens": 4} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def start(sdk: OpenAI, lines: list[dict[str, Any]], **options: Any) -> Batch:
    file = sdk.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    given = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file.id} | options
    return sdk.batches.create(**given)


def ended(sdk: OpenAI, batch: Batch, timeout_s: float = 120.0) -> Batch:
    deadline = time.monotonic() + timeout_s
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = sdk.batches.retrieve(batch.id)
    return batch


def entries(sdk: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of an output or error file by custom_id; check that none is there twice."""
    assert file_id is not None
    found = [json.loads(text) for text in sdk.files.content(file_id).text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_line_gets_the_answer_of_a_single_request(sdk: OpenAI):
    batch = start(sdk, [line(i, logprobs=1) for i in range(30)], metadata={"run": "7"})

    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/completions")
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(sdk, batch)
    assert (batch.status, batch.error_file_id, batch.errors, batch.model) == ("completed", None, None, "demo")
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.metadata == {"run": "7"}
    found = entries(sdk, batch.output_file_id)
    assert set(found) == {f"line-{i}" for i in range(30)}
    for i in (0, 17, 29):
        response = found[f"line-{i}"]["response"]
        assert (response["status_code"], found[f"line-{i}"]["error"]) == (200, None)
        alone = sdk.completions.create(model="demo", prompt=f"import {i}", max_tokens=4, temperature=0, logprobs=1)
        assert response["body"]["choices"][0]["text"] == alone.choices[0].text
        assert response["body"]["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            alone.choices[0].logprobs.token_logprobs, abs=1e-4
        )
    bodies = [one["response"]["body"] for one in found.values()]
    assert batch.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies)
    assert batch.usage.total_tokens == sum(body["usage"]["total_tokens"] for body in bodies)
    BatchUsage.model_validate(batch.usage.model_dump())  # the SDK itself accepts missing fields


def test_autobatcher_reads_the_first_answers_before_the_batch_ends(stack: Stack):
    """Send what autobatcher 0.12 sends: see tests/soak/test_autobatcher.py, where it runs itself."""
    lines = [chat_line(i, stream=False, max_tokens=4 if i < 24 else 900, ignore_eos=True) for i in range(30)]
    content = "\n".join(map(json.dumps, lines)).encode()  # no end of line after the last
    headers = {"Authorization": "Bearer unused"}
    with httpx.Client(base_url=f"{stack.url}/v1", headers=headers, timeout=60) as http:
        form = {"file": ("batch-1.jsonl", content, "application/jsonl")}
        file = http.post("/files", files=form, data={"purpose": "batch"})
        FileObject.model_validate_json(file.content, strict=True)
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        reply = http.post("/batches", json=body)
        answers: dict[str, ChatCompletion] = {}
        num_early = offset = 0
        while (batch := Batch.model_validate_json(reply.content, strict=True)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            reply = http.get(f"/batches/{batch.id}")
            if batch.output_file_id:
                path = f"/files/{batch.output_file_id}/content"
                output = http.get(f"{path}?offset={offset}" if offset else path)
                found = [json.loads(text) for text in output.text.strip().split("\n") if text]
                assert int(output.headers["X-Last-Line"]) == offset + len(found)
                offset += len(found)
                num_early += len(found) if output.headers["X-Incomplete"].lower() == "true" else 0
                for one in found:
                    assert one["custom_id"] not in answers
                    raw = json.dumps(one["response"]["body"])
                    answers[one["custom_id"]] = ChatCompletion.model_validate_json(raw, strict=True)
            time.sleep(0.02)
        rest = http.get(f"/files/{batch.output_file_id}/content", params={"offset": offset})
    assert rest.headers["X-Incomplete"] == "false"
    assert num_early >= 20
    assert 4 in {answer.usage.completion_tokens for answer in answers.values() if answer.usage}
    assert len(answers) + len(rest.text.splitlines()) == 30


def test_every_state_of_a_batch_has_the_fields_that_the_sdks_types_require(sdk: OpenAI):
    """The SDK itself builds objects without their required fields, on which a client fails later."""
    raw = sdk.batches.with_raw_response
    for lines in ([line(0), line(1, max_tokens=-1)], [line(0, model="other")]):
        file = sdk.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
        reply = raw.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        seen: set[str] = set()
        while not seen & set(ENDED):
            batch = Batch.model_validate_json(reply.content, strict=True)
            assert batch.usage is not None
            assert batch.request_counts is not None
            seen.add(batch.status)
            reply = raw.retrieve(batch.id)
        assert seen - {"in_progress", "finalizing"} == {"validating", "failed" if batch.errors else "completed"}
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            FileObject.model_validate_json(sdk.files.with_raw_response.retrieve(file_id).content, strict=True)
        if batch.output_file_id:
            [one] = entries(sdk, batch.output_file_id).values()
            Completion.model_validate_json(json.dumps(one["response"]["body"]), strict=True)
        else:
            assert [(error.code, error.line) for error in batch.errors.data] == [("model_not_found", 1)]


def test_lines_may_be_chats_and_lists_of_prompts(sdk: OpenAI):
    chats = start(sdk, [chat_line(i, logprobs=True) for i in range(3)], endpoint="/v1/chat/completions")
    lists = start(sdk, [line(1, prompt=["import", "return", "def"])])

    found = entries(sdk, ended(sdk, chats).output_file_id)
    assert all(one["response"]["body"]["object"] == "chat.completion" for one in found.values())
    [many] = entries(sdk, ended(sdk, lists).output_file_id).values()
    assert [choice["index"] for choice in many["response"]["body"]["choices"]] == [0, 1, 2]


def test_a_refused_line_is_in_the_error_file_and_the_others_are_answered(sdk: OpenAI):
    batch = ended(sdk, start(sdk, [line(1), line(2, logprobs=50), line(3, stream=True), line(4, prompt=[9_999_999])]))

    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    assert set(entries(sdk, batch.output_file_id)) == {"line-1"}
    errors = entries(sdk, batch.error_file_id)
    assert {custom_id: one["response"]["status_code"] for custom_id, one in errors.items()} == {
        "line-2": 400,
        "line-3": 400,
        "line-4": 400,
    }
    params = [errors[f"line-{i}"]["response"]["body"]["error"]["param"] for i in (2, 3, 4)]
    assert params == ["logprobs", "stream", "prompt[0]"]


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl([line(1)]) + b"{nonsense\n", "invalid_json_line", 2),
        (jsonl([line(1), line(2)])[:-9], "invalid_json_line", 2),
        (b"\xef\xbb\xbf" + jsonl([line(1)]), "invalid_json_line", 1),
        (jsonl([line(1), line(2)]).decode().encode("utf-16"), "invalid_json_line", 1),
        (b"\n" + jsonl([line(1) | {"method": "GET"}]), "invalid_line", 2),
        (jsonl([{"custom_id": "a", "method": "POST", "url": "/v1/completions"}]), "invalid_line", 1),
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
        (jsonl([line(1), chat_line(2)]), "mismatched_url", 2),
        (jsonl([line(1, model="nobody")]), "model_not_found", 1),
        (jsonl([line(1, model=7)]), "invalid_line", 1),
    ],
)
def test_a_bad_file_fails_its_batch_and_the_error_names_the_line(
    sdk: OpenAI, text: bytes, code: str, number: int | None
):
    file = sdk.files.create(file=("input.jsonl", text), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    batch = ended(sdk, batch)

    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    [error] = batch.errors.data
    assert (error.code, error.line) == (code, number)
    assert error.message


def test_a_cancelled_batch_keeps_its_answers_and_lists_the_other_lines(sdk: OpenAI):
    batch = start(sdk, [line(i, max_tokens=60, logit_bias={"0": 0}) for i in range(1000)])
    while batch.status != "in_progress" or not batch.request_counts.completed:
        time.sleep(0.02)
        batch = sdk.batches.retrieve(batch.id)

    cancelling = sdk.batches.cancel(batch.id)

    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    with pytest.raises(openai.ConflictError, match="reads this file"):
        sdk.files.delete(batch.input_file_id)
    batch = ended(sdk, cancelling)
    assert (batch.status, batch.cancelling_at) == ("cancelled", cancelling.cancelling_at)
    good, bad = entries(sdk, batch.output_file_id), entries(sdk, batch.error_file_id)
    assert not set(good) & set(bad)
    assert set(good) | set(bad) == {f"line-{i}" for i in range(1000)}
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(good), len(bad))
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        sdk.batches.cancel(batch.id)
    assert sdk.files.delete(batch.input_file_id).deleted


def test_files_are_listed_read_and_deleted(sdk: OpenAI):
    given = jsonl([line(i) for i in range(3)])
    files = [sdk.files.create(file=(f"{i}.jsonl", given), purpose="batch") for i in range(5)]

    assert (files[0].bytes, files[0].filename, files[0].purpose) == (len(given), "0.jsonl", "batch")
    assert files[0].expires_at == files[0].created_at + 30 * 86_400
    assert sdk.files.retrieve(files[2].id) == files[2]
    assert sdk.files.content(files[2].id).content == given
    ids = [file.id for file in sdk.files.list(limit=2, purpose="batch")]  # several pages
    assert ids[:5] == [file.id for file in reversed(files)]
    assert [file.id for file in sdk.files.list(order="asc", purpose="batch")] == ids[::-1]
    assert sdk.files.delete(files[2].id).deleted
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(files[2].id)
    short = sdk.files.create(
        file=("s", given), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600


def test_our_own_client_runs_a_batch(stack: Stack, tmp_path: Path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl([line(i) for i in range(5)]))
    with Client(stack.url) as client:
        file = client.upload_file(path)
        assert (file.filename, file.num_lines, client.file(file.id)) == ("input.jsonl", 5, file)
        batch = client.create_batch(file.id, "/v1/completions", metadata={"run": "7"})
        assert client.batches(limit=1).data[0].id == batch.id
        batch = client.wait_for_batch(batch.id, timeout_s=120)
        assert (batch.status, batch.metadata) == ("completed", {"run": "7"})
        assert batch == client.batch(batch.id)
        lines = list(client.file_lines(batch.output_file_id))
        assert {json.loads(text)["custom_id"] for text in lines} == {f"line-{i}" for i in range(5)}
        assert list(client.file_lines(batch.output_file_id, offset=3)) == lines[3:]
        assert client.files(limit=2).data == [client.file(batch.output_file_id), file]
        with pytest.raises(ScorepoolError, match="only one that has not ended can be cancelled"):
            client.cancel_batch(batch.id)
        client.delete_file(file.id)
        with pytest.raises(ScorepoolError, match="no file"):
            list(client.file_lines(file.id))


def test_batches_are_listed_newest_first(sdk: OpenAI):
    ids = [start(sdk, [line(1)]).id for _ in range(3)]

    listed = [batch.id for batch in sdk.batches.list(limit=2)]

    assert listed[:3] == ids[::-1]
    assert sdk.batches.retrieve(ids[0]).id == ids[0]


def test_errors_name_the_field(sdk: OpenAI):
    file = sdk.files.create(file=("input.jsonl", jsonl([line(1)])), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for change, param in [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.batches.create(**good | change)
        assert caught.value.param.startswith(param)
    with pytest.raises(openai.NotFoundError) as lost:
        sdk.batches.create(**good | {"input_file_id": "file-0"})
    assert lost.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError) as purpose:
        sdk.files.create(file=("input.jsonl", b""), purpose="fine-tune")
    assert purpose.value.param == "purpose"
    with pytest.raises(openai.NotFoundError):
        sdk.batches.retrieve("batch_0")


def test_interactive_requests_are_answered_while_a_batch_runs(sdk: OpenAI):
    batch = start(sdk, [line(i, max_tokens=40) for i in range(1500)])
    while not sdk.batches.retrieve(batch.id).request_counts.completed:
        time.sleep(0.02)

    answers = [sdk.completions.create(model="demo", prompt="import", max_tokens=2) for _ in range(5)]

    assert all(answer.choices for answer in answers)
    counts = sdk.batches.retrieve(batch.id).request_counts
    assert counts.completed < 1500  # the batch was still running
    sdk.batches.cancel(batch.id)
    assert ended(sdk, batch).status == "cancelled"


def test_the_sdk_unwraps_a_batchs_webhook_and_lines_send_none(sdk: OpenAI, stack: Stack):
    with receiver() as listener:
        endpoints = f"{stack.url}/v1/webhooks/endpoints"
        registered = httpx.post(endpoints, json={"url": listener.url}).json()
        good, bad = start(sdk, [line(1), line(2)]), start(sdk, [line(1, model="nobody")])
        for batch in (good, bad):
            ended(sdk, batch)
        deadline = time.monotonic() + 60
        while len(listener.received) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        deliveries = httpx.get(f"{stack.url}/v1/webhooks/deliveries").json()["deliveries"]
        httpx.delete(f"{endpoints}/{registered['endpoint']['id']}")

    events = [
        sdk.webhooks.unwrap(received.body, dict(received.headers), secret=registered["secret"])
        for received in listener.received
    ]
    assert {(event.type, event.data.id) for event in events} == {("batch.completed", good.id), ("batch.failed", bad.id)}
    assert all(event.object == "event" and abs(event.created_at - time.time()) < 60 for event in events)
    assert {one["batch_id"] for one in deliveries} >= {good.id, bad.id}
