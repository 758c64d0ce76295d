"""A strained machine computes in smaller steps, the same numbers, and says why."""

from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from scorepool.engine import Engine, EngineSettings, Sampling, Sequence
from scorepool.worker.inference.batch_worker import BatchWorker
from scorepool.worker.inference.budget import Budget
from scorepool.worker.inference.hosted_model import HostedModel
from scorepool.worker.machine.strain import StrainGauge


class FakeGauge(StrainGauge):
    strains: dict[Any, float] = {}  # noqa: RUF012

    def read(self) -> dict[Any, float]:
        return self.strains


@pytest.fixture
def engine(tiny_models: Any):
    folder = cast(Path, tiny_models("llama"))
    engine = Engine(EngineSettings(model=str(folder), max_batch_tokens=64, max_running_rows=8))
    yield engine
    engine.close()


def rows() -> list[Sequence]:
    sampling = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)
    return [Sequence(token_ids=[*range(i, i + 6)], score_from=1, sampling=sampling) for i in range(1, 9)]


def rows_per_step(engine: Engine, sequences: list[Sequence]) -> float:
    before = engine.stats
    engine.add(sequences).result(60)
    return (engine.stats.rows - before.rows) / (engine.stats.steps - before.steps)


def test_the_budget_follows_the_strain_and_the_numbers_do_not(engine: Engine, caplog: pytest.LogCaptureFixture):
    gauge = FakeGauge()
    budget = Budget(engine, gauge=gauge)
    budget.update()
    assert budget.share == 1.0
    usual = rows()
    assert rows_per_step(engine, usual) > 6

    gauge.strains = {"heat": 0.5, "battery": 0.25}
    budget.update()
    budget.update()
    assert budget.share == 0.25
    strained = rows()
    assert rows_per_step(engine, strained) <= 2.1  # 2 of 8 rows
    assert [one.token_ids for one in strained] == [one.token_ids for one in usual]
    for one, other in zip(strained, usual, strict=True):
        assert one.columns.logprobs == pytest.approx(other.columns.logprobs, abs=1e-4)
    assert caplog.text.count("the batch budget is 25 % from now on: heat, battery") == 1

    gauge.strains = {}
    budget.update()
    assert budget.share == 1.0
    assert rows_per_step(engine, rows()) > 6


def test_memory_that_runs_low_drops_the_kept_prefixes(engine: Engine):
    prefix = [*range(1, 49)]
    engine.add([Sequence(token_ids=[*prefix, 50 + i, 60], score_from=49) for i in range(4)]).result(60)
    gauge = FakeGauge()
    gauge.strains = {"memory": 0.5}
    Budget(engine, gauge=gauge).update()
    assert engine.clear_prefix_cache().result(60) == 0  # nothing is left to drop


def test_a_worker_claims_less_and_shows_why(engine: Engine, redis: Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCOREPOOL_MODEL", "demo=fake")
    monkeypatch.setenv("SCOREPOOL_MAX_RUNNING_ROWS", "8")
    worker = BatchWorker(["demo"], connection=redis)
    gauge = FakeGauge()
    worker.budget = Budget(engine, gauge=gauge)
    [group] = worker.queue_groups
    hosted = HostedModel(engine, group, worker.settings, worker.budget, is_one_of_several=False)
    worker.models = [hosted]
    usual = worker.num_wanted(group)
    gauge.strains = {"battery": 0.25}
    for task in worker.periodic_tasks():
        task.call()
    assert worker.num_wanted(group) < usual
    shown = hosted.read_load()
    assert (shown.budget, shown.strains) == (0.25, ["battery"])


def test_an_engine_that_has_ended_is_left_to_the_loop(engine: Engine):
    gauge = FakeGauge()
    gauge.strains = {"heat": 0.5}
    budget = Budget(engine, gauge=gauge)
    engine.close()
    budget.update()
    assert budget.share == 1.0
