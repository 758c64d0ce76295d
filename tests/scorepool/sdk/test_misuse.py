"""The SDK where it is interrupted, forgotten, forked, or used where it cannot work."""

import asyncio
import itertools
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from scorepool import (
    AsyncClient,
    Client,
    InvalidUrl,
    JobFailed,
    JobTimeout,
    MixedResults,
    NotScorepool,
    ScorepoolError,
    TokensRestarted,
    Unreachable,
    wire,
)
from scorepool.local.demo import free_port
from scorepool.sdk import connection
from scorepool.sdk.async_jobs import MAX_IN_FLIGHT
from scorepool.sdk.calls import Call
from tests.scorepool.sdk.test_client import ACCEPTED, FAILED, ID, JOB, MODELS, SCORE, Answer, Sent, server


def python(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def slow(sent: list[Sent]) -> Iterator[str]:
    """Run a server whose jobs are accepted after 0.3 s and never end."""

    def answer() -> Answer:
        path = sent[-1].path
        if path == "/v1/jobs":
            time.sleep(0.3)
            return 202, {}, ACCEPTED
        if "wait" in path:
            time.sleep(0.5)
        return 200, {}, wire.encode(JOB)

    with server(answer, sent=sent) as url:
        yield url


@pytest.fixture
def sent() -> list[Sent]:
    return []


def interrupt_at(word: str, sent: list[Sent]) -> None:
    """Send SIGINT to the main thread when the server has got a request with a word in its path."""

    def wait() -> None:
        while not any(word in request.path for request in list(sent)):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("call", ["submit", "result", "gather", "as_completed", "score"])
def test_ctrl_c_ends_any_call_and_cancels_its_jobs(call: str, slow: str, sent: list[Sent]):
    calls = {
        "submit": lambda sdk: sdk.submit(SCORE),
        "result": lambda sdk: sdk.submit(SCORE).result(),
        "gather": lambda sdk: list(sdk.gather([SCORE] * 3)),
        "as_completed": lambda sdk: list(sdk.as_completed([sdk.submit(SCORE)])),
        "score": lambda sdk: sdk.score("demo", [("a", "b")]),
    }
    interrupt_at("/v1/jobs" if call == "submit" else "?wait=", sent)  # during the submission, or after it
    with pytest.raises(KeyboardInterrupt), Client(slow) as sdk:
        calls[call](sdk)
    assert f"/v1/jobs/{ID}/cancel" in [request.path for request in sent]


def test_a_client_that_is_never_closed_ends_with_its_process_without_a_word():
    with server(lambda: (200, {}, MODELS)) as url:
        script = f"import scorepool; client = scorepool.Client({url!r}); client.models(); job = client.jobs"
        done = python(script, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_threads_of_forgotten_clients_end():
    with server(lambda: (200, {}, MODELS)) as url:
        before = threading.active_count()
        for _ in range(5):
            Client(url).models()
        deadline = time.monotonic() + 10
        while (clients := [thread for thread in threading.enumerate() if thread.name == "scorepool-client"]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
    assert not clients, before


def test_a_client_in_a_forked_process_says_so_and_leaves_the_jobs_of_its_parent(sent: list[Sent]):
    with server(lambda: (202, {}, ACCEPTED), sent=sent) as url:
        script = f"""
import os, warnings, scorepool
warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads
client = scorepool.Client({url!r})
client.submit(scorepool.Score(model="m", items=[scorepool.ScoreItem(prompt="a", completion="b")])).detach()
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    with client:
        client.models()
except RuntimeError as error:
    print(error)
"""
        done = python(script)
    assert done.stdout == "this client was made before a fork, in another process: make a new one here\n", done.stderr
    assert done.returncode == 0
    assert [request.path for request in sent] == ["/v1/jobs"]


def test_a_closed_client_says_so():
    with server(lambda: (200, {}, MODELS)) as url:
        with Client(url) as sdk:
            pass
        sdk.close()
        with pytest.raises(RuntimeError, match="this client is closed: make a new one"):
            sdk.models()

        async def use_after_close() -> None:
            async with AsyncClient(url) as client:
                pass
            await client.models()

        with pytest.raises(RuntimeError, match="this client is closed: make a new one"):
            asyncio.run(use_after_close())


def test_closing_a_client_ends_the_calls_of_other_threads(slow: str, sent: list[Sent]):
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            sdk.result(ID)
        except RuntimeError as error:
            errors.append(error)

    sdk = Client(slow)
    thread = threading.Thread(target=wait)
    thread.start()
    while not sent:
        time.sleep(0.01)
    sdk.close()
    thread.join(60)
    assert [str(error) for error in errors] == ["the client was closed during this call"]


def test_requests_may_come_from_a_generator_that_calls_the_client():
    def answer() -> Answer:
        replies = {"GET /v1/models": MODELS, "POST /v1/jobs": ACCEPTED}
        return 200, {}, replies.get(f"{sent[-1].method} {sent[-1].path}", wire.encode(FAILED))

    sent: list[Sent] = []
    with server(answer, sent=sent) as url, Client(url) as sdk:
        assert len(list(sdk.gather(SCORE for _ in range(3) if not sdk.models()))) == 3


def test_a_client_in_a_second_event_loop_says_so():
    with server(lambda: (200, {}, MODELS)) as url:
        sdk = AsyncClient(url)
        asyncio.run(sdk.models())
        with pytest.raises(RuntimeError, match="in another event loop"):
            asyncio.run(sdk.models())


def test_a_stream_that_is_left_early_is_closed(recwarn: pytest.WarningsRecorder):
    delta = wire.TokenDelta(id=ID, sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])
    body = b"id: 1\nevent: tokens\ndata: " + wire.encode_json(delta) + b"\n\n"
    with server(lambda: (200, {}, body)) as url:
        sdk = Client(url)
        stream = iter(sdk.events(ID))
        assert next(stream).token_ids == [1]
        sdk.close()
        del stream
    assert not list(recwarn)


def test_a_program_that_ends_in_the_middle_of_a_stream_says_nothing():
    delta = wire.TokenDelta(id=ID, sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])
    body = b"id: 1\nevent: tokens\ndata: " + wire.encode_json(delta) + b"\n\n"
    with server(lambda: (200, {}, body)) as url:
        script = f"import scorepool; client = scorepool.Client({url!r}); stream = client.events({ID!r}); next(stream)"
        done = python(f"{script}; raise SystemExit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def test_separators_of_unicode_in_a_text_do_not_end_a_line_of_a_stream():
    call = wire.ToolCallResult(id="c", name="f", arguments="\u2028\x85\x0c", entry=0)
    delta = wire.TokenDelta(id=ID, sequence=0, first=0, token_ids=[1], token_bytes=[b"a"], tool_calls=[call])
    events = [(b"tokens", wire.encode_json(delta)), (b"end", wire.encode_json(FAILED))]
    body = b"".join(b"event: " + name + b"\ndata: " + data + b"\n\n" for name, data in events)
    with server(lambda: (200, {}, body)) as url, Client(url) as sdk:
        stream = sdk.events(ID)
        assert next(stream).tool_calls == [call]
        with pytest.raises(JobFailed):
            next(stream)


def test_a_silent_api_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.sdk.async_jobs.GRACE_S", 0.1)
    hang = threading.Event()
    with server(lambda: (hang.wait(30), (200, {}, wire.encode(JOB)))[1]) as url, Client(url) as sdk:
        with pytest.raises(Unreachable, match=f"job {ID} goes on"):
            sdk.result(ID, timeout_s=0.2)
        hang.set()


def test_jobs_that_cannot_be_canceled_are_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.sdk.async_jobs.CANCEL_S", 0.3)
    with server(lambda: (202, {}, ACCEPTED)) as url:
        sdk = Client(url)
        sdk.submit(SCORE)
    sdk.close()
    assert f"jobs that go on, not canceled at {url}: 1 ({ID})" in caplog.text


def test_a_job_whose_cancel_failed_is_canceled_at_the_end():
    refusal = wire.encode(wire.ErrorReply(error=wire.ErrorBody(code="internal", type="server_error", message="no")))
    answers = iter([(202, {}, ACCEPTED), (500, {}, refusal), (200, {}, wire.encode(JOB))])
    sent: list[Sent] = []
    with server(lambda: next(answers), sent=sent) as url, Client(url) as sdk:
        job = sdk.submit(SCORE)
        with pytest.raises(ScorepoolError):
            job.cancel()
    assert [request.path for request in sent] == ["/v1/jobs", *[f"/v1/jobs/{ID}/cancel"] * 2]


def test_jobs_are_canceled_for_as_long_as_the_api_answers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.sdk.async_jobs.CANCEL_S", 6.0)
    accepted = [wire.Accepted(id=f"{number:032x}", status="queued", location="") for number in range(128)]
    sent: list[Sent] = []

    def answer() -> Answer:
        if sent[-1].path == "/v1/jobs/bulk":
            return 202, {}, wire.encode(accepted)
        time.sleep(1.0)  # and 16 at a time
        return 200, {}, wire.encode(JOB)

    with server(answer, sent=sent) as url, Client(url) as sdk:
        sdk.submit_many([SCORE] * 128)
    assert len(sent) == 129
    assert "not canceled" not in caplog.text


def test_a_gather_that_is_left_early_leaves_no_job():
    num_ended = 10
    sent: list[Sent] = []
    numbers = itertools.count()

    def answer() -> Answer:
        path = sent[-1].path
        if path == "/v1/jobs":
            time.sleep(0.4)  # longer than a cancel
            return 202, {}, wire.encode(wire.Accepted(id=f"{next(numbers):032x}", status="queued", location=""))
        if path.endswith("/cancel"):
            time.sleep(0.2)
        is_ended = int(path.split("/")[3].partition("?")[0], 16) < num_ended
        return 200, {}, wire.encode(FAILED if is_ended else JOB)

    async def leave_early(url: str) -> None:
        async with AsyncClient(url) as sdk:
            num_yielded = 0
            async for _ in sdk.gather([SCORE] * 40, max_in_flight=num_ended):
                num_yielded += 1
                if num_yielded in (1, num_ended // 2):  # afterwards the loop stands still: what is next has ended
                    await asyncio.sleep(1.0)
                if num_yielded == num_ended:
                    break

    with server(answer, sent=sent) as url:
        asyncio.run(leave_early(url))
    num_submitted = sum(request.path == "/v1/jobs" for request in sent)
    canceled = {request.path for request in sent if request.path.endswith("/cancel")}
    assert num_submitted > num_ended
    assert canceled == {f"/v1/jobs/{number:032x}/cancel" for number in range(num_ended, num_submitted)}


def test_a_wrong_key_is_refused_with_what_to_do():
    error = wire.ErrorReply(error=wire.ErrorBody(code="unauthorized", type="invalid_request_error", message="no"))
    with (
        server(lambda: (401, {}, wire.encode(error))) as url,
        Client(url, "wrong") as sdk,
        pytest.raises(
            ScorepoolError,
            match=r"no .*HTTP 401.*; give a valid API key: SCOREPOOL_API_KEY .*Client\(url, api_key=...\)",
        ),
    ):
        sdk.models()


def test_a_busy_api_that_asks_for_more_time_than_there_is_is_given_up_at_once():
    sent: list[Sent] = []
    with (
        server(lambda: (429, {"Retry-After": "3600"}, b"busy"), sent=sent) as url,
        Client(url) as sdk,
        pytest.raises(ScorepoolError, match="wait until jobs have ended"),
    ):
        sdk.submit(SCORE)
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("url", "api_key", "match"),
    [
        ("unix://", None, "or unix:///PATH"),
        ("unix://relative", None, "or unix:///PATH"),
        ("http://localhost", "schlüssel", "expected printable ASCII"),
        ("http://localhost", "a\nb", "expected printable ASCII"),
    ],
)
def test_what_can_never_work_is_refused_before_a_call(url: str, api_key: str | None, match: str):
    before = threading.active_count()
    with pytest.raises(ValueError, match=match):
        Client(url, api_key)
    assert threading.active_count() == before


def test_a_window_of_no_jobs_is_refused():
    with Client(f"http://127.0.0.1:{free_port()}") as sdk, pytest.raises(ValueError, match="expected 1 or more"):
        list(sdk.gather([SCORE], max_in_flight=0))


@pytest.mark.parametrize(
    "error",
    [
        ScorepoolError(404, wire.ErrorBody(code="not_found", type="t", message="no"), "GET /", ID),
        JobFailed(ID, wire.Failure(code="invalid", message="no"), "http://h"),
        JobTimeout(ID, "queued", 1.0, "http://h"),
        TokensRestarted(ID, "http://h"),
        Unreachable("http://h", 1.0, OSError("no"), "GET /x", ID),
        MixedResults("no"),
        NotScorepool("http://h", "no", "GET /", ID),
        InvalidUrl("h"),
    ],
)
def test_errors_reach_other_processes(error: Exception):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_ten_thousand_jobs_are_awaited_with_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    most_tasks = 0

    async def send(_: object, call: Call[object], retry_s: float | None = None) -> object:
        nonlocal most_tasks
        await asyncio.sleep(0)
        most_tasks = max(most_tasks, len(asyncio.all_tasks()))
        return [wire.Accepted(id=ID, status="queued", location="")] if call.method == "POST" else FAILED

    monkeypatch.setattr(connection.AsyncConnection, "send", send)
    with Client() as sdk:
        assert sum(1 for _ in sdk.gather(SCORE for _ in range(2_000))) == 2_000
        assert sum(1 for _ in sdk.as_completed([ID] * 10_000)) == 10_000
    assert most_tasks <= 3 * MAX_IN_FLIGHT + 2


def test_a_client_is_copied_into_other_processes_without_its_connections():
    with server(lambda: (200, {}, MODELS)) as url, Client(url, "key", retry_s=7.0) as client:
        pickled = pickle.dumps(client)
        assert pickled == pickle.dumps(client)  # so that `datasets.map` recognises a function that uses it
        with pickle.loads(pickled) as copy:
            assert copy.models() == []
            assert (copy.url, copy._arguments) == (url, (url, "key", 7.0))
