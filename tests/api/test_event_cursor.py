"""A client of `/events` receives every token once, and a cursor to reconnect with, wherever it begins."""

import asyncio
import json

import pytest
from msgspec.structs import replace
from redis import Redis
from starlette.types import Message

from scorepool import store, wire
from scorepool.api.event_cursor import CursorEvent, EventCursor
from tests.api.conftest import Serving, generate
from tests.api.fake_worker import PROVENANCE, FakeWorker


def delta(first: int, *ids: int, sequence: int = 0, job_id: str = "j") -> wire.TokenDelta:
    return wire.TokenDelta(
        id=job_id, sequence=sequence, first=first, token_ids=list(ids), token_bytes=[b"x"] * len(ids)
    )


def result(*sequences: list[int]) -> wire.Result:
    return wire.Result(
        sequences=[
            wire.SequenceResult(token_ids=ids, token_bytes=[b"x"] * len(ids), text="x" * len(ids)) for ids in sequences
        ],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=1, completion_tokens=sum(map(len, sequences))),
        stamp=PROVENANCE,
    )


def test_tokens_are_sent_once_and_counted():
    cursor = EventCursor.parse("")

    (first,) = cursor.advance(delta(0, 5, 6))
    (other,) = cursor.advance(delta(0, 9, sequence=2))
    (more,) = cursor.advance(delta(1, 6, 7))

    assert (first.event_cursor, other.event_cursor, more.event_cursor) == ("2", "2,0,1", "3,0,1")
    assert (more.delta.first, more.delta.token_ids) == (2, [7])
    assert cursor.advance(delta(0, 5)) == []


def test_a_client_that_reconnects_continues_where_it_was():
    cursor = EventCursor.parse("2,0")

    assert cursor.advance(delta(0, 5)) == []
    assert cursor.advance(delta(3, 8)) == []  # the token before it is missing
    events = cursor.finish("j", result([5, 6, 7, 8], [1]))

    assert [(event.event_cursor, event.delta.first, event.delta.token_ids) for event in events] == [
        ("4,0", 2, [7, 8]),
        ("4,1", 0, [1]),
    ]


def test_skipped_positions_are_sent_with_the_remaining_tokens():
    cursor = EventCursor.parse("2")
    [sequence] = result([9, 5, 6, 7, 8]).sequences
    ended = replace(result(), sequences=[replace(sequence, num_reported_prompt_tokens=1, skipped=[0, 1, 3])])

    (event,) = cursor.finish("j", ended)

    assert (event.delta.first, event.delta.token_ids, event.delta.skipped) == (2, [7, 8], [3])


CALL = wire.ToolCallResult(id="c", name="look", arguments="{}", entry=2)


def chat_delta(first: int, *ids: int, **more: object) -> wire.TokenDelta:
    channels = ["content", "tool_call", "markup", "reasoning"]
    return replace(delta(first, *ids), channels=channels[first : first + len(ids)], **more)


@pytest.mark.parametrize("num_prompt_tokens", [0, 3])
def test_channels_and_tool_calls_are_sent_once_with_their_tokens(num_prompt_tokens: int):
    """The client may have part of a delta, and the remaining tokens come with the result."""
    ids = [9] * num_prompt_tokens + [5, 6, 7, 8]
    whole = replace(
        result(ids).sequences[0],
        num_reported_prompt_tokens=num_prompt_tokens,
        channels=["content", "tool_call", "markup", "reasoning"],
        tool_calls=[CALL],
    )
    ended = replace(result(ids), sequences=[whole])

    for num_sent in range(4):
        cursor = EventCursor.parse(str(num_sent) if num_sent else "")
        events = [*cursor.advance(chat_delta(0, 5, 6)), *cursor.advance(chat_delta(1, 6, 7, tool_calls=[CALL]))]
        events += cursor.finish("j", ended)

        deltas = [event.delta for event in events]
        channels = [channel for part in deltas for channel in part.channels]
        assert channels == ["content", "tool_call", "markup", "reasoning"][num_sent:]
        assert [call for part in deltas for call in part.tool_calls] == ([CALL] if num_sent <= CALL.entry else [])
        for part in deltas:
            assert len(part.token_ids) == len(part.channels)
            assert not part.tool_calls or part.first <= CALL.entry < part.first + len(part.token_ids)


