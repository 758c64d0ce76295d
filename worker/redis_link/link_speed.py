"""Estimate what the link to Redis carries: how large a message and its reply may be, and how long to wait for it.

A message should take about a second on the link, or four round trips. A shorter one wastes a larger share of its time
on the round trip; a longer one delays what comes behind it, and is lost as a whole when the link fails.

Knows no clock and no Redis. The caller tells each exchange, a message and its reply, in the order in which they ended:

    link.record(size_bytes, seconds)   it was answered
    link.record_timeout()              it was not, and the connection was given up
"""

from collections import deque

FIRST_MESSAGE_BYTES = 64 * 1024
MIN_MESSAGE_BYTES = 1024
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MESSAGE_S = 1.0  # that the bytes of a message should take
MESSAGE_ROUND_TRIPS = 4  # that they should take, if that is longer
MAX_MESSAGE_S = 4.0
NUM_ROUND_TRIPS = 4  # of which the shortest counts; the route may have changed before
FIRST_REPLY_BYTES = 256 * 1024
MIN_REPLY_BYTES = 16 * 1024
MAX_REPLY_BYTES = 64 * 1024 * 1024
REPLY_BYTES_S = 2.0  # that the bytes of a reply should take; far less than a lease, which begins before them
MAX_GROWTH = 4  # from one message to the next: buffers on the way can take one message at once and the next one not
SMALL_BYTES = 16 * 1024  # up to it, the time of a message shows the round trip, unless it is one of the largest
FIRST_ROUND_TRIP_S = 0.25  # assumed until a small exchange shows it
REPLY_S = 0.75  # beyond what is expected
MAX_TIMEOUT_S = 10.0  # of the doubling


class LinkSpeed:
    """The link as the last exchanges show it."""

    def __init__(self) -> None:
        self._round_trip_s: float | None = None
        self._round_trips: deque[float] = deque(maxlen=NUM_ROUND_TRIPS)  # the last ones
        self._deviation_s = 0.0
        self._bytes_per_s: float | None = None
        self._message_bytes = FIRST_MESSAGE_BYTES
        self._reply_bytes = FIRST_REPLY_BYTES
        self._num_timeouts = 0  # in a row

    @property
    def round_trip_s(self) -> float:
        """The smoothed time of a small exchange, Redis's own time included."""
        return FIRST_ROUND_TRIP_S if self._round_trip_s is None else self._round_trip_s

    @property
    def measured_round_trip_s(self) -> float | None:
        """The same, None before there was one."""
        return self._round_trip_s

    @property
    def min_round_trip_s(self) -> float:
        """The shortest time of the last exchanges."""
        return min(list(self._round_trips), default=FIRST_ROUND_TRIP_S)

    @property
    def bytes_per_s(self) -> float | None:
        """The speed of the last messages upwards; None before there was a large one.

        On a link that is fast for its messages, it is a lower bound.
        """
        return self._bytes_per_s

    @property
    def message_bytes(self) -> int:
        """How many bytes the next message may have. What cannot be split may be larger."""
        return self._message_bytes

    @property
    def reply_bytes(self) -> int:
        """How many bytes the next reply may have. What cannot be split may be larger."""
        return self._reply_bytes

    @property
    def num_timeouts(self) -> int:
        """How many exchanges in a row were not answered."""
        return self._num_timeouts

    def timeout_s(self, size_bytes: int) -> float:
        """How long to wait for the reply of a message before the connection is given up."""
        speed = FIRST_MESSAGE_BYTES / MESSAGE_S if self._bytes_per_s is None else self._bytes_per_s
        timeout_s = 3 * self.round_trip_s + 4 * self._deviation_s + 2 * size_bytes / speed + REPLY_S
        return max(timeout_s, min(timeout_s * 2.0 ** min(self._num_timeouts, 10), MAX_TIMEOUT_S))

    def record(self, size_bytes: int, seconds: float, reply_bytes: int = 0) -> None:
        """Take an exchange that was answered. A large reply takes time of its own, so then the time is a bound only."""
        self._num_timeouts = 0
        if reply_bytes >= self._reply_bytes / 2:
            speed = reply_bytes / max(seconds - self.min_round_trip_s, self.min_round_trip_s / 4, 1e-6)
            fits = min(speed * REPLY_BYTES_S, MAX_GROWTH * self._reply_bytes, MAX_REPLY_BYTES)
            self._reply_bytes = max(int(fits), MIN_REPLY_BYTES)
        is_full = size_bytes >= self._message_bytes / 2
        is_upload = is_full or size_bytes > SMALL_BYTES
        if reply_bytes > SMALL_BYTES and (is_upload or seconds > self.round_trip_s):
            return
        if not is_upload:
            self.record_round_trip(seconds)
        elif seconds < self.min_round_trip_s:
            self._round_trips.append(seconds)
        upload_s = seconds - min(self.min_round_trip_s, seconds if self._round_trip_s else seconds / 2)
        if is_full or upload_s > MESSAGE_S:  # else it is too small to show more than that it passed
            self._measure(size_bytes, upload_s)

    def record_round_trip(self, seconds: float) -> None:
        """Take a small exchange, also of another connection. Any thread may call it."""
        self._round_trips.append(seconds)
        if self._round_trip_s is None:
            self._round_trip_s = seconds
        else:  # smoothed as in TCP (RFC 6298)
            self._deviation_s += (abs(seconds - self._round_trip_s) - self._deviation_s) / 4
            self._round_trip_s += (seconds - self._round_trip_s) / 8

    def record_timeout(self) -> None:
        """Take an exchange that was not answered in time."""
        self._num_timeouts += 1
        self._message_bytes = max(self._message_bytes // 2, MIN_MESSAGE_BYTES)
        self._reply_bytes = max(self._reply_bytes // 2, MIN_REPLY_BYTES)

    def _measure(self, size_bytes: int, upload_s: float) -> None:
        # An upload that is short beside the round trip cannot be told from its variation.
        round_trip_s = self.min_round_trip_s
        speed = size_bytes / max(upload_s, min(round_trip_s, MESSAGE_S) / 4, 1e-6)
        if self._bytes_per_s is None:
            self._bytes_per_s = speed
        elif size_bytes > SMALL_BYTES or speed > self._bytes_per_s:
            self._bytes_per_s = (self._bytes_per_s + speed) / 2
        fits = speed * min(max(MESSAGE_S, MESSAGE_ROUND_TRIPS * round_trip_s), MAX_MESSAGE_S)
        fits = min(fits, MAX_GROWTH * self._message_bytes, MAX_MESSAGE_BYTES)
        self._message_bytes = max(int(fits), MIN_MESSAGE_BYTES)
