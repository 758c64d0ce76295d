"""Bad input is refused with a 4xx that names the field, and leaves nothing in Redis."""

import json
from typing import Any

import msgspec
import pytest
from redis import Redis

from scorepool import store
from tests.api.conftest import Serving, generate, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio

ITEM = {"prompt": "a", "completion": "b"}
HOOK = "https://example.com/hook"


def item(**changes: Any) -> dict[str, Any]:
    return score(items=[ITEM | changes])


BODIES: list[tuple[Any, str | None]] = [
    # not a request at all
    ([], None),
    (3, None),
    (None, None),
    ("text", None),
    ({}, "type"),
    ({"type": "rank", "model": "demo"}, "type"),
    ({"type": 1, "model": "demo"}, "type"),
    # fields of every job
    ({"type": "score", "items": [ITEM]}, "model"),
    (score(model=""), "model"),
    (score(model="-x"), "model"),
    (score(model="a:high"), "model"),
    (score(model="a" * 129), "model"),
    (score(model=None), "model"),
    (score(model="webhooks"), "model"),
    (score(modle="demo"), "modle"),
    (score(priority="urgent"), "priority"),
    (score(priority=1), "priority"),
    (score(timeout_s=0), "timeout_s"),
    (score(timeout_s=86_401), "timeout_s"),
    (score(timeout_s=1.5), "timeout_s"),
    (score(timeout_s="10"), "timeout_s"),
    (score(expires_at=1.0), "expires_at"),
    (score(expires_at=-1), "expires_at"),
    (score(expires_at=1e300), "expires_at"),
    (score(expires_at="2030-01-01"), "expires_at"),
    (score(wait_for_model="yes"), "wait_for_model"),
    # score
    ({"type": "score", "model": "demo"}, "items"),
    (score(items=[]), "items"),
    (score(items="ab"), "items"),
    (score(items=[ITEM] * 1025), "items"),
    (score(items=["ab"]), "items[0]"),
    (score(items=[ITEM, {"prompt": "a"}]), "items[1].completion"),
    (item(prompt=5), "items[0].prompt"),
    (item(prompt=None), "items[0].prompt"),
    (score(items=[{"completion": "b"}]), "items[0].prompt"),
    (score(prompt="a"), "items[0].prompt"),
    (score(prompt=[1], items=[{"completion": [1]}, {"completion": "b"}]), "items[1].completion"),
    (score(prompt=[], items=[{"completion": [1]}]), "prompt"),
    (score(prompt=[1, 1000], items=[{"completion": [1]}]), "prompt[1]"),
    (score(prompt=[1], items=[{"completion": [1000]}]), "items[0].completion[0]"),
    (score(prompt=[1] * 60, items=[{"completion": [1]}, {"completion": [1] * 5}]), "items[1]"),
    (item(completion=""), "items[0].completion"),
    (item(completion=[1]), "items[0]"),
    (item(prompt=[1], completion=[]), "items[0].completion"),
    (item(prompt=[], completion=[1]), "items[0].prompt"),
    (item(prompt=[1], completion=[-1]), "items[0].completion[0]"),
    (item(prompt=[1, "2"], completion=[1]), "items[0].prompt[1]"),
    (item(prompt=[2**31], completion=[1]), "items[0].prompt[0]"),
    (item(prompt=[1.5], completion=[1]), "items[0].prompt[0]"),
    (item(prompt=[True], completion=[1]), "items[0].prompt[0]"),
    (item(weight=2), "items[0].weight"),
    (score(targets=5), "targets"),
    (score(targets=[1, -1]), "targets[1]"),
    (score(targets=[[1]]), "targets[0]"),
    (score(targets=[1, 1000]), "targets[1]"),
    (item(targets=[1, "a"]), "items[0].targets[1]"),
    (item(targets=[1, 1000]), "items[0].targets[1]"),
    (item(targets=[1, [2]]), "items[0].targets"),
    (item(targets=[[1]]), "items[0].targets"),
    (item(prompt=[1], completion=[1, 2], targets=[[1], [2, 1000]]), "items[0].targets[1][1]"),
    (item(prompt=[1], completion=[1, 2], targets=[[1]]), "items[0].targets"),
    (item(prompt=[1], completion=[1, 2], targets=[[1]] * 3), "items[0].targets"),
    (item(prompt=[1], completion=[1, 2], targets=[[1]] * 2) | {"score": "all"}, "items[0].targets"),
    (item(targets=[1]) | {"targets": [1]}, "items[0].targets"),
    (generate(targets=[1000]), "targets[0]"),
    (generate(target_bytes=True), "target_bytes"),
    (generate(targets=[1] * 1025, stream=True), "targets"),
    (generate(logprobs_mode="processed"), "logprobs_mode"),
    (generate(logprobs_mode="raw_logits"), "logprobs_mode"),
    (generate(logprobs_mode="processed_logprobs", temperature=0), "temperature"),
    (generate(logprobs_mode="processed_logprobs", temperature=1e-10), "temperature"),
    (generate(logprobs_mode="processed_logprobs", recompute=True, top_p=0.9), "recompute"),
    (score(logprobs_mode="raw_logprobs"), "logprobs_mode"),
    (generate(targets=[1], logprobs=False), "targets"),
    (score(score="prompt"), "score"),
    (score(top_logprobs=1025), "top_logprobs"),
    (score(top_logprobs=1001), "top_logprobs"),  # above the vocabulary
    (score(top_logprobs=-2), "top_logprobs"),
    (score(top_logprobs=True), "top_logprobs"),
    (score(temperature=0), "temperature"),
    (score(temperature=101), "temperature"),
    (score(temperature="1"), "temperature"),
    (score(rank=1), "rank"),
    (score(entropy=None), "entropy"),
    (score(max_tokens=5), "max_tokens"),
    # generate
    (generate(prompt=None), None),
    (generate(messages=[{"role": "user", "content": "hi"}]), None),
    (generate(prompt=None, messages=[]), "messages"),
    (generate(prompt=None, messages=[{"role": "owner", "content": "hi"}]), "messages[0].role"),
    (generate(prompt=None, messages=[{"role": "user"}]), "messages[0].content"),
    (generate(prompt=None, messages=[{"role": "user", "content": "x", "mood": "n"}]), "messages[0].mood"),
    (generate(prompt=["a", "b"]), "prompt[0]"),
    (generate(prompt=[[1]]), "prompt[0]"),
    (generate(prompt=[]), "prompt"),
    (generate(max_tokens=0), "max_tokens"),
    (generate(max_tokens=-1), "max_tokens"),
    (generate(logit_bias={1: 101}), "logit_bias[...]"),
    (generate(logit_bias={"a": 1}), "logit_bias"),
    (generate(presence_penalty=2.1), "presence_penalty"),
    (generate(frequency_penalty=-2.1), "frequency_penalty"),
    (generate(repetition_penalty=0), "repetition_penalty"),
    (generate(prompt_logprobs=1), "prompt_logprobs"),
    (generate(logprobs=False, rank=True), "rank"),
    (generate(prompt=[1] * 60, max_tokens=5), "max_tokens"),
    (generate(max_tokens=131_073), "max_tokens"),
    (generate(temperature=-0.1), "temperature"),
    (generate(top_p=0), "top_p"),
    (generate(top_p=1.01), "top_p"),
    (generate(top_k=-1), "top_k"),
    (generate(min_p=2), "min_p"),
    (generate(seed=-1), "seed"),
    (generate(seed=10**30), "seed"),
    (generate(stop="x"), "stop"),
    (generate(stop=[""]), "stop[0]"),
    (generate(stop=["x"] * 65), "stop"),
    (generate(stop=[5]), "stop[0]"),
    (generate(n=0), "n"),
    (generate(n=129), "n"),
    (generate(logprobs=5), "logprobs"),
    (generate(logprobs=False, top_logprobs=1), "top_logprobs"),
    (generate(items=[ITEM]), "items"),
    # limits of the live worker's model
    (item(prompt=[1, 1000], completion=[1]), "items[0].prompt[1]"),
    (item(prompt=[1], completion=[999, 5000]), "items[0].completion[1]"),
    (item(prompt=[1] * 40, completion=[1] * 25), "items[0]"),
    (generate(prompt=[1000]), "prompt[0]"),
    (generate(logit_bias={1000: 1}), "logit_bias"),
    (generate(prompt=[1] * 65), "prompt"),
    # webhooks
    (score(webhook=""), "webhook"),
    (score(webhook="x" * 2049), "webhook"),
    (score(webhook=5), "webhook"),
    (score(webhook="example.com/hook"), "webhook"),
    (score(webhook="/hook"), "webhook"),
    (score(webhook="ftp://example.com/"), "webhook"),
    (score(webhook="http://example.com/"), "webhook"),
    (score(webhook="https://"), "webhook"),
    (score(webhook="https:///hook"), "webhook"),
    (score(webhook="https://user:pw@example.com/"), "webhook"),
    (score(webhook="https://@example.com/"), "webhook"),
    (score(webhook="https://example.com/#part"), "webhook"),
    (score(webhook="https://example.com:0/"), "webhook"),
    (score(webhook="https://example.com:65536/"), "webhook"),
    (score(webhook="https://example.com:port/"), "webhook"),
    (score(webhook="https://exa mple.com/"), "webhook"),
    (score(webhook="https://example.com\\@127.0.0.1/"), "webhook"),
    (score(webhook="https://example.com/\n"), "webhook"),
    (score(webhook="https://[::1"), "webhook"),
    (score(webhook="https://" + "a" * 64 + ".com/"), "webhook"),
    (score(webhook="https://localhost/"), "webhook"),
    (score(webhook="https://LOCALHOST./"), "webhook"),
    (score(webhook="https://127.0.0.1/"), "webhook"),
    (score(webhook="https://127.1/"), "webhook"),
    (score(webhook="https://0x7f000001/"), "webhook"),
    (score(webhook="https://2130706433/"), "webhook"),
    (score(webhook="https://0/"), "webhook"),
    (score(webhook="https://10.1.2.3/"), "webhook"),
    (score(webhook="https://169.254.169.254/latest/meta-data"), "webhook"),
    (score(webhook="https://192.168.0.1:8443/"), "webhook"),
    (score(webhook="https://224.0.0.1/"), "webhook"),
    (score(webhook="https://[::1]/"), "webhook"),
    (score(webhook="https://[::ffff:127.0.0.1]/"), "webhook"),
    (score(webhook="https://[fe80::1]/"), "webhook"),
    (score(webhook="https://[64:ff9b::7f00:1]/"), "webhook"),
    (score(webhook="https://[2002:7f00:1::]/"), "webhook"),
]


