"""Long texts hold up nobody else: jobs are tokenized in turns, and long texts on a thread of their own."""

import threading
from collections.abc import Iterator

import pytest

from scorepool.worker.inference.tokenizing import MAX_WAITING_CHARACTERS, SLICE_CHARACTERS, TokenizingQueue
from tests.worker.conftest import until


class SlicedJob:
    """A job with texts of these lengths, which records each turn."""

    def __init__(self, owner: str, sizes: list[int], log: list[str], gate: threading.Event | None = None) -> None:
        self.owner = owner
        self.num_characters = sum(sizes)
        self.is_done = threading.Event()
        self.has_begun = threading.Event()
        self._sizes = list(sizes)
        self._announced: int | None = None
        self._log = log
        self._gate = gate  # a text waits for it

    def advance(self, max_characters: int) -> int | None:
        num = 0
        while num <= max_characters:
            if self._announced is not None:
                self.has_begun.set()
                if self._gate is not None:
                    assert self._gate.wait(30)
                self._log.append(f"{self.owner}{self._announced}")
            if not self._sizes:
                self.is_done.set()
                return None
            self._announced = self._sizes.pop(0)
            num += self._announced
        return self._announced


@pytest.fixture
def queue() -> Iterator[TokenizingQueue]:
    queue = TokenizingQueue()
    yield queue
    queue.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_short_texts_pass_a_long_one(queue: TokenizingQueue, gate: threading.Event):
    log: list[str] = []
    long = SlicedJob("a", [SLICE_CHARACTERS + 1], log, gate)
    queue.put(long)
    assert long.has_begun.wait(30)
    shorts = [SlicedJob(owner, [10], log) for owner in ("a", "b") for _ in range(100)]
    for job in shorts:
        queue.put(job)

    assert all(job.is_done.wait(30) for job in shorts)
    assert not long.is_done.is_set()
    assert queue.since is not None  # the watchdog sees the long text
    gate.set()
    assert long.is_done.wait(30)


def test_a_job_of_many_texts_lets_another_name_s_job_pass_after_each_slice(
    queue: TokenizingQueue, gate: threading.Event
):
    log: list[str] = []
    many = SlicedJob("a", [SLICE_CHARACTERS] * 50, log, gate)
    queue.put(many)
    assert many.has_begun.wait(30)
    other = SlicedJob("b", [10] * 3, log)
    queue.put(other)
    gate.set()

    assert other.is_done.wait(30)
    assert many.is_done.wait(30)
    assert log.index("b10") <= 3  # of 50: the slice that ran, and what began before the job was put


def test_small_texts_share_a_turn(queue: TokenizingQueue, gate: threading.Event):
    log: list[str] = []
    first = SlicedJob("c", [1], log, gate)
    queue.put(first)
    assert first.has_begun.wait(30)
    jobs = [SlicedJob(owner, [SLICE_CHARACTERS // 4] * 6, log) for owner in ("a", "b")]
    for job in jobs:
        queue.put(job)
    gate.set()

    assert all(job.is_done.wait(30) for job in jobs)
    assert [text[0] for text in log[1:6]] == ["a"] * 4 + ["b"]


def test_an_owner_is_crowded_while_much_of_its_text_waits(queue: TokenizingQueue, gate: threading.Event):
    long = SlicedJob("a", [MAX_WAITING_CHARACTERS + 1], [], gate)
    queue.put(long)
    small = SlicedJob("b", [100], [])
    queue.put(small)

    assert queue.crowded_owners == {"a"}
    gate.set()
    assert long.is_done.wait(30)
    assert small.is_done.wait(30)
    until(lambda: queue.long.is_idle and queue.short.is_idle)
    assert queue.crowded_owners == frozenset()
    assert not queue._num_characters
    assert queue.since is None


def test_jobs_that_wait_at_the_end_are_dropped(queue: TokenizingQueue, gate: threading.Event):
    log: list[str] = []
    first, second = SlicedJob("a", [1], log, gate), SlicedJob("b", [2], log)
    queue.put(first)
    assert first.has_begun.wait(30)
    queue.put(second)
    queue.close()
    gate.set()

    assert first.is_done.wait(30)
    assert not second.is_done.wait(0.1)
