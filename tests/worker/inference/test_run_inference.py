"""A request runs through the tokenizer and the engine, and can be canceled at any point. Both are fakes."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial

import pytest
from redis import Redis

from scorepool import wire
from scorepool.engine import Sequence, TokenColumns
from scorepool.engine.errors import EngineDeadError
from scorepool.worker.inference import inference_run, run_inference
from scorepool.worker.inference.inference_run import scope_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.run_inference import InferenceRunner
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.rq.errors import FatalError, Postponed
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from tests.worker.conftest import generate, until
from tests.worker.fake import FakeChatCodec, FakeEngine, FakeTokenizer


class SlowTokenizer(FakeTokenizer):
    """A tokenizer that waits in a text that begins with SLOW."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_waiting = threading.Event()
        self.may_continue = threading.Event()
        self.timed_out = False

    def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
        self.texts.append(text)
        if text.startswith("SLOW"):
            self.is_waiting.set()
            self.timed_out = not self.may_continue.wait(60)
            assert not self.timed_out
        return super().encode(text, add_bos)


class RecordingEngine(FakeEngine):
    """An engine whose groups end when the test ends them."""

    def __init__(self) -> None:
        self.tokenizer = SlowTokenizer()
        self.chat = FakeChatCodec(self.tokenizer)
        self.added: list[Future[list[Sequence]]] = []
        self.sequences: list[Sequence] = []
        self.error: EngineDeadError | None = None
        self.in_add = threading.Event()
        self.may_add = threading.Event()
        self.may_add.set()

    def add(self, sequences: list[Sequence]) -> "Future[list[Sequence]]":
        self.in_add.set()
        assert self.may_add.wait(60)
        if self.error is not None:
            raise self.error
        self.sequences += sequences
        self.added.append(Future())
        return self.added[-1]

    def cancel(self, future: "Future[list[Sequence]]") -> None:
        future.cancel()


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def runner(engine: RecordingEngine) -> Iterator[InferenceRunner]:
    runner = InferenceRunner(engine, "demo", TokenPublisher(Redis()))
    yield runner
    engine.tokenizer.may_continue.set()
    engine.may_add.set()
    runner.close()


def send(runner: InferenceRunner, request: str | wire.Request) -> AsyncResult:
    job = Job.__new__(Job)
    job._id = "j"
    job.request = wire.encode(generate(request) if isinstance(request, str) else request)
    pending = runner(job)
    assert isinstance(pending, AsyncResult)
    return pending


def wait_for_tokenizer(runner: InferenceRunner) -> None:
    """Wait until the tokenizer's thread for short texts has finished its queue."""
    until(lambda: runner.tokenizing.short.is_idle, timeout_s=30)


def assert_never_ends(pending: AsyncResult) -> None:
    with pytest.raises(FutureTimeout):
        pending.future.result(0.05)


def test_a_job_canceled_while_it_waits_for_the_tokenizer_is_not_tokenized(
    runner: InferenceRunner, engine: RecordingEngine
):
    first = send(runner, "SLOW")
    assert engine.tokenizer.is_waiting.wait(60)
    second = send(runner, "second")
    second.cancel()
    engine.tokenizer.may_continue.set()
    wait_for_tokenizer(runner)
    assert engine.tokenizer.texts == ["SLOW"]
    assert len(engine.added) == 1
    engine.added[0].set_result([])
    assert first.future.result(60)[0].num_prompt_tokens == 5
    assert_never_ends(second)


def test_a_job_canceled_while_it_is_tokenized_does_not_reach_the_engine(
    runner: InferenceRunner, engine: RecordingEngine
):
    pending = send(runner, "SLOW")
    assert engine.tokenizer.is_waiting.wait(60)
    pending.cancel()  # returns although the tokenizer is still busy
    assert not engine.tokenizer.timed_out
    engine.tokenizer.may_continue.set()
    wait_for_tokenizer(runner)
    assert engine.added == []
    assert_never_ends(pending)


def test_a_job_canceled_while_it_is_added_to_the_engine_is_canceled_there(
    runner: InferenceRunner, engine: RecordingEngine
):
    engine.may_add.clear()
    pending = send(runner, "text")
    assert engine.in_add.wait(60)
    threading.Timer(0.1, engine.may_add.set).start()
    pending.cancel()
    wait_for_tokenizer(runner)
    assert [added.cancelled() for added in engine.added] == [True]
    assert_never_ends(pending)
    pending.cancel()  # a second time has no effect


def test_canceling_at_any_moment_leaves_nothing_running(runner: InferenceRunner, engine: RecordingEngine):
    engine.tokenizer.may_continue.set()
    for i in range(500):
        pending = send(runner, "text")
        time.sleep(i % 10 * 2e-5)
        pending.cancel()
    wait_for_tokenizer(runner)
    assert all(added.cancelled() for added in engine.added)


def test_a_job_has_begun_when_a_part_of_it_is_computed_and_not_when_the_engine_takes_it(
    runner: InferenceRunner, engine: RecordingEngine
):
    pending = send(runner, "text")
    wait_for_tokenizer(runner)
    [sequence] = engine.sequences
    sequence.append_unpredicted()  # as the engine does at once if all tokens are scored
    assert not pending.has_begun()
    sequence.num_computed = 3
    assert pending.has_begun()


