"""An idle engine drops its weights and loads them with the next group: the same numbers, and free memory before."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from scorepool.engine import Engine, EngineSettings, LoadError, ReloadError, Sampling, Sequence, SetBudget
from scorepool.engine.core import EngineCore
from scorepool.engine.model_info import ModelInfo
from tests.engine.test_engine import MODEL_INFO, FakeRunner, generating, scored
from tests.worker.conftest import until


def run(engine: Engine) -> list[object]:
    """Score and sample, alone, together and from a shared prompt. Return all numbers."""
    prompt = list(range(5, 70))
    alone = [Sequence(token_ids=[*prompt, 7], score_from=1, top_logprobs=3)]
    sampled = [
        Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=9, seed=i, temperature=1.0)) for i in range(3)
    ]
    for group in (alone, sampled):
        engine.add(group).result(60)
    return [(one.token_ids, one.columns, one.model_info) for one in (*alone, *sampled)]


@pytest.mark.parametrize("settings", [{"mode": "exact"}, {"max_batch_tokens": 16}])
def test_the_numbers_are_the_same_after_a_reload_and_the_memory_is_free_before(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], settings: dict[str, object]
):
    engine = open_engine(folder_of("demo"), **settings)
    before, info = run(engine), engine.model_info
    gc.collect()  # of engines of other tests
    for _ in range(2):
        held = mx.get_active_memory()
        engine.drop_weights().result(60)
        until(lambda: not engine.is_loaded)
        assert held - mx.get_active_memory() > 0.99 * info.weights_bytes
        assert engine.model_info == info  # still known
        assert run(engine) == before
        assert engine.is_loaded


class Runners:
    """Open runners, each with the next model or the next error."""

    def __init__(self, *opens: ModelInfo | Exception) -> None:
        self.opens = list(opens)
        self.opened: list[FakeRunner] = []

    def __call__(self, settings: EngineSettings) -> FakeRunner:
        following = self.opens.pop(0)
        if isinstance(following, Exception):
            raise following
        runner = FakeRunner()
        runner.model_info = following
        self.opened.append(runner)
        return runner


class ReadBudget:
    def apply(self, core: EngineCore) -> int:
        return core.scheduler.max_batch_tokens


def dropped(runners: Runners) -> Engine:
    engine = Engine(EngineSettings(model="fake"), runners)
    engine.drop_weights().result(60)
    until(lambda: not engine.is_loaded)
    return engine


def test_weights_are_kept_while_there_is_a_group():
    runners = Runners(MODEL_INFO)
    engine = Engine(EngineSettings(model="fake"), runners)
    [runner] = runners.opened
    runner.may_step.clear()
    running = engine.add([generating(3)])
    assert runner.in_step.wait(60)
    asked = engine.drop_weights()
    runner.may_step.set()
    running.result(60)
    asked.result(60)
    assert not runner.is_closed
    assert engine.is_loaded
    engine.close()


def test_groups_that_come_while_the_weights_are_dropped_share_one_reload():
    runners = Runners(MODEL_INFO, MODEL_INFO)
    engine = dropped(runners)
    barrier = threading.Barrier(4)
    added: list[Future[list[Sequence]]] = []

    def add() -> None:
        barrier.wait(60)
        added.append(engine.add([scored(1, 2)]))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(future.result(60)) for future in added] == [1] * 4
    assert [runner.is_closed for runner in runners.opened] == [True, False]
    engine.close()


def test_control_messages_work_without_weights_and_a_budget_outlasts_them():
    engine = dropped(Runners(MODEL_INFO, MODEL_INFO))
    engine.control(SetBudget(1 / 2048)).result(60)
    assert engine.clear_prefix_cache().result(60) == 0
    engine.drop_weights().result(60)
    assert not engine.is_loaded
    engine.add([scored(1)]).result(60)
    assert engine.is_loaded
    assert engine.control(ReadBudget()).result(60) == 1
    engine.close()


def test_a_control_message_fails_with_the_weights_that_it_needs():
    engine = dropped(Runners(MODEL_INFO, LoadError("no config.json")))
    with pytest.raises(ReloadError, match="cannot be loaded again"):
        engine.load_adapter("a", "folder").result(60)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (LoadError("no config.json"), "the weights cannot be loaded again: no config.json"),
        (
            OSError("disk gone"),
            "the weights cannot be loaded again: the model 'fake' cannot be loaded: OSError: disk gone",
        ),
        (
            replace(MODEL_INFO, fingerprint="other"),
            "the model 'fake' changed while its weights were dropped: "
            f"fingerprint was {MODEL_INFO.fingerprint} and is other",
        ),
        (replace(MODEL_INFO, mode="one row at a time"), "mode was default and is one row at a time"),
    ],
)
def test_a_model_that_is_gone_or_another_ends_the_engine_with_the_reason(second: ModelInfo | Exception, says: str):
    engine = dropped(Runners(MODEL_INFO, second))
    with pytest.raises(ReloadError) as caught:
        engine.add([scored(1)]).result(60)
    assert says in caught.value.message
    with pytest.raises(ReloadError):
        engine.add([scored(1)])
    engine.close()
