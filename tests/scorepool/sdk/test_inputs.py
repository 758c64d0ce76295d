"""What the SDK accepts, and how it names what it or the API refuses."""

import asyncio
import threading
import traceback

import numpy as np
import pytest

from scorepool import AsyncClient, Client, JobFailed, ScorepoolError, Unreachable, wire
from scorepool.local.demo import free_port
from scorepool.sdk import connection
from tests.api.fake_worker import RESULT
from tests.scorepool.sdk.test_batches import BATCH
from tests.scorepool.sdk.test_client import ACCEPTED, FAILED, ID, MODELS, Answer, Sent, server
from tests.scorepool.sdk.test_restarts import GONE as GONE_ANSWER

DONE = wire.Job(id=ID, kind="score", model="demo", status="finished", created_at=0.0, result=RESULT)


def test_an_item_that_is_refused_is_named_by_its_place_in_the_call():
    other = "1" * 32
    failure = wire.Failure(code="too_long", message="items[44] has 3005 tokens; at most 2048 fit", field="items[44]")
    failed = wire.Job(id=other, kind="score", model="demo", status="failed", created_at=0.0, failure=failure)
    accepted = wire.encode(wire.Accepted(id=other, status="queued", location=""))
    refusal = wire.ErrorBody(code="invalid", type="", message="items[44].completion: no", field="items[44].completion")

    def answer(request: Sent) -> Answer:
        if request.method == "POST" and b"item 300" in request.body:
            return second
        if request.method == "POST":
            return 202, {}, ACCEPTED
        return 200, {}, wire.encode(failed if other in request.path else DONE)

    items = [("a", f" item {index}") for index in range(302)]
    sent: list[Sent] = []
    with server(lambda: answer(sent[-1]), sent=sent) as url:
        second: Answer = 400, {}, wire.encode(wire.ErrorReply(error=refusal))
        with Client(url) as sdk, pytest.raises(ScorepoolError, match=r"^items\[300\].completion: no") as refused:
            sdk.score("demo", items)
        second = 202, {}, accepted
        with Client(url) as sdk, pytest.raises(JobFailed, match=r": items\[300\] has 3005 tokens") as ended:
            sdk.score("demo", items)
    assert (refused.value.field, ended.value.failure.field) == ("items[300].completion", "items[300]")


def test_chats_and_numbers_are_accepted_as_they_are_usually_written():
    sent: list[Sent] = []

    def answer() -> Answer:
        return (202, {}, ACCEPTED) if sent[-1].method == "POST" else (200, {}, wire.encode(FAILED))

    with server(answer, sent=sent) as url, Client(url) as sdk:
        with pytest.raises(JobFailed):
            sdk.generate("demo", messages=[{"role": "user", "content": "hi"}])  # type: ignore[list-item]
        chat = wire.decode_request(sent[0].body)
        assert isinstance(chat, wire.Generate)
        assert chat.messages == [wire.Message(role="user", content="hi")]
        with pytest.raises(ValueError, match=r"`messages`: .*`content`.*`messages\[0\]`"):
            sdk.generate("demo", messages=[{"role": "user"}])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="`messages`: Expected `array`, got `str`"):
            sdk.generate("demo", messages="hi")  # type: ignore[arg-type]
        sent.clear()
        with pytest.raises(JobFailed):
            sdk.generate("demo", list(np.array([1209, 5])))
        assert wire.decode_request(sent[0].body).prompt == [1209, 5]
        with pytest.raises(TypeError, match=r"cannot send .*object.*expected what JSON has"):
            sdk.generate("demo", [object()])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"expected an id, a str, found .Batch"):
            sdk.wait_for_batch(BATCH)  # type: ignore[arg-type]


def test_an_api_that_is_silent_is_not_awaited_much_longer_than_the_caller_wants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "MIN_REPLY_TIMEOUT_S", 0.3)
    silent = threading.Event()

    def answer() -> Answer:
        silent.wait(30)
        return 200, {}, MODELS

    with server(answer) as url, Client(url, retry_s=0.1) as sdk:
        for call in (sdk.models, lambda: sdk.wait_until_ready(0.1)):
            with pytest.raises(Unreachable, match="ReadTimeout"):
                call()
        silent.set()


def test_an_error_is_not_buried_under_the_frames_of_libraries():
    with Client(f"http://127.0.0.1:{free_port()}", retry_s=0.0) as sdk, pytest.raises(Unreachable) as away:
        sdk.models()
    with server(lambda: GONE_ANSWER) as url, Client(url) as sdk, pytest.raises(ScorepoolError) as refused:
        sdk.job(ID)
    for error in (away.value, refused.value):
        text = "".join(traceback.format_exception(error))
        assert len(text.splitlines()) < 20, text
        assert text.splitlines()[-1].startswith(f"scorepool.sdk.errors.{type(error).__name__}: ")


async def wait_in_vain(url: str, num_turns: int) -> None:
    async with AsyncClient(url, retry_s=1000.0) as sdk:
        waiting = asyncio.create_task(sdk.generate("demo", "a"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while sdk._submitting:  # noqa: ASYNC110 - a set that empties by itself
            await asyncio.sleep(0.01)


def test_what_was_never_sent_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch):
    """Whenever it is canceled: before, while and after it connects."""
    monkeypatch.setattr("scorepool.sdk.async_jobs.CANCEL_S", 1000.0)
    for num_turns in range(40):
        asyncio.run(asyncio.wait_for(wait_in_vain(f"http://127.0.0.1:{free_port()}", num_turns), 60.0))
