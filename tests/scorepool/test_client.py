"""The SDK against servers that are slow, busy, or not scorepool."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from scorepool import Client, ScorepoolError, client, wire

Answer = tuple[int, dict[str, str], bytes]
MODELS = wire.encode(wire.ModelList(models=[]))
JOB = wire.encode(wire.Job(id="0" * 32, kind="score", model="demo", status="queued", created_at=0.0))


@contextmanager
def server(answer: Callable[[], Answer]) -> Iterator[str]:
    """Run an HTTP server that answers every GET with `answer()`; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 200
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("retry_after", ["0", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", ""])
def test_a_request_to_a_busy_server_is_retried_whatever_its_retry_after(retry_after: str):
    answers = iter([(503, {"Retry-After": retry_after}, b"busy"), (200, {}, MODELS)])
    with server(lambda: next(answers)) as url, Client(url) as sdk:
        assert sdk.models() == []


def test_a_reply_of_another_server_is_reported_with_its_status():
    with (
        server(lambda: (502, {}, b"<html>bad gateway")) as url,
        Client(url) as sdk,
        pytest.raises(ScorepoolError, match="HTTP 502: <html>bad gateway") as caught,
    ):
        sdk.models()
    assert (caught.value.status, caught.value.code) == (502, "unknown")


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
def test_a_wait_extends_the_timeout_of_the_reply(wait_s: float):
    requests: list[httpx.Request] = []
    with server(lambda: (200, {}, JOB)) as url, Client(url) as sdk:
        sdk._http.event_hooks = {"request": [requests.append]}
        assert sdk.job("0" * 32, wait_s=wait_s).status == "queued"
    assert [request.extensions["timeout"]["read"] for request in requests] == [client.REPLY_TIMEOUT_S + wait_s]


def test_many_threads_wait_at_once():
    barrier = threading.Barrier(120)

    def answer() -> Answer:
        barrier.wait(60)
        return 200, {}, JOB

    with server(answer) as url, Client(url) as sdk, ThreadPoolExecutor(120) as threads:
        jobs = list(threads.map(lambda _: sdk.job("0" * 32, wait_s=1), range(120)))
    assert len(jobs) == 120


def test_a_malformed_url_is_not_retried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the request was retried"))
    with Client("localhost:8000") as sdk, pytest.raises(httpx.UnsupportedProtocol):
        sdk.models()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_v1(suffix: str):
    requests: list[httpx.Request] = []
    with server(lambda: (200, {}, MODELS)) as url, Client(url + suffix) as sdk:
        sdk._http.event_hooks = {"request": [requests.append]}
        sdk.models()
    assert [request.url.path for request in requests] == ["/v1/models"]


def test_score_takes_pairs_or_completions_of_one_prompt(monkeypatch: pytest.MonkeyPatch):
    sent: list[wire.Request] = []
    monkeypatch.setattr(Client, "submit", lambda _, request: sent.append(request))
    monkeypatch.setattr(Client, "result", lambda *_: None)
    with Client("http://127.0.0.1:1") as sdk:
        sdk.score("demo", [("a", "b")], rank=True)
        sdk.score("demo", ["b", "c"], prompt="a")
    items = [wire.ScoreItem(completion="b"), wire.ScoreItem(completion="c")]
    assert sent == [
        wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")], rank=True),
        wire.Score(model="demo", prompt="a", items=items),
    ]
