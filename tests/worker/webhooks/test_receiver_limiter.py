"""A receiver that hangs or is gone holds little of what everybody needs."""

from scorepool.worker.webhooks.receiver_limiter import MAX_FAILURES, MAX_WAIT_S, PAUSES_S, SLOW_S, ReceiverLimiter

CAPACITY = 200
SHARE = CAPACITY // 40


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def fill(lanes: ReceiverLimiter, receiver: str, most: int = CAPACITY) -> int:
    """How many enter at once."""
    return next((count for count in range(most) if lanes.enter("alice", receiver)), most)


def fail(lanes: ReceiverLimiter, receiver: str, count: int) -> None:
    for _ in range(count):
        assert lanes.enter("alice", receiver) == 0.0
        lanes.leave("alice", receiver, 15.0, is_answered=False)


def answer(lanes: ReceiverLimiter, receiver: str, count: int) -> None:
    for _ in range(count):
        assert lanes.enter("alice", receiver) == 0.0
        lanes.leave("alice", receiver, 0.01, is_answered=True)


def test_however_many_receivers_hang_those_that_answer_find_room():
    lanes = ReceiverLimiter(CAPACITY, Clock())
    answer(lanes, "healthy", CAPACITY)
    assert sum(fill(lanes, f"hanging {number}") for number in range(10)) == 10 * SHARE == CAPACITY / 4
    assert sum(fill(lanes, f"hanging {number}") for number in range(100)) == CAPACITY / 4
    assert fill(lanes, "healthy") == CAPACITY * 9 / 10 - CAPACITY / 2


def test_a_receiver_earns_a_wider_lane_with_every_answer_up_to_half_of_all():
    lanes = ReceiverLimiter(CAPACITY, Clock())
    answer(lanes, "hook", CAPACITY)
    assert fill(lanes, "hook") == CAPACITY // 2


def test_a_receiver_that_begins_to_hang_falls_back_to_its_share():
    clock = Clock()
    lanes = ReceiverLimiter(CAPACITY, clock)
    answer(lanes, "hook", CAPACITY)
    assert fill(lanes, "hook", SHARE) == SHARE
    clock.now_s += SLOW_S * 1.1
    assert lanes.enter("alice", "hook") > 0
    lanes.leave("alice", "hook", 1.1, is_answered=True)
    assert lanes.enter("alice", "hook") == 0.0


def test_a_silent_receiver_is_asked_by_one_at_a_time_ever_more_seldom_and_forgiven_when_it_answers():
    clock = Clock()
    lanes = ReceiverLimiter(CAPACITY, clock)
    fail(lanes, "hook", MAX_FAILURES)
    for pause_s in [*PAUSES_S, PAUSES_S[-1]]:
        assert lanes.enter("alice", "hook") > 0
        clock.now_s += pause_s
        assert lanes.enter("alice", "hook") == 0.0
        assert lanes.enter("alice", "hook") > 0
        lanes.leave("alice", "hook", 15.0, is_answered=False)
    clock.now_s += PAUSES_S[-1]
    assert lanes.enter("alice", "hook") == 0.0
    lanes.leave("alice", "hook", 0.1, is_answered=True)
    assert fill(lanes, "hook") == SHARE + 1
    assert fill(lanes, "another") == SHARE


def test_what_is_put_off_comes_back_one_after_the_other_and_not_all_at_once():
    lanes = ReceiverLimiter(CAPACITY, Clock())
    fail(lanes, "hook", MAX_FAILURES)
    waits = [lanes.enter("alice", "hook") for _ in range(1000)]
    assert waits == sorted(waits)
    assert waits[0] == PAUSES_S[0]
    assert waits[-1] == MAX_WAIT_S
    assert len(set(waits[:20])) == 20


def test_what_is_put_off_comes_back_after_as_long_as_its_receiver_has_been_silent():
    clock = Clock()
    lanes = ReceiverLimiter(CAPACITY, clock)
    assert fill(lanes, "hook") == SHARE
    clock.now_s += 8.0
    assert lanes.enter("alice", "hook") == 8.0


def test_an_owner_who_names_ever_new_hosts_leaves_half_to_the_others():
    lanes = ReceiverLimiter(CAPACITY, Clock())
    taken = sum(lanes.enter("mallory", f"{number}.evil.example") == 0.0 for number in range(10 * CAPACITY))
    assert taken == CAPACITY / 2
    assert fill(lanes, "hook") == SHARE
    lanes.leave("mallory", "0.evil.example", 15.0, is_answered=False)
    assert lanes.enter("mallory", "new.evil.example") == 0.0


def test_attempts_that_fail_together_shut_a_lane_for_one_pause():
    clock = Clock()
    lanes = ReceiverLimiter(CAPACITY, clock)
    for _ in range(SHARE):
        assert lanes.enter("alice", "hook") == 0.0
    for _ in range(SHARE):
        lanes.leave("alice", "hook", 15.0, is_answered=False)
    clock.now_s += PAUSES_S[0]
    assert lanes.enter("alice", "hook") == 0.0
