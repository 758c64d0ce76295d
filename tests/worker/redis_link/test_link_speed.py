"""The size of messages and the timeout of their replies follow what the link carries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.worker.redis_link.link_speed import (
    FIRST_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_TIMEOUT_S,
    MIN_MESSAGE_BYTES,
    REPLY_S,
    LinkSpeed,
)

MBIT = 1e6 / 8
exchanges = st.lists(
    st.one_of(
        st.none(),  # a timeout
        st.tuples(st.integers(1, 64 * 1024 * 1024), st.floats(0, 100), st.integers(0, 10**8)),
    ),
    max_size=60,
)


def upload(link: LinkSpeed, bytes_per_s: float, round_trip_s: float, num_messages: int) -> float:
    """Send full messages over a link without noise; return the bytes/s of the last one, its round trip included."""
    rate = 0.0
    for _ in range(num_messages):
        size = link.message_bytes
        seconds = size / bytes_per_s + round_trip_s
        link.record(size, seconds)
        rate = size / seconds
    return rate


@given(exchanges)
def test_the_estimates_stay_in_their_limits_whatever_happens(history: list[tuple[int, float, int] | None]):
    link = LinkSpeed()
    for exchange in history:
        before = link.message_bytes
        if exchange is None:
            link.record_timeout()
            assert link.message_bytes == max(before // 2, MIN_MESSAGE_BYTES)
        else:
            link.record(*exchange)
            assert link.message_bytes <= 4 * before
            assert link.num_timeouts == 0
        assert MIN_MESSAGE_BYTES <= link.message_bytes <= MAX_MESSAGE_BYTES
        assert 0 <= link.min_round_trip_s <= 100
        assert link.timeout_s(0) >= REPLY_S
        assert link.timeout_s(10**6) >= link.timeout_s(10**3)


@given(st.floats(0.1 * MBIT, 10_000 * MBIT), st.floats(0.0001, 1.0))
def test_messages_take_about_a_second_or_four_round_trips(bytes_per_s: float, round_trip_s: float):
    link = LinkSpeed()
    link.record(500, round_trip_s + 500 / bytes_per_s)
    upload(link, bytes_per_s, round_trip_s, 12)
    target_s = max(1.0, min(4 * round_trip_s, 4.0))
    assert link.message_bytes == MAX_MESSAGE_BYTES or 0.7 < link.message_bytes / bytes_per_s / target_s < 1.5


@given(st.floats(0.1 * MBIT, 1000 * MBIT), st.floats(0.0001, 1.0))
def test_messages_stay_short_on_a_link_that_never_had_a_small_exchange(bytes_per_s: float, round_trip_s: float):
    link = LinkSpeed()
    upload(link, bytes_per_s, round_trip_s, 12)
    assert link.message_bytes / bytes_per_s < 2.5
    link.record(500, round_trip_s)
    assert link.min_round_trip_s <= round_trip_s


@given(st.floats(0.1 * MBIT, 1000 * MBIT), st.floats(0.0001, 1.0), st.integers(0, 10))
def test_no_message_of_a_steady_link_is_given_up(bytes_per_s: float, round_trip_s: float, num_before: int):
    link = LinkSpeed()
    link.record(500, round_trip_s + 500 / bytes_per_s)
    upload(link, bytes_per_s, round_trip_s, num_before)
    size = link.message_bytes
    assert link.timeout_s(size) > size / bytes_per_s + round_trip_s or size == FIRST_MESSAGE_BYTES


def test_messages_at_least_double_while_they_are_quick():
    link = LinkSpeed()
    sizes = [FIRST_MESSAGE_BYTES]
    while link.message_bytes < MAX_MESSAGE_BYTES:
        link.record(link.message_bytes, 0.2)
        sizes.append(link.message_bytes)
        assert sizes[-1] >= min(2 * sizes[-2], MAX_MESSAGE_BYTES)
    assert len(sizes) < 8


def test_a_small_message_tells_nothing_about_large_ones():
    link = LinkSpeed()
    upload(link, 1000 * MBIT, 0.08, 12)
    assert link.message_bytes == MAX_MESSAGE_BYTES
    for _ in range(100):
        link.record(20_000, 0.5)
        link.record(500, 0.5)
    assert link.message_bytes == MAX_MESSAGE_BYTES
    assert link.round_trip_s == pytest.approx(0.5, rel=0.01)


def test_a_large_reply_is_no_slow_upload():
    link = LinkSpeed()
    link.record(500, 0.02)
    link.record(1000, 64.0, reply_bytes=32_000_000)
    assert (link.message_bytes, link.round_trip_s) == (FIRST_MESSAGE_BYTES, 0.02)


@pytest.mark.parametrize("mbit", [0.5, 4, 100])
def test_a_reply_takes_a_small_part_of_a_lease(mbit: float):
    link = LinkSpeed()
    link.record(500, 0.05)
    for _ in range(10):
        link.record(500, 0.05 + link.reply_bytes / (mbit * MBIT), link.reply_bytes)
    assert link.reply_bytes / (mbit * MBIT) == pytest.approx(2.0, rel=0.05)
    link.record_timeout()
    assert link.reply_bytes / (mbit * MBIT) == pytest.approx(1.0, rel=0.05)


def test_a_link_that_becomes_slow_gets_smaller_messages_at_once():
    link = LinkSpeed()
    upload(link, 100 * MBIT, 0.02, 12)
    upload(link, 1 * MBIT, 0.02, 1)
    assert 0.9 * MBIT < link.message_bytes < 1.1 * MBIT


def test_a_link_that_becomes_fast_gets_larger_messages():
    link = LinkSpeed()
    upload(link, 1 * MBIT, 0.02, 12)
    upload(link, 100 * MBIT, 0.02, 6)
    assert 70 * MBIT < link.message_bytes < 130 * MBIT


def test_timeouts_halve_the_messages_and_double_the_patience():
    link = LinkSpeed()
    link.record(500, 0.1)
    patience = [link.timeout_s(500)]
    assert patience[0] < 1.5
    for num in range(1, 12):
        link.record_timeout()
        assert link.message_bytes == max(FIRST_MESSAGE_BYTES >> num, MIN_MESSAGE_BYTES)
        patience.append(link.timeout_s(500))
    assert patience[1] == pytest.approx(2 * patience[0])
    assert patience[-1] == MAX_TIMEOUT_S
    link.record(500, 0.1)
    assert link.timeout_s(500) < 1.5
    assert link.num_timeouts == 0


def test_the_shortest_round_trip_follows_a_longer_route():
    link = LinkSpeed()
    link.record(500, 0.001)
    upload(link, 1 * MBIT, 0.5, 5)
    for _ in range(8):  # heartbeats
        link.record_round_trip(0.5)
        upload(link, 1 * MBIT, 0.5, 4)
    assert link.min_round_trip_s == 0.5
    assert 1.8 * MBIT < link.message_bytes < 2.2 * MBIT
