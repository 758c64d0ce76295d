"""Hold the events of a stream that its client has not taken, within bounds."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from scorepool.api.http.held_bytes import Held, HeldBytes

# Of events as Redis holds them, of one API process.
MAX_BYTES = 4 * 2**20  # of one stream
MAX_BYTES_OF_OWNER = 32 * 2**20
MAX_BYTES_OF_ALL = 128 * 2**20

T = TypeVar("T")
_unsent = HeldBytes()


class TooManyEvents(Exception):
    """Report that a bound is exceeded."""


class UnsentEvents(Generic[T]):
    """The events of one stream, in order, until its client takes them."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._events: asyncio.Queue[tuple[T | Exception, int]] = asyncio.Queue()

    def put_or_drop(self, event: T, num_bytes: int) -> None:
        """Add an event that takes so many bytes, or drop it because it exceeds a bound."""
        if self._held.num_bytes + num_bytes > MAX_BYTES:
            return
        with suppress(TooManyEvents):
            self._held.add(num_bytes)
            self._events.put_nowait((event, num_bytes))

    def put(self, event: T | Exception) -> None:
        """Add an event that must not be dropped."""
        self._events.put_nowait((event, 0))

    async def get(self) -> T:
        """Return the next event. Raise it if it is an exception."""
        event, num_bytes = await self._events.get()
        self._held.resize(self._held.num_bytes - num_bytes)
        if isinstance(event, Exception):
            raise event
        return event


@contextmanager
def unsent_events(owner: str) -> Iterator[UnsentEvents[Any]]:
    """Give what holds the events of one stream until the context ends."""
    with _unsent.request(owner, MAX_BYTES_OF_OWNER, MAX_BYTES_OF_ALL, lambda most, is_own: TooManyEvents()) as held:
        yield UnsentEvents(held)