async def test_each_bad_request_is_400_and_names_its_field(serving: Serving, worker: FakeWorker, redis: Redis):
    """Each is sent as JSON, as msgpack, and as the fourth request of a bulk, where the field begins with [3]."""
    keys = set(redis.keys())
    plain, packed = {"Content-Type": "application/json"}, {"Content-Type": "application/msgpack"}
    wrong = []
    async with serving() as http:
        for body, field in BODIES:
            in_bulk = "[3]" if field is None else f"[3].{field}"
            bulk = [score(), score(), generate(), body]
            replies = [
                (field, await http.post("/v1/jobs", content=msgspec.json.encode(body), headers=plain)),
                (field, await http.post("/v1/jobs", content=_msgpack(body), headers=packed)),
                (in_bulk, await http.post("/v1/jobs/bulk", json=bulk)),
            ]
            for expected, reply in replies:
                error = reply.json()["error"]
                if (reply.status_code, error["code"], error.get("field")) != (400, "invalid", expected):
                    wrong.append((str(body)[:100], expected, reply.status_code, error))
                elif expected and expected not in error["message"]:
                    wrong.append((str(body)[:100], f"{expected} is not in the message", error))
    assert wrong == []
    points = store.Keys.history_slot(0)[:-1].encode()  # are written as time goes on
    assert {key for key in redis.scan_iter() if not key.startswith(points)} == keys


