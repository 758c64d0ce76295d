"""The measured speed of a worker: ends per second in which it had jobs, however the ends are recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.worker.claims.speed import MAX_BUSY_S, MAX_JOBS, Speed


def record(speed: Speed, num_exchanges: int, jobs_each: int, every_s: float, pause_s: float = 0.0) -> None:
    """Record ends in exchanges at equal distances. After each the worker has no job for `pause_s`."""
    now_s = 0.0
    for _ in range(num_exchanges):
        speed.advance(now_s, is_busy=True)
        now_s += every_s
        for index in range(jobs_each):
            speed.advance(now_s + index * 1e-5, is_busy=True)
            speed.end(work=3.0)
        now_s += jobs_each * 1e-5
        speed.advance(now_s, is_busy=False)
        now_s += pause_s


def test_a_worker_without_an_end_has_no_speed():
    speed = Speed()
    speed.advance(0.0, is_busy=True)
    speed.advance(5.0, is_busy=True)

    assert (speed.jobs_per_s, speed.work_per_s, speed.busy_s) == (None, None, 5.0)


@given(
    num_exchanges=st.integers(1, 200),
    jobs_each=st.integers(1, 300),
    every_s=st.floats(0.05, 20),
    pause_s=st.floats(0, 1000),
)
def test_neither_pauses_nor_the_size_of_exchanges_change_the_speed(
    num_exchanges: int, jobs_each: int, every_s: float, pause_s: float
):
    """Over a long link, hundreds of short jobs end in one exchange: these are not hundreds within microseconds."""
    speed = Speed()
    record(speed, num_exchanges, jobs_each, every_s, pause_s)

    assert speed.jobs_per_s == pytest.approx(jobs_each / every_s, rel=0.1)
    assert speed.work_per_s == pytest.approx(3.0 * jobs_each / every_s, rel=0.1)
    assert speed.busy_s == pytest.approx(num_exchanges * every_s, rel=0.1)


@pytest.mark.parametrize(("every_s", "num_before_the_measure"), [(0.1, MAX_JOBS), (5.0, int(MAX_BUSY_S / 5) + 1)])
def test_the_speed_follows_what_the_worker_does_now(every_s: float, num_before_the_measure: int):
    speed = Speed()
    speed.advance(0.0, is_busy=True)
    for index in range(1, 100):
        speed.advance(index * 1.0, is_busy=True)
        speed.end(1.0)
    for index in range(1, num_before_the_measure + 1):
        speed.advance(99 + index * every_s, is_busy=True)
        speed.end(1.0)

    assert speed.jobs_per_s == pytest.approx(1 / every_s)


def test_the_speed_falls_while_a_job_takes_long():
    speed = Speed()
    record(speed, num_exchanges=10, jobs_each=1, every_s=1.0)
    speed.advance(1000.0, is_busy=True)
    speed.advance(1010.0, is_busy=True)

    assert speed.jobs_per_s == pytest.approx(0.5, rel=0.01)


def test_the_speed_follows_what_the_worker_does_now_also_over_a_long_link():
    speed = Speed()
    record(speed, num_exchanges=100, jobs_each=10, every_s=0.2)
    start_s = 1000.0
    for index in range(1, 6):
        speed.advance(start_s + index * 0.2, is_busy=True)
        for _ in range(100):
            speed.end(1.0)

    assert speed.jobs_per_s == pytest.approx(500)
