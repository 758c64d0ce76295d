"""A sequence whose constraint is late is paused: it holds up nobody, and its numbers stay those of the model."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from concurrent.futures import Future
from random import Random

import mlx.core as mx
import pytest

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import runner
from scorepool.engine.sampling.next_token import ask_constraints, find_late
from scorepool.engine.sampling.query import LogprobQuery, UnreadToken
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import TinyModels


class LateConstraint:
    """Allows every token, and is often late by some calls of `wait`."""

    error: str | None = None

    def __init__(self, seed: int, most_calls: int) -> None:
        self.num_foreseen = 0
        self._rng = Random(seed)
        self._most_calls = most_calls
        self._num_asked = -1
        self._calls_left = 0

    def compile(self) -> Future[None]:
        raise NotImplementedError

    def prepare(self, generated: Ids[int], proposed: Ids[int] = ()) -> None:
        if len(generated) != self._num_asked:
            self._num_asked, self.num_foreseen = len(generated), len(proposed)
            self._calls_left = self._rng.randrange(self._most_calls + 1)

    def wait(self, timeout_s: float | None) -> bool:
        self._calls_left -= 1
        return self._calls_left < 0

    def token_bitmask(self, generated: Ids[int], num_proposed: int = 0) -> bytes:
        assert self._num_asked == len(generated)
        assert num_proposed <= self.num_foreseen
        assert self._calls_left < 0
        return b"\xff" * 100


def generating(seed: int, most_calls: int = 0, num_given: int = 5, max_tokens: int = 12, **report: int) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    constraint = LateConstraint(seed, most_calls) if most_calls else None
    return Sequence(token_ids=[0, *range(40, 39 + num_given)], sampling=sampling, constraint=constraint, **report)


@pytest.mark.parametrize(
    ("name", "settings"), [("llama", {}), ("gemma3", {}), ("mamba", {}), ("llama", {"mode": "exact"})]
)
def test_late_sequences_have_the_numbers_of_the_model(
    engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle], name: str, settings: dict[str, str]
):
    late = [generating(seed, 4, num_given=3 + seed, score_from=seed % 3, top_logprobs=2) for seed in range(4)]
    prompt = [generating(seed, num_given=4 + seed) for seed in range(2)]

    engine_of(name, **settings).add([*late, *prompt]).result(120)

    for sequence in [*late, *prompt]:
        assert sequence.num_generated == 12
        assert_agrees(sequence, oracle_of(name))
    assert sum(sequence.num_pauses for sequence in late) > 12


def test_a_late_sequence_samples_what_it_would_have_sampled(engine: Engine):
    punctual, late = generating(7), generating(7, 6)

    engine.add([punctual]).result(60)
    engine.add([late, generating(8)]).result(60)

    assert late.token_ids == punctual.token_ids
    assert late.num_pauses


class StuckConstraint(LateConstraint):
    """Never knows what may follow."""

    def wait(self, timeout_s: float | None) -> bool:
        time.sleep(min(timeout_s or 0, 0.02))
        return False


def test_a_constraint_that_never_answers_holds_up_nobody(engine: Engine):
    stuck = [generating(seed) for seed in range(3)]
    for sequence in stuck:
        sequence.constraint = StuckConstraint(0, 0)
    never = engine.add(stuck)

    engine.add([generating(3)]).result(60)
    engine.add([Sequence(token_ids=[0, 40, 41], score_from=1)]).result(60)
    engine.add([generating(4, 2)]).result(60)

    assert not never.done()
    engine.cancel(never)
    engine.add([generating(5)]).result(60)
    assert [sequence.num_generated for sequence in stuck] == [0, 0, 0]


def test_an_end_token_ends_a_sequence_that_was_paused_after_it(engine: Engine):
    sequence = generating(9, 3)
    sequence.sampling = Sampling(max_tokens=12, seed=9, stop_token_ids=tuple(range(3, 400)))

    engine.add([sequence]).result(60)

    assert sequence.finish_reason == "stop"
    assert sequence.num_generated == 1


class SlowConstraint(LateConstraint):
    """Knows what may follow some time after it was asked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known_at = 0.0

    def prepare(self, generated: Ids[int], proposed: Ids[int] = ()) -> None:
        self._known_at = time.monotonic() + self._seconds

    def wait(self, timeout_s: float | None) -> bool:
        missing_s = self._known_at - time.monotonic()
        time.sleep(max(0.0, missing_s if timeout_s is None else min(timeout_s, missing_s)))
        return missing_s <= (timeout_s or 0)


