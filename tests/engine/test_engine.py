"""The engine's thread and futures, with a faked model: faults end all groups, groups are independent of each other."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from pathlib import Path

import pytest

from scorepool.engine import (
    Engine,
    EngineClosed,
    EngineDeadError,
    EngineSettings,
    InvalidRequest,
    LoadError,
    ModelInfo,
    NonFiniteLogits,
    Sampling,
    Sequence,
)
from scorepool.engine.engine_loop import EngineLoop, Turns
from scorepool.engine.scheduling.prefill_pace import MIN_TOKENS
from scorepool.engine.scheduling.scheduler import Scheduler
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult

MODEL_INFO = ModelInfo(
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="cpu",
    versions={},
    context_length=100,
    max_cached_tokens=1000,
    vocab_size=50,
    self_test="passed",
)
FAILS, FAULTS = 13, 31  # tokens that make a sequence, and the whole runner, fail


class FakeRunner:
    """A runner for which every token's logprob is -1. Steps wait for `may_step`."""

    model_info = MODEL_INFO
    tokenizer = None
    chat = None

    def __init__(self) -> None:
        self.released: list[Sequence] = []
        self.is_closed = False
        self.may_step = threading.Event()
        self.may_step.set()
        self.in_step = threading.Event()
        self.threads: set[str] = set()

    can_share = has_background = False

    def launch(self, output: SchedulerOutput) -> tuple[list[Slice], list[Sequence]]:
        self.threads.add(threading.current_thread().name)
        self.in_step.set()
        assert self.may_step.wait(30)
        if any(FAULTS in slice_.sequence.token_ids for slice_ in output.slices):
            raise ZeroDivisionError("a bug")
        return output.slices, []

    def read(self, step: list[Slice]) -> list[SliceResult]:
        results: list[SliceResult] = []
        for slice_ in step:
            sequence = slice_.sequence
            if sequence.finish_reason is not None:
                continue
            error = NonFiniteLogits("NaN") if FAILS in sequence.token_ids else None
            results.append(SliceResult(slice_, slice_.num_tokens, error))
            num_input = sequence.num_input_tokens - (sequence.score_from or 0)
            missing = 1 if sequence.sampling else num_input - len(sequence.columns)
            sequence.columns.logprobs += [-1.0] * missing
            if sequence.sampling:
                sequence.token_ids.append(1)
                if sequence.num_generated == sequence.sampling.max_tokens:
                    sequence.finish_reason = "length"
        return results

    def release(self, sequences: list[Sequence]) -> None:
        self.released += sequences

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model="fake"), lambda settings: runner)
    yield engine
    runner.may_step.set()
    engine.close()


def scored(*tokens: int) -> Sequence:
    return Sequence(token_ids=[0, *tokens], score_from=1)


def generating(max_tokens: int) -> Sequence:
    return Sequence(token_ids=[0], sampling=Sampling(max_tokens=max_tokens))


