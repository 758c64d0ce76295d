"""Whatever stands in a request of one tenant, it costs about what its body costs, and the other tenant is answered."""

import asyncio
import encodings
import encodings.aliases
import pkgutil
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.api.dialects.sglang.score import SCORE
from scorepool.api.event_cursor import EventCursor
from scorepool.api.http.errors import TooLarge
from scorepool.api.submission import Submission
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, generate, trickle
from tests.api.fake_worker import FakeWorker
from tests.security.hostile_bodies import ROUTES, hostile_bodies
from tests.security.second_tenant import PAUSE_S, second_tenant

pytestmark = pytest.mark.anyio
MAX_TURN_S = 0.3
JSON, MSGPACK = {"Content-Type": "application/json"}, {"Content-Type": "application/msgpack"}
BOUNDARY = "multipart/form-data; boundary=b"
LARGEST_CURSOR = ",".join(["131072"] * 128)
CODECS = sorted(
    {name for _, name, _ in pkgutil.iter_modules(encodings.__path__)}
    | {*encodings.aliases.aliases, "x" * 1000, "UTF-8"}
)
UTF8 = {"utf-8", "utf8", "UTF-8"}


def form(*parts: tuple[str, bytes]) -> bytes:
    """Build a form of parts, each given as its headers and its content."""
    return b"".join(b"--b\r\n" + headers.encode() + b"\r\n\r\n" + content + b"\r\n" for headers, content in parts) + (
        b"--b--\r\n"
    )


def field(name: str, content: bytes) -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"', content


PURPOSE = field("purpose", b"batch")
FILE = ('Content-Disposition: form-data; name="file"; filename="a.jsonl"', b"")


async def test_the_counts_of_a_cursor_cost_nothing_and_the_job_is_looked_up_first(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving(api_keys=KEYS) as http:
        job_id = (await http.post("/v1/jobs", json=generate(stream=True), headers=bearer(BOB))).json()["id"]
        for headers in ({"Last-Event-ID": LARGEST_CURSOR}, {"Last-Event-ID": "no cursor"}):
            reply = await http.get(f"/v1/jobs/{job_id}/events", headers=bearer(ALICE) | headers)
            assert reply.status_code == 404
        worker.end(job_id, wire.Failure(code="canceled", message="a"))
        reply = await http.get(f"/v1/jobs/{job_id}/events", headers=bearer(BOB) | {"Last-Event-ID": LARGEST_CURSOR})
        assert reply.text.count("event: end") == 1

    tracemalloc.start()
    try:
        cursor = EventCursor.parse(LARGEST_CURSOR)
        delta = wire.TokenDelta(id="j", sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])
        assert cursor.advance(delta) == []
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


async def test_a_form_is_read_as_utf8_whatever_codec_it_names(serving: Serving, worker: FakeWorker):
    """Punycode of 800 kB takes 15 s, and others raise errors of their own."""
    content = form(FILE, PURPOSE)
    named = form((f"{FILE[0]}\r\nContent-Type: text/plain; charset=punycode", b"a" * 100_000), PURPOSE)
    async with serving(api_keys=KEYS) as http, second_tenant(http) as progress:
        for codec in CODECS:
            media_type = f"{BOUNDARY}; charset={codec}"
            reply = await http.post("/v1/files", content=content, headers=bearer(ALICE) | {"Content-Type": media_type})
            assert reply.status_code == (200 if codec in UTF8 else 415), codec
            await asyncio.sleep(PAUSE_S)
        reply = await http.post("/v1/files", content=named, headers=bearer(ALICE) | {"Content-Type": BOUNDARY})
        assert (reply.status_code, "charset" in reply.text) == (400, True)
    assert progress.answered > len(CODECS) / 10
    assert progress.longest_turn_s < MAX_TURN_S


FORMS: dict[str, list[tuple[str, bytes]]] = {
    "a number of 5000 digits": [FILE, PURPOSE, field("expires_after[seconds]", b"1" * 1000)],
    "a number of 19 digits": [FILE, PURPOSE, field("expires_after[seconds]", b"1" * 19)],
    "a field twice": [FILE, PURPOSE, PURPOSE],
    "a long field": [FILE, field("purpose", b"b" * 60_000)],
    "a long name of a field": [FILE, PURPOSE, field("x" * 3000, b"")],
    "a field that is not UTF-8": [FILE, field("purpose", b"batch\xff")],
    "no name": [("Content-Disposition: form-data", b"")],
    "many fields": [field("a", b"")] * 100_000,
    "many files": [FILE] * 100_000,
    "many headers": [("\r\n".join(f"X-{number}: a" for number in range(10_000)), b"")],
    "a long header": [(f"X: {'a' * 1_000_000}", b"")],
    "a filename in another charset": [(f"{FILE[0]}; filename*=punycode''a", b""), ("X: \xff", b"")],
    "a charset of a field": [FILE, (f"{PURPOSE[0]}\r\nContent-Type: text/plain; charset=utf-16", b"batch")],
    "lines that look like boundaries": [(FILE[0], b"\r\n-" * 500_000), field("x", b"")],
}


