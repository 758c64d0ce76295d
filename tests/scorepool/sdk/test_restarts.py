"""Calls that go on while the API is away, and calls that do not wait for each other."""

import asyncio
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest

from scorepool import AsyncClient, Client, JobFailed, JobTimeout, ScorepoolError, Unreachable, wire
from scorepool.local.demo import free_port
from scorepool.sdk import connection
from tests.scorepool.sdk.test_client import ACCEPTED, FAILED, ID, JOB, MODELS, SCORE, Answer, Sent, server

RETRY_S = 0.1
AWAY_S = 1.0  # longer than single calls are repeated
DELTA = wire.TokenDelta(id=ID, sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])


def event(name: bytes, event_id: bytes, message: object) -> bytes:
    return b"event: " + name + b"\nid: " + event_id + b"\ndata: " + wire.encode_json(message) + b"\n\n"


def test_submissions_of_a_window_outlive_an_api_that_has_answered():
    port = free_port()

    def answer() -> Answer:
        return (202, {}, ACCEPTED) if sent[-1].method == "POST" else (200, {}, wire.encode(FAILED))

    sent: list[Sent] = []
    with Client(f"http://127.0.0.1:{port}", retry_s=RETRY_S) as sdk, ThreadPoolExecutor(1) as threads:
        jobs = sdk.gather([SCORE] * 3, max_in_flight=1)
        with server(answer, port, sent):
            assert next(jobs).status == "failed"
        second = threads.submit(next, jobs)
        time.sleep(AWAY_S)
        assert not second.done()
        with pytest.raises(Unreachable):  # a single call does not wait
            sdk.models()
        with server(answer, port, sent):
            assert second.result(60).status == "failed"
            with pytest.raises(JobFailed):
                sdk.score("demo", [("a", "b")])


def test_an_api_that_never_answered_is_given_up():
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url, retry_s=RETRY_S) as sdk:
        for call in (lambda: list(sdk.gather([SCORE])), lambda: sdk.score("demo", [("a", "b")])):
            with pytest.raises(Unreachable, match=f"no answer from {url} .* `scorepool serve` starts one"):
                call()


def test_a_window_ends_at_its_deadline_and_cancels_its_jobs():
    sent: list[Sent] = []

    def answer() -> Answer:
        if sent[-1].path == "/v1/jobs":
            return 202, {}, ACCEPTED
        time.sleep(0.1)
        return 200, {}, wire.encode(JOB)

    with server(answer, sent=sent) as url, Client(url) as sdk:
        with pytest.raises(JobTimeout, match=f"job {ID} at {url} is queued after 2 s; it is canceled"):
            list(sdk.gather([SCORE] * 2, timeout_s=2.0))
        assert [request.path for request in sent].count(f"/v1/jobs/{ID}/cancel") == 2


def test_a_window_whose_api_is_away_ends_at_its_deadline():
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", retry_s=250.0) as sdk:
        with server(lambda: (200, {}, MODELS), port):
            sdk.models()
        started_at = time.monotonic()
        with pytest.raises(Unreachable):
            list(sdk.gather([SCORE], timeout_s=0.5))
        assert time.monotonic() - started_at < 100


def test_a_stream_goes_on_after_its_last_event_when_the_api_is_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.sdk.async_jobs.RECONNECT_S", 0.0)
    seen: list[str | None] = []
    send_response = BaseHTTPRequestHandler.send_response

    def note(self: BaseHTTPRequestHandler, status: int, message: str | None = None) -> None:
        seen.append(self.headers["Last-Event-ID"])
        send_response(self, status, message)

    monkeypatch.setattr(BaseHTTPRequestHandler, "send_response", note)
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", retry_s=RETRY_S) as sdk, ThreadPoolExecutor(1) as threads:
        tokens = sdk.events(ID)
        with server(lambda: (200, {}, event(b"tokens", b"1@2:3", DELTA) + b"event: tok"), port):
            assert next(tokens).token_ids == [1]
        second = threads.submit(next, tokens)
        time.sleep(AWAY_S)
        assert not second.done()
        with server(lambda: (200, {}, event(b"tokens", b"2@2:3", DELTA) + event(b"end", b"", FAILED)), port):
            assert second.result(60).token_ids == [1]
        with pytest.raises(JobFailed):
            next(tokens)
    assert seen == ["", "1@2:3"]


