"""Several models on one MLX thread: each has the numbers that it has alone, and weights come and go with the memory."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest
import torch

from scorepool.engine import (
    Engine,
    EngineClosed,
    EngineDeadError,
    EngineSettings,
    LoadError,
    Sampling,
    Sequence,
    open_engines,
)
from scorepool.engine.engines import divide_memory
from scorepool.engine.versions import installed_version
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_certificate import CERTIFICATE
from tests.engine.test_engine import FAULTS, FakeRunner, generating, scored
from tests.engine.test_pushed_weights import changed_copy
from tests.tiny_classifiers import build, logits_of
from tests.tiny_models import TinyModels
from tests.tiny_tokenizer import BOS
from tests.worker.conftest import until

TURN_S = 0.3
SMALLEST_VOCABULARY = 256


def tokens(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [BOS] + [draw.randrange(4, SMALLEST_VOCABULARY) for _ in range(length - 1)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("judge")
    return folder, build(folder, "qwen2", num_labels=3)


@pytest.fixture
def folders(tiny_models: TinyModels, judge: tuple[Path, torch.nn.Module]) -> dict[str, Path]:
    return {"teacher": tiny_models("qwen3"), "student": tiny_models("llama"), "judge": judge[0]}


Open = Callable[..., dict[str, Engine]]


@pytest.fixture
def opened() -> Iterator[Open]:
    found: list[Engine] = []

    def open_(folders: Mapping[str, Path], memory_bytes: int | None = None, **settings: object) -> dict[str, Engine]:
        engines = open_engines(
            {
                name: EngineSettings(model=str(folder), memory_bytes=memory_bytes, **settings)  # type: ignore[arg-type]
                for name, folder in folders.items()
            },
            TURN_S,
        )
        found.extend(engines.values())
        return engines

    yield open_
    for engine in found:
        engine.close()


def budget_for_one(engines: Mapping[str, Engine]) -> int:
    """Return memory that holds each model, and no two of them."""
    return int(1.5 * max(engine.model_info.weights_bytes for engine in engines.values()))


def start_all(engines: Mapping[str, Engine], seed: int) -> list[tuple[str, Future[list[Sequence]]]]:
    """Add one group to each model, all of which wait at the same time."""
    groups = []
    for name, engine in engines.items():
        sequences = [Sequence(token_ids=tokens(9 + seed % 30, seed), classify=True)]
        if name != "judge":
            sequences = [
                Sequence(token_ids=tokens(9 + seed % 30, seed), score_from=1, temperature=0.7),
                Sequence(token_ids=tokens(5 + seed % 11, seed), sampling=Sampling(max_tokens=8)),
            ]
        groups.append((name, engine.add(sequences)))
    return groups


def assert_equal_transformers(
    groups: list[tuple[str, Future[list[Sequence]]]], oracles: Mapping[str, Oracle], judge: torch.nn.Module
) -> None:
    for name, group in groups:
        for sequence in group.result(120):
            if name == "judge":
                assert sequence.class_logits == pytest.approx(logits_of(judge, sequence.token_ids), abs=1e-4)
                continue
            first = sequence.num_input_tokens if sequence.sampling else 1
            table = oracles[name].logprobs(sequence.token_ids, sequence.temperature)
            expected = [table[at - 1, sequence.token_ids[at]] for at in range(first, len(sequence.token_ids))]
            assert sequence.columns.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("holds", ["all", "one"])
def test_three_models_in_one_process_compute_what_transformers_computes(
    holds: str,
    folders: dict[str, Path],
    judge: tuple[Path, torch.nn.Module],
    opened: Open,
    oracle_of: Callable[[str], Oracle],
):
    oracles = {"teacher": oracle_of("qwen3"), "student": oracle_of("llama")}
    engines = opened(folders)
    if holds == "one":
        memory_bytes = budget_for_one(engines)
        for engine in engines.values():
            engine.close()
        engines = opened(folders, memory_bytes, prefix_cache_bytes=0, max_running_rows=8)
    infos = {name: engine.model_info for name, engine in engines.items()}

    assert_equal_transformers([group for seed in range(20) for group in start_all(engines, seed)], oracles, judge[1])

    loads = {name: engine.resident.num_loads for name, engine in engines.items()}
    assert sum(engine.is_loaded for engine in engines.values()) == (3 if holds == "all" else 1)
    assert loads == dict.fromkeys(engines, 1) if holds == "all" else sum(loads.values()) <= 9
    assert infos == {name: engine.model_info for name, engine in engines.items()}


@pytest.mark.soak
def test_the_memory_of_the_loaded_models_stays_within_the_budget(folders: dict[str, Path], opened: Open):
    engines = opened(folders)
    memory_bytes = budget_for_one(engines)
    for engine in engines.values():
        engine.close()
    gc.collect()  # of engines of other tests
    before = mx.get_active_memory()
    engines = opened(folders, memory_bytes, prefix_cache_bytes=0, max_running_rows=8)
    for seed in range(3):
        for _, group in start_all(engines, seed):
            group.result(60)
            assert mx.get_active_memory() - before <= memory_bytes
            assert sum(engine.is_loaded for engine in engines.values()) == 1


def test_200_alternating_groups_of_two_models_that_do_not_fit_together_need_few_loads(
    folders: dict[str, Path], opened: Open
):
    del folders["judge"]
    engines = opened(folders)
    memory_bytes = budget_for_one(engines)
    for engine in engines.values():
        engine.close()
    engines = opened(folders, memory_bytes, prefix_cache_bytes=0, max_running_rows=8)
    groups = [group for seed in range(100) for group in start_all(engines, seed)]
    for _, group in groups:
        group.result(120)
    assert len(groups) == 200
    assert sum(engine.resident.num_loads for engine in engines.values()) <= 8


def test_a_long_prefill_of_one_model_delays_the_other_by_no_more_than_a_step(folders: dict[str, Path], opened: Open):
    engines = opened(folders, max_batch_tokens=8)
    steps_at_end: dict[str, int] = {}

    def note(name: str) -> Callable[[object], None]:
        return lambda _: steps_at_end.setdefault(name, engines["teacher"].stats.steps)

    long = engines["teacher"].add([Sequence(token_ids=tokens(500, 1), score_from=1)])
    until(lambda: engines["teacher"].stats.steps > 0)
    short = engines["student"].add([Sequence(token_ids=tokens(5, 2), sampling=Sampling(max_tokens=4))])
    began_at = engines["teacher"].stats.steps
    short.add_done_callback(note("short"))
    long.add_done_callback(note("long"))
    long.result(60), short.result(60)
    assert steps_at_end["short"] - began_at <= 10  # 4 tokens, and a step that was launched before
    assert steps_at_end["long"] > 60


@pytest.fixture
def for_one(folders: dict[str, Path], opened: Open) -> dict[str, Engine]:
    """Open the models with memory for any one of them."""
    engines = opened(folders)
    memory_bytes = budget_for_one(engines)
    for engine in engines.values():
        engine.close()
    return opened(folders, memory_bytes, prefix_cache_bytes=0, max_running_rows=8)


def score(engine: Engine, seed: int, adapter: str | None = None) -> Sequence:
    return engine.add([Sequence(token_ids=tokens(20, seed), score_from=1, adapter_name=adapter)]).result(60)[0]


def test_weights_of_a_model_that_is_not_in_memory_are_replaced_within_the_budget(
    for_one: dict[str, Engine], folders: dict[str, Path], tmp_path: Path, oracle_of: Callable[[str], Oracle]
):
    student, others = for_one["student"], [for_one["teacher"], for_one["judge"]]
    other = changed_copy(folders["student"], tmp_path / "other", seed=1)
    score(for_one["teacher"], 0)
    assert not student.is_loaded
    before = [engine.model_info for engine in others]

    student.stage_weights(str(other), 3).result(60)
    student.switch_weights().result(60).result(60)

    assert sum(engine.is_loaded for engine in for_one.values()) <= 1
    changed, same = score(student, 1), score(for_one["teacher"], 2)
    assert_agrees(changed, Oracle(other))
    assert_agrees(same, oracle_of("qwen3"))
    assert (changed.model_info.weights_version, same.model_info.weights_version) == (3, 0)
    assert_agrees(score(student, 4), Oracle(other))  # loaded again
    assert [engine.model_info for engine in others] == before


def test_a_switch_of_a_model_that_is_not_in_memory_drops_it_again_while_another_computes():
    engines, runners = fakes("a", "b")
    for engine in engines.values():
        engine.resident.size_bytes = 2**20
    engines["b"].drop_weights().result(60)
    runners.by_name["a"].may_step.clear()
    busy = engines["a"].add([generating(3)])
    staging, switching = engines["b"].stage_weights("other", 1), engines["b"].switch_weights()
    runners.by_name["a"].may_step.set()
    staging.result(60), switching.result(60).result(60)
    assert busy.result(60)
    until(lambda: sum(engine.is_loaded for engine in engines.values()) <= 1)
    assert engines["b"].model_info.weights_version == 1
    assert engines["b"].add([scored(1)]).result(60)[0].model_info.weights_version == 1
    for engine in engines.values():
        engine.close()


def test_an_adapter_of_a_model_that_is_not_in_memory_waits_for_its_turn(
    for_one: dict[str, Engine], folders: dict[str, Path], tmp_path: Path
):
    folder = save_adapter(folders["student"], tmp_path / "a", 0, r=2)
    teacher, student = for_one["teacher"], for_one["student"]
    score(teacher, 0)
    busy = [teacher.add([Sequence(token_ids=tokens(20, 1), sampling=Sampling(max_tokens=60))]) for _ in range(8)]
    seen: list[int] = []
    busy[-1].add_done_callback(lambda _: seen.append(sum(engine.is_loaded for engine in for_one.values())))

    loading = student.load_adapter("a", str(folder))
    loading.add_done_callback(lambda _: seen.append(sum(engine.is_loaded for engine in for_one.values())))

    assert loading.result(60).name == "a"
    assert all(group.result(60) for group in busy)
    assert_agrees(score(student, 2, adapter="a"), oracle_with(folders["student"], folder))
    assert score(teacher, 2).model_info.adapter is None
    assert_agrees(score(student, 3, adapter="a"), oracle_with(folders["student"], folder))  # loaded again
    assert set(seen) == {1}


def test_each_model_has_its_own_certificate(folders: dict[str, Path], opened: Open, tmp_path: Path):
    before = opened(folders)["student"].model_info
    identity = {name: getattr(before, name) for name in ("fingerprint", "dtype", "mode", "backend")}
    versions = {"scorepool": installed_version("scorepool"), **before.versions}
    certificate = replace(CERTIFICATE, **identity, versions=versions)
    (tmp_path / f"{before.fingerprint[:16]}.json").write_text(certificate.to_json())

    infos = {name: engine.model_info for name, engine in opened(folders, certificates=str(tmp_path)).items()}

    assert {name: info.verification.by for name, info in infos.items()} == {
        "teacher": None,
        "student": "ann@mac",
        "judge": None,
    }
    with pytest.raises(LoadError, match=r"model 'teacher': require_certificate is set, and .* is unverified"):
        opened(folders, certificates=str(tmp_path), require_certificate=True)


class Runners:
    """One fake runner for each model."""

    def __init__(self) -> None:
        self.by_name: dict[str, FakeRunner] = {}

    def __call__(self, settings: EngineSettings) -> FakeRunner:
        if settings.model == "damaged":
            raise LoadError("it is damaged")
        runner = self.by_name.setdefault(settings.model, FakeRunner())
        runner.model_info = replace(runner.model_info, weights_version=settings.weights_version)
        return runner


def fakes(*names: str) -> tuple[dict[str, Engine], Runners]:
    runners = Runners()
    settings = {name: EngineSettings(model=name, memory_bytes=2**20) for name in names}
    return open_engines(settings, TURN_S, runners), runners


def test_a_model_that_cannot_be_loaded_is_named_and_the_others_are_closed():
    with pytest.raises(LoadError, match=r"^model 'damaged': .*it is damaged"):
        fakes("a", "damaged", "c")


def test_models_take_turns_on_one_thread_which_they_leave_one_by_one():
    engines, runners = fakes("a", "b")
    for engine in engines.values():
        engine.add([scored(1, 2)]).result(60)
    assert runners.by_name["a"].threads == runners.by_name["b"].threads == {"mlx"}
    engines["a"].close()
    with pytest.raises(EngineClosed):
        engines["a"].add([scored(1)])
    assert engines["b"].add([scored(3)]).result(60)
    engines["b"].close()


def test_a_fault_of_one_model_ends_its_groups_with_an_error_and_not_those_of_the_others():
    engines, _ = fakes("a", "b")
    faulty, good = engines["a"].add([scored(FAULTS)]), engines["b"].add([generating(50)])
    with pytest.raises(EngineDeadError, match="a bug"):
        faulty.result(60)
    assert good.result(60)
    with pytest.raises(EngineDeadError):
        engines["a"].add([scored(1)])
    for engine in engines.values():
        engine.close()


def test_a_group_that_waits_for_memory_can_be_canceled_and_does_not_load_the_weights():
    engines, runners = fakes("a", "b")
    for engine in engines.values():
        engine.resident.size_bytes = 2**20
    engines["b"].drop_weights().result(60)
    runners.by_name["a"].may_step.clear()
    busy = engines["a"].add([generating(3)])
    waiting = engines["b"].add([scored(1)])
    assert engines["b"].has_to_wait
    assert not engines["a"].has_to_wait
    engines["b"].cancel(waiting)
    runners.by_name["a"].may_step.set()
    assert busy.result(60)
    time.sleep(0.3)
    assert not engines["b"].is_loaded
    assert waiting.cancelled()
    for engine in engines.values():
        engine.close()


def test_closing_ends_groups_that_wait_for_memory():
    engines, runners = fakes("a", "b")
    for engine in engines.values():
        engine.resident.size_bytes = 2**20
    engines["b"].drop_weights().result(60)
    runners.by_name["a"].may_step.clear()
    engines["a"].add([generating(3)])
    waiting = engines["b"].add([scored(1)])
    threading.Timer(0.1, runners.by_name["a"].may_step.set).start()
    engines["b"].close()
    with pytest.raises(EngineClosed):
        waiting.result(60)
    engines["a"].close()


def test_memory_is_divided_among_all_models_or_for_as_many_as_fit():
    assert divide_memory(100, {"a": 20, "b": 30}) == {"a": 45, "b": 55}
    assert divide_memory(100, {"a": 40, "b": 50}) == {"a": 65, "b": 75}  # 75 for weights: one of them fits
    assert divide_memory(100, {"a": 30, "b": 40, "c": 60}) == {"a": 42, "b": 52, "c": 72}
    assert divide_memory(100, {"a": 10, "b": 95}) == {"a": 35, "b": 100}


def test_a_budget_that_leaves_no_memory_for_caches_is_refused_by_name(folders: dict[str, Path], opened: Open):
    with pytest.raises(LoadError, match=r"^model 'teacher': .*no memory is left for KV caches"):
        opened(folders, memory_bytes=2**16)
