"""Images by URL: the API fetches them where the operator allows it, at submission and once, and from nowhere inside."""

import asyncio
import logging
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest
from redis import Redis

from scorepool import wire
from scorepool.api.http import held_bytes, tasks
from scorepool.api.images import fetched_images
from scorepool.store import ImageUrl
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, generate
from tests.api.fake_worker import FakeWorker
from tests.api.images.servers import PNG, ImageServer, image_server

pytestmark = pytest.mark.anyio
CHAT, RESPONSES, MESSAGES, JOBS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/jobs"


@pytest.fixture
def server() -> Iterator[ImageServer]:
    """Start a server for one test: another's fetches may still be under way."""
    with image_server() as server:
        yield server


@pytest.fixture(autouse=True)
def vision(redis: Redis) -> Iterator[FakeWorker]:
    """A live worker whose model takes images. Nothing is held when a test has ended."""
    worker = FakeWorker(redis, model="see", name="w2")
    worker.register(images="mistral3", context_length=1000)
    yield worker
    assert not held_bytes._received.by_owner


def job(*urls: str, **changes: Any) -> dict[str, Any]:
    return generate(model="see", images=[{"url": url} for url in urls], **changes)


def bodies(url: str) -> list[tuple[str, dict[str, Any], str]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    shown = {"type": "input_image", "image_url": url}
    return [
        (CHAT, {"model": "see", "messages": [{"role": "user", "content": [part]}]}, "messages[0].content"),
        (RESPONSES, {"model": "see", "input": [{"role": "user", "content": [shown]}]}, "input"),
        (MESSAGES, {"model": "see", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}, "messages"),
        (JOBS, job(url), "images[0]"),
    ]


async def queued(vision: FakeWorker, request: Any) -> wire.Request:
    """Send a request that waits, and return the job that reaches the worker."""
    task = asyncio.create_task(request)
    await eventually(lambda: vision.waiting() or task.done())
    [job_id] = vision.waiting()
    found = vision.start(job_id)
    await tasks.cancel_and_wait([task])
    return found


@pytest.mark.parametrize("index", range(4))
async def test_what_is_queued_is_the_file(serving: Serving, vision: FakeWorker, server: ImageServer, index: int):
    path, body, _ = bodies(server.url("/moved.png?signature=hush"))[index]
    async with serving(fetch_images="any") as http:
        [(_, image)] = wire.images_of(await queued(vision, http.post(path, json=body)))
    assert (image.data, image.url) == (PNG, None)
    assert server.asked == ["/moved.png?signature=hush", "/a.png"]


@pytest.mark.parametrize("index", range(4))
async def test_by_default_none_is_fetched(serving: Serving, vision: FakeWorker, index: int):
    path, body, field = bodies("https://example.com/a.png?signature=hush")[index]
    async with serving() as http:
        reply = await http.post(path, json=body)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert message.startswith(f"{field}: this server fetches no images (SCOREPOOL_FETCH_IMAGES is off)")
    assert not vision.waiting()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://example.com/a.png", "an image URL begins with https://"),
        ("https://127.0.0.1/a.png", "not an address or a name on the internet"),
        ("https://127.1/a.png", "not an address"),
        ("https://169.254.169.254/latest/meta-data/", "not an address"),
        ("https://[::1]/a.png", "not an address"),
        ("https://[::ffff:10.0.0.1]/a.png", "not an address"),
        ("https://localhost/a.png", "not an address"),
        ("https://redis:6379/", "not an address"),
        ("https://metadata.google.internal/", "not an address"),
        ("https://user:hush@example.com/a.png", "no user name"),
        ("https://example.com:22/a.png", "the port"),
        ("https://inside.example/a.png", "has an address that is not public"),
        ("ftp://example.com/a.png", "begins with https://"),
        ("file:///etc/passwd", "begins with https://"),
        (f"https://example.com/{'a' * 9000}", "8192"),
    ],
)
async def test_no_address_inside_is_reached(
    serving: Serving, vision: FakeWorker, monkeypatch: pytest.MonkeyPatch, url: str, says: str
):
    monkeypatch.setattr(fetched_images, "resolve", lambda host, port: ["93.184.215.14", "10.1.2.3"])
    async with serving(fetch_images="public") as http:
        for path, body, _ in bodies(url):
            reply = await http.post(path, json=body)
            message = reply.json()["error"]["message"]
            assert reply.status_code == 400
            assert says in message or "a data URL" in message
            assert not any(secret in message for secret in ("hush", "10.1.2.3"))
    assert not vision.waiting()


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/page.png", 400, "expected a PNG, JPEG, WebP or GIF image, found bytes that begin with 3c 68"),
        ("/film.png", 400, "expected an image, found a video: videos are not fetched"),
        ("/empty.png", 400, "found none"),
        ("/cut.png", 400, "no image came from 127.0.0.1"),
        ("/claims.png", 413, "SCOREPOOL_MAX_IMAGE_BYTES"),
        ("/large.png", 413, "at most 20000 bytes (SCOREPOOL_MAX_IMAGE_BYTES), found more at 127.0.0.1"),
        ("/endless.png", 413, "SCOREPOOL_MAX_IMAGE_BYTES"),
        ("/vast.png", 400, "found 50000 x 50000"),
        ("/dot.png", 400, "found 1 x 1"),
        ("/gzip.png", 400, "begin with 1f 8b"),
        ("/none.png", 400, "found HTTP status 404"),
        ("/loop.png", 400, "more than 3 redirects"),
        ("/nowhere.png", 400, "redirect"),
        ("/heads.png", 400, "no image came from 127.0.0.1: "),
        ("/slow.png", 400, "within 0.5 s (SCOREPOOL_FETCH_IMAGES_TIMEOUT_S)"),
        ("/silent.png", 400, "within 0.5 s"),
    ],
)
async def test_servers_that_lie_or_dawdle_are_named(
    serving: Serving, vision: FakeWorker, server: ImageServer, path: str, status: int, says: str
):
    async with serving(fetch_images="any", fetch_images_timeout_s=0.5, max_image_bytes=20_000) as http:
        reply = await http.post(JOBS, json=job(server.url(f"{path}?signature=hush")))
    error = reply.json()["error"]
    assert (reply.status_code, error["field"]) == (status, "images[0]"), error
    assert says in error["message"]
    assert "hush" not in error["message"]
    assert not vision.waiting()