def test_a_rerun_with_other_tokens_voids_those_that_were_sent():
    cursor = EventCursor.parse("")
    cursor.advance(delta(0, 5, 6))

    restart, again = cursor.advance(delta(0, 7))

    assert (restart.restart, restart.event_cursor) == (True, "0")
    assert (again.event_cursor, again.delta.token_ids) == ("1", [7])


def of_run(run: int, first: int, *ids: int, sequence: int = 0) -> wire.TokenDelta:
    return replace(delta(first, *ids, sequence=sequence), run=run)


def tokens(events: list[CursorEvent]) -> list[list[int]]:
    """Return the tokens of each event; none of a restart."""
    return [[] if event.restart else event.delta.token_ids for event in events]


def test_a_restart_sends_the_tokens_of_every_sequence_again():
    cursor = EventCursor.parse("")
    cursor.advance(of_run(1, 0, 5, 6))
    cursor.advance(of_run(1, 0, 9, sequence=1))

    assert tokens(cursor.advance(of_run(2, 0, 9, sequence=1))) == []
    assert tokens(cursor.advance(of_run(2, 0, 5, 7, sequence=0))) == [[], [5, 7]]
    assert tokens(cursor.advance(of_run(2, 1, 8, sequence=1))) == []  # its first token is void, too
    assert cursor.missing == {1: 0}
    assert tokens(cursor.advance(of_run(2, 0, 9, 8, sequence=1))) == [[9, 8]]


def test_a_restart_in_the_middle_of_a_run_waits_for_its_first_tokens():
    cursor = EventCursor.parse("")
    cursor.advance(of_run(1, 0, 5, 6, 7))
    cursor.advance(of_run(2, 0, 5))

    (restart,) = cursor.advance(of_run(2, 1, 8))

    assert restart.restart
    assert cursor.missing == {0: 0}
    assert tokens(cursor.advance(of_run(2, 0, 5, 8))) == [[5, 8]]


def test_late_tokens_of_an_earlier_run_are_not_sent():
    cursor = EventCursor.parse("")
    cursor.advance(of_run(1, 0, 5, 6))
    cursor.advance(of_run(2, 0, 5))

    assert cursor.advance(of_run(1, 2, 7)) == []
    assert tokens(cursor.advance(of_run(2, 1, 6, 8))) == [[8]]


def test_a_result_with_other_tokens_voids_all_sequences():
    cursor = EventCursor.parse("")
    cursor.advance(delta(0, 1))
    cursor.advance(delta(0, 5, 6, sequence=1))

    assert tokens(cursor.finish("j", result([1, 2], [5, 7]))) == [[], [1, 2], [5, 7]]


def test_a_result_with_fewer_tokens_voids_those_that_were_sent():
    cursor = EventCursor.parse("")
    cursor.advance(delta(0, 5, 6))

    assert tokens(cursor.finish("j", result([5]))) == [[], [5]]


def reconnected(*deltas: wire.TokenDelta) -> EventCursor:
    """Return the cursor of a client that got these deltas on an earlier connection."""
    cursor = EventCursor.parse("")
    events = [event for delta in deltas for event in cursor.advance(delta)]
    return EventCursor.parse(events[-1].event_cursor)


def test_a_client_that_reconnects_continues_in_the_same_run():
    cursor = reconnected(of_run(1, 0, 5, 6), of_run(1, 0, 9, sequence=1), of_run(1, 2, 7))

    assert tokens(cursor.advance(of_run(1, 2, 7, 8))) == [[8]]
    assert tokens(cursor.advance(of_run(1, 1, 4, sequence=1))) == [[4]]
    assert str(cursor) == str(reconnected(of_run(1, 0, 5, 6, 7, 8), of_run(1, 0, 9, 4, sequence=1)))


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 2), (4,)])
def test_a_client_that_reconnects_after_another_run_is_told_if_its_tokens_differ(sizes: tuple[int, ...]):
    for ids, expected in ([5, 6, 7, 8], [8]), ([5, 9, 7, 8], None):
        cursor = reconnected(of_run(1, 0, 5, 6), of_run(1, 2, 7))
        assert cursor.advance(of_run(2, 3, 8)) == []  # nothing is sent before the tokens of the new run are compared
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        events = [event for first, size in zip(firsts, sizes, strict=True)
                  for event in cursor.advance(of_run(2, first, *ids[first : first + size]))]  # fmt: skip
        if expected:
            assert tokens(events) == [expected]
        else:
            assert events[0].restart


