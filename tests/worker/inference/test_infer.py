"""A request's way through tokenizer and engine, and who cancels it where. In one process, with faked ones."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

import pytest
from redis import Redis

from scorepool import wire
from scorepool.engine import Sequence
from scorepool.engine.errors import EngineDeadError
from scorepool.worker.inference.infer import Infer, stamp_of
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.rq.errors import FatalError
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from tests.worker.conftest import generate
from tests.worker.fake import FakeEngine, FakeTokenizer


class Slow(FakeTokenizer):
    """Waits in a text that begins with SLOW."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_in = threading.Event()
        self.may_go_on = threading.Event()
        self.gave_up = False

    def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
        self.texts.append(text)
        if text.startswith("SLOW"):
            self.is_in.set()
            self.gave_up = not self.may_go_on.wait(60)
            assert not self.gave_up
        return super().encode(text, add_bos)


class Recorder(FakeEngine):
    """Ends a group when the test does."""

    def __init__(self) -> None:
        self.tokenizer = Slow()
        self.added: list[Future[list[Sequence]]] = []
        self.fault: EngineDeadError | None = None
        self.in_add = threading.Event()
        self.may_add = threading.Event()
        self.may_add.set()

    def add(self, sequences: list[Sequence]) -> "Future[list[Sequence]]":
        self.in_add.set()
        assert self.may_add.wait(60)
        if self.fault is not None:
            raise self.fault
        self.added.append(Future())
        return self.added[-1]

    def cancel(self, future: "Future[list[Sequence]]") -> None:
        future.cancel()


@pytest.fixture
def engine() -> Recorder:
    return Recorder()


@pytest.fixture
def infer(engine: Recorder) -> Iterator[Infer]:
    infer = Infer(engine, stamp_of("demo", engine.model_info), TokenPublisher(Redis()))
    yield infer
    engine.tokenizer.may_go_on.set()
    engine.may_add.set()
    infer.close()


def send(infer: Infer, prompt: str) -> AsyncResult:
    job = Job.__new__(Job)
    job._id = "j"
    job.request = wire.encode(generate(prompt))
    pending = infer(job)
    assert isinstance(pending, AsyncResult)
    return pending


def end_of(infer: Infer) -> None:
    """Until the tokenizer's thread has done what it was given."""
    infer._tokenizing.submit(lambda: None).result(30)


def never(pending: AsyncResult) -> None:
    with pytest.raises(NotYet):
        pending.future.result(0.05)


def test_what_is_canceled_behind_a_long_text_is_not_tokenized(infer: Infer, engine: Recorder):
    first = send(infer, "SLOW")
    assert engine.tokenizer.is_in.wait(60)
    second = send(infer, "second")
    second.cancel()
    engine.tokenizer.may_go_on.set()
    end_of(infer)
    assert engine.tokenizer.texts == ["SLOW"]
    assert len(engine.added) == 1
    engine.added[0].set_result([])
    assert first.future.result(10)[0].num_prompt_tokens == 5
    never(second)


def test_what_is_canceled_while_it_is_tokenized_reaches_no_engine(infer: Infer, engine: Recorder):
    pending = send(infer, "SLOW")
    assert engine.tokenizer.is_in.wait(60)
    pending.cancel()  # the main thread waits for no text: this one ends only when it may
    assert not engine.tokenizer.gave_up
    engine.tokenizer.may_go_on.set()
    end_of(infer)
    assert engine.added == []
    never(pending)


def test_what_is_canceled_while_the_engine_takes_it_is_canceled_there(infer: Infer, engine: Recorder):
    engine.may_add.clear()
    pending = send(infer, "text")
    assert engine.in_add.wait(60)
    threading.Timer(0.1, engine.may_add.set).start()
    pending.cancel()
    end_of(infer)
    assert [added.cancelled() for added in engine.added] == [True]
    never(pending)
    pending.cancel()  # twice is harmless


def test_cancels_at_any_moment_leave_nothing_running(infer: Infer, engine: Recorder):
    engine.tokenizer.may_go_on.set()
    for i in range(500):
        pending = send(infer, "text")
        time.sleep(i % 10 * 2e-5)
        pending.cancel()
    end_of(infer)
    assert all(added.cancelled() for added in engine.added)


def test_a_fault_that_the_engine_raises_on_that_thread_is_the_main_threads(infer: Infer, engine: Recorder):
    engine.fault = EngineDeadError("the engine failed")
    with pytest.raises(FatalError):
        send(infer, "text").future.result(10)
    engine.fault = None
    pending = send(infer, "text")  # the thread has lived on
    end_of(infer)
    engine.added[0].set_result([])
    assert pending.future.result(10)


def test_close_waits_for_no_text_and_drops_those_that_wait(infer: Infer, engine: Recorder):
    send(infer, "SLOW")
    assert engine.tokenizer.is_in.wait(60)
    send(infer, "second")
    infer.close()
    assert not engine.tokenizer.gave_up  # the text still waits
    engine.tokenizer.may_go_on.set()
