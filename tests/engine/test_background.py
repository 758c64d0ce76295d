"""Prompts that are computed beside decoding rows, on a second thread, have the numbers of those computed in steps."""

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from scorepool.engine import Engine, EngineSettings, Sampling, Sequence
from scorepool.engine.model import background, cpu_threads
from scorepool.engine.model.backbone import split_model
from tests.engine.adapters import save_adapter
from tests.engine.oracle import Oracle, assert_agrees

FAMILIES = ["llama", "gemma3", "qwen3_moe", "granitehybrid", "demo"]  # sliding windows, experts, recurrent states


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads on which the background ran. It is used on any number of cores."""
    names: list[str] = []
    job = background.Job

    def noting(work: Callable[[], Any]) -> Any:
        names.append(threading.current_thread().name)
        return job(work)

    monkeypatch.setattr(background, "Job", noting)
    monkeypatch.setattr(background, "_is_gain", lambda: True)
    return names


def scored(draw: Random, length: int) -> Sequence:
    token_ids = [draw.randrange(3, 90) for _ in range(length)]
    return Sequence(token_ids=token_ids, score_from=1, top_logprobs=3, rank=True, entropy=True)


def decoding() -> Sequence:
    sampling = Sampling(max_tokens=60, temperature=0, ignore_eos=True)
    return Sequence(token_ids=[1, 5, 9], sampling=sampling)


class Decoding:
    """A context manager in which rows decode, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[Sequence] = []
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Decoding":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.rows += self._engine.add([decoding()]).result(120)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_rows_have_the_numbers_that_they_have_alone(
    name: str, folder_of: Callable[[str], Path], oracle_of: Callable[[str], Oracle], runs: list[str]
):
    engine = Engine(EngineSettings(model=str(folder_of(name)), dtype="float32"))
    num_at_load = len(runs)
    draw = Random(3)
    sequences: list[Sequence] = []
    try:
        alone = engine.add([decoding()]).result(120)[0]
        with Decoding(engine) as stream:
            for _ in range(30):
                sequences += engine.add([scored(draw, draw.randrange(2, 60)) for _ in range(2)]).result(120)
        assert len(runs) > num_at_load + 10  # steps between two rows compute prompts themselves
    finally:
        engine.close()
    assert stream.rows
    for row in stream.rows:
        assert row.token_ids == alone.token_ids
        np.testing.assert_allclose(row.columns.logprobs, alone.columns.logprobs, atol=5e-5, rtol=0)
    for sequence in sequences[:20]:
        assert_agrees(sequence, oracle_of(name))


def test_rows_are_computed_in_steps_while_an_adapter_is_loaded(
    folder_of: Callable[[str], Path], runs: list[str], tmp_path: Path
):
    adapter = save_adapter(folder_of("llama"), tmp_path / "adapter", seed=1)
    engine = Engine(EngineSettings(model=str(folder_of("llama")), dtype="float32"))
    try:
        engine.load_adapter("a", str(adapter)).result(60)
        num_before = len(runs)
        with Decoding(engine):
            for _ in range(10):
                engine.add([scored(Random(1), 20)]).result(120)
            assert len(runs) == num_before
            engine.unload_adapter("a").result(60)
            for _ in range(30):
                engine.add([scored(Random(1), 20)]).result(120)
        assert len(runs) > num_before
    finally:
        engine.close()


class Plain(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Layer()
        self.layers: list[nn.Module] = []
        self.head = nn.Linear(8, 16)

    def __call__(self, token_ids: mx.array, cache: object = None) -> mx.array:
        return self.head(self.model(token_ids))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)

    def __call__(self, token_ids: mx.array) -> mx.array:
        return self.embed_tokens(token_ids)


class Changing(Layer):
    """Keeps what it computed last, as some architectures of mlx-lm do."""

    def __call__(self, token_ids: mx.array) -> mx.array:
        self.last = self.embed_tokens(token_ids)
        return self.last


class OfItsThread(Layer):
    """Computes something else on each thread."""

    def __call__(self, token_ids: mx.array) -> mx.array:
        return self.embed_tokens(token_ids) + threading.get_ident() % 1000


def suits(layer: Layer) -> bool:
    model = Plain()
    model.model = layer
    mx.eval(model.parameters())
    return background.suits(model, split_model(model))


@pytest.mark.parametrize(("kind", "expected"), [(Layer, True), (Changing, False), (OfItsThread, False)])
def test_a_model_that_a_forward_pass_changes_has_no_background(kind: type[Layer], expected: bool, runs: list[str]):
    assert suits(kind()) is expected


def test_a_model_that_fails_on_another_thread_has_no_background(runs: list[str], monkeypatch: pytest.MonkeyPatch):
    def fails(work: Callable[[], Any]) -> Any:
        raise RuntimeError("There is no Stream(cpu, 0) in current thread.")

    monkeypatch.setattr(background, "Job", fails)
    assert not suits(Layer())


def test_products_take_one_thread_until_the_last_has_left_on_whatever_thread():
    controller, most, _ = cpu_threads._threads()
    libraries = controller.lib_controllers

    def counts() -> set[int]:
        return {library.get_num_threads() for library in libraries}

    inside, leave = threading.Barrier(3), threading.Event()

    def hold() -> None:
        with cpu_threads.one_thread_a_product():
            inside.wait(30)
            leave.wait(30)

    before = [library.get_num_threads() for library in libraries]
    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    assert counts() == {1}
    with cpu_threads.one_thread_a_product():
        assert counts() == {1}
    assert counts() == {1}
    leave.set()
    for thread in threads:
        thread.join()
    assert [library.get_num_threads() for library in libraries] == before
    assert max(before) == most