async def test_a_body_in_chunks_of_a_byte_is_bounded(serving: Serving, vision: FakeWorker, server: ImageServer):
    """By the bytes of the image or by those that came, whichever is first."""
    async with serving(fetch_images="any", fetch_images_timeout_s=2, max_image_bytes=20_000) as http:
        reply = await http.post(JOBS, json=job(server.url("/chunks.png")))
    assert reply.status_code in (400, 413)
    assert "127.0.0.1" in reply.json()["error"]["message"]


async def test_the_file_says_what_it_is(serving: Serving, vision: FakeWorker, server: ImageServer):
    async with serving(fetch_images="any") as http:
        assert (await http.post(JOBS, json=job(server.url("/typed.html")))).status_code == 202


async def test_redirects_into_the_network_are_not_followed(serving: Serving, server: ImageServer):
    """A redirect is checked as the first URL is: here the first one would be public."""
    settings = {"fetch_images": "public", "fetch_images_timeout_s": 5.0}
    async with serving(**settings) as http:
        state = http._transport.app.state.scorepool  # type: ignore[attr-defined]
        fetch = state.images._new_fetch(server.url("/inside.png"))
        first, fetch._allow_private = fetch._parse, True
        fetch._parse = lambda url: first(url) if "169.254" in url else ImageUrl.parse(url, True)
        with pytest.raises(ValueError, match="a redirect is not followed: an image URL begins with https://"):
            await asyncio.to_thread(fetch.run)
    assert server.asked == ["/inside.png"]


async def test_a_url_that_stands_often_is_fetched_once(serving: Serving, vision: FakeWorker, server: ImageServer):
    url = server.url("/a.png")
    async with serving(fetch_images="any") as http:
        bulk = await http.post("/v1/jobs/bulk", json=[job(url, url), job(url)])
        assert bulk.status_code == 202, bulk.text
        many = [job(*(server.url(f"/a.png?{number * 16 + each}") for each in range(16))) for number in range(5)]
        refused = await http.post("/v1/jobs/bulk", json=many)
    assert server.asked == ["/a.png"]
    assert refused.status_code == 413
    assert "at most 64 different URLs" in refused.json()["error"]["message"]
    assert refused.json()["error"]["field"] == "[0].images[0]"


async def test_images_of_a_request_are_bounded_together(serving: Serving, vision: FakeWorker, server: ImageServer):
    urls = [server.url(f"/large.png?{number}") for number in range(4)]
    async with serving(fetch_images="any", max_body_bytes=120_000) as http:
        reply = await http.post(JOBS, json=job(*urls))
    assert reply.status_code == 413
    assert "at most 120000 bytes together (SCOREPOOL_MAX_BODY_BYTES)" in reply.json()["error"]["message"]


