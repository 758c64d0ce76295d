"""The SDK against servers that are slow, busy, away, or not scorepool."""

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import httpx
import pytest

from scorepool import (
    AsyncClient,
    Client,
    InvalidUrl,
    JobFailed,
    JobTimeout,
    NotScorepool,
    ScorepoolError,
    Unreachable,
    wire,
)
from scorepool.local.demo import free_port
from scorepool.sdk import connection

Answer = tuple[int, dict[str, str], bytes]
MODELS = wire.encode(wire.ModelList(models=[]))
ID = "0" * 32
JOB = wire.Job(id=ID, kind="score", model="demo", status="queued", created_at=0.0)
FAILED = wire.Job(
    id=ID,
    kind="score",
    model="demo",
    status="failed",
    created_at=0.0,
    failure=wire.Failure(code="invalid", message="no"),
)
ACCEPTED = wire.encode(wire.Accepted(id=ID, status="queued", location=""))
SCORE = wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")])


class Sent(NamedTuple):
    """A request that the server got."""

    method: str
    path: str
    body: bytes
    authorization: str | None


@contextmanager
def server(answer: Callable[[], Answer], port: int = 0, sent: list[Sent] | None = None) -> Iterator[str]:
    """Run an HTTP server that answers every request with `answer()`; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if sent is not None:
                sent.append(Sent(self.command, self.path, body, self.headers.get("Authorization")))
            status, headers, reply = answer()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the client has left
                self.end_headers()
                self.wfile.write(reply)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 200
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,)).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize(
    ("api_key", "authorization"), [(None, "Bearer sp_environ"), ("sp_given", "Bearer sp_given"), ("", None)]
)
def test_the_url_and_the_key_come_from_the_environment_if_they_are_not_given(
    monkeypatch: pytest.MonkeyPatch, api_key: str | None, authorization: str | None
):
    sent: list[Sent] = []
    with server(lambda: (200, {}, MODELS), sent=sent) as url:
        monkeypatch.setenv("SCOREPOOL_URL", url)
        monkeypatch.setenv("SCOREPOOL_API_KEY", "sp_environ")
        with Client(api_key=api_key) as sdk:
            pickled = pickle.dumps(sdk)
            sdk.models()
            monkeypatch.setenv("SCOREPOOL_URL", "http://127.0.0.1:9")
            monkeypatch.delenv("SCOREPOOL_API_KEY")
            with pickle.loads(pickled) as copy:
                copy.models()
    assert [each.authorization for each in sent] == [authorization] * 2


@pytest.mark.parametrize("retry_after", ["0", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", ""])
def test_a_request_to_a_busy_server_is_retried_whatever_its_retry_after(retry_after: str):
    answers = iter([(503, {"Retry-After": retry_after}, b"busy"), (200, {}, MODELS)])
    with server(lambda: next(answers)) as url, Client(url) as sdk:
        assert sdk.models() == []


def test_a_reply_of_another_server_is_reported_with_its_status():
    with (
        server(lambda: (502, {}, b"<html>bad gateway")) as url,
        Client(url, retry_s=0) as sdk,
        pytest.raises(ScorepoolError, match=f"HTTP 502: <html>bad gateway \\(GET {url}/v1/models: HTTP 502") as caught,
    ):
        sdk.models()
    assert (caught.value.status, caught.value.code) == (502, "unknown")


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
def test_a_wait_extends_the_timeout_of_the_reply(wait_s: float):
    timeouts: list[float] = []

    async def record(request: httpx.Request) -> None:
        timeouts.append(request.extensions["timeout"]["read"])

    with server(lambda: (200, {}, wire.encode(FAILED))) as url, Client(url) as sdk:
        sdk._async._connection.http.event_hooks = {"request": [record]}
        assert sdk.job(ID, wait_s=wait_s).status == "failed"
    assert timeouts == [connection.REPLY_TIMEOUT_S + wait_s]


def test_a_wait_goes_on_when_the_api_has_waited_as_long_as_it_may():
    replies = iter([JOB, JOB, FAILED])
    sent: list[Sent] = []
    with server(lambda: (200, {}, wire.encode(next(replies))), sent=sent) as url, Client(url) as sdk:
        assert sdk.job(ID, wait_s=1000).status == "failed"
    assert [each.path.partition("=")[2] for each in sent] == ["60.0"] * 3


def test_many_threads_wait_at_once():
    barrier = threading.Barrier(120)

    def answer() -> Answer:
        barrier.wait(60)
        return 200, {}, wire.encode(FAILED)

    with server(answer) as url, Client(url) as sdk, ThreadPoolExecutor(120) as threads:
        jobs = list(threads.map(lambda _: sdk.job("0" * 32, wait_s=1), range(120)))
    assert len(jobs) == 120


@pytest.mark.parametrize(
    "url", ["localhost:8000", "nowhere", "", "ftp://host", "http://", "http://[::1", "//host", "http://a:99999"]
)
def test_a_url_that_can_never_work_is_refused_at_once(url: str):
    for make in (Client, AsyncClient):
        with pytest.raises(InvalidUrl, match=r"the URL is .* expected http://HOST:PORT, https://HOST or unix:///PATH"):
            make(url)


@pytest.mark.parametrize("reply", [b"<html>hello", b"", b"{}", wire.encode(JOB)])
def test_a_reply_that_is_not_scorepools_names_the_url_and_what_to_check(reply: bytes):
    with (
        server(lambda: (200, {}, reply)) as url,
        Client(url) as sdk,
        pytest.raises(
            NotScorepool, match=rf"what answers at {url} is no scorepool API .* \(GET /v1/models\); check the URL"
        ),
    ):
        sdk.models()


def test_a_redirect_names_its_target():
    with (
        server(lambda: (308, {"Location": "https://elsewhere/v1/models"}, b"")) as url,
        Client(url) as sdk,
        pytest.raises(ScorepoolError, match="HTTP 308: it redirects to https://elsewhere/v1/models"),
    ):
        sdk.models()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_v1(suffix: str):
    sent: list[Sent] = []
    with server(lambda: (200, {}, MODELS), sent=sent) as url, Client(url + suffix) as sdk:
        sdk.models()
    assert [request.path for request in sent] == ["/v1/models"]


def test_score_takes_pairs_or_completions_of_one_prompt():
    sent: list[Sent] = []
    answers = iter([(202, {}, ACCEPTED), (200, {}, wire.encode(FAILED))] * 2)
    with server(lambda: next(answers), sent=sent) as url, Client(url) as sdk:
        for items, options in (([("a", "b")], {"rank": True}), (["b", "c"], {"prompt": "a"})):
            with pytest.raises(JobFailed, match=f"job {ID} at {url}: no"):
                sdk.score("demo", items, **options)
    shared = [wire.ScoreItem(completion="b"), wire.ScoreItem(completion="c")]
    assert [wire.decode_request(request.body) for request in sent if request.method == "POST"] == [
        wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")], rank=True),
        wire.Score(model="demo", prompt="a", items=shared),
    ]


def test_a_wait_outlives_an_api_that_is_away_until_its_own_deadline():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Client(url, retry_s=0.1) as sdk, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(sdk.result, ID)
        time.sleep(1.0)  # longer than calls are repeated
        assert not waiting.done()
        for job in (JOB, FAILED):  # up, away, and up again
            answered = threading.Event()

            def answer(job: wire.Job = job, answered: threading.Event = answered) -> Answer:
                answered.set()
                return 200, {}, wire.encode(job)

            with server(answer, port):
                assert answered.wait(60)
        with pytest.raises(JobFailed):
            waiting.result(60)
        with pytest.raises(Unreachable, match=f"no answer from {url} .* job {ID} goes on without it.*scorepool serve"):
            sdk.result(ID, timeout_s=0.5)


def test_a_job_that_does_not_end_in_time_goes_on():
    with server(lambda: (200, {}, wire.encode(JOB))) as url, Client(url) as sdk:
        with pytest.raises(JobTimeout, match=f"job {ID} at {url} is queued after 0.1 s; it goes on"):
            sdk.result(ID, timeout_s=0.1)
        with pytest.raises(JobTimeout):
            list(sdk.as_completed([ID], timeout_s=0.1))
    sent: list[Sent] = []

    def answer() -> Answer:
        return 200, {}, wire.encode([] if sent[-1].path.startswith("/v1/jobs/ended?") else JOB)

    with (
        server(answer, sent=sent) as url,
        Client(url) as sdk,
        pytest.raises(JobTimeout, match=f"job {ID} at {url} is queued after 0.1 s; it goes on"),
    ):
        list(sdk.in_order([ID, ID], timeout_s=0.1))


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_leaving_the_block_cancels_what_was_not_awaited(is_interrupted: bool):
    sent: list[Sent] = []
    ids = [f"{number:032x}" for number in range(4)]
    accepted = iter(ids)

    def answer() -> Answer:
        path = sent[-1].path
        if path == "/v1/jobs":
            return 202, {}, wire.encode(wire.Accepted(id=next(accepted), status="queued", location=""))
        found = FAILED if path.startswith(f"/v1/jobs/{ids[0]}") else JOB
        return 200, {}, wire.encode(found)

    with server(answer, sent=sent) as url:
        try:
            with Client(url) as sdk:
                awaited, _, detached, canceled = [sdk.submit(SCORE) for _ in range(4)]
                with pytest.raises(JobFailed):
                    awaited.result()
                detached.detach()
                canceled.cancel()
                if is_interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    assert [each.path for each in sent if each.path.endswith("/cancel")] == [
        f"/v1/jobs/{ids[3]}/cancel",
        f"/v1/jobs/{ids[1]}/cancel",
    ]


@pytest.mark.parametrize(
    ("key", "attaches", "is_canceled"), [("mine", False, False), ("mine", True, True), (None, False, True)]
)
def test_a_job_that_existed_before_is_canceled_only_if_it_is_ours(key: str | None, attaches: bool, is_canceled: bool):
    """Of a key that the SDK made, an earlier request was a repetition whose reply got lost."""
    sent: list[Sent] = []

    def answer() -> Answer:
        if sent[-1].path == "/v1/jobs":
            return 202, {}, wire.encode(wire.Accepted(id=ID, status="started", location="", is_replay=True))
        return 200, {}, wire.encode(JOB)

    with server(answer, sent=sent) as url, Client(url) as sdk:
        job = sdk.submit(SCORE, idempotency_key=key)
        if attaches:
            sdk.attach(job)
    assert [each.path for each in sent[1:]] == ([f"/v1/jobs/{ID}/cancel"] if is_canceled else [])


def test_any_number_of_requests_runs_within_a_window_and_in_order(monkeypatch: pytest.MonkeyPatch):
    num_open, most_open = 0, 0
    lock = threading.Lock()
    sent: list[Sent] = []
    count = iter(range(1000))

    def answer() -> Answer:
        nonlocal num_open, most_open
        method = sent[-1].method
        with lock:
            if method == "POST":
                num_open += 1
                most_open = max(most_open, num_open)
                return 202, {}, wire.encode(wire.Accepted(id=f"{next(count):032x}", status="queued", location=""))
            num_open -= 1
        return 200, {}, wire.encode(FAILED)

    with server(answer, sent=sent) as url, Client(url) as sdk:
        jobs = list(sdk.gather((SCORE for _ in range(30)), max_in_flight=1))
    assert len(jobs) == 30
    assert most_open == 1
