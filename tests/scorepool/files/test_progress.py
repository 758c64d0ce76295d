"""What the command shows while it works."""

import pytest

from scorepool.files.output.journal import Counts
from scorepool.files.progress import Progress


def test_speeds_and_the_time_left_are_those_of_this_process():
    now = [100.0]
    progress = Progress(lambda: now[0])
    progress.start(Counts(1000, 0, 50_000, 10_000))
    now[0] += 10
    shown = progress.line(Counts(1500, 2, 75_000, 15_000), 40_000)
    assert shown == " 38%  1,500 rows  50.0 rows/s  2,500 tokens/s  0:00:50 left  2 failed"


def test_the_start_does_not_count_for_the_time_left():
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.start(Counts())
    now[0] = 30  # until the first rows, and then 10 bytes a second
    progress.note(Counts(1, 0, 1, 100))
    now[0] = 40
    assert progress.line(Counts(2, 0, 2, 200), 1000).endswith("0:01:20 left")


def test_slow_first_chunks_do_not_count_for_the_time_left():
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.start(Counts())
    for position in range(1, 101):
        now[0] += 10 if position <= 20 else 1
        progress.note(Counts(position, 0, position, position))
    assert progress.left_s(Counts(100, 0, 100, 100), 1000) == pytest.approx(900, rel=0.01)


def test_the_estimate_needs_little_memory_of_a_large_file():
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.start(Counts())
    for position in range(0, 100_000_000, 1000):
        now[0] += 1
        progress.note(Counts(1, 0, 1, position))
    assert len(progress._points) < 1000


def test_a_pipe_has_no_share_and_no_time_left():
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.start(Counts())
    now[0] += 4
    assert progress.line(Counts(8, 0, 80, 800), None) == "8 rows  2.0 rows/s  20 tokens/s"