@pytest.mark.parametrize("name", FORMS)
async def test_a_hostile_form_is_refused_in_bounded_time(serving: Serving, worker: FakeWorker, name: str):
    content = form(*FORMS[name])
    async with serving(api_keys=KEYS) as http, second_tenant(http) as progress:
        reply = await http.post("/v1/files", content=content, headers=bearer(ALICE) | {"Content-Type": BOUNDARY})
        assert reply.status_code in (400, 413), reply.text
    assert len(reply.content) < 1000
    assert progress.longest_turn_s < MAX_TURN_S


LOGIN = {"Origin": "http://127.0.0.1:8000", "Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": f"{BOUNDARY}; charset=punycode"}, form(field("key", b"a" * 50_000)), 415),
        ({"Content-Type": BOUNDARY}, form(field("key", ALICE.encode())), 415),
        ({"Content-Type": f"{LOGIN['Content-Type']}; charset=punycode"}, b"key=a", 415),
        ({}, b"key=\xff", 400),
        ({}, b"key=%ff", 400),
        ({}, b"key=a&key=b", 400),
        ({}, b"&".join(b"%d=a" % number for number in range(9)), 400),
        ({}, b"key=" + b"%41" * 100_000, 413),
    ],
)
async def test_a_login_takes_a_short_form_of_utf8(
    serving: Serving, worker: FakeWorker, headers: dict[str, str], body: bytes, status: int
):
    async with serving(api_keys=KEYS) as http:
        reply = await http.post("/login", content=body, headers=LOGIN | headers)
        assert (reply.status_code, "set-cookie" in reply.headers) == (status, False)


@pytest.mark.parametrize(
    ("origin", "status", "most_read"), [("https://evil.example", 403, 0), (LOGIN["Origin"], 413, 2)]
)
async def test_a_login_of_another_origin_is_refused_unread_and_a_long_one_at_its_limit(
    serving: Serving, worker: FakeWorker, origin: str, status: int, most_read: int
):
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        while num_read < 100:
            num_read += 1
            yield b"key=" + b"a" * 10_000

    async with serving(api_keys=KEYS) as http:
        reply = await http.post("/login", content=body(), headers=LOGIN | {"Origin": origin})
    assert (reply.status_code, num_read <= most_read) == (status, True)


