"""A receiver that hangs or is gone takes few of the shared slots: concurrency limits and circuit breakers."""

from scorepool.worker.webhooks.receiver_limiter import MAX_FAILURES, MAX_WAIT_S, OPEN_S, SILENCE_S, ReceiverLimiter

CAPACITY = 200
MIN_LIMIT = CAPACITY // 40


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def fill(limiter: ReceiverLimiter, host: str, most: int = CAPACITY) -> int:
    """Acquire slots until there is none left, and return how many there were."""
    return next((count for count in range(most) if limiter.acquire("alice", host)), most)


def fail(limiter: ReceiverLimiter, host: str, count: int) -> None:
    for _ in range(count):
        assert limiter.acquire("alice", host) == 0.0
        limiter.release("alice", host, 15.0, is_answered=False)


def answer(limiter: ReceiverLimiter, host: str, count: int) -> None:
    for _ in range(count):
        assert limiter.acquire("alice", host) == 0.0
        limiter.release("alice", host, 0.01, is_answered=True)


def test_receivers_that_answer_find_room_however_many_receivers_hang():
    limiter = ReceiverLimiter(CAPACITY, Clock())
    answer(limiter, "healthy", CAPACITY)
    assert sum(fill(limiter, f"hanging {number}") for number in range(10)) == 10 * MIN_LIMIT == CAPACITY / 4
    assert sum(fill(limiter, f"hanging {number}") for number in range(100)) == CAPACITY / 4
    assert fill(limiter, "healthy") == CAPACITY * 9 / 10 - CAPACITY / 2


def test_every_answer_raises_the_limit_of_a_receiver_up_to_half_of_the_capacity():
    limiter = ReceiverLimiter(CAPACITY, Clock())
    answer(limiter, "host", CAPACITY)
    assert fill(limiter, "host") == CAPACITY // 2


def test_a_receiver_that_falls_silent_has_the_smallest_limit_until_it_answers():
    clock = Clock()
    limiter = ReceiverLimiter(CAPACITY, clock)
    answer(limiter, "host", CAPACITY)
    assert fill(limiter, "host", MIN_LIMIT) == MIN_LIMIT
    clock.now_s += SILENCE_S * 1.1
    assert limiter.acquire("alice", "host") > 0
    limiter.release("alice", "host", 1.1, is_answered=True)
    assert limiter.acquire("alice", "host") == 0.0


def test_an_open_circuit_admits_one_probe_at_growing_intervals_and_closes_at_the_first_answer():
    clock = Clock()
    limiter = ReceiverLimiter(CAPACITY, clock)
    fail(limiter, "host", MAX_FAILURES)
    for open_s in [*OPEN_S, OPEN_S[-1]]:
        assert limiter.acquire("alice", "host") > 0
        clock.now_s += open_s
        assert limiter.acquire("alice", "host") == 0.0
        assert limiter.acquire("alice", "host") > 0
        limiter.release("alice", "host", 15.0, is_answered=False)
    clock.now_s += OPEN_S[-1]
    assert limiter.acquire("alice", "host") == 0.0
    limiter.release("alice", "host", 0.1, is_answered=True)
    assert fill(limiter, "host") == MIN_LIMIT + 1
    assert fill(limiter, "another") == MIN_LIMIT


def test_postponed_deliveries_are_spaced_out():
    limiter = ReceiverLimiter(CAPACITY, Clock())
    fail(limiter, "host", MAX_FAILURES)
    waits = [limiter.acquire("alice", "host") for _ in range(1000)]
    assert waits == sorted(waits)
    assert waits[0] == OPEN_S[0]
    assert waits[-1] == MAX_WAIT_S
    assert len(set(waits[:20])) == 20


def test_a_delivery_is_postponed_for_as_long_as_its_receiver_has_been_silent():
    clock = Clock()
    limiter = ReceiverLimiter(CAPACITY, clock)
    assert fill(limiter, "host") == MIN_LIMIT
    clock.now_s += 8.0
    assert limiter.acquire("alice", "host") == 8.0


def test_an_owner_with_ever_new_hosts_leaves_half_of_the_capacity_to_others():
    limiter = ReceiverLimiter(CAPACITY, Clock())
    taken = sum(limiter.acquire("mallory", f"{number}.evil.example") == 0.0 for number in range(10 * CAPACITY))
    assert taken == CAPACITY / 2
    assert fill(limiter, "host") == MIN_LIMIT
    limiter.release("mallory", "0.evil.example", 15.0, is_answered=False)
    assert limiter.acquire("mallory", "new.evil.example") == 0.0


def test_attempts_that_fail_together_open_the_circuit_once():
    clock = Clock()
    limiter = ReceiverLimiter(CAPACITY, clock)
    for _ in range(MIN_LIMIT):
        assert limiter.acquire("alice", "host") == 0.0
    for _ in range(MIN_LIMIT):
        limiter.release("alice", "host", 15.0, is_answered=False)
    clock.now_s += OPEN_S[0]
    assert limiter.acquire("alice", "host") == 0.0
