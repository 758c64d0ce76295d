"""Other weights of the same architecture serve between two steps: each result is transformers' with one of both."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError, Sampling, Sequence, WeightsReplaced
from tests.engine.between_steps import drive
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_engine import FakeRunner, generating, scored

SLOW_TO_LOAD = ("llama", "gpt2", "mamba2", "phi3_longrope")
PROMPT = list(range(5, 45))


def changed_copy(folder: Path, target: Path, *, seed: int = 1, dtype: torch.dtype | None = None) -> Path:
    """Copy a model, with other weights."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(file)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * 0.3 * weight.float().std().nan_to_num()
        weights[name] = (weight + noise.to(weight.dtype)).to(dtype or weight.dtype).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return target


def serve(engine: Engine, folder: Path, version: int, *, restart: bool = False) -> None:
    staged = engine.stage_weights(str(folder), version).result(60)
    assert staged.weights_version == version
    served = engine.switch_weights(restart=restart).result(60).result(60)
    assert served == staged


def some_groups() -> list[list[Sequence]]:
    shared = [Sequence(token_ids=[*PROMPT, 60 + i], score_from=30, top_logprobs=3) for i in range(3)]
    return [
        [Sequence(token_ids=PROMPT + PROMPT, score_from=0)],
        shared,
        [Sequence(token_ids=list(PROMPT), sampling=Sampling(max_tokens=6, seed=i, ignore_eos=True)) for i in range(2)],
    ]