async def test_a_login_that_comes_too_slowly_is_refused(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.api.http.bodies.BODY_GRACE_S", 0.1)
    async with serving(api_keys=KEYS) as http, asyncio.timeout(30):
        reply = await http.post("/login", content=trickle(), headers=LOGIN)
    assert (reply.status_code, reply.headers["Connection"]) == (408, "close")


async def test_a_query_of_many_equal_names_is_refused_in_bounded_time(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http, second_tenant(http) as progress:
        await eventually(lambda: progress.answered)
        query = "&".join(["include[]"] * 6500)  # as long as a head may be
        reply = await http.get(f"/v1/responses/resp_1?{query}", headers=bearer(ALICE))
        assert reply.status_code == 400
        await asyncio.sleep(PAUSE_S)  # for the turn to be measured
    assert progress.longest_turn_s < MAX_TURN_S


async def test_uploads_at_once_are_bounded_for_each_key(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.api.repositories.files.MAX_UPLOADS_OF_OWNER", 0)
    upload: Any = {"files": {"file": ("a.jsonl", b"")}, "data": {"purpose": "batch"}}
    async with serving(api_keys=KEYS) as http:
        reply = await http.post("/v1/files", **upload, headers=bearer(ALICE))
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_uploads")
    assert int(reply.headers["Retry-After"]) > 0


async def test_an_id_of_another_form_is_never_a_key_in_redis(serving: Serving, worker: FakeWorker, redis: Redis):
    """`{id}:parts` names the chunks of a file."""
    async with serving(api_keys=KEYS) as http:
        upload: Any = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        file_id = (await http.post("/v1/files", **upload, headers=bearer(ALICE))).json()["id"]
        before = redis.info("commandstats")
        for wrong in (f"{file_id}:parts", f"{file_id}x", "x" * 10_000, "file-%00"):
            for method, path in [
                *(("GET", "/v1/files/{}"), ("DELETE", "/v1/files/{}"), ("GET", "/v1/files/{}/content")),
                *(("GET", "/v1/batches/{}"), ("POST", "/v1/batches/{}/cancel")),
                *(("GET", "/v1/jobs/{}"), ("DELETE", "/v1/jobs/{}"), ("GET", "/v1/jobs/{}/events")),
                *(("GET", "/v1/webhooks/endpoints/{}"), ("DELETE", "/v1/webhooks/endpoints/{}")),
                *(("GET", "/v1/webhooks/deliveries/{}"), ("POST", "/v1/webhooks/deliveries/{}/replay")),
            ]:
                reply = await http.request(method, path.format(wrong), headers=bearer(ALICE))
                assert (reply.status_code, len(reply.content) < 1000) == (404, True), (method, path)
        after = redis.info("commandstats")
        assert (await http.get(f"/v1/files/{file_id}", headers=bearer(ALICE))).status_code == 200
    for command in ("hget", "hgetall", "hmget", "hkeys", "hdel"):
        name = f"cmdstat_{command}"
        assert before.get(name, {}).get("calls") == after.get(name, {}).get("calls"), command
    assert redis.exists(store.Keys.file_parts(file_id))


NUM_ENTRIES = 15_000
REFUSED = {400, 403, 404, 409, 413, 429, 503}  # 503: no worker takes the jobs in MAX_WAIT_S
MAX_WAIT_S = 0.02


@pytest.mark.parametrize(
    ("path", "count", "every_filling"),
    [
        *(pytest.param(path, NUM_ENTRIES, False, id=path) for path in ROUTES if path != "/v1/jobs/bulk"),
        *(
            pytest.param(path, 1_000_000, True, id=f"{path} whole", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
            for path in ROUTES
        ),
    ],
)
async def test_every_field_filled_with_very_much_is_answered_in_bounded_time(
    serving: Serving, worker: FakeWorker, path: str, count: int, every_filling: bool
):
    worker.register(context_length=2**20, vocab_size=2**31)
    num_sent = 0
    async with serving(api_keys=KEYS, max_wait_s=MAX_WAIT_S) as http, second_tenant(http) as progress:
        for name, body in hostile_bodies(path, count, every_filling):
            reply = await http.post(path, content=body, headers=bearer(ALICE) | JSON)
            assert reply.status_code in REFUSED or reply.is_success, (name, reply.status_code, reply.text[:300])
            assert len(reply.content) < 2000 or reply.is_success, name
            assert progress.longest_turn_s < MAX_TURN_S, name
            num_sent += 1
            await asyncio.sleep(0)
        await eventually(lambda: progress.answered >= num_sent / 10)


async def test_lines_of_a_batch_filled_with_very_much_are_refused_in_bounded_time(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    hostile = [body for _, body in hostile_bodies("/v1/completions", NUM_ENTRIES, False) if b'"demo"' in body]
    bodies = [*hostile[::2], b'{"model":"demo","prompt":"a"}']
    line = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":%s}\n'
    lines = b"".join(line % numbered for numbered in enumerate(bodies))
    headers = bearer(ALICE)
    async with serving(api_keys=KEYS) as http, second_tenant(http) as progress:
        upload: Any = {"files": {"file": ("a.jsonl", lines)}, "data": {"purpose": "batch"}}
        file_id = (await http.post("/v1/files", **upload, headers=headers)).json()["id"]
        batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = (await http.post("/v1/batches", json=batch, headers=headers)).json()["id"]
        while True:
            shown = (await http.get(f"/v1/batches/{batch_id}", headers=headers)).json()
            if shown["request_counts"]["failed"] + len(worker.waiting()) >= len(bodies):
                break
            assert shown["status"] != "failed", shown
            await asyncio.sleep(0.02)
        assert worker.waiting()
        assert progress.answered > len(bodies) / 10
        assert progress.longest_turn_s < MAX_TURN_S


REPEATED: dict[str, tuple[str, dict[str, Any]]] = {
    "the query of a score": (
        "/v1/score",
        {"query": "a" * 200_000, "items": ["b"] * 300, "label_token_ids": [1, 2]},
    ),
    "the ids of a query": (
        "/v1/score",
        {"query": [5] * 200_000, "items": [[1]] * 300, "label_token_ids": [1, 2]},
    ),
    "a prompt for every label": (
        "/v1/score",
        {"query": [5] * 60_000, "items": [[1]], "label_token_ids": [1] * 1000},
    ),
    "stop strings of many prompts": ("/v1/completions", {"prompt": ["a"] * 1000, "stop": ["b" * 1024] * 64}),
    "stop strings of many texts": ("/generate", {"text": ["a"] * 1000, "sampling_params": {"stop": ["b" * 1024] * 64}}),
    "the prompt of many items": (
        "/v1/jobs",
        {"type": "score", "prompt": "a" * 60_000, "items": [{"completion": "b"}] * 1000},
    ),
}


@pytest.mark.parametrize("name", REPEATED)
async def test_what_a_request_repeats_counts_as_often_as_it_is_repeated(
    serving: Serving, worker: FakeWorker, redis: Redis, name: str
):
    """The sum of the jobs is refused as a body of that size would be, before it is built."""
    path, body = REPEATED[name]
    worker.register(context_length=2**20)
    async with serving(api_keys=KEYS) as http, second_tenant(http) as progress:
        reply = await http.post(path, json={"model": "demo"} | body, headers=bearer(ALICE))
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
        unknown = await http.post(path, json={"model": "none"} | body, headers=bearer(ALICE))
        assert unknown.status_code == 404
    assert progress.longest_turn_s < MAX_TURN_S
    assert worker.waiting() == set()
    assert progress.answered > 0


async def test_jobs_are_built_until_they_are_larger_than_a_body():
    """A query of 2 MB before 500 items took 1 GB."""
    body = SCORE.parse(
        wire.encode_json({"model": "demo", "query": "a" * 2**21, "items": ["b"] * 500, "label_token_ids": [1]})
    )
    num_built = 0

    def texts() -> Iterator[wire.Request]:
        nonlocal num_built
        for text in SCORE.texts_to_encode(body, None):  # type: ignore[arg-type]
            num_built += 1
            yield wire.Tokenize(model="demo", prompt=text)

    submission = SimpleNamespace(_settings=store.Settings())
    with pytest.raises(TooLarge):
        await Submission.build(submission, texts(), "items")  # type: ignore[arg-type]
    assert num_built == 16


async def test_a_shared_prompt_is_stored_once(serving: Serving, worker: FakeWorker, redis: Redis):
    worker.register(context_length=2**20)
    body = {"model": "demo", "query": [5] * 10_000, "items": [[1]], "label_token_ids": [1] * 1000}
    async with serving(api_keys=KEYS, max_wait_s=0.2) as http:
        posting = asyncio.create_task(http.post("/v1/score", json=body, headers=bearer(ALICE)))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        assert redis.strlen(store.Keys.request(job_id)) < 40_000
        await posting


@pytest.mark.parametrize("field", ["json_schema", "tools"])
async def test_schemas_in_msgpack_are_measured_before_they_are_built(serving: Serving, worker: FakeWorker, field: str):
    """A byte of msgpack can be an object, which takes 72 bytes."""
    count = 2**20
    schema = b"\x81\xa1a\xdd" + count.to_bytes(4, "big") + b"\x80" * count
    value = schema if field == "json_schema" else b"\x91\x82\xa4name\xa1f\xaaparameters" + schema
    head = wire.encode({"type": "generate", "model": "demo", "messages": [{"role": "user", "content": "a"}]})
    body = b"\x84" + head[1:] + wire.encode(field) + value
    async with serving(api_keys=KEYS) as http, second_tenant(http) as progress:
        reply = await http.post("/v1/jobs", content=body, headers=bearer(ALICE) | MSGPACK)
    assert (reply.status_code, "expected at most 1048576 bytes" in reply.text) == (400, True)
    assert progress.longest_turn_s < MAX_TURN_S


async def test_bodies_that_are_sent_slowly_are_bounded_for_each_key(serving: Serving, worker: FakeWorker):
    """Each connection would hold a whole body. Those of the other key are read meanwhile."""
    largest = 300_000
    begun, all_held = 0, asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal begun
        yield b" " * 250_000
        begun += 1
        await all_held.wait()
        yield b" " * 100

    async with serving(api_keys=KEYS, max_body_bytes=largest) as http, second_tenant(http) as progress:
        sending = [
            asyncio.create_task(http.post("/v1/jobs", content=body(), headers=bearer(ALICE) | JSON)) for _ in range(20)
        ]
        await eventually(lambda: sum(task.done() for task in sending) >= 16)
        refused = [task.result() for task in sending if task.done()]
        assert {reply.status_code for reply in refused} == {429}
        assert all(int(reply.headers["Retry-After"]) > 0 for reply in refused)
        large = generate(prompt="a" * 200_000)
        assert (await http.post("/v1/jobs", json=large, headers=bearer(BOB))).status_code == 202
        all_held.set()
        assert [reply.status_code for reply in await asyncio.gather(*sending)].count(400) == 4
    assert progress.answered > 0
