"""Bound the bytes that the requests of each owner, and of all owners, hold in memory at once."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scorepool.api.http.errors import TooManyUploads

# In bodies of the largest size, of one API process.
MAX_BODIES = 16
MAX_BODIES_OF_OWNER = 4
FREE_BYTES = 128 * 1024  # of each request, so that small ones are served whatever others hold


class HeldBytes:
    """Bytes of one kind, by owner."""

    def __init__(self) -> None:
        self.by_owner: Counter[str] = Counter()

    @contextmanager
    def request(
        self, owner: str, max_of_owner: int, max_of_all: int, refusal: Callable[[int, bool], Exception]
    ) -> Iterator["Held"]:
        """Count what one request holds until the context ends.

        `refusal` makes the error from the bound that was exceeded, and from whether it is the owner's.
        """
        held = Held(self.by_owner, owner, max_of_owner, max_of_all, refusal)
        try:
            yield held
        finally:
            held.close()


class Held:
    """What one request holds."""

    def __init__(
        self,
        by_owner: Counter[str],
        owner: str,
        max_of_owner: int,
        max_of_all: int,
        refusal: Callable[[int, bool], Exception],
    ) -> None:
        self.owner = owner
        self.num_bytes = 0
        self._by_owner = by_owner
        self._max_of_owner = max_of_owner
        self._max_of_all = max_of_all
        self._refusal = refusal
        self._is_closed = False

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises the refusal, and counts none, if they exceed a bound.

        A request that is its owner's only one may exceed the owner's bound: it could never be served otherwise. In
        all it counts no more than that bound, so that it does not lock others out.
        """
        before = self.num_bytes
        self.resize(before + num_bytes)
        if self.num_bytes <= FREE_BYTES:
            return
        of_owner = self._by_owner[self.owner]
        is_own = self.num_bytes < of_owner > self._max_of_owner
        if is_own or sum(min(held, self._max_of_owner) for held in self._by_owner.values()) > self._max_of_all:
            self.resize(before)
            raise self._refusal(self._max_of_owner if is_own else self._max_of_all, is_own)

    def close(self) -> None:
        """Count nothing any more, also if something is added later: a request that was cut off may still run."""
        self.resize(0)
        self._is_closed = True

    def resize(self, num_bytes: int) -> None:
        """Change what is counted, without a check."""
        if self._is_closed:
            return
        self._by_owner[self.owner] += num_bytes - self.num_bytes
        self.num_bytes = num_bytes
        if not self._by_owner[self.owner]:
            del self._by_owner[self.owner]


_received = HeldBytes()


@contextmanager
def receiving(owner: str, max_body_bytes: int) -> Iterator[Callable[[int], None]]:
    """Give a function that counts bytes of one body until the context ends. It raises TooManyUploads."""
    with holding(owner, max_body_bytes) as held:
        yield held.add


@contextmanager
def holding(owner: str, max_body_bytes: int) -> Iterator[Held]:
    """Count the bytes that come in for a request, as its body or as images by URL, until the context ends."""

    def refusal(most: int, is_own: bool) -> TooManyUploads:
        if is_own:
            return TooManyUploads(
                f"you are sending bodies, or images by URL, of more than {most} bytes at once "
                f"({MAX_BODIES_OF_OWNER} times SCOREPOOL_MAX_BODY_BYTES); wait until one has been read"
            )
        return TooManyUploads(f"this server is receiving bodies of more than {most} bytes; try again soon")

    most_of_owner, most_of_all = MAX_BODIES_OF_OWNER * max_body_bytes, MAX_BODIES * max_body_bytes
    with _received.request(owner, most_of_owner, most_of_all, refusal) as held:
        yield held
