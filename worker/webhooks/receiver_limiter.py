"""How many deliveries each receiver may hold at once, so that one that hangs or is gone delays nobody else.

A receiver earns its lane: it starts with a fortieth of all deliveries in flight, gets one more with every answer, up to
half of all, and falls back to the fortieth while it has said nothing for SLOW_S. After MAX_FAILURES attempts in a row
without an answer the lane is shut, and one attempt at a time asks whether the receiver is back: after 30 s, 60 s, ...
15 minutes.

A receiver is an owner's host and port, whatever the path. Those of one owner that have not answered, or not lately,
share half of all deliveries in flight, so that one who names ever new hosts that hang delays the others little; and
all of one owner's leave a tenth of them to the others.

A delivery that finds no room is told when there will be: after as long as its receiver has been silent so far, and
each in a place behind those put off before, as far apart as the receiver's own pace. What is put off is not counted as
tried.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

SLOW_S = 1.0  # without an answer, after which a receiver is not given more than its share
MAX_FAILURES = 5  # attempts in a row that brought no answer at all
PAUSES_S = (30.0, 60.0, 120.0, 240.0, 480.0, 900.0)  # of a shut lane
MIN_WAIT_S, MAX_WAIT_S = 1.0, 900.0  # of a delivery that is put off
MAX_LANES = 10_000  # remembered; beyond that idle ones are forgotten


@dataclass(slots=True)
class ReceiverState:
    width: int  # earned
    in_flight: int = 0
    quiet_since: float = 0.0  # the last answer, or the start of the oldest attempt
    failures: int = 0  # in a row
    num_pauses: int = 0
    shut_until: float = 0.0
    pace_s: float = 0.1  # how long an attempt takes, lately
    next_place_at: float = 0.0  # for the next delivery that is put off


class ReceiverLimiter:
    """Thread-safe. It is one process's memory: nothing is lost with it."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = max(1, capacity // 40)
        self._most = max(1, capacity // 2)
        self._most_of_owner = max(1, capacity * 9 // 10)
        self._clock = clock
        self._lock = Lock()
        self._lanes: dict[tuple[str, str], ReceiverState] = {}
        self._owners: Counter[str] = Counter()  # in flight

    def enter(self, owner: str, receiver: str) -> float:
        """0.0: there is room, and it is taken until `leave`. Otherwise the seconds after which to come again."""
        with self._lock:
            now = self._clock()
            lane = self._lane(owner, receiver)
            silence_s = now - lane.quiet_since if lane.in_flight else 0.0
            width = self._width(lane, now, silence_s)
            most_of_owner = self._most_of_owner if width > self._least else self._most
            if lane.in_flight < width and self._owners[owner] < most_of_owner:
                self._owners[owner] += 1
                if lane.in_flight == 0:
                    lane.quiet_since = now
                lane.in_flight += 1
                return 0.0
            at = max(lane.next_place_at, lane.shut_until, now + max(MIN_WAIT_S, silence_s))
            lane.next_place_at = at + lane.pace_s / max(1, width)
            return min(at - now, MAX_WAIT_S)

    def leave(self, owner: str, receiver: str, elapsed_s: float, is_answered: bool) -> None:
        """An attempt that entered is over."""
        with self._lock:
            now = self._clock()
            lane = self._lane(owner, receiver)
            lane.in_flight -= 1
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
            lane.pace_s += (elapsed_s - lane.pace_s) / 8
            if is_answered:
                lane.width = min(lane.width + 1, self._most)
                lane.failures = lane.num_pauses = 0
                lane.quiet_since, lane.shut_until, lane.next_place_at = now, 0.0, 0.0
                return
            lane.width = self._least
            lane.failures += 1
            if lane.failures >= MAX_FAILURES and now >= lane.shut_until:
                lane.shut_until = now + PAUSES_S[min(lane.num_pauses, len(PAUSES_S) - 1)]
                lane.num_pauses += 1

    def _width(self, lane: ReceiverState, now: float, silence_s: float) -> int:
        """More than the least is only for those who answer."""
        if now < lane.shut_until:
            return 0
        if lane.failures >= MAX_FAILURES:
            return 1
        return self._least if silence_s > SLOW_S else lane.width

    def _lane(self, owner: str, receiver: str) -> ReceiverState:
        lane = self._lanes.get((owner, receiver))
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                self._lanes = {name: lane for name, lane in self._lanes.items() if lane.in_flight}
            lane = self._lanes[owner, receiver] = ReceiverState(width=self._least)
        return lane
