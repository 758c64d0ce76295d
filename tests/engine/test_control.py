"""Control messages run between steps on the MLX thread, in order, and end with the engine."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest

from scorepool.engine import Engine, EngineClosed, EngineDeadError, EngineSettings
from scorepool.engine.core import EngineCore
from tests.engine.test_engine import MODEL_INFO, FakeRunner, generating, scored


class Note:
    """Notes where and when it is applied; raises `error` if it has one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.was_idle: bool | None = None
        self.thread: str | None = None

    def apply(self, core: EngineCore) -> str:
        self.thread = threading.current_thread().name
        self.was_idle = core._launched is None
        if self.error is not None:
            raise self.error
        return "applied"


class LoadOther:
    """Stands for a message that changes the weights."""

    def apply(self, core: EngineCore) -> None:
        core.runner.model_info = replace(core.runner.model_info, fingerprint="other")


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model="fake"), lambda settings: runner)
    yield engine
    runner.may_step.set()
    engine.close()


def test_a_message_is_applied_on_the_mlx_thread_while_no_step_is_in_flight(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    running = engine.add([generating(50)])
    assert runner.in_step.wait(60)
    note = Note()

    future = engine.control(note)
    runner.may_step.set()

    assert future.result(60) == "applied"
    assert (note.thread, note.was_idle) == ("mlx", True)
    running.result(60)


def test_a_message_wakes_an_idle_engine(engine: Engine):
    assert engine.control(Note()).result(60) == "applied"


def test_an_exception_ends_the_message_and_not_the_engine(engine: Engine):
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine.control(Note(ZeroDivisionError("a bug"))).result(60)
    engine.add([scored(1)]).result(60)


def test_an_engine_fault_in_a_message_ends_the_engine(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    running = engine.add([generating(90)])
    assert runner.in_step.wait(60)
    guilty, waiting = engine.control(Note(EngineDeadError("half a model"))), engine.control(Note())
    runner.may_step.set()

    for future in (guilty, waiting, running):
        with pytest.raises(EngineDeadError, match="half a model"):
            future.result(60)
    with pytest.raises(EngineDeadError):
        engine.control(Note())


def test_closing_ends_messages_that_wait(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    engine.add([generating(90)])
    assert runner.in_step.wait(60)
    future = engine.control(Note())
    threading.Timer(0.05, runner.may_step.set).start()

    engine.close()

    with pytest.raises(EngineClosed):
        future.result(60)
    with pytest.raises(EngineClosed):
        engine.control(Note())


def test_a_canceled_message_is_not_applied(engine: Engine, runner: FakeRunner):
    runner.may_step.clear()
    engine.add([generating(2)])
    assert runner.in_step.wait(60)
    canceled = Note()
    future = engine.control(canceled)

    assert future.cancel()
    runner.may_step.set()

    engine.control(Note()).result(60)
    assert canceled.thread is None
    with pytest.raises(CancelledError):
        future.result(60)


def test_messages_from_several_threads_are_all_applied_and_no_group_is_lost(engine: Engine):
    def work() -> None:
        for _ in range(50):
            groups.append(engine.add([generating(3)]))
            messages.append(engine.control(Note()))

    groups, messages = [], []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {future.result(60) for future in messages} == {"applied"}
    assert all(future.result(60)[0].is_done for future in groups)


def test_a_sequence_names_the_model_that_computed_its_last_token(engine: Engine, runner: FakeRunner):
    before, after = scored(1), scored(1)

    engine.add([before]).result(60)
    engine.control(LoadOther()).result(60)
    engine.add([after]).result(60)

    assert before.model_info == MODEL_INFO
    assert after.model_info == engine.model_info == replace(MODEL_INFO, fingerprint="other")


def test_clearing_the_prefix_cache_of_a_model_without_one_frees_nothing(engine: Engine):
    assert engine.clear_prefix_cache().result(60) == 0
