"""What a client of `/events` is told, wherever it comes in: every entry once, and the place to come back to."""

import asyncio
import json

import pytest
from msgspec.structs import replace
from redis import Redis
from starlette.types import Message

from scorepool import store, wire
from scorepool.api.dialects.event_cursor import EventCursor
from tests.api.conftest import Serving, generate
from tests.api.fake_worker import STAMP, FakeWorker


def growth(first: int, *ids: int, sequence: int = 0, id: str = "j") -> wire.TokenDelta:  # noqa: A002
    return wire.TokenDelta(id=id, sequence=sequence, first=first, token_ids=list(ids), token_bytes=[b"x"] * len(ids))


def result(*rows: list[int]) -> wire.Result:
    return wire.Result(
        sequences=[
            wire.SequenceResult(token_ids=ids, token_bytes=[b"x"] * len(ids), text="x" * len(ids)) for ids in rows
        ],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=1, completion_tokens=sum(map(len, rows))),
        stamp=STAMP,
    )


def test_entries_are_told_once_and_counted():
    progress = EventCursor.parse("")

    (first,) = progress.grow(growth(0, 5, 6))
    (other,) = progress.grow(growth(0, 9, sequence=2))
    (more,) = progress.grow(growth(1, 6, 7))

    assert (first.place, other.place, more.place) == ("2", "2,0,1", "3,0,1")
    assert (more.growth.first, more.growth.token_ids) == (2, [7])
    assert progress.grow(growth(0, 5)) == []


def test_a_client_that_comes_back_goes_on_where_it_was():
    progress = EventCursor.parse("2,0")

    assert progress.grow(growth(0, 5)) == []
    assert progress.grow(growth(3, 8)) == []  # one is missing before it
    told = progress.end("j", result([5, 6, 7, 8], [1]))

    assert [(one.place, one.growth.first, one.growth.token_ids) for one in told] == [
        ("4,0", 2, [7, 8]),
        ("4,1", 0, [1]),
    ]


def test_what_is_skipped_is_told_with_the_entries_that_are_left():
    progress = EventCursor.parse("2")
    [scored] = result([9, 5, 6, 7, 8]).sequences
    ended = replace(result(), sequences=[replace(scored, num_reported_prompt_tokens=1, skipped=[0, 1, 3])])

    (told,) = progress.end("j", ended)

    assert (told.growth.first, told.growth.token_ids, told.growth.skipped) == (2, [7, 8], [3])


CALL = wire.ToolCallResult(id="c", name="look", arguments="{}", entry=2)


def chat_growth(first: int, *ids: int, **more: object) -> wire.TokenDelta:
    channels = ["content", "tool_call", "markup", "reasoning"]
    return replace(growth(first, *ids), channels=channels[first : first + len(ids)], **more)


@pytest.mark.parametrize("num_prompt_tokens", [0, 3])
def test_channels_and_calls_are_told_once_with_their_entries(num_prompt_tokens: int):
    """Also where a client has some of the entries of a growth, or all but the last come with the result."""
    ids = [9] * num_prompt_tokens + [5, 6, 7, 8]
    whole = replace(
        result(ids).sequences[0],
        num_reported_prompt_tokens=num_prompt_tokens,
        channels=["content", "tool_call", "markup", "reasoning"],
        tool_calls=[CALL],
    )
    ended = replace(result(ids), sequences=[whole])

    for place in range(4):
        progress = EventCursor.parse(str(place) if place else "")
        told = [*progress.grow(chat_growth(0, 5, 6)), *progress.grow(chat_growth(1, 6, 7, tool_calls=[CALL]))]
        told += progress.end("j", ended)

        growths = [one.growth for one in told]
        channels = [channel for one in growths for channel in one.channels]
        assert channels == ["content", "tool_call", "markup", "reasoning"][place:]
        assert [call for one in growths for call in one.tool_calls] == ([CALL] if place <= CALL.entry else [])
        for one in growths:
            assert len(one.token_ids) == len(one.channels)
            assert not one.tool_calls or one.first <= CALL.entry < one.first + len(one.token_ids)


def test_a_run_that_takes_another_way_voids_what_was_told():
    progress = EventCursor.parse("")
    progress.grow(growth(0, 5, 6))

    restart, again = progress.grow(growth(0, 7))

    assert (restart.restart, restart.place) == (True, "0")
    assert (again.place, again.growth.token_ids) == ("1", [7])


@pytest.mark.parametrize("place", ["x", "1,", "-1", "1;2", "9999999", "1" * 500])
def test_a_place_that_is_none_is_refused(place: str):
    with pytest.raises(ValueError, match="Last-Event-ID"):
        EventCursor.parse(place)


@pytest.mark.anyio
@pytest.mark.parametrize("last", [None, "1"])
async def test_a_job_is_followed_from_before_its_tokens_to_its_end(
    serving: Serving, worker: FakeWorker, redis: Redis, last: str | None
):
    """The first token came before anybody listened."""
    headers = {} if last is None else {"Last-Event-ID": last}
    async with serving() as http:
        while (await http.get("/readyz")).status_code != 200:
            pass
        id_ = (await http.post("/v1/jobs", json=generate(stream=True))).json()["id"]
        worker.start(id_)
        redis.xadd(store.TOKENS, {"step": wire.encode([growth(0, 5, id=id_), growth(0, 1, id="other")])})
        following = asyncio.create_task(http.get(f"/v1/jobs/{id_}/events", headers=headers))
        redis.xadd(store.TOKENS, {"step": wire.encode([growth(1, 6, id=id_)])})
        worker.end(id_, result([5, 6, 7]))
        reply = await following

    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in part.splitlines()) for part in reply.text.split("\n\n") if part]
    tokens = [
        token for event in events if event["event"] == "tokens" for token in json.loads(event["data"])["token_ids"]
    ]
    assert tokens == ([5, 6, 7] if last is None else [6, 7])
    assert (events[-1]["event"], events[-1]["id"]) == ("end", "3")
    assert json.loads(events[-1]["data"])["status"] == "finished"


@pytest.mark.anyio
async def test_a_client_that_reads_nothing_holds_up_nobody_and_misses_nothing(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    reads, sent = asyncio.Event(), []

    async def send(message: Message) -> None:
        if message.get("body"):
            await reads.wait()
            sent.append(message["body"])

    async with serving() as http:
        while (await http.get("/readyz")).status_code != 200:
            pass
        slow, other = [(await http.post("/v1/jobs", json=generate(stream=True))).json()["id"] for _ in range(2)]
        url = f"/v1/jobs/{slow}/events"
        scope = {"type": "http", "method": "GET", "path": url, "raw_path": url.encode(), "root_path": ""}
        scope |= {"scheme": "http", "headers": [(b"host", b"127.0.0.1")], "query_string": b"", "http_version": "1.1"}
        hanging = asyncio.create_task(http._transport.app(scope, asyncio.Event().wait, send))
        for id_ in (slow, other):
            worker.start(id_)
            for first in range(50):
                redis.xadd(store.TOKENS, {"step": wire.encode([growth(first, first, id=id_)])})
            worker.end(id_, result(list(range(50))))
        told = (await http.get(f"/v1/jobs/{other}/events")).text  # while the slow one has read nothing
        assert sent == []
        reads.set()
        await hanging

    assert told.count("event: end") == 1
    events = b"".join(sent).decode().split("\n\n")[:-1]
    tokens = [json.loads(event.split("data: ")[1])["token_ids"] for event in events[:-1]]
    assert [token for some in tokens for token in some] == list(range(50))
    assert events[-1].startswith("event: end")
