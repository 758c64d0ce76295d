"""Stream the events of a job whose body is kept, and which goes on whether its clients read or not."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from scorepool import wire
from scorepool.api.dialects.deltas import Diverged
from scorepool.api.dialects.protocol import KeptEvents
from scorepool.api.event_cursor import CursorEvent
from scorepool.api.http.errors import begun_again
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.repositories.jobs import ENDED


async def kept_events(
    followed: AsyncGenerator[CursorEvent | wire.Progress | wire.Job | None], writer: KeptEvents, held: HeldResults
) -> AsyncGenerator[object | None]:
    """Yield the chunks of a job, and None when there is nothing to send.

    If the server's longest wait is over first, they end without the job's. Raises Failed if tokens that were sent are
    void.
    """
    async with aclosing(followed):
        for chunk in writer.begin():
            yield chunk
        async for event in followed:
            chunks = [] if event is None else await _chunks(event, writer, held)
            for chunk in chunks:
                yield chunk
            if not chunks:
                yield None


async def _chunks(event: CursorEvent | wire.Progress | wire.Job, writer: KeptEvents, held: HeldResults) -> list[object]:
    tokens = event.delta if isinstance(event, CursorEvent) else event
    try:
        if isinstance(event, CursorEvent):
            if event.restart:
                raise Diverged
            if event.is_from_result:  # the writer takes them from the job, which says where the text ends
                return []
        if isinstance(tokens, wire.TokenDelta):
            return list(await held.run(partial(writer.add, tokens)))
        if isinstance(tokens, wire.Job) and tokens.status in ENDED:
            return list(await held.run(partial(writer.add, tokens)))
    except Diverged:
        raise begun_again() from None
    return []