def by(weights: str, run: int, first: int, *ids: int, sequence: int = 0) -> wire.TokenDelta:
    return replace(of_run(run, first, *ids, sequence=sequence), weights=weights)


def test_the_same_tokens_of_other_weights_void_those_that_were_sent():
    """Their logprobs differ: a stream that went on would have those of both."""
    cursor = EventCursor.parse("")
    cursor.advance(by("a", 1, 0, 5, 6))
    assert tokens(cursor.advance(by("a", 2, 0, 5, 6, 7))) == [[7]]  # the worker died, another has the same weights

    assert tokens(cursor.advance(by("b", 3, 0, 5))) == [[], [5]]
    assert tokens(cursor.advance(of_run(3, 1, 6))) == [[6]]


@pytest.mark.parametrize(("weights", "expected"), [("a", [[7]]), ("b", [[], [5, 6, 7]])])
def test_a_client_that_reconnects_is_told_if_other_weights_computed_its_tokens(weights: str, expected: list[list[int]]):
    sent = by("a", 1, 0, 5, 6)
    stamp = replace(PROVENANCE, fingerprint=weights)

    assert tokens(reconnected(sent).advance(by(weights, 2, 0, 5, 6, 7))) == expected
    assert tokens(reconnected(sent).finish("j", replace(result([5, 6, 7]), stamp=stamp))) == expected
    connected = EventCursor.parse("")
    connected.advance(sent)
    assert tokens(connected.finish("j", replace(result([5, 6, 7]), stamp=stamp))) == expected


def test_an_adapter_is_a_part_of_the_weights():
    assert PROVENANCE.weights == PROVENANCE.fingerprint
    assert replace(PROVENANCE, adapter="x@0").weights == f"{PROVENANCE.fingerprint},x@0"


def test_a_client_that_reconnects_after_the_end_is_told_if_its_tokens_differ():
    sent = of_run(1, 0, 5, 6)

    assert tokens(reconnected(sent).finish("j", result([5, 6, 7]))) == [[7]]
    assert tokens(reconnected(sent).finish("j", result([5, 7, 8]))) == [[], [5, 7, 8]]
    assert tokens(reconnected(sent).finish("j", result([5]))) == [[], [5]]


@pytest.mark.parametrize(
    "text", ["x", "1,", "-1", "1;2", "9999999", "1" * 500, "1@", "1@5", "1@5:xyz", "1,2@5:00000000", "1@5:0000000"]
)
def test_a_malformed_cursor_is_refused(text: str):
    with pytest.raises(ValueError, match="Last-Event-ID"):
        EventCursor.parse(text)


@pytest.mark.anyio
@pytest.mark.parametrize("last", [None, "1"])
async def test_a_job_is_followed_from_its_first_token_to_its_end(
    serving: Serving, worker: FakeWorker, redis: Redis, last: str | None
):
    """The first token is published before the client connects."""
    headers = {} if last is None else {"Last-Event-ID": last}
    async with serving() as http:
        while (await http.get("/readyz")).status_code != 200:
            pass
        job_id = (await http.post("/v1/jobs", json=generate(stream=True))).json()["id"]
        worker.start(job_id)
        redis.xadd(store.TOKENS, {"step": wire.encode([delta(0, 5, job_id=job_id), delta(0, 1, job_id="other")])})
        following = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events", headers=headers))
        redis.xadd(store.TOKENS, {"step": wire.encode([delta(1, 6, job_id=job_id)])})
        worker.end(job_id, result([5, 6, 7]))
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
async def test_a_client_that_reads_slowly_delays_no_other_and_misses_nothing(
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
        for job_id in (slow, other):
            worker.start(job_id)
            for first in range(50):
                redis.xadd(store.TOKENS, {"step": wire.encode([delta(first, first, job_id=job_id)])})
            worker.end(job_id, result(list(range(50))))
        stream = (await http.get(f"/v1/jobs/{other}/events")).text  # while the slow client has read nothing
        assert sent == []
        reads.set()
        await hanging

    assert stream.count("event: end") == 1
    events = b"".join(sent).decode().split("\n\n")[:-1]
    tokens = [json.loads(event.split("data: ")[1])["token_ids"] for event in events[:-1]]
    assert [token for some in tokens for token in some] == list(range(50))
    assert events[-1].startswith("event: end")