def test_a_dead_engine_ends_the_process_and_not_the_tokenizer_thread(runner: InferenceRunner, engine: RecordingEngine):
    engine.error = EngineDeadError("the engine failed")
    with pytest.raises(FatalError):
        send(runner, "text").future.result(60)
    engine.error = None
    pending = send(runner, "text")  # the thread is still alive
    wait_for_tokenizer(runner)
    engine.added[0].set_result([])
    assert pending.future.result(60)


def test_close_waits_for_no_text_and_drops_queued_jobs(runner: InferenceRunner, engine: RecordingEngine):
    send(runner, "SLOW")
    assert engine.tokenizer.is_waiting.wait(60)
    send(runner, "second")
    runner.close()
    assert not engine.tokenizer.timed_out  # the text is still being tokenized
    engine.tokenizer.may_continue.set()


def test_a_result_reports_the_model_that_computed_its_last_token(runner: InferenceRunner, engine: RecordingEngine):
    pending = send(runner, "text")
    wait_for_tokenizer(runner)
    engine.added[0].set_result([])
    (prepared,) = pending.future.result(60)
    prepared.sequence.model_info = replace(engine.model_info, fingerprint="new weights")
    prepared.sequence.finish_reason = "length"
    prepared.sequence.columns = TokenColumns()

    result = pending.finish([prepared])

    assert isinstance(result, wire.Result)
    assert (result.stamp.model, result.stamp.fingerprint) == ("demo", "new weights")


@pytest.mark.parametrize("bad", [0, 1])
def test_the_stamp_is_of_what_was_computed_also_if_the_last_item_failed(
    runner: InferenceRunner, engine: RecordingEngine, bad: int
):
    items = [wire.ScoreItem(prompt=[5], completion=[999] if index == bad else [7]) for index in range(2)]
    pending = send(runner, wire.Score(model="demo", adapter="sql", items=items, on_item_error="report"))
    wait_for_tokenizer(runner)
    (sequence,) = engine.sequences
    sequence.columns.logprobs = [-0.5]
    sequence.model_info = replace(engine.model_info, adapter="sql@0123", weights_version=5)
    engine.added[0].set_result([])

    result = pending.finish(pending.future.result(60))

    assert isinstance(result, wire.Result)
    assert [each.failure is None for each in result.sequences] == [index != bad for index in range(2)]
    assert (result.stamp.adapter, result.stamp.weights_version) == ("sql@0123", 5)


def test_a_large_result_is_built_on_its_own_thread_and_holds_up_no_small_one(
    runner: InferenceRunner, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
):
    may_build = threading.Event()
    builders: list[threading.Thread] = []

    def slow_to_result(*args: object) -> wire.Result:
        builders.append(threading.current_thread())
        assert builders[-1] is threading.main_thread() or may_build.wait(30)
        return to_result(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_inference, "to_result", slow_to_result)
    monkeypatch.setattr(inference_run, "LARGE_RESULT", 1000)
    large, small = send(runner, "x" * 999), send(runner, "x" * 998)  # and BOS
    wait_for_tokenizer(runner)
    for added in engine.added:
        added.set_result([])
    assert isinstance(small.finish(small.future.result(60)), wire.Result)
    assert not large.future.done()
    may_build.set()
    prepared = large.future.result(30)

    assert isinstance(large.finish(prepared), wire.Result)
    assert len(builders) == 2  # the large one was built once, on another thread
    assert builders.count(threading.main_thread()) == 1


def test_a_large_result_that_cannot_be_built_fails_its_job(
    runner: InferenceRunner, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inference_run, "LARGE_RESULT", 1)
    pending = send(runner, "x")
    wait_for_tokenizer(runner)
    engine.sequences[0].columns.logprobs = [-0.5]
    engine.added[0].set_result([])

    with pytest.raises(ValueError, match="logprobs has 1 entries for 0 tokens"):
        pending.future.result(30)


@pytest.mark.parametrize(
    "request_of",
    [
        partial(wire.Score, items=[wire.ScoreItem(prompt=[5], completion=[6])]),
        partial(wire.Generate, prompt="a"),
        partial(wire.Classify, items=[wire.ClassifyItem(prompt="a")]),
    ],
)
def test_a_salted_job_shares_prefixes_with_jobs_of_its_owner_and_salt_alone(request_of: Callable[..., wire.Request]):
    asked = [("alice", None), ("bob", None), ("alice", "s"), ("alice", "t"), ("bob", "s")]
    scopes = [scope_of(request_of(model="demo", cache_salt=salt), owner) for owner, salt in asked]
    assert scopes[:2] == [None, None]
    assert len({None, *scopes[2:]}) == 4


def test_a_job_waits_for_an_adapter_that_is_served_and_that_the_worker_could_not_load(engine: RecordingEngine):
    runner = InferenceRunner(engine, "demo", TokenPublisher(Redis()), is_adapter_missing="sql".__eq__)
    try:
        with pytest.raises(Postponed):
            send(runner, wire.Generate(model="demo", adapter="sql", prompt="hello"))
        send(runner, wire.Generate(model="demo", adapter="other", prompt="hello"))
    finally:
        runner.close()