async def test_a_key_that_comes_again_asks_for_the_same_job(serving: Serving, vision: FakeWorker, server: ImageServer):
    """The URL is what was sent: another file there, or none, changes nothing, and nothing is fetched."""
    headers = {"Idempotency-Key": "k"}
    async with serving(fetch_images="any") as http:
        first = await http.post(JOBS, json=job(server.url("/a.png")), headers=headers)
        server.files["/a.png"] = (404, {}, b"")
        again = await http.post(JOBS, json=job(server.url("/a.png")), headers=headers)
        other = await http.post(JOBS, json=job(server.url("/b.png")), headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (202, 202, 409)
    assert (again.json()["id"], again.headers["Idempotent-Replayed"]) == (first.json()["id"], "true")
    assert server.asked == ["/a.png"]
    [(_, image)] = wire.images_of(vision.start(first.json()["id"]))
    assert image.data == PNG


async def test_what_cannot_run_is_not_fetched(serving: Serving, worker: FakeWorker, server: ImageServer):
    url = server.url("/a.png")
    async with serving(fetch_images="any", max_images=2) as http:
        for body in (
            job(url) | {"model": "demo"},
            job(url) | {"model": "none"},
            job(url, url, url),
            job(url, expires_at=1),
        ):
            assert (await http.post(JOBS, json=body)).status_code in (400, 404, 413)
    assert not server.asked


async def test_slow_servers_hold_up_their_own_user_alone(serving: Serving, vision: FakeWorker, server: ImageServer):
    """Memory stays bounded, other owners' images come at once, and so do other routes."""
    settings = {"fetch_images": "any", "fetch_images_timeout_s": 60.0, "api_keys": KEYS, "max_image_bytes": 2**20}
    async with serving(**settings) as http:
        slow = [
            asyncio.create_task(
                http.post(
                    JOBS, json=job(*(server.url(f"/slow{number}-{each}") for each in range(8))), headers=bearer(ALICE)
                )
            )
            for number in range(40)
        ]
        await eventually(lambda: server.num_open == fetched_images.MAX_FETCHES_OF_OWNER)
        started_at = time.monotonic()
        tracemalloc.start()
        reply = await http.post(JOBS, json=job(server.url("/a.png")), headers=bearer(BOB))
        assert (reply.status_code, (await http.get("/health")).status_code) == (202, 200)
        assert time.monotonic() - started_at < 30
        assert server.num_open <= fetched_images.MAX_FETCHES_OF_OWNER
        refused = [task.result() for task in slow if task.done()]
        await tasks.cancel_and_wait(slow)
        assert tracemalloc.get_traced_memory()[1] < 2**24
        tracemalloc.stop()
        await eventually(lambda: not server.num_open)  # a client that left: its threads end before their time
    assert refused
    for reply in refused:
        assert reply.status_code == 429
        assert "are being fetched" in reply.json()["error"]["message"]


@contextmanager
def port_that_does_not_answer() -> Iterator[int]:
    """A port whose queue of connections is full: further ones hang until their time is over."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_a_connection_that_outlasts_its_request_counts_as_its_users(serving: Serving, server: ImageServer):
    def num_hanging() -> int:
        found = psutil.Process().net_connections("tcp4")
        return sum(one.status == psutil.CONN_SYN_SENT and one.raddr.port == port for one in found) - num_before

    num_before = 0
    with port_that_does_not_answer() as port:
        num_before = num_hanging()
        async with serving(fetch_images="any", fetch_images_timeout_s=3.0) as http:
            for number in range(5):
                hanging = [f"http://127.0.0.1:{port}/{number}-{each}.png" for each in range(3)]
                reply = await http.post(JOBS, json=job(server.url("/none.png"), *hanging))
                assert reply.status_code == 400
                assert "HTTP status 404" in reply.json()["error"]["message"]
                assert num_hanging() <= fetched_images.MAX_FETCHES_OF_OWNER
            assert num_hanging() >= 2
            await eventually(lambda: not num_hanging())


async def test_an_image_waits_for_others_of_its_owner_no_longer_than_a_fetch_may_take(
    serving: Serving, server: ImageServer
):
    async with serving(fetch_images="any", fetch_images_timeout_s=0.5) as http:
        started_at = time.monotonic()
        urls = [[server.url(f"/slow{number}-{each}") for each in range(4)] for number in range(6)]
        replies = await asyncio.gather(*(http.post(JOBS, json=job(*each)) for each in urls))
        assert time.monotonic() - started_at < 60  # nor for ever
        found = sorted(reply.status_code for reply in replies)
    assert found[0] == 400
    assert found[-1] == 429
    assert any("had no turn within 0.5 s" in reply.json()["error"]["message"] for reply in replies)


async def test_urls_are_not_logged(
    serving: Serving, vision: FakeWorker, server: ImageServer, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        async with serving(fetch_images="any") as http:
            for path in ("/a.png", "/none.png", "/page.png"):
                await http.post(JOBS, json=job(server.url(f"{path}?signature=hush")))
    assert "hush" not in caplog.text


async def test_lines_of_batches_fetch_nothing(serving: Serving, vision: FakeWorker, server: ImageServer):
    _, body, _ = bodies(server.url("/a.png"))[0]
    line = wire.encode_json({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
    async with serving(fetch_images="any") as http:
        file = await http.post("/v1/files", files={"file": ("a.jsonl", line)}, data={"purpose": "batch"})
        asked = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=asked)).json()
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        errors: httpx.Response = await http.get(f"/v1/files/{batch['error_file_id']}/content")
    assert "images of lines of batches are not fetched" in errors.text
    assert not server.asked