def test_a_failed_load_raises_only_after_the_mlx_thread_is_idle(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the process may end while the thread drops MLX's arrays, which aborts it."""
    returned = threading.Event()

    def start_slowly(loop: EngineLoop, turns: Turns) -> threading.Event:
        assert next(turns, None) is None
        threading.Timer(0.2, returned.set).start()
        return returned

    def fails(settings: EngineSettings) -> FakeRunner:
        raise RuntimeError("a\nlong story")

    monkeypatch.setattr(EngineLoop, "start", start_slowly)
    with pytest.raises(LoadError, match="'fake' cannot be loaded: RuntimeError: a long story"):
        Engine(EngineSettings(model="fake"), fails)
    assert returned.is_set()


def test_a_groups_future_gives_the_same_objects_when_all_are_done(engine: Engine, runner: FakeRunner):
    sequences = [scored(1), generating(5), scored(2, 3)]

    assert engine.add(sequences).result(60) == sequences

    assert all(sequence.is_done for sequence in sequences)
    assert set(runner.released) == set(sequences)
    assert runner.threads == {"mlx"}


def test_a_failed_sequence_ends_its_group_and_no_other(engine: Engine):
    good, bad = engine.add([generating(5)]), engine.add([generating(20), scored(FAILS)])

    with pytest.raises(NonFiniteLogits, match="NaN"):
        bad.result(60)
    good.result(60)
    engine.add([scored(1)]).result(60)


def test_an_engine_fault_ends_every_group_and_later_calls(
    engine: Engine, runner: FakeRunner, caplog: pytest.LogCaptureFixture
):
    runner.may_step.clear()
    innocent, guilty = engine.add([generating(90)]), engine.add([scored(FAULTS)])
    runner.may_step.set()

    for future in (innocent, guilty):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: a bug"):
            future.result(60)
    with pytest.raises(EngineDeadError, match="a bug"):
        engine.add([scored(1)])
    assert "Traceback" in caplog.text
    assert engine.step_started_at is None
    engine.close()
    with pytest.raises(EngineDeadError):  # closing does not hide the fault
        engine.add([scored(1)])


def test_close_ends_pending_groups(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    running = engine.add([generating(90)])
    assert runner.in_step.wait(60)
    waiting = engine.add([scored(1)])
    threading.Timer(0.05, runner.may_step.set).start()

    engine.close()

    for future in (running, waiting):
        with pytest.raises(EngineClosed):
            future.result(60)
    with pytest.raises(EngineClosed):
        engine.add([scored(1)])


def test_cancel_releases_the_sequences_and_ends_the_wait(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    sequence = generating(90)
    future = engine.add([sequence])
    assert runner.in_step.wait(60)

    engine.cancel(future)
    runner.may_step.set()

    assert wait([future], 10).done == {future}
    with pytest.raises(CancelledError):
        future.result(60)
    engine.add([scored(1)]).result(60)
    assert sequence in runner.released
    engine.cancel(future)  # a second cancellation is ignored


def test_a_group_canceled_before_it_runs_never_runs(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    engine.add([generating(2)])
    assert runner.in_step.wait(60)
    sequence = scored(1)
    engine.cancel(engine.add([sequence]))
    runner.may_step.set()

    engine.add([scored(2)]).result(60)

    assert sequence.columns.logprobs == []


def test_the_start_of_the_running_step_is_visible(engine: Engine, runner: FakeRunner):
    assert engine.step_started_at is None
    runner.may_step.clear()
    before = time.monotonic()

    future = engine.add([generating(1)])

    assert runner.in_step.wait(60)
    assert engine.step_started_at is not None
    assert before <= engine.step_started_at <= time.monotonic()
    runner.may_step.set()
    future.result(60)


def test_an_invalid_request_is_refused_in_the_callers_thread(engine: Engine, runner: FakeRunner):
    with pytest.raises(InvalidRequest, match="token id 50 at position 1"):
        engine.add([scored(50)])
    assert runner.threads == set()


@pytest.mark.parametrize(
    ("error", "message"),
    [(LoadError("no such model"), "no such model"), (OSError("disk on fire"), "OSError: disk on fire")],
)
def test_a_load_error_says_why(error: Exception, message: str):
    def fail(settings: EngineSettings) -> FakeRunner:
        raise error

    with pytest.raises(LoadError, match=message):
        Engine(EngineSettings(model="m"), fail)


@pytest.mark.parametrize(
    "module",
    [f"scorepool.engine{module}" for module in ("", ".scheduling.scheduler", ".text.tokenizer", ".sampling.stop")],
)
def test_an_import_does_not_load_mlx(module: str, root: Path):
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('mlx')])"

    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


def test_a_fault_while_a_canceled_group_is_released_ends_every_group(
    engine: Engine, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
):
    runner.may_step.clear()
    canceled = engine.add([Sequence(token_ids=[1, 2], sampling=Sampling(max_tokens=5))])
    other = engine.add([Sequence(token_ids=[3, 4], sampling=Sampling(max_tokens=5))])
    assert runner.in_step.wait(60)

    def release(sequences: list[Sequence]) -> None:
        if any(sequence.token_ids[0] == 1 for sequence in sequences):
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(runner, "release", release)
    engine.cancel(canceled)
    runner.may_step.set()
    with pytest.raises(EngineDeadError):
        other.result(60)
    assert engine._returned.wait(60)


class SlowRunner(FakeRunner):
    """A prompt token takes 1 ms. Notes the prompt tokens of steps beside decoding rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model_info = replace(MODEL_INFO, context_length=10**6, max_cached_tokens=10**6)
        self.beside_decoding: list[int] = []
        self.decodes = threading.Event()

    def launch(self, output: SchedulerOutput) -> tuple[list[Slice], list[Sequence]]:
        if output.decodes:
            self.decodes.set()
            self.beside_decoding.append(output.num_prefilled)
        time.sleep(0.001 * (1 + output.num_prefilled))
        return super().launch(output)


def test_not_even_the_first_prompt_beside_a_stream_holds_it_up():
    runner = SlowRunner()
    engine = Engine(EngineSettings(model="fake", prefill_ms=20), lambda settings: runner)
    try:
        stream = engine.add([generating(100_000)])
        assert runner.decodes.wait(60)
        engine.add([scored(*[1] * 500)]).result(60)
        stream.cancel()
        assert next(num for num in runner.beside_decoding if num) == MIN_TOKENS
    finally:
        engine.close()


class BackgroundRunner(FakeRunner):
    """A runner whose background computes what it was given when the test says so."""

    has_background = True

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[Slice]] = []
        self.computed: Future[list[Slice]] = Future()
        self.prefilled: list[Sequence] = []  # in steps
        self.is_given = threading.Event()

    def launch(self, output: SchedulerOutput) -> tuple[list[Slice], list[Sequence]]:
        self.prefilled += [slice_.sequence for slice_ in output.slices if not slice_.is_decode]
        return super().launch(output)

    def launch_background(self, forwards: list[list[Slice]]) -> "Future[list[Slice]]":
        self.given.append([slice_ for forward in forwards for slice_ in forward])
        self.computed = Future()
        self.is_given.set()
        return self.computed

    def compute(self) -> None:
        """Let the background end with what it was given last."""
        self.is_given.clear()
        self.computed.set_result(self.given[-1])


@pytest.fixture
def beside() -> Iterator[tuple[Engine, BackgroundRunner, Sequence]]:
    """An engine with a background, and a sequence that decodes until it is canceled."""
    runner = BackgroundRunner()
    engine = Engine(EngineSettings(model="fake", prefill_ms=60_000), lambda settings: runner)
    runner.model_info = engine.model_info = replace(MODEL_INFO, context_length=10**9, max_cached_tokens=10**9)
    row = generating(10**8)
    engine.add([row])
    while len(row.token_ids) < 10:  # steps were measured
        time.sleep(0.001)
    yield engine, runner, row
    if not runner.computed.done():
        runner.computed.set_result([])
    engine.close()


def grows(row: Sequence) -> bool:
    length, until = len(row.token_ids), time.monotonic() + 30
    while len(row.token_ids) < length + 5 and time.monotonic() < until:
        time.sleep(0.001)
    return len(row.token_ids) >= length + 5


def test_rows_decode_while_prompts_are_computed_in_the_background(beside: tuple[Engine, BackgroundRunner, Sequence]):
    engine, runner, row = beside
    first, second = scored(1, 2), scored(3)
    future = engine.add([first])
    assert runner.is_given.wait(30)
    later = engine.add([second])
    assert grows(row)
    assert not future.done()
    assert [[slice_.sequence for slice_ in given] for given in runner.given] == [[first]]  # one after the other
    runner.compute()
    assert future.result(30) == [first]
    assert runner.is_given.wait(30)
    runner.compute()
    assert later.result(30) == [second]
    assert runner.prefilled == [row]
    assert engine.stats.scored_tokens == 3


def test_what_the_background_computed_of_a_canceled_group_is_dropped(
    beside: tuple[Engine, BackgroundRunner, Sequence],
):
    engine, runner, row = beside
    canceled = engine.add([scored(1)])
    assert runner.is_given.wait(30)
    engine.cancel(canceled)
    assert grows(row)
    runner.compute()
    future = engine.add([scored(2)])
    assert runner.is_given.wait(30)
    runner.compute()
    assert len(future.result(30)) == 1


def test_an_error_in_the_background_ends_its_sequence_only(beside: tuple[Engine, BackgroundRunner, Sequence]):
    engine, runner, row = beside
    future = engine.add([scored(FAILS)])
    assert runner.is_given.wait(30)
    runner.compute()
    with pytest.raises(NonFiniteLogits):
        future.result(30)
    assert grows(row)


def test_a_fault_in_the_background_ends_the_engine(beside: tuple[Engine, BackgroundRunner, Sequence]):
    engine, runner, _ = beside
    future = engine.add([scored(1)])
    assert runner.is_given.wait(30)
    runner.computed.set_exception(ZeroDivisionError("a bug"))
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: a bug"):
        future.result(30)


def test_the_background_is_waited_for_when_nothing_decodes_any_more():
    runner = BackgroundRunner()
    engine = Engine(EngineSettings(model="fake", prefill_ms=60_000), lambda settings: runner)
    runner.model_info = engine.model_info = replace(MODEL_INFO, context_length=10**9, max_cached_tokens=10**9)
    decoding = engine.add([generating(10**8)])
    try:
        assert runner.in_step.wait(30)
        time.sleep(0.2)
        future = engine.add([scored(1)])
        assert runner.is_given.wait(30)
        engine.cancel(decoding)
        threading.Timer(0.3, runner.compute).start()
        num_steps = engine.stats.steps
        assert len(future.result(30)) == 1
        assert engine.stats.steps <= num_steps + 100  # it slept
    finally:
        engine.close()


def test_a_control_message_waits_for_the_background_while_rows_decode(
    beside: tuple[Engine, BackgroundRunner, Sequence],
):
    engine, runner, row = beside
    future = engine.add([scored(1)])
    assert runner.is_given.wait(30)
    message = engine.clear_prefix_cache()
    later = engine.add([scored(2)])
    assert grows(row)
    assert not message.done()
    runner.compute()
    message.result(30)
    assert len(future.result(30)) == 1
    assert runner.is_given.wait(30)
    runner.compute()
    assert len(later.result(30)) == 1


def test_an_engine_that_is_closed_waits_for_the_background(beside: tuple[Engine, BackgroundRunner, Sequence]):
    engine, runner, _ = beside
    future = engine.add([scored(1)])
    assert runner.is_given.wait(30)
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(EngineClosed):
        future.result(30)
    closing.join(0.2)
    assert closing.is_alive()
    runner.compute()
    closing.join(30)
    assert not closing.is_alive()


def test_a_fault_while_other_weights_begin_to_serve_ends_the_groups_that_wait_for_them():
    class FailsToClose(FakeRunner):
        model_info = replace(MODEL_INFO, context_length=10**9, max_cached_tokens=10**9)

        def close(self) -> None:
            raise ZeroDivisionError("a bug")

    engine = Engine(EngineSettings(model="fake"), lambda settings: FailsToClose())
    stream = engine.add([generating(10**8)])
    engine.stage_weights("folder", 1).result(30)
    switched = engine.switch_weights().result(30)
    waiting = engine.add([scored(1)])
    assert not wait([waiting], 0.1).done
    engine.cancel(stream)
    for future in (waiting, switched):
        with pytest.raises(EngineDeadError, match="a bug"):
            future.result(30)


def test_steps_that_verify_proposals_do_not_wait_for_the_background(
    beside: tuple[Engine, BackgroundRunner, Sequence], monkeypatch: pytest.MonkeyPatch
):
    engine, runner, row = beside
    future = engine.add([scored(1)])
    assert runner.is_given.wait(30)
    monkeypatch.setattr(Scheduler, "awaits_commit", True)
    assert grows(row)
    assert not future.done()
    runner.compute()
    assert len(future.result(30)) == 1
