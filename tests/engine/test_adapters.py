"""Rows of LoRA adapters and of none in one batch equal peft on torch with the same weights."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Event

import pytest
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, Sampling, Sequence, UnknownAdapter
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE, TinyModels
from tests.tiny_tokenizer import BOS

NAMES = (None, "a", "b")


def tokens(draw: Random, length: int) -> list[int]:
    return [BOS] + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - 1)]


def mixed_queue(num_jobs: int, names: tuple[str | None, ...] = NAMES) -> list[Sequence]:
    """Return scores and generations of the base and of adapters, of many lengths, in one order; some share prompts."""
    draw = Random(0)
    shared = tokens(draw, 40)
    queue: list[Sequence] = []
    for number in range(num_jobs):
        token_ids = shared + tokens(draw, 6) if number % 5 == 0 else tokens(draw, draw.randrange(2, 50))
        samples = Sampling(max_tokens=draw.randrange(1, 8), temperature=0) if number % 3 == 0 else None
        queue.append(
            Sequence(
                token_ids=token_ids,
                score_from=draw.randrange(1, len(token_ids)),
                top_logprobs=number % 4,
                sampling=samples,
                adapter_name=draw.choice(names),
            )
        )
    return queue


@pytest.fixture(scope="module")
def adapted(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def save(model: str, name: str, seed: int, **settings: object) -> Path:
        return save_adapter(tiny_models(model), tmp_path_factory.mktemp(name), seed, **settings)

    return save


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.soak), "qwen3"])
def test_a_mixed_queue_of_500_equals_peft(
    model: str, adapted: Callable[..., Path], tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    folders = {name: adapted(model, name, seed) for seed, name in enumerate(("a", "b"))}
    engine = open_engine(
        tiny_models(model),
        adapters=tuple((name, str(folder)) for name, folder in folders.items()),
        max_batch_tokens=256,
    )
    oracles: dict[str | None, Oracle] = {None: Oracle(tiny_models(model))}
    oracles |= {name: oracle_with(tiny_models(model), folder) for name, folder in folders.items()}
    queue = mixed_queue(500)

    for future in [engine.add([sequence]) for sequence in queue]:
        future.result(120)

    for sequence in queue:
        assert_agrees(sequence, oracles[sequence.adapter_name])
        assert (sequence.model_info.adapter or "").partition("@")[0] == (sequence.adapter_name or "")


def test_an_adapter_that_is_not_loaded_is_refused_by_name(engine: Engine):
    future = engine.add([Sequence(token_ids=[BOS, 5], score_from=1, adapter_name="gone")])

    with pytest.raises(UnknownAdapter, match="adapter 'gone' is not loaded, expected one of those that are: none"):
        future.result(60)


@pytest.fixture(scope="module")
def llama_adapters(adapted: Callable[..., Path]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(adapted("llama", name, seed))) for seed, name in enumerate(("a", "b")))


def scored(engine: Engine, sequences: list[Sequence]) -> list[list[float | None]]:
    """Run each sequence as a group of its own, all at once; return their logprobs."""
    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(120)
    return [sequence.columns.logprobs for sequence in sequences]


def queue_of(*names: str | None, seed: int = 3) -> list[Sequence]:
    """Return a score and a generation per name."""
    draw = Random(seed)
    rows = [(tokens(draw, draw.randrange(5, 40)), name) for name in names]
    return [
        Sequence(token_ids=list(ids), score_from=1, sampling=sampling, adapter_name=name)
        for ids, name in rows
        for sampling in (None, Sampling(max_tokens=5, temperature=0))
    ]


@pytest.mark.parametrize("mode", ["exact", "default"])
def test_rows_without_an_adapter_keep_their_numbers(
    mode: str,
    llama_adapters: tuple[tuple[str, str], ...],
    tiny_models: TinyModels,
    open_engine: Callable[..., Engine],
):
    plain = open_engine(tiny_models("llama"), mode=mode)
    adapted = open_engine(tiny_models("llama"), mode=mode, adapters=llama_adapters)
    names = [None, "a", None, "b", None, "a"]

    expected = scored(plain, queue_of(*[None] * 6))
    found = scored(adapted, queue_of(*names))

    for sequence, one, other in zip(queue_of(*names), expected, found, strict=True):
        if sequence.adapter_name is not None:
            assert one != pytest.approx(other, abs=0.01)
        elif mode == "exact":
            assert one == other
        else:
            assert one == pytest.approx(other, abs=1e-4)


def test_rows_of_an_adapter_have_the_same_bits_in_any_batch_in_exact_mode(
    llama_adapters: tuple[tuple[str, str], ...],
    adapted: Callable[..., Path],
    tiny_models: TinyModels,
    open_engine: Callable[..., Engine],
):
    wide = (("wide", str(adapted("llama", "wide", 5, r=20))),)  # its rank pads the others
    alone = open_engine(tiny_models("llama"), mode="exact", adapters=llama_adapters[:1])
    beside = open_engine(tiny_models("llama"), mode="exact", adapters=wide + llama_adapters)

    expected = [scored(alone, [sequence])[0] for sequence in queue_of("a", "a", "a")]
    found = scored(beside, queue_of("a", "a", "a") + queue_of("b", None, "wide", seed=4))

    assert found[:6] == expected


def test_a_shared_prompt_is_never_that_of_another_adapter(
    llama_adapters: tuple[tuple[str, str], ...], tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters)
    base = tiny_models("llama")
    oracles = {None: Oracle(base)} | {name: oracle_with(base, Path(folder)) for name, folder in llama_adapters}
    shared = tokens(Random(7), 120)
    for name in (None, "a", "b", None, "a", "b"):  # each name twice, the second time from the cache
        sequences = [
            Sequence(token_ids=[*shared, last], score_from=118, adapter_name=name, sampling=sampling)
            for last in (5, 6, 7)
            for sampling in (None, Sampling(max_tokens=3, temperature=0))
        ]

        scored(engine, sequences)

        for sequence in sequences:
            assert_agrees(sequence, oracles[name])
    assert engine.stats.cached_tokens > 0


def test_an_unloaded_adapter_computes_its_rows_to_their_end(
    llama_adapters: tuple[tuple[str, str], ...], tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters)
    sequence = Sequence(
        token_ids=[BOS, 5, 6], sampling=Sampling(max_tokens=200, temperature=0, ignore_eos=True), adapter_name="a"
    )
    begun = Event()
    running = engine.add([sequence], on_step=lambda _: begun.set())
    begun.wait(60)

    assert engine.unload_adapter("a").result(60).name == "a"
    assert not running.done()
    late = engine.add([Sequence(token_ids=[BOS, 5], score_from=1, adapter_name="a")])

    with pytest.raises(UnknownAdapter, match="expected one of those that are: b"):
        late.result(60)
    running.result(60)
    assert sequence.num_generated == 200
    assert_agrees(sequence, oracle_with(tiny_models("llama"), Path(llama_adapters[0][1])))
    assert engine.unload_adapter("a").result(60) is None


def test_an_adapter_that_is_unloaded_while_the_weights_are_dropped_leaves_nothing_to_the_next(
    llama_adapters: tuple[tuple[str, str], ...],
    adapted: Callable[..., Path],
    tiny_models: TinyModels,
    open_engine: Callable[..., Engine],
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters)
    engine.drop_weights().result(60)
    assert not engine.is_loaded

    assert engine.unload_adapter("a").result(60).name == "a"

    narrow = adapted("llama", "narrow", 7, target_modules=["q_proj"])
    engine.load_adapter("c", str(narrow)).result(60)
    for name, folder in (("c", narrow), ("b", llama_adapters[1][1])):
        sequence = Sequence(token_ids=tokens(Random(3), 30), score_from=1, adapter_name=name)
        engine.add([sequence]).result(60)
        assert_agrees(sequence, oracle_with(tiny_models("llama"), Path(folder)))
    engine.drop_weights().result(60)
    assert [engine.unload_adapter(name).result(60).name for name in ("b", "c")] == ["b", "c"]
    base = Sequence(token_ids=tokens(Random(3), 30), score_from=1)
    engine.add([base]).result(60)
    assert_agrees(base, Oracle(tiny_models("llama")))


def test_an_adapter_is_replaced_under_its_name(
    llama_adapters: tuple[tuple[str, str], ...], tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters)
    _, other = llama_adapters[1]

    adapter = engine.load_adapter("a", other).result(60)

    sequences = queue_of("a", "b")
    scored(engine, sequences)
    for sequence in sequences:
        assert_agrees(sequence, oracle_with(tiny_models("llama"), Path(other)))
    assert sequences[0].model_info.adapter == f"a@{adapter.fingerprint[:16]}"
    assert {each.fingerprint for each in engine.adapters} == {adapter.fingerprint}


@pytest.mark.usefixtures("unmeasured_steps")
def test_proposed_tokens_are_verified_with_the_adapter(
    llama_adapters: tuple[tuple[str, str], ...], tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters, speculation="ngram")
    sequences = [
        Sequence(
            token_ids=[BOS, *[7, 8, 9] * 10],
            sampling=Sampling(max_tokens=60, temperature=0, ignore_eos=True),
            adapter_name=name,
        )
        for name in (None, "a", "b", "a")
    ]

    scored(engine, sequences)

    oracles = {None: Oracle(tiny_models("llama"))}
    oracles |= {name: oracle_with(tiny_models("llama"), Path(folder)) for name, folder in llama_adapters}
    for sequence in sequences:
        assert_agrees(sequence, oracles[sequence.adapter_name])
    assert sum(sequence.num_proposed for sequence in sequences) > 0


def test_adapters_outlive_dropped_weights(
    llama_adapters: tuple[tuple[str, str], ...], tiny_models: TinyModels, open_engine: Callable[..., Engine]
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters)
    engine.drop_weights().result(60)
    assert not engine.is_loaded

    sequences = queue_of("a", None)
    scored(engine, sequences)

    oracles = {None: Oracle(tiny_models("llama")), "a": oracle_with(tiny_models("llama"), Path(llama_adapters[0][1]))}
    for sequence in sequences:
        assert_agrees(sequence, oracles[sequence.adapter_name])


def test_rows_of_an_unloaded_adapter_that_a_push_begins_anew_keep_it(
    llama_adapters: tuple[tuple[str, str], ...],
    tiny_models: TinyModels,
    tmp_path: Path,
    open_engine: Callable[..., Engine],
):
    engine = open_engine(tiny_models("llama"), adapters=llama_adapters)
    other = Path(shutil.copytree(tiny_models("llama"), tmp_path / "other"))
    sequence = Sequence(
        token_ids=[BOS, 5, 6], sampling=Sampling(max_tokens=200, temperature=0, ignore_eos=True), adapter_name="a"
    )
    running = engine.add([sequence])
    while len(sequence.token_ids) < 5:
        time.sleep(0.001)
    assert engine.unload_adapter("a").result(60).name == "a"

    engine.stage_weights(str(other), 1).result(60)
    assert not running.done()
    engine.switch_weights(restart=True).result(60).result(60)

    running.result(60)
    assert sequence.num_generated == 200
    assert_agrees(sequence, oracle_with(other, Path(llama_adapters[0][1])))
    assert engine.unload_adapter("a").result(60) is None


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_go_on_with_other_weights(
    settings: dict[str, object],
    adapted: Callable[..., Path],
    tiny_models: TinyModels,
    tmp_path: Path,
    open_engine: Callable[..., Engine],
):
    folder = adapted("llama", "a", 0, **settings)
    engine = open_engine(tiny_models("llama"), adapters=(("a", str(folder)),))
    other = Path(shutil.copytree(tiny_models("llama"), tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})

    engine.stage_weights(str(other), 1).result(60)
    engine.switch_weights().result(60).result(60)

    sequences = queue_of("a", None)
    scored(engine, sequences)
    oracles = {None: Oracle(other), "a": oracle_with(other, folder)}
    for sequence in sequences:
        assert_agrees(sequence, oracles[sequence.adapter_name])