def _msgpack(body: Any) -> bytes:
    """Encode as msgpack. 10**30 does not fit, so the largest integer that fits replaces it."""
    return msgspec.msgpack.encode(body if body != generate(seed=10**30) else generate(seed=2**64 - 1))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid json"),
        (b"{", "not valid json"),
        (b'{"type": "score",}', "not valid json"),
        (b"\xff\xfe", "not valid json"),
        (b'{"type":"score","model":"demo","items":[{"prompt":"\\ud800","completion":"b"}]}', "not valid json"),
        (b'{"type":"score","model":"demo","items":' + b"[" * 100_000, "items"),
        (b'{"type":"score","model":"demo","temperature":NaN,"items":[]}', "not valid json"),
    ],
    ids=["empty", "cut", "trailing comma", "not utf-8", "lone surrogate", "deep", "NaN"],
)
async def test_bytes_that_are_not_json_are_400(serving: Serving, worker: FakeWorker, content: bytes, says: str):
    async with serving() as http:
        reply = await http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
async def test_msgpack_values_that_json_does_not_have_are_refused(serving: Serving, worker: FakeWorker, value: float):
    async with serving() as http:
        for field in ("temperature", "top_p", "min_p"):
            body = msgspec.msgpack.encode(generate(**{field: value}))
            reply = await http.post("/v1/jobs", content=body, headers={"Content-Type": "application/msgpack"})
            assert (reply.status_code, reply.json()["error"]["field"]) == (400, field)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "field"),
    [
        ("POST", "/v1/jobs", {"Content-Type": "text/plain"}, 415, "Content-Type"),
        ("POST", "/v1/jobs", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
        ("POST", "/v1/jobs", {"Content-Type": ""}, 415, "Content-Type"),
        ("POST", "/v1/jobs", {"Content-Type": "application/json; charset=latin-1"}, 415, "Content-Type"),
        ("POST", "/v1/jobs/bulk", {"Content-Type": "application/jsonl"}, 415, "Content-Type"),
        ("POST", "/v1/jobs", {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
        ("POST", "/v1/jobs/bulk", {"Content-Encoding": "br"}, 415, "Content-Encoding"),
        ("POST", "/v1/jobs", {"Accept": "text/html"}, 406, "Accept"),
        ("POST", "/v1/jobs", {"Accept": "application/json;q=0"}, 406, "Accept"),
        ("GET", "/v1/jobs", {"Accept": "image/*"}, 406, "Accept"),
        ("GET", "/v1/models", {"Accept": "application/json;q=high"}, 406, "Accept"),
        ("POST", "/v1/jobs", {"Idempotency-Key": ""}, 400, "Idempotency-Key"),
        ("POST", "/v1/jobs", {"Idempotency-Key": "a b"}, 400, "Idempotency-Key"),
        ("POST", "/v1/jobs/bulk", {"Idempotency-Key": "x" * 256}, 400, "Idempotency-Key"),
        ("POST", "/v1/jobs", [("Idempotency-Key", "a"), ("Idempotency-Key", "b")], 400, "Idempotency-Key"),
        ("POST", "/v1/jobs", {"Prefer": "wait=soon"}, 400, "Prefer"),
        ("POST", "/v1/jobs", {"Prefer": "wait"}, 400, "Prefer"),
        ("POST", "/v1/jobs", {"Prefer": "respond-async, wait=-1"}, 400, "Prefer"),
        ("POST", "/v1/jobs?dry_run=1", {}, 400, "dry_run"),
        ("GET", "/v1/jobs?status=done", {}, 400, "status"),
        ("GET", "/v1/jobs?limit=0", {}, 400, "limit"),
        ("GET", "/v1/jobs?limit=201", {}, 400, "limit"),
        ("GET", "/v1/jobs?limit=ten", {}, 400, "limit"),
        ("GET", "/v1/jobs?limit=1&limit=2", {}, 400, "limit"),
        ("GET", "/v1/jobs?cursor=abc", {}, 400, "cursor"),
        ("GET", "/v1/jobs?cursor=", {}, 400, "cursor"),
        ("GET", "/v1/jobs?page=2", {}, 400, "page"),
        ("GET", "/v1/jobs?model=" + "m" * 129, {}, 400, "model"),
        ("GET", f"/v1/jobs/{'0' * 32}?wait=-1", {}, 400, "wait"),
        ("GET", f"/v1/jobs/{'0' * 32}?wait=nan", {}, 400, "wait"),
        ("GET", f"/v1/jobs/{'0' * 32}?wait=inf", {}, 400, "wait"),
        ("GET", f"/v1/jobs/{'0' * 32}?wait=soon", {}, 400, "wait"),
        ("GET", f"/v1/jobs/{'0' * 32}?timeout=1", {}, 400, "timeout"),
        ("GET", "/v1/models?all=1", {}, 400, "all"),
        ("GET", f"/v1/jobs/{'0' * 32}", {}, 404, "id"),
        ("GET", "/v1/jobs/1", {}, 404, "id"),
        ("GET", f"/v1/jobs/{'A' * 32}", {}, 404, "id"),
        ("GET", f"/v1/jobs/wh_{'0' * 32}", {}, 404, "id"),
        ("POST", "/v1/jobs/x/cancel", {}, 404, "id"),
        ("DELETE", "/v1/jobs/x", {}, 404, "id"),
        ("GET", "/v1/nothing", {}, 404, None),
        ("GET", "/v1/jobs/", {}, 404, None),
        ("PUT", "/v1/jobs", {}, 405, None),
        ("GET", "/v1/jobs/bulk/cancel", {}, 405, None),
        ("PATCH", "/healthz", {}, 405, None),
    ],
)
async def test_headers_paths_and_parameters_are_refused_by_name(
    serving: Serving, worker: FakeWorker, method: str, path: str, headers: Any, status: int, field: str
):
    body = {"content": msgspec.json.encode([score()] if "bulk" in path else score())} if method == "POST" else {}
    if method == "POST":
        given = headers.items() if isinstance(headers, dict) else headers
        is_said = any(name == "Content-Type" for name, _ in given)
        headers = [*given] if is_said else [("Content-Type", "application/json"), *given]
    async with serving() as http:
        reply = await http.request(method, path, headers=headers, **body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.get("field") == field
    assert error["message"]
    if field is not None:
        assert field in error["message"] or field == "id"


@pytest.mark.parametrize(("body", "status"), [([], 400), ({}, 400), ([score()] * 4, 413), ([[score()]], 400)])
async def test_a_bulk_is_a_list_of_one_to_max_bulk_jobs_requests(
    serving: Serving, worker: FakeWorker, body: object, status: int
):
    async with serving(max_bulk_jobs=3) as http:
        reply = await http.post("/v1/jobs/bulk", json=body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


async def test_an_error_has_the_format_that_the_client_accepts(serving: Serving):
    async with serving() as http:
        reply = await http.get("/v1/nothing", headers={"Accept": "text/html;q=0.9, application/x-msgpack"})
    assert reply.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(reply.content)["error"]["code"] == "not_found"


async def test_a_path_that_does_not_exist_is_answered_with_what_would_be_right(serving: Serving):
    async with serving() as http:
        messages = [(await http.get(path)).json()["error"]["message"] for path in ("/models", "/v1/moderations")]
    assert messages == [
        "GET /models: there is no such path; expected /v1/models: a base URL for OpenAI's clients ends in /v1",
        "GET /v1/moderations: there is no such path; GET /openapi.json lists all",
    ]


async def test_an_unknown_model_is_404_with_the_list_unless_the_job_may_wait(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        refused = await http.post("/v1/jobs", json=score(model="dmo"))
        in_bulk = await http.post("/v1/jobs/bulk", json=[score(), score(model="dmo")])
        waits = await http.post("/v1/jobs", json=score(model="dmo", wait_for_model=True))

    assert (refused.status_code, in_bulk.status_code, waits.status_code) == (404, 404, 202)
    assert refused.json()["error"]["code"] == "model_not_served"
    assert "live models: demo" in refused.json()["error"]["message"]
    assert in_bulk.json()["error"]["field"] == "[1].model"


async def test_a_model_accepts_what_its_worker_with_the_longest_context_accepts(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    FakeWorker(redis, name="w2").register(vocab_size=2000, context_length=128)
    async with serving() as http:
        assert (await http.post("/v1/jobs", json=generate(prompt=[1999] * 127, max_tokens=1))).status_code == 202
        assert (await http.post("/v1/jobs", json=generate(prompt=[2000]))).status_code == 400


async def test_a_webhook_without_a_secret_to_sign_it_is_refused(serving: Serving, worker: FakeWorker):
    async with serving(webhook_secret="") as http:
        reply = await http.post("/v1/jobs", json=score(webhook=HOOK))
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, "webhook")
    assert "SCOREPOOL_WEBHOOK_SECRET" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9009/hook", "http://localhost/", "https://10.0.0.1/", "http://[::1]:8080/"]
)
async def test_the_operator_can_allow_webhooks_to_private_hosts(serving: Serving, worker: FakeWorker, url: str):
    async with serving(webhook_allow_private=True) as http:
        assert (await http.post("/v1/jobs", json=score(webhook=url))).status_code == 202
        assert (await http.post("/v1/jobs", json=score(webhook=url + "#x"))).status_code == 400


@pytest.mark.parametrize(
    "url", [HOOK, "https://example.com", "https://bücher.example/", "https://93.184.216.34:8443/a?b=c"]
)
async def test_a_public_https_webhook_is_accepted(serving: Serving, worker: FakeWorker, url: str):
    async with serving() as http:
        assert (await http.post("/v1/jobs", json=score(webhook=url))).status_code == 202


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/jobs", "GET, HEAD, POST"),
        (f"/v1/jobs/{'0' * 32}", "DELETE, GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/docs", "GET, HEAD"),
    ],
)
async def test_405_names_every_method_of_the_path(serving: Serving, path: str, allowed: str):
    async with serving() as http:
        reply = await http.put(path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert f"expected {allowed}" in reply.json()["error"]["message"]


@pytest.mark.parametrize("arguments", [{"n": 2**64}, {"n": [{"m": -(2**63) - 1}]}])
async def test_a_number_that_fits_json_but_not_msgpack_is_refused(serving: Serving, arguments: dict[str, Any]):
    """Requests are stored as msgpack, whose integers have 64 bits; JSON's have no limit."""
    call = {"id": "1", "name": "f", "arguments": arguments}
    native = generate(prompt=None, messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    dialect = {"model": "demo", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    async with serving() as http:
        for path, body in (("/v1/jobs", native), ("/v1/chat/completions", dialect)):
            reply = await http.post(path, json=body)

            assert reply.status_code == 400, path
            assert "64 bits" in reply.json()["error"]["message"]
            assert reply.json()["error"]["param" if path != "/v1/jobs" else "field"].startswith("messages[0]")