def test_a_constraint_that_answers_before_the_device_does_holds_up_nobody():
    sequence = generating(1)
    sequence.constraint = SlowConstraint(1.0)
    query = LogprobQuery(sequence, range(5, 6))

    assert find_late(ask_constraints([query]), lambda: time.sleep(1.2)) == []

    assert sequence.held_up_s < 0.9


def test_a_constraint_that_answers_long_after_the_device_did_is_late():
    sequence = generating(1)
    sequence.constraint = SlowConstraint(5.0)

    assert find_late(ask_constraints([LogprobQuery(sequence, range(5, 6))]), lambda: None) == [sequence]


def test_the_device_computes_logits_while_a_constraint_is_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    launched: list[int] = []
    before_wait: list[int] = []
    async_eval = mx.async_eval

    def note(*arrays: object) -> None:
        launched.extend(array.shape[-1] for array in arrays if isinstance(array, mx.array) and array.ndim == 2)
        async_eval(*arrays)

    class Watching(LateConstraint):
        def wait(self, timeout_s: float | None) -> bool:
            before_wait.append(launched[-1])
            return super().wait(timeout_s)

    monkeypatch.setattr(mx, "async_eval", note)
    sequence = generating(3)
    sequence.constraint = Watching(0, 0)
    engine.add([sequence, generating(4)]).result(60)

    assert set(before_wait) == {engine.model_info.vocab_size}


@pytest.mark.parametrize("waits", [False, True])
def test_constraints_are_asked_before_a_launch_that_waits_and_after_another(
    waits: bool,
    open_engine: Callable[..., Engine],
    tiny_models: TinyModels,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
):
    events: list[str] = []
    async_eval = mx.async_eval

    def note(*arrays: object) -> None:
        if any(isinstance(array, mx.array) and array.shape[-1] == engine.model_info.vocab_size for array in arrays):
            events.append("launch")
        async_eval(*arrays)

    class Asked(LateConstraint):
        def prepare(self, generated: Ids[int], proposed: Ids[int] = ()) -> None:
            events.append("ask")
            super().prepare(generated, proposed)

        def wait(self, timeout_s: float | None) -> bool:
            events.append("wait")
            return super().wait(timeout_s)

    monkeypatch.setattr(runner, "launch_waits", lambda: waits)
    engine = open_engine(tiny_models("llama"), dtype="float32", speculation="off")
    monkeypatch.setattr(mx, "async_eval", note)
    sequence, free = generating(3, top_logprobs=2), generating(4)
    sequence.constraint = Asked(0, 0)
    engine.add([sequence, free]).result(60)

    first, second = ("ask", "launch") if waits else ("launch", "ask")
    assert events == [first, second, "wait"] * 12
    assert_agrees(sequence, oracle)
    assert_agrees(free, oracle)


def test_a_token_is_read_while_the_device_computes_what_was_launched_after_it():
    token_ids = mx.array([3, 4, 5]) + 1
    mx.async_eval(token_ids)
    numbers = mx.random.normal((1500, 1500))
    mx.eval(numbers)
    product = numbers
    for _ in range(8):  # few enough for the queue of a CPU
        product = product @ numbers
    started_at = time.monotonic()
    mx.async_eval(product)

    token_id = UnreadToken(token_ids, 1).read()
    read_s = time.monotonic() - started_at
    mx.eval(product)

    assert token_id == 5
    assert read_s < (time.monotonic() - started_at) / 2
