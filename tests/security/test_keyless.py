"""A server without keys refuses, on every route, what a proxy passes on and what pages of other origins send."""

from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import store
from scorepool.api.app import create_app
from scorepool.api.http.loopback import PROXY_HEADERS, PROXY_PREFIXES
from tests.api.conftest import KEYS, Serving, bearer, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
DOCUMENT = create_app(store.Settings()).openapi()
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
OTHERS = [("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("PATCH", "/v1/jobs"), ("HEAD", "/v1/jobs")]
MUTATING = [(method, path) for method, path in OPERATIONS if method != "GET"]
HOST = "127.0.0.1:8000"
FORWARDED = [
    {"Forwarded": "for=10.0.0.1"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"X-Forwarded-Host": "localhost"},
    {"X-Forwarded-Proto": "https"},
    {"X-Forwarded": ""},
    {"x_forwarded_for": "127.0.0.1"},
    {"X-Real-IP": "127.0.0.1"},
    {"Via": "1.1 proxy"},
    {"CF-Connecting-IP": "10.0.0.1"},
    {"Tailscale-User-Login": "a@b"},
]
CROSS_SITE = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": f"https://{HOST}"},
    {"Origin": f"http://{HOST}.evil.example"},
    {"Origin": f"http://{HOST}@evil.example"},
    {"Origin": "http://127.0.0.1:3000"},
    {"Origin": "http://localhost:8000"},
    {"Origin": f"http://{HOST} http://evil.example"},
    {"Origin": "chrome-extension://abcdef"},
    {"Origin": "file://"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "CROSS-SITE"},
    {"Sec-Fetch-Site": "new-value"},
    {"Sec-Fetch-Site": "cross-site", "Origin": f"http://{HOST}"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "object"},
]
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
OWN = [
    {},
    {"Sec-Fetch-Site": "same-origin", "Origin": f"http://{HOST}", "Sec-Fetch-Mode": "cors"},
    {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    {"Host": "localhost", "Origin": "http://localhost"},
    {"Host": "localhost:80", "Origin": "http://localhost"},
    {"Host": "LOCALHOST:8000", "Origin": "http://localhost:8000"},
]
REBOUND = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.localhost",
    "127.0.0.1:8000@evil.example",
    "localhost:evil.example",
    "localhost:",
    "[::1]evil.example",
    "[::1%25lo]",
    "",
    "0.0.0.0",
    "0",
    "[::]",
    "2130706433.evil.example",
    "localhost,evil.example",
    "localhost evil.example",
    "localhost/evil.example",
    "evil.example\\@localhost",
    "169.254.169.254",
    "[::ffff:10.0.0.1]",
    "127.0.0.1..evil",
]


async def send(http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """Send what a page can send to a route: a body that names a content type, ids of any kind."""
    for name in ("id", "job_id", "file_id", "batch_id", "endpoint_id", "delivery_id", "model_id", "model"):
        path = path.replace(f"{{{name}}}", "0" * 32)
    body: dict[str, Any] = {} if method in ("GET", "HEAD", "OPTIONS") else {"json": score()}
    return await http.request(method, path, headers=headers, **body)


def check_refused(reply: httpx.Response, method: str) -> None:
    assert reply.status_code == 403, (reply.request.method, reply.request.url, reply.request.headers)
    assert not [name for name in reply.headers if name.startswith("access-control-")]
    if method != "HEAD":
        error = reply.json()["error"]
        message = error if isinstance(error, str) else error["message"]  # text-generation-inference's is a sentence
        assert "this server has no API keys" in message


@pytest.mark.parametrize("refused", [FORWARDED, CROSS_SITE], ids=["forwarded", "cross-site"])
async def test_what_comes_from_elsewhere_is_refused_on_every_route(
    serving: Serving, worker: FakeWorker, redis: Redis, refused: list[dict[str, str]]
):
    async with serving() as http:
        for headers in refused:
            for method, path in [*OPERATIONS, *OTHERS]:
                check_refused(await send(http, method, path, headers), method)
            assert (
                await http.post("/v1/jobs", json=score())
            ).status_code == 202  # a program of this machine, beside it
    assert redis.llen("rq:queue:demo") == len(refused)


async def test_a_preflight_is_allowed_nothing(serving: Serving):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    asks["Access-Control-Request-Private-Network"] = "true"
    for settings, origins in [({}, CROSS_SITE + OWN), ({"api_keys": KEYS}, CROSS_SITE)]:
        async with serving(**settings) as http:
            for headers in origins:
                for path in ("/v1/jobs", "/v1/chat/completions", "/v1/files"):
                    reply = await http.options(path, headers=headers | asks)
                    assert reply.status_code in (403, 404, 405)
                    assert not [name for name in reply.headers if name.startswith("access-control-")]


async def test_programs_and_pages_of_its_own_are_served(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        for headers in OWN:
            assert (await http.post("/v1/jobs", json=score(), headers=headers)).status_code == 202
            assert (await http.get("/v1/jobs", headers=headers)).status_code == 200


async def test_another_page_may_link_to_a_page_and_send_no_form(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        assert (await http.get("/docs", headers=LINK)).status_code == 200
        for method, path in MUTATING:
            check_refused(await send(http, method, path, LINK), method)
        check_refused(await http.get("/docs", headers=LINK | {"Origin": "https://evil.example"}), "GET")


async def test_a_rebound_name_is_refused_in_every_spelling(serving: Serving):
    async with serving() as http:
        for host in REBOUND:
            for method, path in [("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/metrics"), ("GET", "/docs")]:
                check_refused(await send(http, method, path, {"Host": host}), method)


async def test_with_keys_proxies_and_pages_are_served(serving: Serving, worker: FakeWorker):
    """The key is what such a page lacks. A browser adds none by itself."""
    async with serving(api_keys=KEYS) as http:
        for headers in [*FORWARDED, *CROSS_SITE]:
            assert (await http.post("/v1/jobs", json=score(), headers=headers | bearer("alice-key"))).status_code == 202
            assert (await http.post("/v1/jobs", json=score(), headers=headers)).status_code == 401


def test_every_known_header_of_a_proxy_is_lower_case():
    assert all(name == name.lower() for name in [*PROXY_HEADERS, *PROXY_PREFIXES])