def test_a_stream_ends_at_its_own_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.sdk.async_jobs.GRACE_S", 0.5)
    silent = threading.Event()
    sent: list[Sent] = []

    def answer() -> Answer:
        if sent[-1].path.endswith("/events"):
            silent.wait(30)
        return 200, {}, wire.encode(JOB)

    with server(answer, sent=sent) as url, Client(url) as sdk:
        with pytest.raises(JobTimeout, match=f"job {ID} at {url} is queued after 0.2 s"):
            list(sdk.events(ID, timeout_s=0.2))
        silent.set()
    where = f"GET /v1/jobs/{ID}/events: ConnectError .*; job {ID} goes on without it"
    with Client(url) as sdk, pytest.raises(Unreachable, match=rf"no answer from {url} for [\d.]+ s \({where}"):
        list(sdk.events(ID, timeout_s=0.3))


LOST = (200, {"Content-Length": "100"}, b"")
GONE = (404, {}, wire.encode(wire.ErrorReply(error=wire.ErrorBody(code="not_found", type="", message="no such job"))))


@pytest.mark.parametrize("delete", [Client.delete, Client.delete_file, Client.delete_endpoint])
@pytest.mark.parametrize("first", [LOST, (503, {}, b"Redis is silent")], ids=["lost", "503"])
def test_a_deletion_that_may_have_been_done_before_is_done(first: Answer, delete: Callable[[Client, str], None]):
    answers = iter([first, GONE, GONE])
    with server(lambda: next(answers)) as url, Client(url) as sdk:
        delete(sdk, ID)
        with pytest.raises(ScorepoolError, match="no such job"):
            delete(sdk, ID)


def test_what_may_have_been_done_is_not_asked_for_again():
    sent: list[Sent] = []
    with server(lambda: LOST, sent=sent) as url, Client(url, retry_s=RETRY_S) as sdk:
        with pytest.raises(Unreachable, match=r"\(POST /v1/webhooks/endpoints: .*\); it may have") as lost:
            sdk.register_endpoint("https://example.com/")
        assert (len(sent), lost.value.may_be_done) == (1, True)
        with pytest.raises(Unreachable, match="GET /v1/models") as lost:
            sdk.models()
        assert not lost.value.may_be_done
    with Client(url, retry_s=RETRY_S) as sdk, pytest.raises(Unreachable) as lost:
        sdk.register_endpoint("https://example.com/")
    assert not lost.value.may_be_done  # nothing was sent


ONCE: list[Callable[[Client], object]] = [
    lambda sdk: sdk.register_endpoint("https://example.com/"),
    lambda sdk: sdk.rotate_endpoint_secret(ID),
    Client.rotate_webhook_secret,
    lambda sdk: sdk.send_test_event(ID),
    lambda sdk: sdk.replay_delivery(ID),
    lambda sdk: sdk.replay_deliveries(0.0),
    lambda sdk: sdk.push_weights("demo", b"weights"),
    lambda sdk: sdk.load_adapter("tuned", "/adapters/tuned"),
]


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_call_that_may_have_been_done_is_not_repeated_after_a_reply_that_leaves_it_open(status: int):
    sent: list[Sent] = []
    with server(lambda: (status, {}, b"silent"), sent=sent) as url, Client(url) as sdk:
        for number, call in enumerate(ONCE, 1):
            with pytest.raises(ScorepoolError, match=r"; it may have been done$") as caught:
                call(sdk)
            assert (len(sent), caught.value.status, caught.value.may_be_done) == (number, status, True)
            assert pickle.loads(pickle.dumps(caught.value)).may_be_done


FULL = wire.encode(wire.ErrorReply(error=wire.ErrorBody(code="redis_full", type="", message="nothing was changed")))


@pytest.mark.parametrize("refusal", [(429, {}, b"busy"), (503, {}, FULL)], ids=["busy", "full"])
def test_a_call_that_was_refused_for_now_is_repeated(refusal: Answer):
    answers = iter([refusal, (400, {}, b"no")])
    with server(lambda: next(answers)) as url, Client(url) as sdk, pytest.raises(ScorepoolError) as caught:
        sdk.send_test_event(ID)
    assert (caught.value.status, caught.value.may_be_done) == (400, False)