@pytest.mark.parametrize(
    "name",
    [*("qwen3", "qwen3_moe", "gemma3"), *(pytest.param(name, marks=pytest.mark.soak) for name in SLOW_TO_LOAD)],
)
def test_results_after_a_switch_are_those_of_transformers_with_the_new_weights(
    name: str, folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    """qwen3 and gpt2 tie their heads; qwen3_moe has experts; the last three have mends or caches of their own."""
    base = folder_of(name)
    other = changed_copy(base, tmp_path / "other")
    engine = open_engine(base)
    before, after = engine.model_info, Engine(EngineSettings(model=str(other)))
    after.close()
    for folder, version in ((base, 0), (other, 1), (base, 2)):
        if version:
            serve(engine, folder, version)
        groups = some_groups()
        for future in [engine.add(group) for group in groups]:
            future.result(60)
        oracle = Oracle(folder)
        for sequence in (one for group in groups for one in group):
            assert_agrees(sequence, oracle)
            assert sequence.model_info == engine.model_info
        expected = (before if folder == base else after.model_info).fingerprint
        assert (engine.model_info.fingerprint, engine.model_info.weights_version) == (expected, version)


def test_weights_in_bfloat16_are_cast_to_what_the_model_computes_in(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("llama")
    other = changed_copy(base, tmp_path / "other", dtype=torch.bfloat16)
    engine = open_engine(base)
    serve(engine, other, 1)
    assert engine.model_info.dtype == "float32"
    sequence = Sequence(token_ids=list(PROMPT), score_from=1)
    engine.add([sequence]).result(60)
    assert_agrees(sequence, Oracle(other))


def test_a_prompt_that_was_cached_is_computed_again(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("llama")
    other = changed_copy(base, tmp_path / "other")
    engine = open_engine(base)
    prompt = PROMPT * 3

    def score() -> list[Sequence]:
        group = [Sequence(token_ids=[*prompt, 60 + i], score_from=len(prompt)) for i in range(3)]
        return engine.add(group).result(60)

    score()
    cached = engine.stats.cached_tokens
    assert cached > 0
    serve(engine, other, 1)
    for sequence in score():
        assert_agrees(sequence, Oracle(other))
    assert engine.stats.prompt_tokens > len(prompt)


def test_dropped_weights_come_back_as_the_version_that_served(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("llama")
    other = changed_copy(base, tmp_path / "other")
    engine = open_engine(base)
    serve(engine, other, 3)
    engine.drop_weights().result(60)
    sequence = Sequence(token_ids=list(PROMPT), score_from=1)
    engine.add([sequence]).result(60)
    assert_agrees(sequence, Oracle(other))
    assert sequence.model_info is not None
    assert sequence.model_info.weights_version == 3


def test_an_engine_opens_with_a_version(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("llama")
    other = changed_copy(base, tmp_path / "other")
    engine = open_engine(base, weights_folder=str(other), weights_version=7)
    sequence = Sequence(token_ids=list(PROMPT), score_from=1)
    engine.add([sequence]).result(60)
    assert_agrees(sequence, Oracle(other))
    assert engine.model_info.weights_version == 7


def test_only_two_copies_of_the_weights_are_ever_in_memory(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("demo")
    other = changed_copy(base, tmp_path / "other")
    engine = open_engine(base)
    size = engine.model_info.weights_bytes
    held = mx.get_active_memory()
    for version in range(1, 4):
        mx.reset_peak_memory()
        serve(engine, base if version % 2 else other, version)
        assert mx.get_peak_memory() - held < 1.6 * size
    assert mx.get_active_memory() - held < 0.1 * size


def broken(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop(NORM), f"the weights lack {NORM}; expected all 21 tensors of the model, under its names"),
        (lambda w: w.update(extra=torch.ones(2)), "the weights have, beyond those of the model, extra"),
        (lambda w: w.update({NORM: torch.ones(63)}), f"{NORM} has the shape [63], expected [64]"),
        (lambda w: w.update({NORM: torch.ones(64, dtype=torch.int32)}), f"{NORM} has the dtype I32, expected F32"),
        (lambda w: w.update({NORM: torch.full((64,), torch.nan)}), "the checkpoint's model.norm.weight holds NaN"),
        (lambda w: w.update({NORM: torch.zeros(64)}), "is all zeros"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_those_before_go_on(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, folder_of: Callable[[str], Path], engine: Engine,
    oracle: Oracle, tmp_path: Path,
):  # fmt: skip
    other = broken(folder_of("llama"), tmp_path / "other", change)
    with pytest.raises(LoadError) as caught:
        engine.stage_weights(str(other), 1).result(60)
    assert says in caught.value.message
    with pytest.raises(LoadError, match="no weights are staged"):
        engine.switch_weights().result(60)
    sequence = Sequence(token_ids=list(PROMPT), score_from=1)
    engine.add([sequence]).result(60)
    assert_agrees(sequence, oracle)


def test_folders_that_cannot_be_read_are_refused_by_name(
    folder_of: Callable[[str], Path], engine: Engine, tmp_path: Path
):
    base = folder_of("llama")
    short = shutil.copytree(base, tmp_path / "short")
    content = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(content[:-10])
    empty = tmp_path / "empty"
    empty.mkdir()
    wide = shutil.copytree(base, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    for folder, says in (
        (str(short), f"it has {len(content) - 10} bytes, and its header says {len(content)}"),
        (str(empty), "has no model*.safetensors"),
        (str(tmp_path / "none"), "there is no folder"),
        ("relative", "expected an absolute path"),
        (str(wide), "config.json: hidden_size is 128, expected 64"),
        (str(folder_of("gpt2")), "config.json: model_type is 'gpt2', expected 'llama'"),
    ):
        with pytest.raises(LoadError) as caught:
            engine.stage_weights(folder, 1).result(60)
        assert says in caught.value.message


def test_a_quantised_model_takes_weights_packed_as_its_own_and_refuses_others(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    from mlx_lm import convert

    base = folder_of("llama")
    other = changed_copy(base, tmp_path / "other")
    for source, name in ((base, "base4"), (other, "other4")):
        convert(str(source), str(tmp_path / name), quantize=True, q_bits=4, q_group_size=64)
    engine = open_engine(tmp_path / "base4")
    (other / "config.json").unlink()
    with pytest.raises(LoadError, match=r"the weights lack .*\.biases"):
        engine.stage_weights(str(other), 1).result(60)
    serve(engine, tmp_path / "other4", 1)
    pushed, fresh = Sequence(token_ids=list(PROMPT), score_from=1), Sequence(token_ids=list(PROMPT), score_from=1)
    engine.add([pushed]).result(60)
    open_engine(tmp_path / "other4").add([fresh]).result(60)
    assert pushed.columns == fresh.columns


def test_no_group_mixes_two_versions_while_the_weights_change_under_load(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("llama")
    folders = [base, *(changed_copy(base, tmp_path / f"v{i}", seed=i) for i in range(1, 4))]
    engine = open_engine(base, max_running_rows=4)
    groups = []
    for i in range(60):
        sampling = Sampling(max_tokens=12, seed=i, ignore_eos=True)
        groups.append(
            [Sequence(token_ids=PROMPT[: 8 + i % 9], sampling=sampling) for _ in range(2)]
            if i % 3
            else [Sequence(token_ids=PROMPT + PROMPT, score_from=0)]
        )
    futures = []
    for i, group in enumerate(groups):
        futures.append(engine.add(group))
        if i in (20, 35, 50):
            version = (20, 35, 50).index(i) + 1
            engine.stage_weights(str(folders[version]), version).result(60)
            engine.switch_weights(restart=version == 2).result(60).result(60)
    oracles = [Oracle(folder) for folder in folders]
    versions = set()
    for group, future in zip(groups, futures, strict=True):
        done = future.result(60)
        [version] = {one.model_info.weights_version for one in group if one.model_info}
        versions.add(version)
        for sequence in done:
            assert_agrees(sequence, oracles[version])
    assert len(versions) > 1


def staged_fake(settings: EngineSettings) -> FakeRunner:
    runner = FakeRunner()
    runner.model_info = replace(
        FakeRunner.model_info, weights_version=settings.weights_version, fingerprint=str(settings.weights_folder)
    )
    runner.may_step.clear()
    RUNNERS.append(runner)
    return runner


RUNNERS: list[FakeRunner] = []


def started(*groups: list[Sequence], **options: object) -> tuple[Engine, list[object]]:
    RUNNERS.clear()
    engine = Engine(EngineSettings(model="fake", max_running_rows=1), staged_fake)
    futures = [engine.add(group, **options) for group in groups]
    assert RUNNERS[0].in_step.wait(60)
    return engine, futures


def versions_of(futures: list) -> list[int]:
    return [future.result(60)[0].model_info.weights_version for future in futures]


def test_groups_that_have_begun_finish_on_the_weights_before_and_the_others_wait():
    engine, futures = started([generating(30)], [generating(3)])
    staging = engine.stage_weights("other", 1)
    switching = engine.switch_weights()
    RUNNERS[0].may_step.set()
    staging.result(60)
    switched = switching.result(60)
    late = engine.add([scored(1)])
    switched.add_done_callback(lambda _: RUNNERS[1].may_step.set())
    assert versions_of([*futures, late]) == [0, 1, 1]
    assert RUNNERS[0].is_closed
    engine.close()


def test_groups_that_have_begun_start_anew_if_that_is_asked_for():
    engine, futures = started([generating(90)], [generating(3)])
    engine.stage_weights("other", 1)
    switching = engine.switch_weights(restart=True)
    RUNNERS[0].may_step.set()
    switching.result(60).result(60)
    RUNNERS[1].may_step.set()
    assert versions_of(futures) == [1, 1]
    assert len(futures[0].result(60)[0].columns) == 90
    engine.close()


def test_a_group_that_reports_its_steps_is_told_to_begin_anew():
    engine, futures = started([generating(90)], on_step=lambda _: None)
    engine.stage_weights("other", 1)
    switching = engine.switch_weights(restart=True)
    RUNNERS[0].may_step.set()
    switching.result(60).result(60)
    with pytest.raises(WeightsReplaced):
        futures[0].result(60)
    RUNNERS[1].may_step.set()
    engine.close()


def test_a_switch_that_waits_ends_when_the_last_group_is_canceled_and_with_the_engine():
    engine, futures = started([generating(90)])
    engine.stage_weights("other", 1)
    switching = engine.switch_weights()
    RUNNERS[0].may_step.set()
    switched = switching.result(60)
    held = engine.add([generating(1)])
    engine.cancel(held)
    engine.cancel(futures[0])
    assert switched.result(60).weights_version == 1
    RUNNERS[1].may_step.set()
    engine.close()


def test_caches_leave_room_for_staged_weights(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    base = folder_of("llama")
    engine = open_engine(base, dtype="float32")
    info = engine.model_info
    room = 3 * info.weights_bytes
    drive(engine, lambda core: core.set_memory(room, 0))
    tokens = drive(engine, lambda core: core.scheduler.kv_budget.max_cached_tokens)
    assert tokens == engine.model_info.max_cached_tokens
    difference = info.weights_bytes // info.cache_sizes.bytes_per_token

    engine.stage_weights(str(changed_copy(base, tmp_path / "other")), 1).result(60)
    staged = drive(engine, lambda core: core.scheduler.kv_budget.max_cached_tokens)
    assert difference - 1 <= tokens - staged <= difference + 1
    engine.discard_staged().result(60)
    assert drive(engine, lambda core: core.scheduler.kv_budget.max_cached_tokens) == tokens
    serve(engine, tmp_path / "other", 2)
    assert drive(engine, lambda core: core.scheduler.kv_budget.max_cached_tokens) == engine.model_info.max_cached_tokens


def test_weights_that_are_staged_and_discarded_never_serve():
    engine, futures = started([generating(3)])
    RUNNERS[0].may_step.set()
    engine.stage_weights("other", 1).result(60)
    engine.discard_staged().result(60)
    assert RUNNERS[1].is_closed
    with pytest.raises(LoadError):
        engine.switch_weights().result(60)
    assert versions_of(futures) == [0]
    engine.close()
