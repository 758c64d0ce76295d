"""Limit the deliveries in flight to each receiver, so that a receiver that hangs or is gone delays no other.

Every receiver has a concurrency limit and a circuit breaker:

    closed ──MAX_FAILURES attempts in a row without an answer──► open ──after 30 s, 60 s, ... 15 minutes──► half-open
       ▲                                                          ▲                                             │
       │                                                          └──────────────── no answer ──────────────────┤
       └───────────────────────────────────────────── an answer ────────────────────────────────────────────────┘

    closed      deliveries up to the limit. The limit starts at 1/40 of the capacity, grows by one with every answer up
                to half of the capacity, and is 1/40 while the receiver has been silent for SILENCE_S
    open        no delivery
    half-open   one delivery at a time, to probe whether the receiver answers again

A receiver is an owner's host and port, whatever the path. All receivers of one owner that are at the smallest limit
share half of the capacity, so an owner who registers ever new hosts that hang delays the others little. All receivers
of one owner together leave a tenth of the capacity to other owners.

A delivery that finds no room is postponed: for as long as its receiver has been silent so far, and behind the
deliveries postponed before it, spaced by the receiver's mean duration of an attempt. A postponed delivery does not
count as an attempt.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Literal

SILENCE_S = 1.0  # without an answer: then only the smallest limit applies
MAX_FAILURES = 5  # attempts in a row without an answer, after which the circuit opens
OPEN_S = (30.0, 60.0, 120.0, 240.0, 480.0, 900.0)  # how long the circuit stays open, the first time and later ones
MIN_WAIT_S, MAX_WAIT_S = 1.0, 900.0  # for which a delivery is postponed
MAX_RECEIVERS = 10_000  # remembered; beyond it receivers without a delivery in flight are forgotten

CircuitState = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class ReceiverState:
    """The limit, the circuit breaker and the recent answers of one receiver.

    Times are time.monotonic(), which stops while a Mac sleeps: a receiver is not silent in that time.
    """

    limit: int  # most deliveries in flight while the circuit is closed
    in_flight: int = 0
    silent_since: float = 0.0  # the last answer, or the start of the oldest attempt in flight
    failures: int = 0  # in a row
    num_openings: int = 0  # of the circuit, since the last answer
    open_until: float = 0.0
    mean_attempt_s: float = 0.1  # moving average
    next_slot_at: float = 0.0  # for the next delivery that is postponed

    def circuit(self, now: float) -> CircuitState:
        """Return the state of the circuit breaker."""
        if now < self.open_until:
            return "open"
        return "half_open" if self.failures >= MAX_FAILURES else "closed"


class ReceiverLimiter:
    """The receivers of all owners. Thread-safe. Its state is not persistent: a restart forgets it and loses nothing."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_limit = max(1, capacity // 40)
        self._max_limit = max(1, capacity // 2)
        self._max_per_owner = max(1, capacity * 9 // 10)
        self._clock = clock
        self._lock = Lock()
        self._receivers: dict[tuple[str, str], ReceiverState] = {}
        self._in_flight: Counter[str] = Counter()  # by owner

    def acquire(self, owner: str, host: str) -> float:
        """Take a slot until `release` and return 0.0, or return the seconds after which to try again."""
        with self._lock:
            now = self._clock()
            receiver = self._receiver(owner, host)
            silence_s = now - receiver.silent_since if receiver.in_flight else 0.0
            limit = self._limit(receiver, now, silence_s)
            max_of_owner = self._max_per_owner if limit > self._min_limit else self._max_limit
            if receiver.in_flight < limit and self._in_flight[owner] < max_of_owner:
                self._in_flight[owner] += 1
                if receiver.in_flight == 0:
                    receiver.silent_since = now
                receiver.in_flight += 1
                return 0.0
            slot_at = max(receiver.next_slot_at, receiver.open_until, now + max(MIN_WAIT_S, silence_s))
            receiver.next_slot_at = slot_at + receiver.mean_attempt_s / max(1, limit)
            return min(slot_at - now, MAX_WAIT_S)

    def release(self, owner: str, host: str, elapsed_s: float, is_answered: bool) -> None:
        """Give the slot of an ended attempt back. Any HTTP status is an answer."""
        with self._lock:
            now = self._clock()
            receiver = self._receiver(owner, host)
            receiver.in_flight -= 1
            self._in_flight[owner] -= 1
            if not self._in_flight[owner]:
                del self._in_flight[owner]
            receiver.mean_attempt_s += (elapsed_s - receiver.mean_attempt_s) / 8
            if is_answered:
                receiver.limit = min(receiver.limit + 1, self._max_limit)
                receiver.failures = receiver.num_openings = 0
                receiver.silent_since, receiver.open_until, receiver.next_slot_at = now, 0.0, 0.0
                return
            receiver.limit = self._min_limit
            receiver.failures += 1
            if receiver.circuit(now) == "half_open":
                receiver.open_until = now + OPEN_S[min(receiver.num_openings, len(OPEN_S) - 1)]
                receiver.num_openings += 1

    def _limit(self, receiver: ReceiverState, now: float, silence_s: float) -> int:
        match receiver.circuit(now):
            case "open":
                return 0
            case "half_open":
                return 1
            case "closed":
                return self._min_limit if silence_s > SILENCE_S else receiver.limit

    def _receiver(self, owner: str, host: str) -> ReceiverState:
        receiver = self._receivers.get((owner, host))
        if receiver is None:
            if len(self._receivers) >= MAX_RECEIVERS:
                self._receivers = {key: state for key, state in self._receivers.items() if state.in_flight}
            receiver = self._receivers[owner, host] = ReceiverState(limit=self._min_limit)
        return receiver
