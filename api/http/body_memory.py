"""Bound the bytes of bodies that are being received: a client may send slowly, on many connections."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scorepool.api.http.errors import TooManyUploads

# In bodies of the largest size, of one API process.
MAX_BODIES = 16
MAX_BODIES_OF_OWNER = 4
FREE_BYTES = 128 * 1024  # of each body, so that small requests are read whatever others send

_received: Counter[str] = Counter()  # bytes, by owner


@contextmanager
def receiving(owner: str, max_body_bytes: int) -> Iterator[Callable[[int], None]]:
    """Give a function that counts bytes of one body until the context ends. It raises TooManyUploads."""
    held_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal held_bytes
        held_bytes += num_bytes
        _received[owner] += num_bytes
        if held_bytes <= FREE_BYTES:
            return
        if _received[owner] > MAX_BODIES_OF_OWNER * max_body_bytes:
            raise TooManyUploads(
                f"you are sending bodies of more than {MAX_BODIES_OF_OWNER * max_body_bytes} bytes at once "
                f"({MAX_BODIES_OF_OWNER} times SCOREPOOL_MAX_BODY_BYTES); wait until one has been read"
            )
        if _received.total() > MAX_BODIES * max_body_bytes:
            raise TooManyUploads(
                f"this server is receiving bodies of more than {MAX_BODIES * max_body_bytes} bytes; try again soon"
            )

    try:
        yield count
    finally:
        _received[owner] -= held_bytes
        if not _received[owner]:
            del _received[owner]