def test_nothing_is_done_of_a_request_that_redis_has_no_room_for():
    with server(lambda: (503, {}, FULL)) as url, Client(url, retry_s=0) as sdk:
        with pytest.raises(ScorepoolError, match="nothing was changed") as caught:
            sdk.submit(SCORE)
        assert not caught.value.may_be_done


def test_what_is_only_read_is_never_done():
    with server(lambda: (503, {}, b"busy")) as url, Client(url, retry_s=0) as sdk:
        with pytest.raises(ScorepoolError) as caught:
            sdk.models()
        assert not caught.value.may_be_done
        with pytest.raises(ScorepoolError) as caught:  # its last attempt: another would have done no harm
            sdk.submit(SCORE)
        assert caught.value.may_be_done


def test_a_slow_source_of_requests_and_a_slow_reader_of_tokens_stop_no_other_call():
    def answer() -> Answer:
        replies = {
            "/v1/models": MODELS,
            "/v1/jobs": ACCEPTED,
            f"/v1/jobs/{ID}/events": event(b"tokens", b"1", DELTA) * 1000,
        }
        return 200, {}, replies.get(sent[-1].path, wire.encode(FAILED))

    sent: list[Sent] = []
    is_reading, may_go_on = threading.Event(), threading.Event()

    def requests() -> Iterator[wire.Request]:
        is_reading.set()
        assert may_go_on.wait(30)
        yield SCORE

    with server(answer, sent=sent) as url, Client(url) as sdk, ThreadPoolExecutor(1) as threads:
        tokens = sdk.events(ID)
        assert next(tokens).token_ids == [1]  # and the reader takes no more
        gathering = threads.submit(lambda: list(sdk.gather(requests())))
        assert is_reading.wait(30)
        assert sdk.models() == []
        may_go_on.set()
        assert len(gathering.result(30)) == 1
        assert next(tokens).token_ids == [1]


def test_a_long_wait_says_where_and_for_how_long(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_PAUSE", lambda state: 0.01)
    monkeypatch.setattr(connection, "WARN_EVERY", 6)
    monkeypatch.setattr(connection, "WARN_PAUSE_S", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url) as sdk, caplog.at_level(logging.WARNING, "scorepool"), pytest.raises(Unreachable):
        sdk.result(ID, timeout_s=1.0)
    assert re.search(rf"no answer from {url} about job {ID} for \d s, still trying: ConnectError", caplog.text)
    assert len(caplog.records) > 1


def test_the_last_attempt_is_made_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_PAUSE", lambda state: 100.0)
    answers = iter([(503, {}, b"busy"), (200, {}, MODELS)])
    with server(lambda: next(answers)) as url, Client(url, retry_s=0.3) as sdk:
        begun_at = time.monotonic()
        assert sdk.models() == []
        assert time.monotonic() - begun_at >= 0.3


def test_calls_that_wait_together_are_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_PAUSE", lambda state: 0.01)

    async def wait_for_several(url: str) -> None:
        async with AsyncClient(url) as sdk:
            await asyncio.gather(*(sdk.result(ID, timeout_s=2.0) for _ in range(4)), return_exceptions=True)

    with caplog.at_level(logging.WARNING, "scorepool"):
        asyncio.run(wait_for_several(f"http://127.0.0.1:{free_port()}"))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("text", "`items` is a str: expected a list"),
        ([("a", "b"), ["a", "b"]], r"`items\[1\]` is .*: expected a tuple \(prompt, completion\), both str"),
        ([("a", [1])], r"`items\[0\]` is .*both lists of token ids, or the completion alone"),
        ([("a", "b", "c")], r"`items\[0\]`"),
        ([None], r"`items\[0\]` is 'None'"),
        ([("a", "b")] * 300 + [1], r"`items\[300\]` is '1'"),
    ],
)
def test_an_item_that_cannot_be_scored_is_named(items: list[object], message: str):
    def answer() -> Answer:
        return (202, {}, ACCEPTED) if sent[-1].method == "POST" else (200, {}, wire.encode(JOB))

    sent: list[Sent] = []
    with server(answer, sent=sent) as url, Client(url) as sdk, pytest.raises(TypeError, match=message):
        sdk.score("demo", items)  # type: ignore[arg-type]
