"""Whatever stands in a request of one tenant, it costs about what its body costs, and the other tenant is answered."""

import asyncio
import encodings
import encodings.aliases
import pkgutil
import tracemalloc
from typing import Any

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.api.event_cursor import EventCursor
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, generate
from tests.api.fake_worker import FakeWorker
from tests.security.second_tenant import PAUSE_S, second_tenant

pytestmark = pytest.mark.anyio
MAX_TURN_S = 0.3
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
