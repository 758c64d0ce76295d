"""Encode the events of a job as server-sent events: `tokens`, `progress`, `restart` and `end`."""

from collections.abc import AsyncGenerator
from functools import partial

from msgspec import Struct

from scorepool import wire
from scorepool.api.event_cursor import CursorEvent, EventCursor
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.repositories.jobs import ENDED


class Restart(Struct, frozen=True, forbid_unknown_fields=True):
    """Make all tokens sent so far void."""


EVENTS = [("tokens", wire.TokenDelta), ("progress", wire.Progress), ("restart", Restart), ("end", wire.Job)]


async def encode_events(
    events: AsyncGenerator[CursorEvent | wire.Progress | wire.Job | None], cursor: EventCursor, held: HeldResults
) -> AsyncGenerator[bytes | None]:
    """Write each event with its name and its id. Progress has none: every connection begins with the latest."""
    try:
        async for event in events:
            if event is None:
                yield None
            elif isinstance(event, wire.Progress):
                yield b"event: progress\ndata: " + wire.encode_json(event) + b"\n\n"
            elif isinstance(event, CursorEvent):
                yield await held.run(partial(_cursor_event, event))  # the last may have a result's tokens
            elif event.status in ENDED:
                end = await held.run(partial(_end_event, event, str(cursor)))
                held.count_reply(len(end))
                yield end
    finally:
        await events.aclose()


def _end_event(job: wire.Job, event_id: str) -> bytes:
    return _event("end", event_id, wire.encode_json(job))


def _cursor_event(event: CursorEvent) -> bytes:
    if isinstance(event.delta, wire.TokenDelta):
        return _event("tokens", event.event_cursor, wire.encode_json(event.delta))
    return _event("restart", event.event_cursor, wire.encode_json(Restart()))


def _event(name: str, event_id: str, data: bytes) -> bytes:
    return f"event: {name}\nid: {event_id}\ndata: ".encode() + data + b"\n\n"
